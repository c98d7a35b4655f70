"""A failed attempt is followed by another one, elsewhere, from the tokens that are there."""

import asyncio
from pathlib import Path

import grpc
import httpx
import pytest

from protos.inference_pb2 import FINISH_REASON_LENGTH, TokenLogprobs
from protos.worker_pb2 import (
    DROP_CAUSE_DAMAGED,
    DROP_CAUSE_DRAINING,
    DROP_CAUSE_INCOMPATIBLE,
    DROP_CAUSE_INTERNAL,
    DROP_CAUSE_INVALID,
    DROP_CAUSE_PUSH_BROKEN,
    ROLE_DECODE,
    ROLE_PREFILL,
    DropCause,
)
from tests.cluster.router_bench import (
    PROMPT,
    Reply,
    both_legs,
    generating,
    inference_stub,
    running_router,
    token_request,
    until,
)
from tests.cluster.router_fixtures import Cluster
from tests.cluster.scripted_worker import DEADLINE_S, ScriptedWorker, SubmittedLeg


async def error_of(task: asyncio.Task[Reply]) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await task
    return caught.value


def answer(leg: SubmittedLeg, index: int, token_ids: list[int]) -> None:
    """The rest of a sample, and its end."""
    leg.say_tokens(index, token_ids, sample=leg.submit.sample)
    leg.say_finished(FINISH_REASON_LENGTH, sample=leg.submit.sample)


async def metrics_of(cluster: Cluster) -> str:
    async with httpx.AsyncClient(base_url=f"http://{cluster.router.http_address}") as client:
        return (await client.get("/metrics")).text


@pytest.mark.parametrize(
    ("cause", "at_fault"),
    [
        (DROP_CAUSE_PUSH_BROKEN, "p0"),
        (DROP_CAUSE_DAMAGED, "p0"),
        (DROP_CAUSE_INCOMPATIBLE, "p0"),
        (DROP_CAUSE_DRAINING, "d0"),
        (DROP_CAUSE_INTERNAL, "d0"),
    ],
)
async def test_what_the_decode_worker_drops_is_tried_without_the_one_at_fault(
    scripted: Cluster, cause: DropCause, at_fault: str
) -> None:
    async with generating(scripted.router, token_request(max_tokens=2, seed=7)) as task:
        p, d = await both_legs(scripted.prefill, scripted.decode)
        d.say_dropped(cause, "because d0 says so")
        await p.cancel_arrives()
        other = scripted.decode if at_fault == "p0" else scripted.prefill
        leg = await other.next_leg()
        assert leg.kind == "local"
        assert (leg.submit.attempt.attempt, leg.submit.sampling) == (1, p.submit.sampling)
        assert leg.submit.attempt.number > p.submit.attempt.number
        assert leg.submit.secret != p.submit.secret
        answer(leg, 0, [100, 101])
        assert (await task).token_ids == [100, 101]
    name = DropCause.Name(cause).removeprefix("DROP_CAUSE_").lower()
    assert f'baton_request_retries_total{{cause="{name}"}} 1.0' in await metrics_of(scripted)


@pytest.mark.parametrize("role", ["prefill", "decode", "local"])
async def test_what_a_worker_finds_wrong_with_the_request_is_not_tried_again(
    scripted: Cluster, role: str
) -> None:
    async with generating(scripted.router, token_request(max_tokens=1 if role == "local" else 8)) as task:
        if role == "local":
            leg = await scripted.prefill.next_leg()
        else:
            legs = await both_legs(scripted.prefill, scripted.decode)
            leg = next(leg for leg in legs if leg.kind == role)
        leg.say_dropped(DROP_CAUSE_INVALID, "max_tokens: too many")
        error = await error_of(task)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details() == "max_tokens: too many"
    assert scripted.prefill.submitted.empty() and scripted.decode.submitted.empty()


async def test_a_prefill_worker_that_leaves_is_not_asked_again(scripted: Cluster) -> None:
    async with generating(scripted.router, token_request(max_tokens=2)) as task:
        p, d = await both_legs(scripted.prefill, scripted.decode)
        p.say_dropped(DROP_CAUSE_DRAINING, "p0 takes nothing")
        await d.cancel_arrives()
        for _ in range(3):
            (await scripted.decode.next_leg()).say_dropped(DROP_CAUSE_INTERNAL, "no")
        assert "no" in str((await error_of(task)).details())
    assert scripted.prefill.submitted.empty()


