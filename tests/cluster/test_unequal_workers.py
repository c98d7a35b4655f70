"""Hand-offs between workers whose caches differ."""

from pathlib import Path

import pytest

from tests.cluster.local_cluster import local_cluster, together, token_request
from tests.engine.engines import prompt_of
from tests.reference import NearTies, Reference

PROMPTS = [prompt_of(30 + 41 * n, seed=n) for n in range(4)]


@pytest.mark.parametrize("transport", ["grpc", "shm", "gloo"])
async def test_blocks_of_different_sizes_give_the_reference_texts(tiny_model: Path, transport: str) -> None:
    reference, ties = Reference(tiny_model), NearTies(allowed=1)
    async with local_cluster(
        tiny_model, step_tokens=64, kv_transport=transport, block_size=16, decode_options={"block_size": 24}
    ) as cluster:
        # The second time both workers know the prefixes, in blocks of their own.
        for _ in range(2):
            answers = await together(cluster, [token_request(prompt, 8) for prompt in PROMPTS])
            for prompt, answer in zip(PROMPTS, answers, strict=True):
                ties.check(answer.token_ids, reference.greedy(prompt, 8))
        await cluster.wait_clean()


@pytest.mark.parametrize("kv_wire_dtype", ["bfloat16", "int8", "fp8"])
async def test_compressed_kv_is_converted_by_who_takes_it(tiny_model: Path, kv_wire_dtype: str) -> None:
    async with local_cluster(
        tiny_model, kv_wire_dtype=kv_wire_dtype, decode_options={"kv_conversion": True}
    ) as cluster:
        answers = await together(cluster, [token_request(prompt, 8, ignore_eos=True) for prompt in PROMPTS])
        sent = cluster.prefill[0].description.wire_token_bytes
        assert sent <= cluster.decode[0].layout.token_bytes / 2
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            assert answer.last.served_by.kv_bytes == len(prompt) * sent
            assert len(answer.token_ids) == 8
        await cluster.wait_clean()


async def test_workers_that_cannot_hand_off_to_each_other_still_serve(tiny_model: Path) -> None:
    """The decode worker prefills by itself: nothing is sent that would be refused."""
    async with local_cluster(tiny_model, kv_wire_dtype="int8") as cluster:
        answer = await cluster.generate(token_request(PROMPTS[0], 8))
        NearTies(0).check(answer.token_ids, Reference(tiny_model).greedy(PROMPTS[0], 8))
        assert answer.last.served_by.kv_bytes == 0
