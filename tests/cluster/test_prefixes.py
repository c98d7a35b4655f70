"""What is cached is neither computed nor sent again, and the text is the same."""

from pathlib import Path

import pytest

from tests.cluster.local_cluster import LocalCluster, local_cluster, together, token_request
from tests.engine.engines import prompt_of
from tests.reference import NearTies, Reference

BLOCK_SIZE = 16


@pytest.fixture
async def cluster(tiny_model: Path):
    async with local_cluster(tiny_model, step_tokens=64, block_size=BLOCK_SIZE) as running:
        yield running
        await running.wait_clean()


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> Reference:
    return Reference(tiny_model)


@pytest.mark.parametrize("length", [16, 17, 64, 65, 200])
async def test_the_same_prompt_again_is_found_on_both_workers(
    cluster: LocalCluster, reference: Reference, length: int
):
    prompt = prompt_of(length, seed=length)
    first = await cluster.generate(token_request(prompt, 12, ignore_eos=True))
    again = await cluster.generate(token_request(prompt, 12, ignore_eos=True))
    assert first.token_ids == again.token_ids == reference.greedy(prompt, 12, ignore_eos=True).tokens
    token_bytes = cluster.decode[0].layout.token_bytes
    assert first.last.served_by.kv_bytes == length * token_bytes
    assert again.last.served_by.kv_bytes == length % BLOCK_SIZE * token_bytes
    prefill, _ = await cluster.loads()
    # The last token's block is computed again: its logits are wanted.
    assert prefill.prefix_hit_tokens == (length - 1) // BLOCK_SIZE * BLOCK_SIZE


async def test_the_next_turn_sends_only_what_is_new(cluster: LocalCluster, reference: Reference):
    prompt = prompt_of(100)
    first = await cluster.generate(token_request(prompt, 30, ignore_eos=True))
    turn = (*prompt, *first.token_ids, *prompt_of(20, seed=5))
    second = await cluster.generate(token_request(turn, 10))
    NearTies(0).check(second.token_ids, reference.greedy(turn, 10))
    # The decode worker has the prompt and the answer but its last token, in full blocks.
    known = (100 + 30 - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert second.last.served_by.kv_bytes == (len(turn) - known) * cluster.decode[0].layout.token_bytes


async def test_another_salt_shares_nothing(cluster: LocalCluster):
    request = token_request(prompt_of(100), 5)
    await cluster.generate(request)
    request.cache_salt = "another tenant"
    answer = await cluster.generate(request)
    assert answer.last.served_by.kv_bytes == 100 * cluster.decode[0].layout.token_bytes


async def test_requests_that_share_a_prefix_at_once_give_the_reference_texts(
    cluster: LocalCluster, reference: Reference
):
    shared = prompt_of(150)
    prompts = [(*shared, *prompt_of(n + 1, seed=n)) for n in range(12)]
    await cluster.generate(token_request(shared, 4))
    answers = await together(cluster, [token_request(prompt, 16) for prompt in prompts])
    ties = NearTies(1)
    for prompt, answer in zip(prompts, answers, strict=True):
        ties.check(answer.token_ids, reference.greedy(prompt, 16))
