"""Models that run on transformers' own modules go through the whole cluster like any other."""

import shutil
from pathlib import Path

import pytest

from tests.cluster.local_cluster import local_cluster, together, token_request
from tests.engine.engines import prompt_of
from tests.reference import NearTies, Reference
from tests.tiny_decoders import make_tiny_decoder


# Sliding windows and capped logits; V narrower than K; learned positions; layers of unequal shapes.
@pytest.mark.parametrize("family", ["gemma2", "deepseek_v3", "gpt2", "mimo_v2_flash"])
async def test_handed_off_texts_are_the_references(family: str, tmp_path: Path, tiny_model: Path):
    folder = make_tiny_decoder(tmp_path, family)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_model / name, folder)
    prompts = [prompt_of(length, seed=length) for length in (1, 16, 17, 70, 150)]
    async with local_cluster(folder, step_tokens=64) as cluster:
        answers = await together(cluster, [token_request(prompt, 8) for prompt in prompts])
        _, decode = await cluster.loads()
        assert decode.computed_prompt_tokens == 0
        await cluster.wait_clean()
    reference, ties = Reference(folder), NearTies(allowed=1)
    for prompt, answer in zip(prompts, answers, strict=True):
        ties.check(answer.token_ids, reference.greedy(prompt, 8))
