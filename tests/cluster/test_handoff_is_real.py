"""The decode worker really goes on from what the prefill worker sent, while it is still computing."""

import asyncio
import threading
from pathlib import Path

import pytest
import torch

from engine.engine import Engine
from kv_transfer.frame import decode as decode_frame
from kv_transfer.frame import reseal
from tests.cluster.local_cluster import LocalCluster, local_cluster, token_request
from tests.engine.engines import prompt_of

CHUNK = 32


@pytest.fixture
async def cluster(tiny_model: Path):
    async with local_cluster(tiny_model, step_tokens=CHUNK) as running:
        yield running
        await running.wait_clean()


def negated_values(frame: bytes) -> bytes:
    """Every float's sign turned round, under a checksum that fits."""
    altered = bytearray(frame)
    start = len(frame) - decode_frame(frame).payload_bytes
    payload = torch.frombuffer(altered, dtype=torch.float32, offset=start)
    payload.neg_()
    return reseal(bytes(altered))


async def test_altered_and_resealed_frames_change_the_text(cluster: LocalCluster):
    request = token_request(prompt_of(100), 20, ignore_eos=True)
    undisturbed = await cluster.generate(request)
    cluster.proxies[0].alter["Frames"] = negated_values
    altered = await cluster.generate(request)
    # The first token is the prefill worker's.
    assert altered.token_ids[0] == undisturbed.token_ids[0]
    assert altered.token_ids != undisturbed.token_ids


async def test_a_damaged_frame_ends_in_an_error_and_never_in_text(cluster: LocalCluster):
    """Conformance 18."""

    def damage(frame: bytes) -> bytes:
        return frame[:-1] + bytes([frame[-1] ^ 1])

    cluster.proxies[0].alter["Frames"] = damage
    with pytest.raises(Exception, match=r"UNAVAILABLE.*checksum"):
        await cluster.generate(token_request(prompt_of(100), 20, ignore_eos=True))
    cluster.proxies[0].alter.clear()
    answer = await cluster.generate(token_request(prompt_of(100), 20, ignore_eos=True))
    assert len(answer.token_ids) == 20


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
    frames: list[bytes] = []
    cluster.proxies[0].alter["Frames"] = lambda frame: frames.append(frame) or frame
    request = asyncio.create_task(cluster.generate(token_request(prompt_of(CHUNK * 8), 4, ignore_eos=True)))
    await asyncio.to_thread(hold.reached.wait)
    # The engine that is held cannot change what is read of it here.
    sent = first_chunk_of_layer_0(prefill.engine._ready.result())
    assert sent.abs().sum() > 0
    while not torch.equal(await decode.engine.call(first_chunk_of_layer_0), sent):
        pass
    assert max(decode_frame(frame).token_start for frame in frames) < CHUNK * 7
    hold.release.set()
    answer = await request
    assert len(answer.token_ids) == 4


def first_chunk_of_layer_0(engine: Engine) -> torch.Tensor:
    """K of the first chunk's tokens, of the one sequence that there is."""
    (sequence,) = engine._sequences.values()
    slots = sequence.slots(0, CHUNK, engine.layout.block_size)
    return engine._cache.gather(0, 0, torch.from_numpy(slots))
