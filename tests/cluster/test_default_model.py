"""The embedded default model through the whole cluster, against transformers with the same weights."""

import json
from pathlib import Path

import pytest
from openai import AsyncOpenAI
from tokenizers import Tokenizer

import model_store
from tests.cluster.local_cluster import local_cluster, together, token_request
from tests.reference import NearTies, Reference

QUESTION = "What is the capital of France?"


@pytest.fixture(scope="module")
def folder() -> Path:
    return model_store.resolve("smollm2-135m")


def prompt_of(folder: Path, length: int) -> list[int]:
    """The first tokens of a real text."""
    text = (Path(json.__file__).read_text(encoding="utf-8") + QUESTION) * 2
    return Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids[:length]


async def test_real_text_alone_and_together_is_continued_as_the_reference_does(folder: Path):
    lengths = (1, 16, 33, 200, 513)
    reference = Reference(folder)
    ties = NearTies(allowed=1)
    async with local_cluster(folder, kv_cache_bytes=512 << 20) as cluster:
        prompts = [prompt_of(folder, length) for length in lengths]
        expected = [reference.greedy(prompt, 12) for prompt in prompts]
        for prompt, right in zip(prompts[:3], expected, strict=False):
            ties.check((await cluster.generate(token_request(prompt, 12))).token_ids, right)
        requests = [token_request(prompt, 12) for prompt in prompts]
        for answer, right in zip(await together(cluster, requests), expected, strict=True):
            ties.check(answer.token_ids, right)
            assert answer.last.served_by.decode_worker == "decode-0"


async def test_the_openai_package_streams_the_answer_that_names_paris(folder: Path):
    async with (
        local_cluster(folder, kv_cache_bytes=256 << 20) as cluster,
        AsyncOpenAI(base_url=f"http://{cluster.router.http_address}/v1", api_key="unused") as client,
    ):
        stream = await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": QUESTION}], temperature=0, stream=True
        )
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert "Paris" in text
