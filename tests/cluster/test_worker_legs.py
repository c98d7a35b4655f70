"""Legs of one worker, without a router."""

from pathlib import Path

import pytest

from decode_worker.server import DecodeWorker
from engine.engine import Engine
from kv_transfer.sink import HandoffDropped
from protos import inference_pb2, worker_pb2
from tests.device import DEVICE
from worker.config import WorkerConfig
from worker.leg import Assignment
from worker.session import RouterSession


@pytest.fixture
async def worker(tiny_model: Path):
    config = WorkerConfig(model_path=tiny_model, dtype="float32", device=str(DEVICE))
    started = await DecodeWorker.start(config)
    yield started
    await started.stop()


async def test_a_push_that_comes_with_the_end_of_its_attempt_leaves_no_blocks(worker: DecodeWorker) -> None:
    """Conformance 2 and 3: the sink is asked for blocks after the leg was closed."""
    submit = worker_pb2.Submit(
        prompt_token_ids=range(50), sampling=inference_pb2.SamplingParams(max_tokens=5)
    )
    submit.decode.SetInParent()
    leg = worker._decode_leg(Assignment(RouterSession("s"), submit))
    worker.legs.start(leg)
    await leg._complete
    worker.legs.cancel(leg.assignment.sequence_id)
    await worker.legs.wait_empty()
    with pytest.raises(HandoffDropped):
        await leg.reserve()
    load = await worker.engine.call(Engine.load)
    assert load.free_blocks == load.num_blocks and load.num_waiting == 0


@pytest.mark.parametrize("kind", ["local", "prefill", "decode"])
@pytest.mark.parametrize(
    ("sampling", "generated", "reason"),
    [
        ({"max_tokens": 9, "stop_token_ids": [7]}, [5, 7], inference_pb2.FINISH_REASON_STOP),
        ({"max_tokens": 2}, [5, 6], inference_pb2.FINISH_REASON_LENGTH),
        ({"max_tokens": 9}, [5, "eos"], inference_pb2.FINISH_REASON_STOP),
        (
            {"max_tokens": 9, "ignore_eos": True, "grammar": inference_pb2.Grammar(regex="a+")},
            [5, "eos"],
            inference_pb2.FINISH_REASON_STOP,
        ),
    ],
)
async def test_a_sample_whose_last_token_was_its_end_is_only_told_so(
    worker: DecodeWorker, kind: str, sampling: dict, generated: list, reason: inference_pb2.FinishReason
) -> None:
    """Its worker died between the token and the word that it was the last."""
    (eos, *_) = worker._eos_token_ids
    session = RouterSession("s")
    submit = worker_pb2.Submit(
        prompt_token_ids=[1, 2],
        generated_token_ids=[eos if token == "eos" else token for token in generated],
        sampling=inference_pb2.SamplingParams(**sampling),
        sample=3,
    )
    getattr(submit, kind).SetInParent()
    worker.service._submit(session, submit)
    await worker.legs.wait_empty()
    message = await session._outbox.get()
    (finished,) = message.step.finished
    assert (finished.sample, finished.finish_reason) == (3, reason)
    assert not message.step.tokens and not message.step.dropped
