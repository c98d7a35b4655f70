"""The gRPC door: errors with details, health, reflection, deadlines, draining."""

import asyncio
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status
from tokenizers import Tokenizer

from protos import inference_pb2
from protos.inference_pb2 import GenerateRequest, SamplingParams, TokenIds
from protos.worker_pb2 import ROLE_DECODE
from router.router_server import INFERENCE
from tests.cluster.router_bench import (
    both_legs,
    generate,
    generating,
    inference_stub,
    running_router,
    token_request,
    until,
)
from tests.cluster.router_fixtures import Cluster
from tests.cluster.scripted_worker import DEADLINE_S, ScriptedWorker


async def refusal(scripted: Cluster, request: GenerateRequest) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(scripted.router, request)
    return caught.value


def details(error: grpc.aio.AioRpcError) -> dict[str, object]:
    """By the name of the message."""
    status = rpc_status.from_call(error)
    assert status is not None and status.message == error.details()
    found = {}
    for packed in status.details:
        message = getattr(error_details_pb2, packed.type_url.rpartition(".")[2])()
        assert packed.Unpack(message)
        found[type(message).__name__] = message
    return found


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (token_request(temperature=3.0), "sampling.temperature"),
        (token_request(temperature=float("nan")), "sampling.temperature"),
        (token_request(top_p=0.0), "sampling.top_p"),
        (token_request(min_p=1.5), "sampling.min_p"),
        (token_request(max_tokens=0), "sampling.max_tokens"),
        (token_request(max_tokens=5000), "sampling.max_tokens"),
        (token_request(min_tokens=9), "sampling.min_tokens"),
        (token_request(stop_token_ids=[384]), "sampling.stop_token_ids"),
        (token_request(stop=["x"] * 17), "stop"),
        (token_request(stop=[""]), "stop"),
        (token_request([]), "prompt"),
        (token_request([384]), "prompt"),
        (token_request([1] * 4096), "prompt"),
        (GenerateRequest(), "prompt"),
        (GenerateRequest(text=""), "prompt"),
        (GenerateRequest(chat=inference_pb2.Chat()), "chat.messages"),
    ],
)
async def test_a_wrong_field_is_named_and_nothing_reaches_a_worker(
    scripted: Cluster,
    request_: GenerateRequest,
    field: str,
) -> None:
    error = await refusal(scripted, request_)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    bad_request = details(error)["BadRequest"]
    assert isinstance(bad_request, error_details_pb2.BadRequest)
    assert [violation.field for violation in bad_request.field_violations] == [field]
    assert scripted.prefill.submitted.empty() and scripted.decode.submitted.empty()


async def test_an_error_carries_the_request_id_and_a_reason(scripted: Cluster) -> None:
    error = await refusal(scripted, GenerateRequest(request_id="mine", token_ids=TokenIds(ids=[384])))
    found = details(error)
    assert found["RequestInfo"] == error_details_pb2.RequestInfo(request_id="mine")
    assert found["ErrorInfo"] == error_details_pb2.ErrorInfo(reason="INVALID_ARGUMENT", domain="baton")


async def test_unavailable_carries_a_retry_hint(tiny_model: Path) -> None:
    async with running_router(tiny_model) as router:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(router, token_request())
    hint = details(caught.value)["RetryInfo"]
    assert isinstance(hint, error_details_pb2.RetryInfo) and hint.retry_delay.ToNanoseconds() > 0


async def test_another_model_is_not_found(scripted: Cluster) -> None:
    request = token_request()
    request.model = "other"
    assert (await refusal(scripted, request)).code() is grpc.StatusCode.NOT_FOUND


async def test_unset_sampling_is_complete_on_the_workers(scripted: Cluster) -> None:
    request = GenerateRequest(token_ids=TokenIds(ids=[1, 2, 3]))
    async with generating(scripted.router, request):
        p, _ = await both_legs(scripted.prefill, scripted.decode)
    sampling = p.submit.sampling
    assert sampling.max_tokens == 4096 - 3
    expected = SamplingParams(
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        max_tokens=4093,
        seed=sampling.seed,
        repetition_penalty=1.0,
        n=1,
    )
    assert sampling == expected


async def test_a_deadline_cancels_the_workers(scripted: Cluster) -> None:
    async with inference_stub(scripted.router) as stub:
        call = stub.Generate(token_request(), timeout=1.0)
        p, d = await both_legs(scripted.prefill, scripted.decode)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await p.cancel_arrives()
    await d.cancel_arrives()


async def test_the_model_is_listed_with_the_context_its_workers_have(
    tiny_model: Path,
    scripted_decode: ScriptedWorker,
) -> None:
    async with (
        ScriptedWorker(ROLE_DECODE, "small", max_model_len=100) as small,
        running_router(tiny_model, decode=[scripted_decode, small]) as router,
        inference_stub(router) as stub,
    ):
        models = (await stub.ListModels(inference_pb2.ListModelsRequest())).models
    assert [(model.id, model.max_model_len) for model in models] == [("tiny", 100)]


