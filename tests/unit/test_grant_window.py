import asyncio
import time

import pytest

from worker.grant_window import GrantWindow, Turn


def turn(came: float, peer: str = "d0", num_tokens: int = 10) -> Turn:
    return Turn(peer, num_tokens, came)


def grant_window(max_ahead_tokens: int, max_asking_per_peer: int) -> GrantWindow:
    return GrantWindow(max_ahead_tokens, lambda: 1000.0, max_asking_per_peer)


class Asker:
    """Asks for a grant until it is told that it has it, then computes until told that it is done."""

    def __init__(self, window: GrantWindow, turn: Turn) -> None:
        self.grant, self.computed = asyncio.Event(), asyncio.Event()
        self.turn = turn
        self.task = asyncio.create_task(self._live(window))

    async def _live(self, window: GrantWindow) -> None:
        async with window.turn(self.turn):
            await self.grant.wait()
            window.granted(self.turn)
            await self.computed.wait()

    @property
    def asks(self) -> bool:
        return self.turn.come.is_set()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_no_more_ask_of_one_receiver_than_the_limit():
    window = grant_window(max_ahead_tokens=1000, max_asking_per_peer=2)
    askers = [Asker(window, turn(i)) for i in range(4)]
    await settle()
    assert [a.asks for a in askers] == [True, True, False, False]
    askers[0].grant.set()
    await settle()
    assert [a.asks for a in askers] == [True, True, True, False]


async def test_a_receiver_without_room_holds_up_only_its_own_prompts():
    window = grant_window(max_ahead_tokens=1000, max_asking_per_peer=1)
    full = [Asker(window, turn(i, "full")) for i in range(2)]
    other = Asker(window, turn(9, "other"))
    await settle()
    assert [a.asks for a in full] == [True, False]
    assert other.asks


async def test_nobody_asks_while_enough_is_granted_and_not_computed():
    window = grant_window(max_ahead_tokens=15, max_asking_per_peer=1)
    first, second, third = (Asker(window, turn(i)) for i in range(3))
    await settle()
    first.grant.set()
    await settle()
    assert second.asks
    second.grant.set()
    await settle()
    assert not third.asks
    first.computed.set()
    await settle()
    assert third.asks


@pytest.mark.parametrize(("short_waited_s", "first"), [(1000.0, "short"), (10.0, "long")])
async def test_a_short_prompt_asks_before_a_long_one_that_has_not_waited_for_long(short_waited_s, first):
    window = grant_window(max_ahead_tokens=100_000, max_asking_per_peer=1)
    running = Asker(window, turn(0))
    await settle()
    now = time.monotonic()
    long = Asker(window, turn(now - 1000, num_tokens=9000))
    short = Asker(window, turn(now - short_waited_s, num_tokens=100))
    await settle()
    running.grant.set()
    await settle()
    assert {"long": long, "short": short}[first].asks
    assert long.asks != short.asks


async def test_a_cancel_at_any_point_gives_the_place_to_the_next():
    for point in ("waiting", "asking", "granted"):
        window = grant_window(max_ahead_tokens=10, max_asking_per_peer=1)
        first = Asker(window, turn(0))
        await settle()
        cancelled = Asker(window, turn(1)) if point == "waiting" else first
        await settle()
        if point == "granted":
            first.grant.set()
            await settle()
        cancelled.task.cancel()
        await settle()
        after = Asker(window, turn(2))
        await settle()
        if point == "waiting":
            first.grant.set()
            first.computed.set()
            await settle()
        assert after.asks, point
        assert window.num_waiting == 0
