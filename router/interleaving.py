"""Several streams of outputs as one."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Ended:
    """A stream's last word. `error`: None where it ended well."""

    error: Exception | None


async def interleave(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """What they yield, as it comes, each with the place of its source.

    The error of one ends all and is raised. Closing it closes all. A source is at most one item ahead of
    what is taken here, but for as many as there are sources.
    """
    waiting: asyncio.Queue[tuple[int, T] | _Ended] = asyncio.Queue(len(sources))

    async def drain(place: int, source: AsyncGenerator[T, None]) -> None:
        error: Exception | None = None
        try:
            async with aclosing(source):
                async for item in source:
                    await waiting.put((place, item))
        except Exception as raised:  # told to whoever waits, below
            error = raised
        await waiting.put(_Ended(error))

    tasks = [asyncio.create_task(drain(place, source)) for place, source in enumerate(sources)]
    num_running = len(tasks)
    try:
        while num_running:
            got = await waiting.get()
            if not isinstance(got, _Ended):
                yield got
            elif got.error is not None:
                raise got.error
            else:
                num_running -= 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
