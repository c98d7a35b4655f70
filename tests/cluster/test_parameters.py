"""Every parameter through real workers, asked for with the openai package."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest
import torch
from openai.types import Completion
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from protos.inference_pb2 import FINISH_REASON_STOP, GenerateRequest
from tests.cluster.local_cluster import LocalCluster, local_cluster, token_request
from tests.engine.engines import prompt_of
from tests.tiny_models import IM_END

TURNS = [{"role": "user", "content": "What is it?"}]
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "word": {"enum": ["north", "wind"]}},
    "required": ["ok", "word"],
    "additionalProperties": False,
}


@pytest.fixture
async def cluster(tiny_model: Path) -> AsyncIterator[LocalCluster]:
    async with local_cluster(tiny_model, step_tokens=64) as running:
        yield running
        await running.wait_clean()


@pytest.fixture
async def client(cluster: LocalCluster) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai_client(cluster) as client:
        yield client


def openai_client(cluster: LocalCluster) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"http://{cluster.router.http_address}/v1", api_key="none", max_retries=0, timeout=120
    )


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(tiny_model / "tokenizer.json"))


class Scorer:
    """What transformers says of every place of a text: log probabilities, [num_tokens - 1, vocab_size]."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def __call__(self, token_ids: Sequence[int]) -> torch.Tensor:
        with torch.inference_mode():
            return self._model(torch.tensor([list(token_ids)])).logits[0].log_softmax(-1)[:-1]


@pytest.fixture(scope="module")
def score(tiny_model: Path) -> Scorer:
    return Scorer(tiny_model)


@dataclass(frozen=True)
class Samples:
    """By sample: token ids and finish reason."""

    token_ids: dict[int, list[int]]
    reasons: dict[int, int]
    kv_bytes: int


async def samples_of(cluster: LocalCluster, request: GenerateRequest) -> Samples:
    ids: dict[int, list[int]] = {}
    reasons: dict[int, int] = {}
    kv_bytes = 0
    async for response in cluster.client.Generate(request, timeout=120):
        own = ids.setdefault(response.sample, [])
        assert response.index == len(own)
        own += response.token_ids
        if response.HasField("finish_reason"):
            reasons[response.sample] = response.finish_reason
        kv_bytes = response.served_by.kv_bytes
    return Samples(ids, reasons, kv_bytes)


async def test_n_is_one_prefill_one_transfer_and_n_results(cluster: LocalCluster) -> None:
    """Conformance 10."""
    request = token_request(prompt_of(100), 12, n=4, temperature=1.0, seed=5, ignore_eos=True)
    samples = await samples_of(cluster, request)
    assert [len(samples.token_ids[sample]) for sample in range(4)] == [12] * 4
    assert len({tuple(ids) for ids in samples.token_ids.values()}) == 4
    assert samples.kv_bytes == 100 * cluster.decode[0].layout.token_bytes
    prefill, decode = await cluster.loads()
    assert (prefill.computed_prompt_tokens, decode.computed_prompt_tokens) == (100, 0)


async def test_every_sample_has_its_own_reproducible_stream_on_one_worker_and_on_two(
    cluster: LocalCluster, tiny_model: Path
) -> None:
    """Conformance 10 and 11."""
    request = token_request(prompt_of(40), 10, n=3, temperature=1.0, seed=7, ignore_eos=True)
    first, again = await samples_of(cluster, request), await samples_of(cluster, request)
    async with local_cluster(tiny_model, prefill=0) as alone:
        local = await samples_of(alone, request)
    assert first.token_ids == again.token_ids == local.token_ids
    fewer = token_request(prompt_of(40), 10, n=1, temperature=1.0, seed=7, ignore_eos=True)
    assert (await samples_of(cluster, fewer)).token_ids[0] == first.token_ids[0]


async def test_samples_that_all_end_at_their_first_token_need_no_hand_off(
    cluster: LocalCluster, tokenizer: Tokenizer
) -> None:
    """Conformance 7."""
    eos = tokenizer.token_to_id(IM_END)
    samples = await samples_of(cluster, token_request(prompt_of(20), 10, n=3, logit_bias={eos: 100.0}))
    assert samples.token_ids == {sample: [eos] for sample in range(3)}
    assert set(samples.reasons.values()) == {FINISH_REASON_STOP} and samples.kv_bytes == 0


