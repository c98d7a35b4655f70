"""Several streams as one: nothing lost, one error, all closed."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from router.interleaving import interleave


class Source:
    """Yields what the test gives it, until it is told to end or to fail."""

    def __init__(self) -> None:
        self.given: asyncio.Queue[int | Exception | None] = asyncio.Queue()
        self.num_taken = 0
        self.is_closed = False

    async def items(self) -> AsyncGenerator[int, None]:
        try:
            while (item := await self.given.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                self.num_taken += 1
                yield item
        finally:
            self.is_closed = True

    def give(self, *items: int | Exception | None) -> None:
        for item in items:
            self.given.put_nowait(item)


async def test_all_that_comes_is_told_with_its_place_and_in_its_order() -> None:
    sources = [Source() for _ in range(3)]
    for place, source in enumerate(sources):
        source.give(*range(place * 10, place * 10 + 5), None)
    told = [item async for item in interleave([source.items() for source in sources])]
    for place in range(3):
        assert [item for at, item in told if at == place] == list(range(place * 10, place * 10 + 5))


async def test_one_that_waits_holds_up_no_other() -> None:
    slow, fast = Source(), Source()
    fast.give(1, 2)
    merged = interleave([slow.items(), fast.items()])
    async with aclosing(merged):
        assert [await anext(merged), await anext(merged)] == [(1, 1), (1, 2)]
        slow.give(7)
        assert await anext(merged) == (0, 7)


async def test_the_first_error_is_raised_and_ends_all() -> None:
    failing, other = Source(), Source()
    other.give(1)
    merged = interleave([other.items(), failing.items()])
    assert await anext(merged) == (0, 1)
    failing.give(ValueError("mine"))
    with pytest.raises(ValueError, match="mine"):
        await anext(merged)
    assert failing.is_closed and other.is_closed


async def test_closing_it_closes_all() -> None:
    sources = [Source(), Source()]
    merged = interleave([source.items() for source in sources])
    for source in sources:
        source.give(1)
    await anext(merged)
    await merged.aclose()
    assert all(source.is_closed for source in sources)


async def test_cancelling_who_waits_closes_all() -> None:
    sources = [Source(), Source()]

    async def read() -> None:
        async with aclosing(interleave([source.items() for source in sources])) as merged:
            async for _ in merged:
                has_begun.set()

    has_begun = asyncio.Event()
    sources[0].give(1)
    task = asyncio.create_task(read())
    await has_begun.wait()
    task.cancel()
    await asyncio.wait({task})
    assert all(source.is_closed for source in sources)


async def test_who_does_not_read_makes_no_source_run_ahead() -> None:
    sources = [Source(), Source()]
    for source in sources:
        source.give(*range(50), None)
    merged = interleave([source.items() for source in sources])
    async with aclosing(merged):
        await anext(merged)
        # Whatever could run has run when as many turns of the loop have passed as there are items.
        for _ in range(200):
            await asyncio.sleep(0)
        assert sum(source.num_taken for source in sources) <= 1 + 2 * len(sources)
