"""One request through its attempt: what two workers say, merged into one answer."""

import asyncio
from pathlib import Path

import grpc
import pytest
from tokenizers import Tokenizer

from protos import inference_pb2
from protos.inference_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP
from protos.worker_pb2 import (
    DROP_CAUSE_ENDED_AT_FIRST_TOKEN,
    DROP_CAUSE_PUSH_BROKEN,
)
from tests.cluster.router_bench import PROMPT, both_legs, generate, generating, running_router, token_request
from tests.cluster.router_fixtures import Cluster
from tests.cluster.scripted_worker import ScriptedWorker


async def test_both_legs_carry_one_identity_and_the_way_to_the_decode_worker(scripted: Cluster) -> None:
    session = await scripted.decode.next_session()
    async with generating(scripted.router, token_request(seed=9)):
        p, d = await both_legs(scripted.prefill, scripted.decode)
    assert (p.kind, d.kind) == ("prefill", "decode")
    assert p.submit.attempt == d.submit.attempt
    assert p.submit.secret == d.submit.secret and len(p.submit.secret) >= 16
    assert p.submit.prefill.decode_address == scripted.decode.address
    assert p.submit.prefill.decode_worker_id == "d0"
    assert p.submit.prefill.decode_epoch == 1
    assert p.submit.prefill.decode_session == session.hello.session
    assert d.submit.decode.prefill_worker_id == "p0"
    assert list(d.submit.prompt_token_ids) == list(PROMPT)
    assert p.submit.sampling == d.submit.sampling
    assert (p.submit.sampling.seed, p.submit.sampling.max_tokens) == (9, 8)


async def test_a_request_without_a_seed_gets_one_and_another_gets_another(scripted: Cluster) -> None:
    seeds = set()
    for _ in range(2):
        async with generating(scripted.router, token_request()):
            p, _ = await both_legs(scripted.prefill, scripted.decode)
            assert p.submit.sampling.HasField("seed")
            seeds.add(p.submit.sampling.seed)
    assert len(seeds) == 2


async def test_tokens_of_both_workers_make_one_answer(scripted: Cluster) -> None:
    async with generating(scripted.router, token_request(max_tokens=3)) as task:
        p, d = await both_legs(scripted.prefill, scripted.decode)
        p.say_tokens(0, [100])
        d.say_admitted(kv_bytes=1234)
        p.say_prefilled(queue_s=0.5, prefill_s=0.25, transfer_s=0.125, kv_bytes=1234)
        d.say_tokens(0, [100])
        d.say_tokens(1, [101])
        d.say_tokens(2, [102])
        d.say_finished(FINISH_REASON_LENGTH, decode_wait_s=0.0625, decode_s=2.0)
        reply = await task
    assert reply.token_ids == [100, 101, 102]
    assert reply.last.finish_reason == FINISH_REASON_LENGTH
    assert reply.last.usage == inference_pb2.Usage(prompt_tokens=3, completion_tokens=3)
    served = reply.last.served_by
    assert (served.prefill_worker, served.decode_worker, served.kv_bytes) == ("p0", "d0", 1234)
    times = reply.last.stage_times
    assert (times.queue_s, times.prefill_s, times.transfer_s) == (0.5, 0.25, 0.125)
    assert (times.decode_wait_s, times.decode_s) == (0.0625, 2.0)
    assert times.door_s > 0


async def test_token_zero_counts_from_the_decode_worker_when_it_says_it_first(scripted: Cluster) -> None:
    async with generating(scripted.router, token_request(max_tokens=2)) as task:
        p, d = await both_legs(scripted.prefill, scripted.decode)
        d.say_admitted()
        d.say_tokens(0, [100, 101])
        d.say_finished()
        p.say_tokens(0, [100])
        p.say_prefilled()
        assert (await task).token_ids == [100, 101]


async def test_tokens_that_overtake_token_zero_wait_for_it(scripted: Cluster) -> None:
    async with generating(scripted.router, token_request(max_tokens=2)) as task:
        p, d = await both_legs(scripted.prefill, scripted.decode)
        d.say_admitted()
        d.say_tokens(1, [101])
        d.say_finished()
        p.say_tokens(0, [100])
        p.say_prefilled()
        assert (await task).token_ids == [100, 101]


async def test_tokens_beyond_max_tokens_are_not_delivered(scripted: Cluster) -> None:
    async with generating(scripted.router, token_request(max_tokens=2)) as task:
        p, d = await both_legs(scripted.prefill, scripted.decode)
        d.say_admitted()
        p.say_prefilled()
        d.say_tokens(0, [100, 101, 102, 103])
        d.say_finished()
        assert (await task).token_ids == [100, 101]


