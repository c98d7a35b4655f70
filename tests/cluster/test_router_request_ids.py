"""One id in every answer, error and log line of a request, at both doors."""

import asyncio
import json
import logging
import re
from pathlib import Path

import grpc
import httpx
import openai
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from protos.inference_pb2 import GenerateRequest
from protos.worker_pb2 import DROP_CAUSE_INVALID
from router.worker_directory import StaticDirectory
from tests.cluster.router_bench import both_legs, inference_stub, started_router, token_request
from tests.cluster.router_fixtures import Cluster

TEXT = {"prompt": [5, 6]}
OURS = re.compile("[0-9a-f]{32}")


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/health", b"", 200),
        ("GET", "/v1/models", b"", 200),
        ("GET", "/v1/nothing", b"", 404),
        ("GET", "/v1/completions", b"", 405),
        ("GET", "/explain/unknown", b"", 404),
        ("POST", "/v1/completions", b"{", 400),
        ("POST", "/v1/completions", b'{"prompt": [5], "n": 99}', 400),
        ("POST", "/v1/chat/completions", b'{"messages": [], "stream": true}', 400),
    ],
)
async def test_every_answer_has_the_clients_id(
    scripted: Cluster, method: str, path: str, body: bytes, status: int
) -> None:
    async with httpx.AsyncClient(base_url=f"http://{scripted.router.http_address}") as http:
        answer = await http.request(method, path, content=body, headers={"X-Request-Id": "mine-7"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (status, "mine-7")
    if status >= 400:
        assert answer.json()["error"]["request_id"] == "mine-7"


@pytest.mark.parametrize("given", ["", "two words", "x" * 129, "\u00e9", "a\tb"])
async def test_an_id_that_is_not_sound_is_replaced(scripted: Cluster, given: str) -> None:
    async with httpx.AsyncClient(base_url=f"http://{scripted.router.http_address}") as http:
        answer = await http.get("/v1/nothing", headers={"X-Request-Id": given.encode("latin-1")})
    assert OURS.fullmatch(answer.headers["x-request-id"])
    assert answer.json()["error"]["request_id"] == answer.headers["x-request-id"]


@pytest.mark.parametrize("body", [{"prompt": [5], "n": 99}, {"prompt": [384]}, {"prompt": "a", "model": "b"}])
async def test_a_refusal_is_logged_with_the_id(
    scripted: Cluster, caplog: pytest.LogCaptureFixture, body: dict
) -> None:
    with caplog.at_level(logging.INFO, "router"):
        async with httpx.AsyncClient(base_url=f"http://{scripted.router.http_address}") as http:
            answer = await http.post("/v1/completions", json=body, headers={"X-Request-Id": "mine-7"})
    (line,) = [record.getMessage() for record in caplog.records if record.name.startswith("router")]
    assert line.startswith("mine-7: ") and line.endswith(answer.json()["error"]["message"])


async def test_an_error_in_the_middle_of_a_stream_names_it(scripted: Cluster) -> None:
    async with httpx.AsyncClient(base_url=f"http://{scripted.router.http_address}", timeout=20) as http:
        asked = http.post("/v1/completions", json={**TEXT, "stream": True}, headers={"X-Request-Id": "mine"})
        async with asyncio.TaskGroup() as group:
            answering = group.create_task(asked)
            p, d = await both_legs(scripted.prefill, scripted.decode)
            d.say_admitted()
            p.say_prefilled()
            d.say_tokens(0, [100])
            d.say_dropped(DROP_CAUSE_INVALID, "stop: is wrong")
    answer = answering.result()
    assert (answer.status_code, answer.headers["x-request-id"]) == (200, "mine")
    last = answer.text.strip().split("\n\n")[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["request_id"] == "mine"


async def test_the_openai_package_tells_it(scripted: Cluster) -> None:
    async with openai.AsyncOpenAI(
        base_url=f"http://{scripted.router.http_address}/v1", api_key="none", max_retries=0
    ) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(
                model="tiny", prompt=[5], n=99, extra_headers={"X-Request-Id": "mine"}
            )
    assert caught.value.request_id == "mine"


def rich_request_id(error: grpc.aio.AioRpcError) -> str:
    """Of the error's details."""
    status = rpc_status.from_call(error)
    assert status is not None
    (packed,) = [each for each in status.details if each.Is(error_details_pb2.RequestInfo.DESCRIPTOR)]
    told = error_details_pb2.RequestInfo()
    packed.Unpack(told)
    return told.request_id


def trailing_request_id(metadata: grpc.aio.Metadata) -> object:
    return dict(metadata)["x-request-id"]


@pytest.mark.parametrize(
    ("in_request", "in_metadata", "expected"),
    [("mine", "other", "mine"), ("", "mine", "mine"), ("two\nlines", "mine", "mine")],
)
async def test_a_grpc_error_has_the_clients_id_in_its_details_and_its_trailing_metadata(
    scripted: Cluster, in_request: str, in_metadata: str, expected: str
) -> None:
    request = GenerateRequest(request_id=in_request, model="other")
    async with inference_stub(scripted.router) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(request, metadata=(("x-request-id", in_metadata),)).read()
    assert rich_request_id(caught.value) == expected
    assert trailing_request_id(caught.value.trailing_metadata()) == expected


async def test_a_grpc_answer_ends_with_the_id_that_its_parts_have(scripted: Cluster) -> None:
    async with inference_stub(scripted.router) as stub:
        call = stub.Generate(token_request(max_tokens=1))
        leg = await scripted.prefill.next_leg()
        leg.say_tokens(0, [100])
        leg.say_finished()
        ids = {part.request_id async for part in call}
        assert ids == {trailing_request_id(await call.trailing_metadata())}
    assert ids == {leg.submit.request_id} and OURS.fullmatch(leg.submit.request_id)


async def test_who_has_no_key_gets_an_id_too(tiny_model: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("a-good-key")
    async with started_router(tiny_model, StaticDirectory(), api_keys_file=keys) as router:
        async with httpx.AsyncClient(base_url=f"http://{router.http_address}") as http:
            answer = await http.post("/v1/completions", json=TEXT, headers={"X-Request-Id": "mine"})
        assert (answer.status_code, answer.headers["x-request-id"]) == (401, "mine")
        assert answer.json()["error"]["request_id"] == "mine"
        async with inference_stub(router) as stub:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Generate(GenerateRequest(), metadata=(("x-request-id", "mine"),)).read()
    assert rich_request_id(caught.value) == "mine"
    assert trailing_request_id(caught.value.trailing_metadata()) == "mine"
