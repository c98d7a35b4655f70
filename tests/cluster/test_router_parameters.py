"""What clients ask reaches the workers, and what workers tell comes back, at both doors."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import grpc
import openai
import pytest
from tokenizers import Tokenizer

from protos import inference_pb2
from protos.inference_pb2 import (
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    GenerateRequest,
    GenerateResponse,
    Grammar,
    JsonObject,
    SamplingParams,
    TokenLogprobs,
)
from protos.worker_pb2 import DROP_CAUSE_INVALID
from tests.cluster.router_bench import both_legs, generate, generating, inference_stub, token_request
from tests.cluster.router_fixtures import Cluster
from tests.cluster.scripted_worker import SubmittedLeg

TURNS = [{"role": "user", "content": "What is it?"}]


@pytest.fixture
async def client(scripted: Cluster) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"http://{scripted.router.http_address}/v1", api_key="none", max_retries=0, timeout=20
    ) as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(tiny_model / "tokenizer.json"))


def scored(id_: int, *others: int) -> TokenLogprobs:
    """Log probability -id_ / 1024 of a token, and of others that are likelier."""
    top = [*others, id_]
    return TokenLogprobs(logprob=-id_ / 1024, top_token_ids=top, top_logprobs=[-each / 1024 for each in top])


async def started(cluster: Cluster) -> SubmittedLeg:
    """The decode leg of a request that is handed off."""
    p, d = await both_legs(cluster.prefill, cluster.decode)
    if p.submit.sampling.HasField("prompt_logprobs"):
        prompt = p.submit.prompt_token_ids
        p.say_prompt_logprobs([TokenLogprobs(), *(scored(id_) for id_ in prompt[1:])])
    d.say_admitted()
    p.say_prefilled(cached_tokens=2)
    return d


async def play(cluster: Cluster, samples: Sequence[Sequence[int]]) -> SubmittedLeg:
    """Every sample a token at a time, in turn, with log probabilities if they are asked for."""
    d = await started(cluster)
    for index in range(max(map(len, samples))):
        for sample, ids in enumerate(samples):
            if index < len(ids):
                told = [scored(ids[index], 5)] if d.submit.sampling.HasField("logprobs") else []
                d.say_tokens(index, [ids[index]], sample=sample, logprobs=told)
    for sample in range(len(samples)):
        d.say_finished(FINISH_REASON_LENGTH, sample=sample)
    return d


EVERYTHING = SamplingParams(
    temperature=0.5,
    top_k=7,
    top_p=0.75,
    min_p=0.125,
    seed=9,
    max_tokens=8,
    min_tokens=2,
    stop_token_ids=[5, 6],
    ignore_eos=True,
    presence_penalty=0.5,
    frequency_penalty=-0.5,
    repetition_penalty=1.25,
    logit_bias={7: 1.5, 8: -100.0},
    n=2,
    logprobs=3,
    prompt_logprobs=1,
    grammar=Grammar(regex="a+"),
)


async def test_every_parameter_of_grpc_reaches_the_workers(scripted: Cluster) -> None:
    request = token_request()
    request.sampling.CopyFrom(EVERYTHING)
    request.cache_salt = "tenant"
    async with generating(scripted.router, request):
        p, d = await both_legs(scripted.prefill, scripted.decode)
    assert p.submit.sampling == d.submit.sampling == EVERYTHING
    assert p.submit.cache_salt == d.submit.cache_salt == "tenant"


async def test_every_parameter_of_http_reaches_the_workers(
    scripted: Cluster, client: openai.AsyncOpenAI
) -> None:
    async with asyncio.TaskGroup() as group:
        played = group.create_task(play(scripted, [[100], [101]]))
        await client.completions.create(
            model="tiny",
            prompt=[5, 6, 7],
            temperature=0.5,
            top_p=0.75,
            seed=9,
            max_tokens=8,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            logit_bias={"7": 1.5, "8": -100},  # pyright: ignore
            n=2,
            best_of=2,
            logprobs=3,
            extra_body={
                "top_k": 7,
                "min_p": 0.125,
                "min_tokens": 2,
                "stop_token_ids": [5, 6],
                "ignore_eos": True,
                "repetition_penalty": 1.25,
                "prompt_logprobs": 1,
                "structured_outputs": {"regex": "a+"},
                "cache_salt": "tenant",
            },
        )
    assert played.result().submit.sampling == EVERYTHING
    assert played.result().submit.cache_salt == "tenant"


async def test_a_response_format_reaches_the_workers(scripted: Cluster, client: openai.AsyncOpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    async with asyncio.TaskGroup() as group:
        played = group.create_task(play(scripted, [[100]]))
        await client.chat.completions.create(
            model="tiny",
            messages=TURNS,  # pyright: ignore
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": schema, "strict": True},
            },
        )
    text = '{"type":"object","properties":{"a":{"type":"string"}}}'
    assert played.result().submit.sampling.grammar == Grammar(json_schema=text)


async def test_every_sample_is_a_choice(
    scripted: Cluster, client: openai.AsyncOpenAI, tokenizer: Tokenizer
) -> None:
    samples = [tokenizer.encode(text).ids for text in ("the north wind", "a forest", "dogs")]
    async with asyncio.TaskGroup() as group:
        group.create_task(play(scripted, samples))
        chat = await client.chat.completions.create(model="tiny", messages=TURNS, n=3)  # pyright: ignore
    assert [choice.index for choice in chat.choices] == [0, 1, 2]
    assert [choice.message.content for choice in chat.choices] == ["the north wind", "a forest", "dogs"]
    assert chat.usage is not None
    assert chat.usage.completion_tokens == sum(map(len, samples))
    assert chat.usage.total_tokens == chat.usage.completion_tokens + chat.usage.prompt_tokens
    assert chat.usage.prompt_tokens_details is not None
    assert chat.usage.prompt_tokens_details.cached_tokens == 2


async def test_samples_are_streamed_side_by_side(
    scripted: Cluster, client: openai.AsyncOpenAI, tokenizer: Tokenizer
) -> None:
    samples = [tokenizer.encode(text).ids for text in ("the north wind", "a forest")]
    async with asyncio.TaskGroup() as group:
        group.create_task(play(scripted, samples))
        stream = await client.chat.completions.create(
            model="tiny",
            messages=TURNS,  # pyright: ignore
            n=2,
            stream=True,
            stream_options={"include_usage": True},
        )
        *chunks, usage = [chunk async for chunk in stream]
    texts, ends = ["", ""], [[], []]
    for chunk in chunks:
        (choice,) = chunk.choices
        assert not ends[choice.index], "a chunk after its sample's end"
        texts[choice.index] += choice.delta.content or ""
        ends[choice.index] += [choice.finish_reason] if choice.finish_reason else []
    assert texts == ["the north wind", "a forest"]
    assert ends == [["length"], ["length"]]
    assert usage.usage is not None and usage.usage.completion_tokens == sum(map(len, samples))


async def test_every_chunk_counts_if_that_is_asked_for(
    scripted: Cluster, client: openai.AsyncOpenAI, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode("the north wind").ids
    async with asyncio.TaskGroup() as group:
        playing = group.create_task(play(scripted, [ids]))
        stream = await client.chat.completions.create(
            model="tiny",
            messages=TURNS,  # pyright: ignore
            stream=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True},  # pyright: ignore
        )
        chunks = [chunk async for chunk in stream]
    counts = [chunk.usage and chunk.usage.completion_tokens for chunk in chunks]
    assert counts[0] == 0 and counts == sorted(counts) and counts[-2:] == [len(ids), len(ids)]
    num_prompt = len(playing.result().submit.prompt_token_ids)
    assert {chunk.usage and chunk.usage.prompt_tokens for chunk in chunks} == {num_prompt}


async def test_a_sample_that_ends_is_told_while_others_run(
    scripted: Cluster, client: openai.AsyncOpenAI, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode("the north wind").ids
    request = client.completions.create(model="tiny", prompt="a", n=2, stream=True)
    async with asyncio.TaskGroup() as group:
        starting = group.create_task(started(scripted))
        stream_task = group.create_task(request)
        d = await starting
        d.say_tokens(0, ids)
        d.say_finished(FINISH_REASON_STOP)
    stream = aiter(await stream_task)
    choices = [(await anext(stream)).choices[0] for _ in range(2)]
    assert [(choice.index, choice.finish_reason) for choice in choices] == [(0, None), (0, "stop")]
    d.say_tokens(0, ids, sample=1)
    d.say_finished(sample=1)
    assert [chunk.choices[0].index async for chunk in stream] == [1, 1]


async def test_a_stop_string_ends_its_sample_and_the_last_one_cancels(
    scripted: Cluster, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode("the north wind").ids
    responses: list[GenerateResponse] = []
    async with inference_stub(scripted.router) as stub:
        call = aiter(stub.Generate(token_request(stop=["nor"], n=2, max_tokens=64), timeout=20))
        d = await started(scripted)
        d.say_tokens(0, [*ids, *ids], sample=1)
        while not responses or not responses[-1].HasField("finish_reason"):
            responses.append(await anext(call))
        assert {response.sample for response in responses} == {1}
        assert not d.cancelled.is_set()
        d.say_tokens(2 * len(ids), ids, sample=1)
        d.say_tokens(0, ids, sample=0)
        await d.cancel_arrives()
        rest = [response async for response in call]
    assert {response.sample for response in rest} == {0}
    assert "".join(response.text for response in responses) == "the "
    assert "".join(response.text for response in rest) == "the "
    last = rest[-1]
    assert last.finish_reason == FINISH_REASON_STOP
    num_tokens = sum(len(response.token_ids) for response in (*responses, *rest))
    assert last.usage.completion_tokens == num_tokens <= 2 * len(ids)


async def test_a_chats_logprobs_are_openais(
    scripted: Cluster, client: openai.AsyncOpenAI, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode("the north").ids
    async with asyncio.TaskGroup() as group:
        played = group.create_task(play(scripted, [ids]))
        chat = await client.chat.completions.create(
            model="tiny",
            messages=TURNS,  # pyright: ignore
            logprobs=True,
            top_logprobs=1,
        )
    assert played.result().submit.sampling.logprobs == 1
    logprobs = chat.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert "".join(entry.token for entry in logprobs.content) == "the north"
    assert b"".join(bytes(entry.bytes or []) for entry in logprobs.content) == b"the north"
    assert [entry.logprob for entry in logprobs.content] == [-id_ / 1024 for id_ in ids]
    likeliest = [[(top.token, top.logprob) for top in entry.top_logprobs] for entry in logprobs.content]
    assert likeliest == [[(tokenizer.decode([5]), -5 / 1024)]] * len(ids)


async def test_streamed_logprobs_are_those_of_the_streamed_text(
    scripted: Cluster, client: openai.AsyncOpenAI, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode("the north wind").ids
    async with asyncio.TaskGroup() as group:
        group.create_task(play(scripted, [ids]))
        stream = await client.chat.completions.create(
            model="tiny",
            messages=TURNS,  # pyright: ignore
            logprobs=True,
            stream=True,
        )
        chunks = [chunk async for chunk in stream]
    entries = [
        entry
        for chunk in chunks
        if chunk.choices[0].logprobs is not None
        for entry in chunk.choices[0].logprobs.content or []
    ]
    assert [entry.logprob for entry in entries] == [-id_ / 1024 for id_ in ids]
    assert {len(entry.top_logprobs) for entry in entries} == {0}


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_of_a_stop_string_are_not_told(
    scripted: Cluster, client: openai.AsyncOpenAI, tokenizer: Tokenizer, stream: bool
) -> None:
    ids = tokenizer.encode("the north wind").ids
    kept = tokenizer.encode("the north").ids
    async with asyncio.TaskGroup() as group:
        group.create_task(play(scripted, [ids]))
        answer = await client.completions.create(
            model="tiny", prompt="a", stop=" wind", logprobs=0, max_tokens=64, stream=stream
        )
        chunks = [chunk async for chunk in answer] if stream else [answer]  # pyright: ignore
    tokens = [
        token
        for chunk in chunks
        if chunk.choices[0].logprobs is not None
        for token in chunk.choices[0].logprobs.tokens or []
    ]
    assert "".join(chunk.choices[0].text for chunk in chunks) == "the north"
    assert tokens == [tokenizer.decode([id_]) for id_ in kept]


@pytest.mark.parametrize("prompt", ["a house", "token ids"])
async def test_an_echo_is_the_prompt_before_the_answer_with_its_logprobs(
    scripted: Cluster, client: openai.AsyncOpenAI, tokenizer: Tokenizer, prompt: str
) -> None:
    asked, ids = tokenizer.encode("a house").ids, tokenizer.encode(" of wind").ids
    async with asyncio.TaskGroup() as group:
        group.create_task(play(scripted, [ids, ids]))
        answer = await client.completions.create(
            model="tiny", prompt=prompt if prompt == "a house" else asked, echo=True, logprobs=1, n=2
        )
    for choice in answer.choices:
        assert choice.text == "a house of wind"
        logprobs = choice.logprobs
        assert logprobs is not None and logprobs.tokens is not None and logprobs.text_offset is not None
        assert "".join(logprobs.tokens) == choice.text
        assert logprobs.token_logprobs == [None, *(-id_ / 1024 for id_ in (*asked[1:], *ids))]
        assert logprobs.text_offset == [
            len("".join(logprobs.tokens[:place])) for place in range(len(logprobs.tokens))
        ]
        assert logprobs.top_logprobs is not None and logprobs.top_logprobs[0] is None
        assert len(logprobs.top_logprobs) == len(logprobs.tokens)


async def test_an_echo_is_streamed_before_the_answer(
    scripted: Cluster, client: openai.AsyncOpenAI, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode(" of wind").ids
    async with asyncio.TaskGroup() as group:
        played = group.create_task(play(scripted, [ids]))
        stream = await client.completions.create(model="tiny", prompt="a house", echo=True, stream=True)
        chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].text == "a house"
    assert "".join(chunk.choices[0].text for chunk in chunks) == "a house of wind"
    assert not played.result().submit.sampling.HasField("prompt_logprobs")


async def test_prompt_logprobs_are_vllms(
    scripted: Cluster, client: openai.AsyncOpenAI, tokenizer: Tokenizer
) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(play(scripted, [[100]]))
        answer = await client.completions.create(
            model="tiny", prompt=[5, 6, 7], extra_body={"prompt_logprobs": 0}
        )
    told = answer.choices[0].model_dump()["prompt_logprobs"]
    assert told[0] is None
    assert [list(each) for each in told[1:]] == [["6"], ["7"]]
    assert told[1]["6"] == {"logprob": -6 / 1024, "rank": 1, "decoded_token": tokenizer.decode([6])}


async def test_grpc_tells_log_probabilities_with_the_tokens_and_the_prompts_first(scripted: Cluster) -> None:
    async with inference_stub(scripted.router) as stub:
        call = stub.Generate(token_request(logprobs=2, prompt_logprobs=1), timeout=20)
        await play(scripted, [[100, 101]])
        first, *rest = [response async for response in call]
    assert list(first.prompt_logprobs) == [TokenLogprobs(), scored(6), scored(7)]
    assert not first.token_ids and not any(response.prompt_logprobs for response in rest)
    assert all(len(response.logprobs) == len(response.token_ids) for response in rest)
    assert [each for response in rest for each in response.logprobs] == [scored(100, 5), scored(101, 5)]
    assert rest[-1].usage.cached_tokens == 2


async def test_a_first_token_of_which_the_decode_worker_knows_no_log_probability_is_not_doubled(
    scripted: Cluster,
) -> None:
    async with generating(scripted.router, token_request(logprobs=0, max_tokens=2)) as task:
        p, d = await both_legs(scripted.prefill, scripted.decode)
        d.say_admitted()
        d.say_tokens(0, [100])
        d.say_tokens(1, [101], logprobs=[scored(101)])
        d.say_finished()
        p.say_tokens(0, [100], logprobs=[scored(100)])
        p.say_prefilled()
        assert (await task).token_ids == [100, 101]


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_a_workers_refusal_names_the_field(
    scripted: Cluster, client: openai.AsyncOpenAI, leg: str
) -> None:
    async def refuse() -> None:
        p, d = await both_legs(scripted.prefill, scripted.decode)
        {"prefill": p, "decode": d}[leg].say_dropped(DROP_CAUSE_INVALID, "response_format: $ref loops")

    async with asyncio.TaskGroup() as group:
        group.create_task(refuse())
        with pytest.raises(openai.BadRequestError, match=r"\$ref loops") as caught:
            await client.completions.create(
                model="tiny", prompt="a", extra_body={"structured_outputs": {"json_object": True}}
            )
    assert caught.value.param == "structured_outputs"


async def test_a_workers_refusal_is_invalid_argument_at_grpc(scripted: Cluster) -> None:
    request = token_request()
    request.sampling.grammar.CopyFrom(Grammar(json_object=JsonObject()))
    async with generating(scripted.router, request) as task:
        p, _ = await both_legs(scripted.prefill, scripted.decode)
        p.say_dropped(DROP_CAUSE_INVALID, "response_format: no end-of-sequence token")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await task
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    "sampling",
    [
        {"n": 0},
        {"n": 17},
        {"logprobs": 21},
        {"presence_penalty": float("nan")},
        {"repetition_penalty": 0.0},
        {"logit_bias": {384: 1.0}},
        {"grammar": Grammar(json_schema="{")},
    ],
)
async def test_what_is_out_of_range_reaches_no_worker(scripted: Cluster, sampling: dict) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(scripted.router, token_request(**sampling))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert scripted.prefill.submitted.empty()


async def test_an_absent_grammar_is_none(scripted: Cluster) -> None:
    request = GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[1]))
    async with generating(scripted.router, request):
        p, _ = await both_legs(scripted.prefill, scripted.decode)
    assert not p.submit.sampling.HasField("grammar")
