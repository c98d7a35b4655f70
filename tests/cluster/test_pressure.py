"""Blocks for a part of what is asked: everything finishes with the right text."""

from pathlib import Path

import pytest

from tests.cluster.local_cluster import local_cluster, together, token_request
from tests.engine.engines import prompt_of
from tests.reference import NearTies, Reference


@pytest.mark.parametrize("prefill", [1, 0])
async def test_outputs_that_do_not_fit_together_all_finish(tiny_model: Path, prefill: int):
    """Conformance 5 and 20: 32 requests over blocks for a quarter of them, handed off or not."""
    lengths = [10 + 13 * n % 90 for n in range(32)]
    outputs = [60 + 17 * n % 80 for n in range(32)]
    token_bytes = 3 * 2 * 2 * 16 * 4
    kv_cache_bytes = sum(lengths + outputs) * token_bytes // 4
    reference = Reference(tiny_model)
    async with local_cluster(
        tiny_model, prefill=prefill, step_tokens=64, kv_cache_bytes=kv_cache_bytes
    ) as cluster:
        requests = [
            token_request(prompt_of(length, seed=n), output, ignore_eos=True)
            for n, (length, output) in enumerate(zip(lengths, outputs, strict=True))
        ]
        answers = await together(cluster, requests)
        ties = NearTies(1)
        for n, answer in enumerate(answers):
            expected = reference.greedy(prompt_of(lengths[n], seed=n), outputs[n], ignore_eos=True)
            ties.check(answer.token_ids, expected)
        *_, decode = await cluster.loads()
        assert decode.num_preemptions > 0
        await cluster.wait_clean()
