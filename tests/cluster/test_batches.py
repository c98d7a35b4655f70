"""Several prompts in one request for completions, asked for with the openai package."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import openai
import pytest
from openai.types import Completion

from protos.worker_pb2 import DROP_CAUSE_INVALID
from router.router_server import RouterServer
from tests.cluster.local_cluster import LocalCluster, local_cluster
from tests.cluster.router_bench import running_router
from tests.cluster.router_fixtures import Cluster
from tests.cluster.scripted_worker import DEADLINE_S, ScriptedWorker
from tests.engine.engines import prompt_of

PROMPTS = [list(prompt_of(length, seed=length)) for length in (5, 40, 130)]


@pytest.fixture
async def cluster(tiny_model: Path) -> AsyncIterator[LocalCluster]:
    async with local_cluster(tiny_model, step_tokens=64) as running:
        yield running
        await running.wait_clean()


def client_of(router: RouterServer) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"http://{router.http_address}/v1", api_key="none", max_retries=0, timeout=120
    )


@pytest.fixture
async def client(cluster: LocalCluster) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(cluster.router) as client:
        yield client


async def ask(client: openai.AsyncOpenAI, prompt: list, **fields: object) -> Completion:
    asked = {"max_tokens": 12, "seed": 3, "extra_body": {"ignore_eos": True}, **fields}
    return await client.completions.create(model="tiny", prompt=prompt, **asked)  # pyright: ignore


def texts(answer: Completion) -> list[str]:
    """By index."""
    assert [choice.index for choice in answer.choices] == list(range(len(answer.choices)))
    return [choice.text for choice in answer.choices]


@pytest.mark.parametrize("n", [1, 3])
async def test_choices_come_prompt_by_prompt_with_the_texts_that_each_alone_gets(
    client: openai.AsyncOpenAI, n: int
) -> None:
    alone = [await ask(client, prompt, n=n) for prompt in PROMPTS]
    batch = await ask(client, PROMPTS, n=n)
    assert texts(batch) == [text for answer in alone for text in texts(answer)]
    assert {choice.finish_reason for choice in batch.choices} == {"length"}
    assert batch.usage is not None
    assert batch.usage.prompt_tokens == sum(map(len, PROMPTS))
    assert batch.usage.completion_tokens == 12 * n * len(PROMPTS)
    assert batch.usage.total_tokens == batch.usage.prompt_tokens + batch.usage.completion_tokens


async def test_texts_and_equal_prompts_may_be_asked_for_together(client: openai.AsyncOpenAI) -> None:
    batch = texts(await ask(client, ["the wind", "a fox", "the wind"]))
    assert batch[0] == batch[2] != batch[1]


async def test_a_streamed_batch_has_the_texts_of_the_whole_one(client: openai.AsyncOpenAI) -> None:
    whole = texts(await ask(client, PROMPTS, n=2))
    stream = await client.completions.create(
        model="tiny",
        prompt=PROMPTS,
        n=2,
        seed=3,
        max_tokens=12,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    *chunks, usage = [chunk async for chunk in stream]
    streamed = [""] * 6
    ended: list[int] = []
    for chunk in chunks:
        (choice,) = chunk.choices
        assert choice.index not in ended, "a chunk after its choice's end"
        streamed[choice.index] += choice.text
        ended += [choice.index] if choice.finish_reason else []
    assert streamed == whole and sorted(ended) == list(range(6))
    assert len({chunk.id for chunk in (*chunks, usage)}) == 1
    assert usage.choices == [] and usage.usage is not None
    assert usage.usage.completion_tokens == 72
    assert usage.usage.prompt_tokens == sum(map(len, PROMPTS))


@pytest.mark.parametrize("stream", [False, True])
async def test_every_prompt_is_echoed_with_its_own_log_probabilities(
    client: openai.AsyncOpenAI, stream: bool
) -> None:
    prompts = ["the wind", "a fox and the forest"]
    alone = [(await ask(client, [prompt], echo=True, logprobs=2)).choices[0] for prompt in prompts]
    answer = await ask(client, prompts, echo=True, logprobs=2, stream=stream)
    told = ["", ""]
    scores: list[list] = [[], []]
    async for part in parts_of(answer):
        for choice in part.choices:
            told[choice.index] += choice.text
            scores[choice.index] += (choice.logprobs and choice.logprobs.token_logprobs) or []
    for index, choice in enumerate(alone):
        assert choice.logprobs is not None
        assert told[index] == choice.text and told[index].startswith(prompts[index])
        assert scores[index] == pytest.approx(choice.logprobs.token_logprobs, abs=1e-3)


async def parts_of(answer: Completion | openai.AsyncStream[Completion]) -> AsyncIterator[Completion]:
    if isinstance(answer, Completion):
        yield answer
    else:
        async for chunk in answer:
            yield chunk


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("prompts", "place"), [([[5], [], [6]], 1), ([[5], [6], [384]], 2), (["a", "b " * 20_000], 1)]
)
async def test_one_unsound_prompt_is_named_by_its_place_and_nothing_runs(
    scripted: Cluster, prompts: list, place: int, stream: bool
) -> None:
    async with client_of(scripted.router) as client:
        with pytest.raises(openai.BadRequestError, match=f"prompt: {place}: ") as caught:
            await client.completions.create(model="tiny", prompt=prompts, stream=stream)
    assert caught.value.param == "prompt"
    assert scripted.prefill.submitted.empty() and scripted.decode.submitted.empty()


async def test_what_no_worker_can_compile_is_one_error(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await ask(client, PROMPTS, extra_body={"structured_outputs": {"regex": "(a"}})
    assert caught.value.param == "structured_outputs"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_hangs_up_leaves_nothing_of_any_prompt(
    client: openai.AsyncOpenAI, cluster: LocalCluster, stream: bool
) -> None:
    task = asyncio.create_task(ask(client, PROMPTS, n=2, max_tokens=2000, stream=stream))
    while not (await cluster.loads())[1].num_running:
        continue
    task.cancel()
    if stream and not (await asyncio.wait({task}))[0].pop().cancelled():
        await task.result().close()  # pyright: ignore
    await cluster.wait_clean()


@pytest.fixture
async def alone(tiny_model: Path, scripted_decode: ScriptedWorker) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a router that has one worker."""
    async with (
        running_router(tiny_model, decode=[scripted_decode]) as router,
        httpx.AsyncClient(base_url=f"http://{router.http_address}", timeout=20) as http,
    ):
        yield http