async def test_a_hint_that_the_decode_worker_never_confirms_ends_the_attempt(scripted: Cluster) -> None:
    async with generating(scripted.router, token_request(max_tokens=2)) as task:
        p, d = await both_legs(scripted.prefill, scripted.decode)
        p.say_dropped(DROP_CAUSE_PUSH_BROKEN, "d0 cannot be reached")
        await d.cancel_arrives()
        answer(await scripted.decode.next_leg(), 0, [100, 101])
        assert (await task).token_ids == [100, 101]


async def test_a_token_that_never_comes_is_asked_for_again_and_leaves_no_hole(scripted: Cluster) -> None:
    async with generating(scripted.router, token_request(max_tokens=3)) as task:
        p, d = await both_legs(scripted.prefill, scripted.decode)
        p.say_tokens(0, [100])
        d.say_admitted()
        p.say_prefilled()
        d.say_tokens(2, [102])
        d.say_finished()
        leg = await scripted.decode.next_leg()
        assert list(leg.submit.generated_token_ids) == [100]
        answer(leg, 1, [101, 102])
        assert (await task).token_ids == [100, 101, 102]


async def test_the_death_of_the_decode_worker_is_a_pause_and_no_token_is_lost_or_doubled(
    scripted: Cluster,
) -> None:
    """Conformance 14."""
    async with generating(scripted.router, token_request(max_tokens=4, seed=3)) as task:
        p, d = await both_legs(scripted.prefill, scripted.decode)
        p.say_tokens(0, [100])
        d.say_admitted(kv_bytes=10)
        p.say_prefilled(queue_s=1, prefill_s=2, transfer_s=4, cached_tokens=2)
        d.say_tokens(1, [101])
        await until_delivered(scripted, 2)
        await scripted.decode.die()
        leg = await scripted.prefill.next_leg()
        assert leg.kind == "local"
        assert list(leg.submit.prompt_token_ids) == list(PROMPT)
        assert list(leg.submit.generated_token_ids) == [100, 101]
        assert leg.submit.sampling == p.submit.sampling
        assert leg.submit.arrival_unix_s == p.submit.arrival_unix_s
        # The dead worker's last words, had they come late, and the new one's first.
        leg.say_tokens(1, [101])
        leg.say_tokens(2, [102])
        leg.say_tokens(3, [103])
        leg.say_finished(queue_s=8, prefill_s=16, decode_wait_s=32, decode_s=64, cached_tokens=3)
        reply = await task
    assert reply.token_ids == [100, 101, 102, 103]
    usage, served, times = reply.last.usage, reply.last.served_by, reply.last.stage_times
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (3, 4, 2)
    assert (served.prefill_worker, served.decode_worker) == ("p0", "p0")
    assert (times.queue_s, times.prefill_s, times.transfer_s, times.decode_wait_s) == (9, 18, 4, 32)
    assert times.decode_s > 64
    assert 'baton_request_retries_total{cause="worker_lost"} 1.0' in await metrics_of(scripted)


async def until_delivered(cluster: Cluster, num_tokens: int) -> None:
    """The router has passed so many tokens on."""
    while f"baton_generation_tokens_total {num_tokens}.0" not in await metrics_of(cluster):
        pass


async def test_the_death_of_the_prefill_worker_before_the_hand_off_is_a_later_first_token(
    scripted: Cluster,
) -> None:
    """Conformance 13."""
    async with generating(scripted.router, token_request(max_tokens=2)) as task:
        _, d = await both_legs(scripted.prefill, scripted.decode)
        await scripted.prefill.die()
        d.say_dropped(DROP_CAUSE_PUSH_BROKEN, "the stream ended")
        answer(await scripted.decode.next_leg(), 0, [100, 101])
        assert (await task).token_ids == [100, 101]


async def test_a_log_probability_that_died_with_the_prefill_worker_is_computed_again(
    scripted: Cluster,
) -> None:
    """The decode worker has the first token without: nothing could be passed on before the end."""
    async with generating(scripted.router, token_request(max_tokens=2, logprobs=0)) as task:
        _, d = await both_legs(scripted.prefill, scripted.decode)
        d.say_admitted()
        d.say_tokens(0, [100])
        await scripted.prefill.die()
        leg = await scripted.decode.next_leg()
        await d.cancel_arrives()
        leg.say_tokens(0, [100, 101], logprobs=[TokenLogprobs(logprob=-1), TokenLogprobs(logprob=-2)])
        leg.say_finished()
        reply = await task
    assert reply.token_ids == [100, 101]


