"""Where workers are: who joins, who leaves."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from router.cluster_view import Role


@dataclass(frozen=True, slots=True)
class Joined:
    """A worker's gRPC address, host:port. Its own description says the role; this is the hint until then."""

    address: str
    role: Role


@dataclass(frozen=True, slots=True)
class Left:
    """No session is made with the address any more; a live one may finish its requests."""

    address: str


class WorkerDirectory(Protocol):
    def changes(self) -> AsyncIterator[Joined | Left]:
        """First every worker there is, then every change; ends when nothing can change any more."""
        ...


class StaticDirectory:
    """Workers at addresses that are known from the start."""

    def __init__(self, *, prefill: Sequence[str] = (), decode: Sequence[str] = ()) -> None:
        self._workers = [Joined(address, Role.PREFILL) for address in prefill]
        self._workers += [Joined(address, Role.DECODE) for address in decode]

    async def changes(self) -> AsyncIterator[Joined | Left]:
        for worker in self._workers:
            yield worker
        await asyncio.Event().wait()
