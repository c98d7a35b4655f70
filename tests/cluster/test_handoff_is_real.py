"""The decode worker really goes on from what the prefill worker sent, while it is still computing."""

import asyncio
import threading
from pathlib import Path

import pytest
import torch

from engine.engine import Engine
from tests.cluster.local_cluster import LocalCluster, local_cluster, token_request
from tests.engine.engines import prompt_of
from tests.reference import NearTies, Reference
from tests.transfer.tampering import Tampering

CHUNK = 32


@pytest.fixture(params=["grpc", "shm"])
async def cluster(tiny_model: Path, request: pytest.FixtureRequest):
    async with local_cluster(tiny_model, step_tokens=CHUNK, kv_transport=request.param) as running:
        yield running
        await running.wait_clean()


def negate_values(payload: memoryview) -> None:
    """Turns every float's sign round."""
    torch.frombuffer(payload, dtype=torch.float32).neg_()


async def test_altered_and_resealed_frames_change_the_text(cluster: LocalCluster, tiny_model: Path):
    Tampering(cluster.proxies[0]).forge(negate_values)
    altered = await cluster.generate(token_request(prompt_of(100), 20, ignore_eos=True))
    right = Reference(tiny_model).greedy(prompt_of(100), 20, ignore_eos=True).tokens
    # The first token is the prefill worker's.
    assert altered.token_ids[0] == right[0]
    assert altered.token_ids != right


async def test_damaged_frames_never_become_text(cluster: LocalCluster, tiny_model: Path):
    """Conformance 18, and 17: what fails always is computed elsewhere."""
    tampering = Tampering(cluster.proxies[0])
    tampering.damage()
    answer = await cluster.generate(token_request(prompt_of(100), 20))
    assert tampering.seen
    NearTies(0).check(answer.token_ids, Reference(tiny_model).greedy(prompt_of(100), 20))


class Hold:
    """Stops an engine between two steps until it is let go."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.release = threading.Event()

    def __call__(self, engine: Engine) -> None:
        self.reached.set()
        self.release.wait()


async def test_layer_0_is_at_the_decode_worker_while_the_prompt_is_still_computed(cluster: LocalCluster):
    prefill, decode = cluster.prefill[0], cluster.decode[0]
    hold = Hold()
    on_report = prefill.engine._on_report

    def hold_after_first_chunk(report) -> None:
        on_report(report)
        if report.step is not None and report.step.num_prompt_tokens and not hold.release.is_set():
            prefill.engine.post(hold)

    prefill.engine._on_report = hold_after_first_chunk
    tampering = Tampering(cluster.proxies[0])
    request = asyncio.create_task(cluster.generate(token_request(prompt_of(CHUNK * 8), 4, ignore_eos=True)))
    try:
        await asyncio.to_thread(hold.reached.wait)
        # The engine that is held cannot change what is read of it here.
        sent = first_chunk_of_layer_0(prefill.engine._ready.result())
        assert sent.abs().sum() > 0
        while not torch.equal(await decode.engine.call(first_chunk_of_layer_0), sent):
            pass
        assert max(frame.token_start for frame in tampering.seen) < CHUNK * 7
    finally:
        hold.release.set()
    answer = await request
    assert len(answer.token_ids) == 4


def first_chunk_of_layer_0(engine: Engine) -> torch.Tensor:
    """K of the first chunk's tokens, of the one sequence that there is."""
    ((sequence,),) = engine._sequences.values()
    slots = sequence.slots(0, CHUNK, engine.layout.block_size)
    return engine._cache.gather(0, 0, torch.from_numpy(slots).to(engine.device)).cpu()