async def health_of(router_address: str, service: str) -> int:
    async with grpc.aio.insecure_channel(router_address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status


@pytest.mark.parametrize("service", ["", INFERENCE])
async def test_health_follows_whether_a_worker_is_there(
    scripted: Cluster,
    service: str,
) -> None:
    async with grpc.aio.insecure_channel(scripted.router.grpc_address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(service=service), timeout=20
        )
        while (await watch.read()).status != health_pb2.HealthCheckResponse.SERVING:
            continue
        await scripted.prefill.die()
        await scripted.decode.die()
        while (await watch.read()).status != health_pb2.HealthCheckResponse.NOT_SERVING:
            continue


async def test_reflection_names_the_services(scripted: Cluster) -> None:
    async with grpc.aio.insecure_channel(scripted.router.grpc_address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=20
        )
        answer = await call.read()
    names = {service.name for service in answer.list_services_response.service}
    assert {"baton.v1.Inference", "grpc.health.v1.Health"} <= names


async def test_draining_refuses_new_requests_and_finishes_running_streams(
    scripted: Cluster,
) -> None:
    async with generating(scripted.router, token_request(max_tokens=1)) as running:
        leg = await scripted.prefill.next_leg()
        drain = asyncio.create_task(scripted.router.drain(60))
        await until_draining(scripted)
        error = await refusal(scripted, token_request())
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert not drain.done()
        leg.say_tokens(0, [100])
        leg.say_finished()
        assert (await running).token_ids == [100]
        await drain


async def until_draining(scripted: Cluster) -> None:
    while await health_of(scripted.router.grpc_address, "") != health_pb2.HealthCheckResponse.NOT_SERVING:
        await until(scripted.router, lambda _: True)


async def test_the_drain_limit_ends_the_wait(scripted: Cluster) -> None:
    async with generating(scripted.router, token_request()) as running:
        await both_legs(scripted.prefill, scripted.decode)
        await scripted.router.drain(0.0)
        assert not running.done()


async def test_every_call_of_a_burst_is_answered(tiny_model: Path) -> None:
    """gRPC itself would cancel some."""
    async with running_router(tiny_model) as router, inference_stub(router) as stub:
        calls = [stub.Generate(token_request(), timeout=DEADLINE_S) for _ in range(3000)]
        codes = await asyncio.gather(*(call.code() for call in calls))
    assert set(codes) == {grpc.StatusCode.UNAVAILABLE}


async def test_tokens_of_a_text_and_back(scripted: Cluster, tiny_model: Path) -> None:
    async with inference_stub(scripted.router) as stub:
        tokenized = await stub.Tokenize(inference_pb2.TokenizeRequest(text="the north wind"))
        back = await stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=tokenized.token_ids))
    expected = Tokenizer.from_file(str(tiny_model / "tokenizer.json")).encode("the north wind").ids
    assert list(tokenized.token_ids) == expected and tokenized.max_model_len == 4096
    assert back.text == "the north wind"


@pytest.mark.parametrize("opened", [None, True, False])
async def test_the_tokens_of_a_chat_are_those_that_are_generated_from(
    scripted: Cluster, opened: bool | None
) -> None:
    chat = inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="user", content="the wind")])
    async with generating(scripted.router, GenerateRequest(chat=chat)):
        p, _ = await both_legs(scripted.prefill, scripted.decode)
    asked = inference_pb2.TokenizeRequest(chat=chat, add_generation_prompt=opened)
    async with inference_stub(scripted.router) as stub:
        told = list((await stub.Tokenize(asked)).token_ids)
    generated_from = list(p.submit.prompt_token_ids)
    assert told == generated_from[: len(told)]
    assert (len(told) < len(generated_from)) is (opened is False)


@pytest.mark.parametrize(
    ("method", "request_", "field"),
    [
        ("Tokenize", inference_pb2.TokenizeRequest(), "prompt"),
        ("Tokenize", inference_pb2.TokenizeRequest(chat=inference_pb2.Chat()), "chat.messages"),
        ("Detokenize", inference_pb2.DetokenizeRequest(token_ids=[384]), "token_ids"),
    ],
)
async def test_what_cannot_be_tokenized_is_named(
    scripted: Cluster,
    method: str,
    request_: inference_pb2.TokenizeRequest | inference_pb2.DetokenizeRequest,
    field: str,
) -> None:
    async with inference_stub(scripted.router) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await getattr(stub, method)(request_)
    bad_request = details(caught.value)["BadRequest"]
    assert isinstance(bad_request, error_details_pb2.BadRequest)
    assert [violation.field for violation in bad_request.field_violations] == [field]