async def test_the_next_attempt_is_made_with_another_pair_if_there_is_one(tiny_model: Path) -> None:
    async with (
        ScriptedWorker(ROLE_PREFILL, "p0") as p0,
        ScriptedWorker(ROLE_PREFILL, "p1") as p1,
        ScriptedWorker(ROLE_DECODE, "d0") as d0,
        running_router(tiny_model, prefill=[p0, p1], decode=[d0]) as router,
        generating(router, token_request(max_tokens=2)) as task,
    ):
        await both_legs(p0, d0)
        await p0.die()
        p, d = await both_legs(p1, d0)
        assert (p.kind, d.kind) == ("prefill", "decode")
        d.say_admitted()
        p.say_prefilled()
        answer(d, 0, [100, 101])
        reply = await task
    assert reply.token_ids == [100, 101]
    assert reply.last.served_by.prefill_worker == "p1"


async def test_a_silent_worker_is_left_and_what_it_says_later_does_not_count(
    tiny_model: Path, scripted_prefill: ScriptedWorker, scripted_decode: ScriptedWorker
) -> None:
    async with running_router(
        tiny_model, prefill=[scripted_prefill], decode=[scripted_decode], stall_limit_s=1.0
    ) as router:
        speaking = asyncio.create_task(speak(scripted_prefill))
        async with generating(router, token_request(max_tokens=3)) as task:
            p, d = await both_legs(scripted_prefill, scripted_decode)
            p.say_tokens(0, [100])
            d.say_admitted()
            p.say_prefilled()
            leg = await scripted_prefill.next_leg()
            # It lives again, and goes on where it was.
            d.say_tokens(1, [101, 102])
            d.say_finished()
            await until(router, lambda workers: any(w.worker_id == "d0" for w in workers))
            answer(leg, 1, [201, 202])
            assert (await task).token_ids == [100, 201, 202]
        speaking.cancel()


async def speak(worker: ScriptedWorker) -> None:
    """A worker's heartbeat."""
    while True:
        worker.report(worker.load)
        await asyncio.sleep(0.1)


async def test_when_every_attempt_failed_the_error_names_the_last_cause(scripted: Cluster) -> None:
    async with generating(scripted.router, token_request()) as task:
        _, d = await both_legs(scripted.prefill, scripted.decode)
        d.say_dropped(DROP_CAUSE_INTERNAL, "first")
        (await scripted.prefill.next_leg()).say_dropped(DROP_CAUSE_INTERNAL, "second")
        _, d = await both_legs(scripted.prefill, scripted.decode)
        d.say_dropped(DROP_CAUSE_DAMAGED, "third")
        _, d = await both_legs(scripted.prefill, scripted.decode)
        d.say_dropped(DROP_CAUSE_INTERNAL, "fourth")
        error = await error_of(task)
    assert error.code() is grpc.StatusCode.INTERNAL
    assert "fourth" in str(error.details()) and "attempt 4" in str(error.details())


async def test_attempts_that_bring_tokens_are_not_counted(tiny_model: Path) -> None:
    async with (
        ScriptedWorker(ROLE_DECODE, "d0") as d0,
        running_router(tiny_model, decode=[d0], max_attempts=2) as router,
        generating(router, token_request(max_tokens=8)) as task,
    ):
        for index in range(7):
            leg = await d0.next_leg()
            leg.say_tokens(index, [100 + index])
            leg.say_dropped(DROP_CAUSE_INTERNAL)
        answer(await d0.next_leg(), 7, [107])
        assert (await task).token_ids == [*range(100, 108)]


async def test_without_a_worker_left_the_error_is_unavailable_and_names_the_last_cause(
    tiny_model: Path, scripted_decode: ScriptedWorker
) -> None:
    async with (
        running_router(tiny_model, decode=[scripted_decode]) as router,
        generating(router, token_request()) as task,
    ):
        await scripted_decode.next_leg()
        await scripted_decode.die()
        error = await error_of(task)
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert "worker d0 died" in str(error.details())


async def test_a_request_waits_for_its_worker_to_come_back(
    tiny_model: Path, scripted_decode: ScriptedWorker
) -> None:
    """Conformance 15: another life on the same address."""
    async with (
        running_router(tiny_model, decode=[scripted_decode], rejoin_limit_s=60) as router,
        generating(router, token_request(max_tokens=3)) as task,
    ):
        leg = await scripted_decode.next_leg()
        leg.say_tokens(0, [100])
        await scripted_decode.die()
        async with ScriptedWorker(ROLE_DECODE, "d0", epoch=2, address=scripted_decode.address) as again:
            leg = await again.next_leg()
            generated = list(leg.submit.generated_token_ids)
            answer(leg, len(generated), [100, 101, 102][len(generated) :])
            assert (await task).token_ids == [100, 101, 102]