@pytest.mark.parametrize("decode_first", [True, False])
async def test_a_sequence_that_ends_at_its_first_token_ends_the_request(
    scripted: Cluster, decode_first: bool
) -> None:
    async with generating(scripted.router, token_request()) as task:
        p, d = await both_legs(scripted.prefill, scripted.decode)
        if decode_first:
            d.say_dropped(DROP_CAUSE_ENDED_AT_FIRST_TOKEN)
        p.say_tokens(0, [1])
        p.say_finished(FINISH_REASON_STOP, queue_s=0.5, prefill_s=0.25)
        if not decode_first:
            d.say_dropped(DROP_CAUSE_ENDED_AT_FIRST_TOKEN)
        reply = await task
    assert reply.token_ids == [1]
    assert reply.last.finish_reason == FINISH_REASON_STOP
    served = reply.last.served_by
    assert (served.prefill_worker, served.decode_worker, served.kv_bytes) == ("p0", "", 0)
    assert (reply.last.stage_times.queue_s, reply.last.stage_times.prefill_s) == (0.5, 0.25)


async def test_a_stop_string_cancels_both_legs_and_nothing_beyond_it_is_counted(
    scripted: Cluster,
    tiny_model: Path,
) -> None:
    ids = Tokenizer.from_file(str(tiny_model / "tokenizer.json")).encode("the north wind").ids
    request = token_request(stop=["nor"], max_tokens=64)
    async with generating(scripted.router, request) as task:
        p, d = await both_legs(scripted.prefill, scripted.decode)
        d.say_admitted()
        d.say_tokens(0, [*ids, *ids, *ids])
        reply = await task
        await d.cancel_arrives()
        await p.cancel_arrives()
    assert reply.text == "the "
    assert reply.last.finish_reason == FINISH_REASON_STOP
    assert reply.token_ids == ids[: len(reply.token_ids)]
    assert reply.last.usage.completion_tokens == len(reply.token_ids) <= len(ids)


async def test_a_client_that_hangs_up_cancels_both_legs(scripted: Cluster) -> None:
    async with generating(scripted.router, token_request()):
        p, d = await both_legs(scripted.prefill, scripted.decode)
    await p.cancel_arrives()
    await d.cancel_arrives()


async def test_a_client_that_hangs_up_while_decoding_cancels_the_decode_leg(scripted: Cluster) -> None:
    async with generating(scripted.router, token_request()):
        p, d = await both_legs(scripted.prefill, scripted.decode)
        d.say_admitted()
        p.say_prefilled()
        d.say_tokens(0, [100, 101])
    await d.cancel_arrives()


async def test_a_prefill_workers_failure_is_only_a_hint_once_the_hand_off_is_accepted(
    scripted: Cluster,
) -> None:
    async with generating(scripted.router, token_request(max_tokens=2)) as task:
        p, d = await both_legs(scripted.prefill, scripted.decode)
        p.say_dropped(DROP_CAUSE_PUSH_BROKEN, "the answer was lost")
        d.say_admitted()
        d.say_tokens(0, [100, 101])
        d.say_finished()
        assert (await task).token_ids == [100, 101]


async def test_the_death_of_the_prefill_worker_after_the_hand_off_disturbs_nobody(
    scripted: Cluster,
) -> None:
    async with generating(scripted.router, token_request(max_tokens=2)) as task:
        p, d = await both_legs(scripted.prefill, scripted.decode)
        d.say_admitted()
        d.say_tokens(0, [100])
        p.say_prefilled()
        await scripted.prefill.die()
        d.say_tokens(1, [101])
        d.say_finished()
        assert (await task).token_ids == [100, 101]


async def test_one_token_is_prefilled_and_decoded_on_the_prefill_worker(scripted: Cluster) -> None:
    async with generating(scripted.router, token_request(max_tokens=1)) as task:
        leg = await scripted.prefill.next_leg()
        assert leg.kind == "local"
        leg.say_tokens(0, [100])
        leg.say_finished(queue_s=0.5, prefill_s=0.25, decode_s=0.125)
        reply = await task
    times, served = reply.last.stage_times, reply.last.served_by
    assert (times.queue_s, times.prefill_s, times.transfer_s, times.decode_s) == (0.5, 0.25, 0, 0.125)
    assert (served.prefill_worker, served.decode_worker, served.kv_bytes) == ("p0", "p0", 0)


async def test_a_short_prompt_runs_on_the_decode_worker_alone(
    tiny_model: Path,
    scripted_prefill: ScriptedWorker,
    scripted_decode: ScriptedWorker,
) -> None:
    async with running_router(
        tiny_model, prefill=[scripted_prefill], decode=[scripted_decode], local_prefill_tokens=len(PROMPT)
    ) as router:
        async with generating(router, token_request()):
            assert (await scripted_decode.next_leg()).kind == "local"
        async with generating(router, token_request([*PROMPT, 8])):
            assert (await scripted_decode.next_leg()).kind == "decode"


async def test_without_a_worker_the_answer_is_unavailable_at_once(tiny_model: Path) -> None:
    async with running_router(tiny_model) as router:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(router, token_request())
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_numbers_only_grow_in_a_session(scripted: Cluster) -> None:
    session = await scripted.decode.next_session()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(generate(scripted.router, token_request())) for _ in range(20)]
        for _ in tasks:
            p, _ = await both_legs(scripted.prefill, scripted.decode)
            p.say_tokens(0, [100])
            p.say_finished()
    assert session.numbers == sorted(set(session.numbers))
    assert len(session.numbers) == 20
