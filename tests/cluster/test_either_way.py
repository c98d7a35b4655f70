"""A role is a preference: any worker hands off to any other."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from decode_worker.server import DecodeWorker
from prefill_worker.server import PrefillWorker
from protos import worker_pb2
from tests.cluster.bare_session import bare_session, submit_message, submit_pair
from tests.device import DEVICE
from tests.engine.engines import prompt_of
from tests.reference import NearTies, Reference
from worker.config import WorkerConfig
from worker.server import WorkerServer


@pytest.fixture
async def workers(tiny_model: Path) -> AsyncIterator[dict[str, WorkerServer]]:
    """One of each role."""
    config = WorkerConfig(model_path=tiny_model, dtype="float32", device=str(DEVICE), kv_cache_bytes=16 << 20)
    async with AsyncExitStack() as stack:
        running: dict[str, WorkerServer] = {}
        for kind in (PrefillWorker, DecodeWorker):
            running[kind.role_name] = await kind.start(config)
            stack.push_async_callback(running[kind.role_name].stop)
        yield running


@pytest.mark.parametrize(("sender", "receiver"), [("decode", "prefill"), ("prefill", "decode")])
async def test_any_role_hands_off_to_any_role(
    workers: dict[str, WorkerServer], tiny_model: Path, sender: str, receiver: str
):
    prompt = prompt_of(100)
    at = workers[receiver].address
    async with (
        bare_session(workers[sender].address, "from") as sending,
        bare_session(at, "to") as receiving,
    ):
        sent, received = await submit_pair(0, sending, receiving, at, submit_message(0, prompt, 12))
        await sent.over.wait()
        await received.over.wait()
    (outcome,) = received.outcomes
    assert isinstance(outcome, worker_pb2.Admitted)
    assert sent.prefilled[0].kv_bytes == outcome.kv_bytes == 100 * workers[sender].layout.token_bytes
    NearTies(0).check(received.text, Reference(tiny_model).greedy(prompt, 12, ignore_eos=True))


async def test_two_workers_hand_off_to_each_other_at_once(workers: dict[str, WorkerServer], tiny_model: Path):
    prompts = [prompt_of(40 + 20 * n, seed=n) for n in range(8)]
    prefill, decode = workers["prefill"].address, workers["decode"].address
    async with bare_session(prefill, "p") as at_prefill, bare_session(decode, "d") as at_decode:
        received = []
        for number, prompt in enumerate(prompts):
            message = submit_message(number, prompt, 8)
            if number % 2:
                legs = await submit_pair(number, at_decode, at_prefill, prefill, message)
            else:
                legs = await submit_pair(number, at_prefill, at_decode, decode, message)
            received.append(legs[1])
        for told in received:
            await told.over.wait()
    reference, ties = Reference(tiny_model), NearTies(1)
    for prompt, told in zip(prompts, received, strict=True):
        assert [type(outcome) for outcome in told.outcomes] == [worker_pb2.Admitted]
        ties.check(told.text, reference.greedy(prompt, 8, ignore_eos=True))
