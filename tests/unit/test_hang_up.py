"""Work that ends with its client's connection, however the server tells of that."""

import asyncio
from collections.abc import Callable

import pytest
from starlette.types import Message, Scope

from router.hang_up import until_hang_up
from router.http_connection import HANG_UP, HangUp


class Client:
    """Hangs up when it is told to."""

    def __init__(self) -> None:
        self._gone = asyncio.Event()
        self._hang_up = HangUp()

    def plain_scope(self) -> Scope:
        return {"type": "http"}

    def our_scope(self) -> Scope:
        return {"type": "http", "extensions": {HANG_UP: {"hang_up": self._hang_up}}}

    async def receive(self) -> Message:
        await self._gone.wait()
        return {"type": "http.disconnect"}

    def hangs_up(self) -> None:
        self._gone.set()
        self._hang_up.happened()


servers = pytest.mark.parametrize("scope_of", [Client.plain_scope, Client.our_scope])


@servers
async def test_work_is_cancelled_when_the_client_hangs_up_and_nobody_else_is(
    scope_of: Callable[[Client], Scope],
) -> None:
    client, ended = Client(), ""

    async def work() -> None:
        nonlocal ended
        try:
            asyncio.get_running_loop().call_soon(client.hangs_up)
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended = "cancelled"
            raise

    await until_hang_up(scope_of(client), client.receive, work())
    assert ended == "cancelled"
    current = asyncio.current_task()
    assert current is not None
    assert current.cancelling() == 0


@servers
async def test_work_for_a_client_that_is_gone_already_is_cancelled(
    scope_of: Callable[[Client], Scope],
) -> None:
    client = Client()
    client.hangs_up()
    await until_hang_up(scope_of(client), client.receive, asyncio.Event().wait())


@servers
async def test_who_is_done_is_not_cancelled_later(scope_of: Callable[[Client], Scope]) -> None:
    client = Client()
    await until_hang_up(scope_of(client), client.receive, asyncio.sleep(0))
    client.hangs_up()
    await asyncio.sleep(0)


@servers
async def test_a_cancellation_from_elsewhere_goes_on(scope_of: Callable[[Client], Scope]) -> None:
    client = Client()
    task = asyncio.create_task(until_hang_up(scope_of(client), client.receive, asyncio.Event().wait()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