@pytest.mark.parametrize("prompt", [[9], list(prompt_of(30))])
async def test_one_token_of_every_sample(client: openai.AsyncOpenAI, prompt: list[int]) -> None:
    """Conformance 6 and 8."""
    answer = await client.completions.create(
        model="tiny", prompt=prompt, n=3, max_tokens=1, seed=1, extra_body={"ignore_eos": True}
    )
    assert [choice.finish_reason for choice in answer.choices] == ["length"] * 3
    assert answer.usage is not None and answer.usage.completion_tokens == 3


async def test_samples_end_at_stop_strings_each_in_its_own_place(client: openai.AsyncOpenAI) -> None:
    """Conformance 12."""
    asked = {"model": "tiny", "prompt": prompt_of(30), "n": 4, "seed": 3, "max_tokens": 40}
    whole = await client.completions.create(**asked, extra_body={"ignore_eos": True})  # pyright: ignore
    stop = whole.choices[0].text[10:12]
    cut = await client.completions.create(**asked, stop=[stop], extra_body={"ignore_eos": True})  # pyright: ignore
    for before, after in zip(whole.choices, cut.choices, strict=True):
        found = before.text.find(stop)
        assert after.text == (before.text if found < 0 else before.text[:found])
        assert after.finish_reason == ("length" if found < 0 else "stop")


def assert_scored(answer: Completion, ids: Sequence[int], first: int, expected: torch.Tensor) -> None:
    """The last of the choice's log probabilities are the reference's of ids[first:]."""
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.token_logprobs is not None and logprobs.top_logprobs is not None
    places = expected[first - 1 :]
    own = places.gather(1, torch.tensor(ids[first:])[:, None])[:, 0]
    assert logprobs.token_logprobs[-len(own) :] == pytest.approx(own.tolist(), abs=1e-3)
    best = [max(top.values()) for top in logprobs.top_logprobs[-len(own) :]]
    assert best == pytest.approx(places.amax(1).tolist(), abs=1e-3)


async def test_logprobs_are_the_references_from_the_first_token_on(
    client: openai.AsyncOpenAI, cluster: LocalCluster, score: Scorer
) -> None:
    """Conformance 9."""
    prompt = prompt_of(50)
    ids = [*prompt, *(await cluster.generate(token_request(prompt, 12, ignore_eos=True))).token_ids]
    answer = await client.completions.create(
        model="tiny",
        prompt=prompt,
        temperature=0,
        max_tokens=12,
        logprobs=5,
        extra_body={"ignore_eos": True},
    )
    assert_scored(answer, ids, 50, score(ids))
    assert answer.choices[0].logprobs is not None
    assert len(answer.choices[0].logprobs.token_logprobs or []) == 12


async def test_the_likeliest_tokens_are_the_references(cluster: LocalCluster, score: Scorer) -> None:
    """Conformance 9."""
    prompt, told = prompt_of(50), []
    request = token_request(prompt, 8, ignore_eos=True, logprobs=5)
    ids = list(prompt)
    async for response in cluster.client.Generate(request, timeout=120):
        ids += response.token_ids
        told += response.logprobs
    best = score(ids)[49:].topk(5)
    assert len(told) == 8
    assert [list(each.top_token_ids) for each in told] == best.indices.tolist()
    for each, values in zip(told, best.values.tolist(), strict=True):
        assert list(each.top_logprobs) == pytest.approx(values, abs=1e-3)


async def test_an_echos_logprobs_are_the_references_also_when_the_prompt_is_cached(
    client: openai.AsyncOpenAI, cluster: LocalCluster, score: Scorer
) -> None:
    prompt = prompt_of(150, seed=2)
    ids = [*prompt, *(await cluster.generate(token_request(prompt, 3, ignore_eos=True))).token_ids]
    for _ in range(2):
        answer = await client.completions.create(
            model="tiny",
            prompt=prompt,
            temperature=0,
            max_tokens=3,
            logprobs=2,
            echo=True,
            extra_body={"ignore_eos": True},
        )
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None and logprobs.token_logprobs is not None
        assert len(logprobs.token_logprobs) == 153 and logprobs.token_logprobs[0] is None
        assert_scored(answer, ids, 1, score(ids))


