import asyncio

from prefill_worker.grant_window import GrantWindow, Turn


def turn(age: float, peer: str = "d0", num_tokens: int = 10) -> Turn:
    return Turn((age, f"s{age}"), peer, num_tokens)


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
    window = GrantWindow(max_ahead_tokens=1000, max_asking_per_peer=2)
    askers = [Asker(window, turn(i)) for i in range(4)]
    await settle()
    assert [a.asks for a in askers] == [True, True, False, False]
    askers[0].grant.set()
    await settle()
    assert [a.asks for a in askers] == [True, True, True, False]


async def test_a_receiver_without_room_holds_up_only_its_own_prompts():
    window = GrantWindow(max_ahead_tokens=1000, max_asking_per_peer=1)
    full = [Asker(window, turn(i, "full")) for i in range(2)]
    other = Asker(window, turn(9, "other"))
    await settle()
    assert [a.asks for a in full] == [True, False]
    assert other.asks


async def test_nobody_asks_while_enough_is_granted_and_not_computed():
    window = GrantWindow(max_ahead_tokens=15, max_asking_per_peer=1)
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


async def test_the_oldest_asks_first():
    window = GrantWindow(max_ahead_tokens=1000, max_asking_per_peer=1)
    running = Asker(window, turn(0))
    await settle()
    young, old = Asker(window, turn(5)), Asker(window, turn(3))
    await settle()
    running.grant.set()
    await settle()
    assert old.asks and not young.asks


async def test_a_cancel_at_any_point_gives_the_place_to_the_next():
    for point in ("waiting", "asking", "granted"):
        window = GrantWindow(max_ahead_tokens=10, max_asking_per_peer=1)
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
