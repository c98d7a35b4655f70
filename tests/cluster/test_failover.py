"""Real workers that are lost at any point: the text is the one of an undisturbed run."""

import json
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

import pytest

from bench.transcript import Transcript, transcribe
from engine.engine import Engine
from protos.inference_pb2 import GenerateRequest, Grammar
from tests.cluster.failures import Failure, How, Point, Role, lose
from tests.cluster.local_cluster import LocalCluster, local_cluster, token_request
from tests.engine.engines import prompt_of

STEP_TOKENS = 64
SCHEMA = {"type": "array", "items": {"enum": ["north", "wind"]}, "minItems": 5, "maxItems": 9}
SAMPLED = {"temperature": 1.0, "seed": 5, "ignore_eos": True}
REQUESTS = {
    "greedy": token_request(prompt_of(200), 24, ignore_eos=True),
    "seeded": token_request(prompt_of(200), 24, top_p=0.9, **SAMPLED),
    "penalized": token_request(prompt_of(200), 24, presence_penalty=1.0, repetition_penalty=1.5, **SAMPLED),
    "two-samples": token_request(prompt_of(200), 24, n=2, **SAMPLED),
    "logprobs": token_request(prompt_of(200), 24, logprobs=2, prompt_logprobs=0, **SAMPLED),
    "json-schema": token_request(
        prompt_of(200), 60, temperature=1.0, seed=5, grammar=Grammar(json_schema=json.dumps(SCHEMA))
    ),
}


@pytest.fixture
async def cluster(tiny_model: Path) -> AsyncIterator[LocalCluster]:
    # Nothing is silent for half a second here but what is stopped.
    options = {"stall_limit_s": 2.0}
    async with local_cluster(
        tiny_model, prefill=2, decode=2, step_tokens=STEP_TOKENS, router_options=options
    ) as running:
        yield running


def uncached(request: GenerateRequest) -> GenerateRequest:
    """The same, of which no worker has a prefix."""
    fresh = GenerateRequest()
    fresh.CopyFrom(request)
    fresh.cache_salt = "fresh"
    return fresh


@pytest.mark.parametrize("kind", REQUESTS)
@pytest.mark.parametrize("point", Point, ids=lambda point: point.value)
@pytest.mark.parametrize("role", Role, ids=lambda role: role.value)
async def test_a_worker_that_dies_during_the_hand_off(
    cluster: LocalCluster, role: Role, point: Point, kind: str
) -> None:
    """Conformance 11, 13 and 14."""
    await lose_during_the_hand_off(cluster, role, How.DIES, point, kind)


@pytest.mark.parametrize("point", Point, ids=lambda point: point.value)
@pytest.mark.parametrize("role", Role, ids=lambda role: role.value)
async def test_a_worker_that_stops_during_the_hand_off(
    cluster: LocalCluster, role: Role, point: Point
) -> None:
    """Conformance 13."""
    await lose_during_the_hand_off(cluster, role, How.STOPS, point, "seeded")


async def lose_during_the_hand_off(
    cluster: LocalCluster, role: Role, how: How, point: Point, kind: str
) -> None:
    failure = Failure(cluster, role, how, point)
    undisturbed = await transcribe(cluster.client, REQUESTS[kind])
    failure.is_armed = True
    disturbed = await transcribe(cluster.client, uncached(REQUESTS[kind]))
    assert failure.happened.is_set()
    assert disturbed.differences(undisturbed) == []
    await cluster.wait_clean()


def slow_down(cluster: LocalCluster) -> None:
    """Steps take so long that no worker is far ahead of what its client has read."""
    for worker in cluster.workers:
        worker.engine._step = partial(_slow_step, worker.engine._step)


def _slow_step(step: Callable[[Engine], bool], engine: Engine) -> bool:
    time.sleep(0.03)
    return step(engine)


@pytest.mark.parametrize("kind", REQUESTS)
@pytest.mark.parametrize("first", [1, 2, 7])
async def test_workers_that_die_one_after_the_other_until_one_is_left(
    cluster: LocalCluster, first: int, kind: str
) -> None:
    """Conformance 11, 14 and 20: after `first` tokens, and then every four, the one that decodes dies."""
    undisturbed = await transcribe(cluster.client, REQUESTS[kind])
    slow_down(cluster)
    left = dict(zip(cluster.workers, (*cluster.prefill_proxies, *cluster.proxies), strict=True))
    told, next_death = Transcript(), first
    async for response in cluster.client.Generate(uncached(REQUESTS[kind]), timeout=60):
        told.add(response)
        busy = next((worker for worker in left if len(worker.legs)), None)
        if told.num_tokens >= next_death and busy is not None and len(left) > 1:
            next_death += 4
            lose(left.pop(busy), How.DIES)
    assert told.differences(undisturbed) == []
    assert len(left) == 1
    await cluster.wait_clean()


async def test_a_worker_that_stops_while_it_decodes_and_lives_again(cluster: LocalCluster) -> None:
    request = token_request(prompt_of(200), 400, ignore_eos=True)
    undisturbed = await transcribe(cluster.client, request)
    told = Transcript()
    stopped = None
    async for response in cluster.client.Generate(uncached(request), timeout=60):
        told.add(response)
        if stopped is None:
            stopped = next(i for i, worker in enumerate(cluster.decode) if len(worker.legs))
            lose(cluster.proxies[stopped], How.STOPS)
    assert stopped is not None
    assert told.differences(undisturbed) == []
    assert told.last.served_by.decode_worker != f"decode-{stopped}"
    cluster.proxies[stopped].flowing.set()
    await cluster.wait_clean()
    seen = 0
    while len(cluster.router.fleet.snapshot()) < 4:
        seen = await cluster.router.fleet.next_change(seen)