async def test_one_that_fails_in_the_middle_ends_all_with_one_error(
    alone: httpx.AsyncClient, scripted_decode: ScriptedWorker
) -> None:
    body = {"prompt": [[5], [6]], "stream": True}
    asking = asyncio.create_task(alone.post("/v1/completions", json=body))
    first, second = await scripted_decode.next_leg(), await scripted_decode.next_leg()
    first.say_tokens(0, [100])
    second.say_dropped(DROP_CAUSE_INVALID, "stop: is wrong")
    await first.cancel_arrives()
    answer = await asking
    events = answer.text.strip().split("\n\n")
    assert sum('"error"' in event for event in events) == 1 and "is wrong" in answer.text
    assert "[DONE]" not in answer.text


async def test_all_prompts_have_the_requests_id(
    alone: httpx.AsyncClient, scripted_decode: ScriptedWorker
) -> None:
    body, headers = {"prompt": [[5], [6]]}, {"x-request-id": "mine"}
    asking = asyncio.create_task(alone.post("/v1/completions", json=body, headers=headers))
    for _ in range(2):
        leg = await scripted_decode.next_leg()
        assert leg.submit.request_id == "mine"
        leg.say_tokens(0, [100])
        leg.say_finished()
    answer = await asking
    assert (answer.headers["x-request-id"], answer.json()["id"]) == ("mine", "cmpl-mine")
    assert len((await alone.get("/explain/mine")).json()) == 2


async def test_where_several_prompts_would_go_is_not_explained(alone: httpx.AsyncClient) -> None:
    answer = await alone.post("/explain", json={"prompt": [[5], [6]]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")


async def test_every_prompt_takes_a_place_in_the_queue(
    tiny_model: Path, scripted_decode: ScriptedWorker
) -> None:
    """Of three-token prompts four are let to the worker, and four may wait."""
    rules = {"max_inflight_prompt_tokens": 16, "max_queued_requests": 4}
    prompts = [[5, 6, 7 + place] for place in range(9)]
    async with (
        running_router(tiny_model, decode=[scripted_decode], **rules) as router,
        client_of(router) as client,
    ):
        with pytest.raises(openai.RateLimitError) as caught:
            await client.completions.create(model="tiny", prompt=prompts)
        assert int(caught.value.response.headers["retry-after"]) >= 1
        for _ in range(4):
            await (await scripted_decode.next_leg()).cancel_arrives()
        asking = asyncio.create_task(client.completions.create(model="tiny", prompt=prompts[:8]))
        for _ in range(8):
            leg = await scripted_decode.next_leg()
            leg.say_tokens(0, [100])
            leg.say_finished()
        assert len((await asking).choices) == 8


async def test_every_prompt_counts_for_its_keys_limits(
    tiny_model: Path, tmp_path: Path, scripted_decode: ScriptedWorker
) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("[{name: tests, key: none, max_concurrent_requests: 2}]")
    async with (
        running_router(tiny_model, decode=[scripted_decode], api_keys_file=keys) as router,
        client_of(router) as client,
    ):
        with pytest.raises(openai.RateLimitError, match="may run 2 requests at once"):
            await client.completions.create(model="tiny", prompt=[[5], [6], [7]])
        for _ in range(2):
            await (await scripted_decode.next_leg()).cancel_arrives()
        asking = asyncio.create_task(client.completions.create(model="tiny", prompt=[[5], [6]]))
        async with asyncio.timeout(DEADLINE_S):
            for _ in range(2):
                leg = await scripted_decode.next_leg()
                leg.say_tokens(0, [100])
                leg.say_finished()
            assert len((await asking).choices) == 2


async def test_every_chunk_counts_its_own_prompts_tokens_if_that_is_asked_for(
    client: openai.AsyncOpenAI,
) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = await ask(client, PROMPTS, n=2, stream=True, stream_options=options)
    counts: dict[int, list[int]] = {0: [], 1: [], 2: []}
    *chunks, last = [chunk async for chunk in parts_of(stream)]
    for chunk in chunks:
        assert chunk.usage is not None
        place = chunk.choices[0].index // 2
        assert chunk.usage.prompt_tokens == len(PROMPTS[place])
        assert chunk.usage.total_tokens == chunk.usage.prompt_tokens + chunk.usage.completion_tokens
        counts[place].append(chunk.usage.completion_tokens)
    for counted in counts.values():
        assert counted == sorted(counted) and counted[-1] == 24
    assert last.usage is not None and last.usage.completion_tokens == 72
