"""Sessions with workers: how they begin, end, and begin again."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import httpx
import pytest

from protos.worker_pb2 import ROLE_DECODE, ROLE_PREFILL, LoadReport
from router.cluster_view import Role
from router.router_server import RouterServer
from router.worker_directory import Joined, Left, StaticDirectory
from tests.cluster.router_bench import (
    generate,
    generating,
    running_router,
    started_router,
    token_request,
    until,
)
from tests.cluster.router_fixtures import Cluster
from tests.cluster.scripted_worker import DEADLINE_S, ScriptedWorker


class ScriptedDirectory:
    """Tells what the test puts in."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[Joined | Left] = asyncio.Queue()

    async def changes(self) -> AsyncIterator[Joined | Left]:
        while True:
            yield await self.queue.get()


async def worker_lines(router: RouterServer) -> list[dict]:
    async with httpx.AsyncClient(base_url=f"http://{router.http_address}") as client:
        return (await client.get("/workers")).json()


async def test_every_session_has_a_name_of_its_own(scripted: Cluster) -> None:
    names = {
        (await scripted.prefill.next_session()).hello.session,
        (await scripted.decode.next_session()).hello.session,
    }
    assert len(names) == 2 and all(len(name) >= 32 for name in names)


async def test_a_silent_worker_loses_its_session_and_its_requests(
    tiny_model: Path,
    scripted_decode: ScriptedWorker,
) -> None:
    async with running_router(tiny_model, decode=[scripted_decode], stall_limit_s=3.0) as router:
        first = await scripted_decode.next_session()
        async with generating(router, token_request()) as task:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await task
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "worker d0 died: silent" in caught.value.details()
        assert (await scripted_decode.next_session()).hello.session != first.hello.session


async def test_a_worker_that_comes_back_on_its_address_is_known_by_its_new_epoch(
    tiny_model: Path,
    scripted_prefill: ScriptedWorker,
) -> None:
    async with (
        ScriptedWorker(ROLE_DECODE, "d0", epoch=1) as old,
        running_router(tiny_model, prefill=[scripted_prefill], decode=[old]) as router,
    ):
        await old.die()
        async with ScriptedWorker(ROLE_DECODE, "d0", epoch=2, address=old.address) as new:
            await until(router, lambda workers: any(worker.epoch == 2 for worker in workers))
            session = await new.next_session()
            async with generating(router, token_request()):
                leg = await scripted_prefill.next_leg()
                assert leg.submit.prefill.decode_epoch == 2
                assert leg.submit.prefill.decode_session == session.hello.session


@pytest.mark.parametrize(
    ("worker", "reason"),
    [
        ({"model": "other"}, "serves 'other'"),
        ({"protocol_version": 7}, "speaks protocol 7"),
    ],
)
async def test_a_worker_that_does_not_fit_is_refused_and_shown(
    tiny_model: Path,
    worker: dict,
    reason: str,
) -> None:
    async with (
        ScriptedWorker(ROLE_DECODE, "stranger", **worker) as stranger,
        started_router(tiny_model, StaticDirectory(decode=[stranger.address])) as router,
    ):
        await stranger.next_session()
        await stranger.next_session()
        (line,) = await worker_lines(router)
        assert line["state"] == "refused" and reason in line["reason"]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(router, token_request())
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_draining_worker_gets_no_new_request(
    tiny_model: Path,
    scripted_decode: ScriptedWorker,
) -> None:
    async with (
        ScriptedWorker(ROLE_DECODE, "d1") as other,
        running_router(tiny_model, decode=[scripted_decode, other]) as router,
    ):
        scripted_decode.report(LoadReport(num_blocks=1024, free_blocks=1024, draining=True))
        await until(router, lambda workers: any(worker.draining for worker in workers))
        for _ in range(3):
            async with generating(router, token_request()):
                await other.next_leg()
    assert scripted_decode.submitted.empty()


async def test_a_worker_that_left_the_directory_finishes_what_it_has(
    tiny_model: Path,
    scripted_decode: ScriptedWorker,
) -> None:
    directory = ScriptedDirectory()
    directory.queue.put_nowait(Joined(scripted_decode.address, Role.DECODE))
    async with started_router(tiny_model, directory) as router:
        await until(router, lambda workers: len(workers) == 1)
        async with generating(router, token_request(max_tokens=2)) as running:
            leg = await scripted_decode.next_leg()
            directory.queue.put_nowait(Left(scripted_decode.address))
            await until(router, lambda workers: workers[0].draining)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await generate(router, token_request())
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            leg.say_tokens(0, [100, 101])
            leg.say_finished()
            assert (await running).token_ids == [100, 101]
        async with asyncio.timeout(DEADLINE_S):
            while await worker_lines(router):
                continue


async def test_load_spreads_requests_over_equal_workers(tiny_model: Path) -> None:
    async with (
        ScriptedWorker(ROLE_PREFILL, "p0") as p0,
        ScriptedWorker(ROLE_PREFILL, "p1") as p1,
        ScriptedWorker(ROLE_DECODE, "d0") as d0,
        ScriptedWorker(ROLE_DECODE, "d1") as d1,
        running_router(tiny_model, prefill=[p0, p1], decode=[d0, d1]) as router,
        generating(router, token_request()),
        generating(router, token_request()),
    ):
        for worker in (p0, p1, d0, d1):
            assert (await worker.next_leg()).kind in ("prefill", "decode")


async def test_workers_are_shown_with_their_description_and_load(scripted: Cluster) -> None:
    scripted.decode.report(LoadReport(num_blocks=1024, free_blocks=7, num_running=3, kv_bytes_received=99))
    await until(scripted.router, lambda workers: any(worker.free_blocks == 7 for worker in workers))
    lines = {line["worker_id"]: line for line in await worker_lines(scripted.router)}
    assert lines["d0"]["role"] == "decode" and lines["p0"]["role"] == "prefill"
    assert lines["d0"]["state"] == "connected" and lines["d0"]["address"] == scripted.decode.address
    assert (lines["d0"]["free_blocks"], lines["d0"]["num_running"]) == (7, 3)
    assert lines["d0"]["kv_bytes_received"] == 99
    assert lines["d0"]["block_size"] == 16 and lines["d0"]["epoch"] == 1
