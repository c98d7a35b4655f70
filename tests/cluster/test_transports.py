"""Whichever way the KV goes, the texts are right, and nothing stays of who hangs up."""

import asyncio
import random
from pathlib import Path

import pytest

from tests.cluster.local_cluster import LocalCluster, local_cluster, together, token_request
from tests.engine.engines import prompt_of
from tests.reference import NearTies, Reference
from tests.transfer.conftest import TRANSPORTS


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
async def cluster(tiny_model: Path, transport: str):
    async with local_cluster(tiny_model, step_tokens=64, kv_transport=transport) as running:
        yield running
        await running.wait_clean()


async def test_sixteen_prompts_give_the_reference_texts(
    cluster: LocalCluster, tiny_model: Path, transport: str
):
    reference, ties = Reference(tiny_model), NearTies(allowed=1)
    prompts = [prompt_of(60 + 25 * n, seed=n) for n in range(16)]
    answers = await together(cluster, [token_request(prompt, 8) for prompt in prompts])
    for prompt, answer in zip(prompts, answers, strict=True):
        ties.check(answer.token_ids, reference.greedy(prompt, 8))
        assert answer.last.served_by.kv_bytes > 0
    (prefill,) = cluster.prefill
    labels = {"role": "prefill", "transport": transport}
    sent = prefill.monitor.registry.get_sample_value("baton_kv_sent_bytes_total", labels)
    assert sent == sum(answer.last.served_by.kv_bytes for answer in answers)


async def test_clients_that_hang_up_leave_both_workers_clean(cluster: LocalCluster, tiny_model: Path):
    """Conformance 2 and 16."""
    chance = random.Random(0)

    async def hang_up(seed: int) -> None:
        prompt = prompt_of(chance.randint(1, 400), seed=seed)
        call = cluster.client.Generate(token_request(prompt, 200, ignore_eos=True))
        for _ in range(chance.choice((0, 0, 1, 2))):
            await call.read()
        call.cancel()

    await asyncio.gather(*(hang_up(seed) for seed in range(20)))
    # The sessions are ordered: with this answer the workers have heard every cancel.
    answer = await cluster.generate(token_request(prompt_of(70, seed=99), 20))
    NearTies(0).check(answer.token_ids, Reference(tiny_model).greedy(prompt_of(70, seed=99), 20))
