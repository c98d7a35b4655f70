"""The HTTP door, with the openai package as its client."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import Tokenizer

from protos.inference_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP
from tests.cluster.router_bench import both_legs, running_router, until
from tests.cluster.router_fixtures import Cluster
from tests.cluster.scripted_worker import SubmittedLeg

TURNS = [{"role": "user", "content": "What is it?"}]


@pytest.fixture
async def client(scripted: Cluster) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"http://{scripted.router.http_address}/v1", api_key="none", max_retries=0, timeout=20
    ) as client:
        yield client


@pytest.fixture
async def http(scripted: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    base_url = f"http://{scripted.router.http_address}"
    async with httpx.AsyncClient(base_url=base_url, timeout=20) as client:
        yield client


@pytest.fixture
def answer_ids(tiny_model: Path) -> list[int]:
    """Tokens of "the north wind"."""
    return Tokenizer.from_file(str(tiny_model / "tokenizer.json")).encode("the north wind").ids


async def play(cluster: Cluster, token_ids: list[int]) -> SubmittedLeg:
    """Both workers do a whole request, a token at a time."""
    p, d = await both_legs(cluster.prefill, cluster.decode)
    p.say_tokens(0, token_ids[:1])
    d.say_admitted()
    p.say_prefilled()
    for index, token_id in enumerate(token_ids):
        d.say_tokens(index, [token_id])
    d.say_finished(FINISH_REASON_LENGTH)
    return d


async def test_a_chat_is_answered_whole(
    scripted: Cluster, client: openai.AsyncOpenAI, answer_ids: list[int]
) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(play(scripted, answer_ids))
        chat = group.create_task(client.chat.completions.create(model="tiny", messages=TURNS))
    answer = chat.result()
    assert answer.object == "chat.completion" and answer.model == "tiny"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == "the north wind"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(answer_ids)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + len(answer_ids)


async def test_a_chat_is_streamed_with_a_finish_chunk_and_usage_last(
    scripted: Cluster, client: openai.AsyncOpenAI, answer_ids: list[int]
) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(play(scripted, answer_ids))
        stream = await client.chat.completions.create(
            model="tiny", messages=TURNS, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    *texts, finish, usage = chunks
    assert texts[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in texts) == "the north wind"
    assert {chunk.choices[0].finish_reason for chunk in texts} == {None}
    assert finish.choices[0].finish_reason == "length"
    assert usage.choices == [] and usage.usage is not None
    assert usage.usage.completion_tokens == len(answer_ids)
    assert len({chunk.id for chunk in chunks}) == 1


async def test_a_stream_ends_in_done_and_without_usage_unless_asked(
    scripted: Cluster, http: httpx.AsyncClient, answer_ids: list[int]
) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(play(scripted, answer_ids))
        answer = await http.post("/v1/completions", json={"prompt": "a", "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = answer.text.strip().split("\n\n")
    assert events[-1] == "data: [DONE]" and all(event.startswith("data: ") for event in events)
    assert "usage" not in answer.text


async def test_the_chat_template_makes_the_prompt(
    scripted: Cluster, client: openai.AsyncOpenAI, tiny_model: Path, answer_ids: list[int]
) -> None:
    parts = [{"type": "text", "text": "What "}, {"type": "text", "text": "is it?"}]
    async with asyncio.TaskGroup() as group:
        played = group.create_task(play(scripted, answer_ids))
        group.create_task(
            client.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": parts}],  # pyright: ignore
                max_completion_tokens=40,
                temperature=0,
                extra_body={"ignore_eos": True, "top_k": 5, "min_tokens": 2},
            )
        )
    submit = played.result().submit
    expected = "<|im_start|>user\nWhat is it?<|im_end|>\n<|im_start|>assistant\n"
    tokenizer = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    assert list(submit.prompt_token_ids) == tokenizer.encode(expected).ids
    assert (submit.sampling.max_tokens, submit.sampling.temperature) == (40, 0)
    assert (submit.sampling.ignore_eos, submit.sampling.top_k, submit.sampling.min_tokens) == (True, 5, 2)


@pytest.mark.parametrize("prompt", ["the", ["the"], [5, 6], [[5, 6]]])
async def test_a_completion_takes_text_and_token_ids(
    scripted: Cluster,
    client: openai.AsyncOpenAI,
    tiny_model: Path,
    answer_ids: list[int],
    prompt: str | list,
) -> None:
    async with asyncio.TaskGroup() as group:
        played = group.create_task(play(scripted, answer_ids))
        answer = await client.completions.create(model="tiny", prompt=prompt)
    assert answer.choices[0].text == "the north wind"
    tokenizer = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    expected = tokenizer.encode("the").ids if "the" in prompt else [5, 6]
    assert list(played.result().submit.prompt_token_ids) == expected
    assert played.result().submit.sampling.max_tokens == 16


async def test_a_stop_string_never_shows(
    scripted: Cluster, client: openai.AsyncOpenAI, answer_ids: list[int]
) -> None:
    async with asyncio.TaskGroup() as group:
        played = group.create_task(play(scripted, answer_ids))
        stream = await client.completions.create(
            model="tiny", prompt="a", stream=True, stop="th wi", max_tokens=99
        )
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == "the nor"
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert played.done()


CHAT = {"model": "tiny", "messages": TURNS}
TEXT = {"model": "tiny", "prompt": "a"}


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("chat/completions", {**CHAT, "temperature": -1}, "temperature"),
        ("chat/completions", {**CHAT, "temperature": "hot"}, "temperature"),
        ("chat/completions", {**CHAT, "temperature": "0.5"}, "temperature"),
        ("chat/completions", {**CHAT, "top_p": 0}, "top_p"),
        ("chat/completions", {**CHAT, "n": 0}, "n"),
        ("chat/completions", {**CHAT, "n": 17}, "n"),
        ("chat/completions", {**CHAT, "max_tokens": 0}, "max_tokens"),
        ("chat/completions", {**CHAT, "max_tokens": 1.5}, "max_tokens"),
        ("chat/completions", {**CHAT, "max_tokens": 99999}, "max_tokens"),
        ("chat/completions", {**CHAT, "seed": 2**70}, "seed"),
        ("chat/completions", {**CHAT, "stop": ["x"] * 3000}, "stop"),
        ("chat/completions", {**CHAT, "stop": [1]}, "stop"),
        ("chat/completions", {**CHAT, "logprobs": 2}, "logprobs"),
        ("chat/completions", {**CHAT, "tools": [{"type": "function"}]}, "tools"),
        ("chat/completions", {**CHAT, "response_format": {"type": "xml"}}, "response_format"),
        ("chat/completions", {**CHAT, "presence_penalty": 2.5}, "presence_penalty"),
        ("chat/completions", {**CHAT, "frequency_penalty": -2.5}, "frequency_penalty"),
        ("chat/completions", {**CHAT, "logit_bias": {"a": 2}}, "logit_bias"),
        ("chat/completions", {**CHAT, "stream_options": {"include_usage": True}}, "stream_options"),
        ("chat/completions", {**CHAT, "messages": []}, "messages"),
        ("chat/completions", {**CHAT, "messages": "hi"}, "messages"),
        ("chat/completions", {**CHAT, "messages": [{"content": "x"}]}, "messages"),
        (
            "chat/completions",
            {**CHAT, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages",
        ),
        ("chat/completions", {"model": "tiny"}, "messages"),
        ("completions", {**TEXT, "best_of": 2}, "best_of"),
        ("completions", {**TEXT, "echo": 1}, "echo"),
        ("completions", {**TEXT, "suffix": "x"}, "suffix"),
        ("completions", {**TEXT, "logprobs": -1}, "logprobs"),
        ("completions", {**TEXT, "prompt": ""}, "prompt"),
        ("completions", {**TEXT, "prompt": []}, "prompt"),
        ("completions", {**TEXT, "prompt": [[]]}, "prompt"),
        ("completions", {**TEXT, "prompt": ["a", 1]}, "prompt"),
        ("completions", {**TEXT, "prompt": ["a"] * 129}, "prompt"),
        ("completions", {**TEXT, "prompt": [-1]}, "prompt"),
        ("completions", {**TEXT, "prompt": [384]}, "prompt"),
        ("completions", {**TEXT, "prompt": [1] * 4096}, "prompt"),
        ("completions", {**TEXT, "prompt": "a b " * 20_000}, "prompt"),
        ("completions", {"model": "tiny"}, "prompt"),
    ],
)
async def test_a_wrong_field_is_named_in_openais_shape(
    http: httpx.AsyncClient, path: str, body: dict, field: str
) -> None:
    answer = await http.post(f"/v1/{path}", json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == field and error["type"] == "invalid_request_error"
    assert field in error["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"[" * 100_000,
        b'{"messages": [{"role": "user", "content": "\xff"}]}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    ],
)
async def test_a_body_that_is_no_request_is_refused(http: httpx.AsyncClient, body: bytes) -> None:
    answer = await http.post("/v1/chat/completions", content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert (await http.get("/health")).status_code == 200


async def test_nan_is_refused(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/completions", content=b'{"prompt": "a", "temperature": NaN}')
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "temperature")


async def test_a_body_that_is_too_large_is_refused(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/completions", content=b'{"prompt": "' + b"a" * (17 << 20))
    assert answer.status_code == 400


async def test_unknown_fields_are_ignored(
    scripted: Cluster, http: httpx.AsyncClient, answer_ids: list[int]
) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(play(scripted, answer_ids))
        answer = await http.post("/v1/chat/completions", json={**CHAT, "user": "me", "new_field": {}})
    assert answer.status_code == 200


async def test_another_model_is_not_found(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await client.chat.completions.create(model="other", messages=TURNS)  # pyright: ignore
    assert caught.value.param == "model"


async def test_a_wrong_path_is_not_found_in_openais_shape(http: httpx.AsyncClient) -> None:
    answer = await http.get("/v1/nothing")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")


async def test_the_request_id_of_the_client_runs_through(
    scripted: Cluster, http: httpx.AsyncClient, answer_ids: list[int]
) -> None:
    async with asyncio.TaskGroup() as group:
        played = group.create_task(play(scripted, answer_ids))
        answer = await http.post("/v1/completions", json=TEXT, headers={"X-Request-Id": "mine-7"})
    assert played.result().submit.request_id == "mine-7"
    assert answer.headers["x-request-id"] == "mine-7" and answer.json()["id"] == "cmpl-mine-7"


async def test_an_error_before_the_first_token_is_a_status_also_of_a_stream(
    scripted: Cluster, client: openai.AsyncOpenAI
) -> None:
    async def die() -> None:
        await both_legs(scripted.prefill, scripted.decode)
        await scripted.prefill.die()
        await scripted.decode.die()

    async with asyncio.TaskGroup() as group:
        group.create_task(die())
        with pytest.raises(openai.APIStatusError, match="no worker is left") as caught:
            await client.completions.create(model="tiny", prompt="a", stream=True)
    assert caught.value.status_code == 503
    assert int(caught.value.response.headers["retry-after"]) >= 1


async def test_an_error_in_the_middle_of_a_stream_is_its_last_event(
    scripted: Cluster, client: openai.AsyncOpenAI, answer_ids: list[int]
) -> None:
    stream_task = asyncio.create_task(client.completions.create(model="tiny", prompt="a", stream=True))
    p, d = await both_legs(scripted.prefill, scripted.decode)
    d.say_admitted()
    p.say_prefilled()
    d.say_tokens(0, answer_ids)
    stream = await stream_task
    texts = [(await anext(aiter(stream))).choices[0].text]
    await scripted.prefill.die()
    await scripted.decode.die()
    with pytest.raises(openai.APIError, match="worker d0 died"):
        async for chunk in stream:
            texts.append(chunk.choices[0].text)
    assert "".join(texts) == "the north wind"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_hangs_up_before_the_first_token_cancels_both_legs(
    scripted: Cluster, http: httpx.AsyncClient, stream: bool
) -> None:
    task = asyncio.create_task(http.post("/v1/completions", json={**TEXT, "stream": stream}))
    p, d = await both_legs(scripted.prefill, scripted.decode)
    task.cancel()
    await p.cancel_arrives()
    await d.cancel_arrives()


async def test_a_client_that_hangs_up_in_a_stream_cancels_the_decode_leg(
    scripted: Cluster, client: openai.AsyncOpenAI, answer_ids: list[int]
) -> None:
    stream_task = asyncio.create_task(client.completions.create(model="tiny", prompt="a", stream=True))
    p, d = await both_legs(scripted.prefill, scripted.decode)
    d.say_admitted()
    p.say_prefilled()
    d.say_tokens(0, answer_ids)
    stream = await stream_task
    await anext(aiter(stream))
    await stream.close()
    await d.cancel_arrives()


async def test_the_model_is_listed(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["tiny"]


async def test_health_is_bad_without_workers_and_while_draining(
    tiny_model: Path, scripted: Cluster, http: httpx.AsyncClient
) -> None:
    assert (await http.get("/health")).status_code == 200
    await scripted.router.drain(0)
    assert (await http.get("/health")).status_code == 503
    assert (await http.post("/v1/completions", json=TEXT)).status_code == 503
    async with running_router(tiny_model) as lonely, httpx.AsyncClient() as client:
        assert (await client.get(f"http://{lonely.http_address}/health")).status_code == 503


async def test_health_recovers_when_a_worker_is_left(scripted: Cluster, http: httpx.AsyncClient) -> None:
    await scripted.prefill.die()
    await until(scripted.router, lambda workers: len(workers) == 1)
    assert (await http.get("/health")).status_code == 200


async def samples(http: httpx.AsyncClient) -> dict[str, float]:
    """Name with labels to value."""
    text = (await http.get("/metrics")).text
    return {
        sample.name + "".join(f"{{{key}={value}}}" for key, value in sample.labels.items()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_metrics_count_what_was_served(
    scripted: Cluster, http: httpx.AsyncClient, answer_ids: list[int]
) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(play(scripted, answer_ids))
        await http.post("/v1/completions", json={**TEXT, "prompt": [5, 6, 7]})
    await http.post("/v1/completions", json={**TEXT, "temperature": 9})
    found = await samples(http)
    assert found["baton_request_success_total{finished_reason=length}"] == 1
    assert found["baton_request_errors_total{code=INVALID_ARGUMENT}"] == 1
    assert found["baton_prompt_tokens_total"] == 3
    assert found["baton_generation_tokens_total"] == len(answer_ids)
    assert found["baton_time_to_first_token_seconds_count"] == 1
    assert found["baton_inter_token_latency_seconds_count"] == len(answer_ids) - 1
    assert found["baton_e2e_request_latency_seconds_count"] == 1
    assert found["baton_request_stage_seconds_count{stage=prefill}"] == 1
    assert found["baton_num_requests_running"] == 0
    assert found["baton_workers_ready{role=decode}"] == 1


async def test_a_finish_at_eos_is_stop(
    scripted: Cluster, client: openai.AsyncOpenAI, answer_ids: list[int]
) -> None:
    async def play_to_eos() -> None:
        p, d = await both_legs(scripted.prefill, scripted.decode)
        d.say_admitted()
        p.say_prefilled()
        d.say_tokens(0, [*answer_ids, 1])
        d.say_finished(FINISH_REASON_STOP)

    async with asyncio.TaskGroup() as group:
        group.create_task(play_to_eos())
        answer = await client.completions.create(model="tiny", prompt="a")
    assert answer.choices[0].text == "the north wind"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and answer.usage.completion_tokens == len(answer_ids) + 1