async def test_another_model_does_not_go_on_with_the_text(tiny_model: Path) -> None:
    async with (
        ScriptedWorker(ROLE_DECODE, "d0", fingerprint="old") as old,
        ScriptedWorker(ROLE_PREFILL, "p0", fingerprint="new") as new,
        running_router(tiny_model, prefill=[new], decode=[old]) as router,
        generating(router, token_request()) as task,
    ):
        leg = await old.next_leg()
        leg.say_tokens(0, [100])
        leg.say_dropped(DROP_CAUSE_DRAINING)
        assert (await error_of(task)).code() is grpc.StatusCode.UNAVAILABLE
    assert new.submitted.empty()


async def test_samples_with_tokens_go_on_each_by_itself_and_ended_ones_stay_ended(scripted: Cluster) -> None:
    async with asyncio.TaskGroup() as group:
        task = group.create_task(samples_of(scripted, n=3))
        p, d = await both_legs(scripted.prefill, scripted.decode)
        for sample in range(3):
            p.say_tokens(0, [100 + sample], sample=sample)
        d.say_admitted()
        p.say_prefilled()
        answer_sample(d, 1, 1, [111])
        d.say_tokens(1, [112], sample=2)
        await until_delivered(scripted, 5)
        await scripted.decode.die()
        legs = [await scripted.prefill.next_leg() for _ in range(2)]
        told = [(leg.submit.sample, list(leg.submit.generated_token_ids)) for leg in legs]
        assert told == [(0, [100]), (2, [102, 112])]
        assert all(leg.submit.sampling.n == 1 for leg in legs)
        assert all(leg.submit.sampling.seed == p.submit.sampling.seed for leg in legs)
        answer(legs[1], 2, [122])
        answer(legs[0], 1, [110, 120])
    assert task.result() == {0: [100, 110, 120], 1: [101, 111], 2: [102, 112, 122]}


async def test_samples_without_tokens_stay_together(scripted: Cluster) -> None:
    async with asyncio.TaskGroup() as group:
        task = group.create_task(samples_of(scripted, n=2))
        p, d = await both_legs(scripted.prefill, scripted.decode)
        d.say_dropped(DROP_CAUSE_PUSH_BROKEN)
        leg = await scripted.decode.next_leg()
        assert (leg.submit.sampling, leg.submit.sample) == (p.submit.sampling, 0)
        answer_sample(leg, 0, 0, [100])
        answer_sample(leg, 1, 0, [101])
    assert task.result() == {0: [100], 1: [101]}


def answer_sample(leg: SubmittedLeg, sample: int, index: int, token_ids: list[int]) -> None:
    leg.say_tokens(index, token_ids, sample=sample)
    leg.say_finished(FINISH_REASON_LENGTH, sample=sample)


async def samples_of(cluster: Cluster, n: int) -> dict[int, list[int]]:
    """A request for several samples: the tokens of each."""
    samples: dict[int, list[int]] = {}
    async with inference_stub(cluster.router) as stub:
        async for response in stub.Generate(token_request(n=n), timeout=DEADLINE_S):
            tokens = samples.setdefault(response.sample, [])
            assert response.index == len(tokens), "a token is lost or doubled"
            tokens += response.token_ids
    return samples


async def test_the_prompts_log_probabilities_are_not_asked_for_again(scripted: Cluster) -> None:
    request = token_request(max_tokens=2, prompt_logprobs=0)
    async with generating(scripted.router, request) as task:
        p, d = await both_legs(scripted.prefill, scripted.decode)
        p.say_prompt_logprobs([TokenLogprobs(), TokenLogprobs(logprob=-1), TokenLogprobs(logprob=-2)])
        p.say_tokens(0, [100])
        await until_delivered(scripted, 1)
        d.say_dropped(DROP_CAUSE_INTERNAL)
        leg = await scripted.prefill.next_leg()
        assert not leg.submit.sampling.HasField("prompt_logprobs")
        answer(leg, 1, [101])
        assert (await task).token_ids == [100, 101]


async def test_prompt_log_probabilities_that_did_not_come_are_asked_for_again(scripted: Cluster) -> None:
    request = token_request(max_tokens=2, prompt_logprobs=0)
    async with generating(scripted.router, request) as task:
        _, d = await both_legs(scripted.prefill, scripted.decode)
        d.say_tokens(0, [100])
        d.say_dropped(DROP_CAUSE_INTERNAL)
        leg = await scripted.prefill.next_leg()
        assert leg.submit.sampling.HasField("prompt_logprobs")
        assert not leg.submit.generated_token_ids
        leg.say_prompt_logprobs([TokenLogprobs(), TokenLogprobs(logprob=-1), TokenLogprobs(logprob=-2)])
        answer(leg, 0, [100, 101])
        assert (await task).token_ids == [100, 101]