async def test_streamed_logprobs_are_those_of_the_whole_answer(client: openai.AsyncOpenAI) -> None:
    asked = {"model": "tiny", "messages": TURNS, "logprobs": True, "top_logprobs": 2, "n": 2, "seed": 4}
    extra = {"ignore_eos": True, "max_completion_tokens": 12}
    whole = await client.chat.completions.create(**asked, extra_body=extra)  # pyright: ignore
    stream = await client.chat.completions.create(**asked, extra_body=extra, stream=True)  # pyright: ignore
    entries: list[list] = [[], []]
    async for chunk in stream:
        (choice,) = chunk.choices
        if choice.logprobs is not None:
            entries[choice.index] += choice.logprobs.content or []
    for choice, streamed in zip(whole.choices, entries, strict=True):
        assert choice.logprobs is not None and choice.logprobs.content is not None
        assert len(streamed) == 12
        assert [entry.token for entry in streamed] == [entry.token for entry in choice.logprobs.content]
        assert all(len(entry.top_logprobs) == 2 and entry.logprob <= 0 for entry in streamed)


async def test_a_schema_is_kept_by_every_sample(client: openai.AsyncOpenAI) -> None:
    format_ = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
    answer = await client.chat.completions.create(
        model="tiny",
        messages=TURNS,  # pyright: ignore
        response_format=format_,  # pyright: ignore
        n=3,
        seed=1,
        max_tokens=200,
    )
    for choice in answer.choices:
        told = json.loads(choice.message.content or "")
        assert isinstance(told["ok"], bool) and told["word"] in ("north", "wind")
        assert choice.finish_reason == "stop"


async def test_a_regex_is_kept_in_a_stream(client: openai.AsyncOpenAI) -> None:
    stream = await client.completions.create(
        model="tiny",
        prompt=prompt_of(20),
        stream=True,
        seed=2,
        max_tokens=50,
        extra_body={"structured_outputs": {"regex": "[0-9]{3}-(the|a) wind"}},
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].text for chunk in chunks)
    assert re.fullmatch("[0-9]{3}-(the|a) wind", text)
    assert chunks[-1].choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs"),
        ({"structured_outputs": {"json": {"type": "nothing"}}}, "structured_outputs"),
    ],
)
async def test_a_grammar_that_no_worker_can_compile_is_the_clients_fault(
    client: openai.AsyncOpenAI, fields: dict, param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(model="tiny", prompt="the", extra_body=fields)
    assert caught.value.param == param


async def test_a_biased_token_is_all_or_nothing(client: openai.AsyncOpenAI, tokenizer: Tokenizer) -> None:
    wind, the = tokenizer.encode(" wind").ids[0], tokenizer.encode(" the").ids[0]
    answer = await client.completions.create(
        model="tiny",
        prompt="the",
        max_tokens=5,
        logit_bias={str(wind): 90, str(the): -100},
        extra_body={"ignore_eos": True},
    )
    assert answer.choices[0].text == tokenizer.decode([wind] * 5)


async def test_penalties_keep_a_text_from_repeating_itself(cluster: LocalCluster) -> None:
    plain = token_request(prompt_of(30), 60, ignore_eos=True)
    penalized = token_request(prompt_of(30), 60, ignore_eos=True, presence_penalty=2.0, frequency_penalty=2.0)
    repeating, varied = await cluster.generate(plain), await cluster.generate(penalized)
    assert len(set(varied.token_ids)) > len(set(repeating.token_ids))


async def test_cached_tokens_are_told_and_a_salt_keeps_tenants_apart(client: openai.AsyncOpenAI) -> None:
    async def cached(salt: str) -> int:
        answer = await client.completions.create(
            model="tiny", prompt=prompt_of(200, seed=8), max_tokens=4, extra_body={"cache_salt": salt}
        )
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens or 0

    assert await cached("one") == 0
    assert await cached("one") >= 176
    assert await cached("two") == 0


async def test_a_client_that_hangs_up_on_many_samples_leaves_nothing(
    client: openai.AsyncOpenAI, cluster: LocalCluster
) -> None:
    stream = await client.completions.create(
        model="tiny", prompt=prompt_of(60), n=8, max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
    )
    await anext(aiter(stream))
    await stream.close()
    await cluster.wait_clean()


async def test_many_requests_of_many_samples_do_not_disturb_each_other(cluster: LocalCluster) -> None:
    requests = [
        token_request(prompt_of(20 + i, seed=i), 10, n=1 + i % 4, temperature=1.0, seed=i, ignore_eos=True)
        for i in range(8)
    ]
    together = await asyncio.gather(*(samples_of(cluster, request) for request in requests))
    alone = [await samples_of(cluster, request) for request in requests]
    assert [samples.token_ids for samples in together] == [samples.token_ids for samples in alone]
