"""Which prompts may ask for a grant now: a few ahead of the computing, and none that blocks the others."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from engine.prefill_order import response_ratio


@dataclass(eq=False, slots=True)
class Turn:
    """A prompt's place in the window.

    Attributes:
        peer: the receiver that must grant.
        num_tokens: to compute.
        came: `time.monotonic()` seconds.
    """

    peer: str
    num_tokens: int
    came: float = field(default_factory=time.monotonic)
    come: asyncio.Event = field(default_factory=asyncio.Event)


class GrantWindow:
    """Bounds the grants that wait for computing, and the prompts that wait for a grant.

    A receiver without room holds up its own prompts only: others overtake them. What it grants sits in its
    blocks until it is computed here, so grants are asked for only while fewer than `max_ahead_tokens`
    are granted and not computed. The next to ask is the one with the highest response ratio.

    Args:
        prefill_rate: tokens a second that this worker computes.
    """

    def __init__(
        self, max_ahead_tokens: int, prefill_rate: Callable[[], float], max_asking_per_peer: int = 2
    ) -> None:
        self._prefill_rate = prefill_rate
        self._max_ahead_tokens = max_ahead_tokens
        self._max_asking_per_peer = max_asking_per_peer
        self._waiting: list[Turn] = []
        self._asking: Counter[str] = Counter()
        self._granted: set[Turn] = set()
        self._ahead_tokens = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def waiting_tokens(self) -> int:
        return sum(turn.num_tokens for turn in self._waiting)

    @asynccontextmanager
    async def turn(self, turn: Turn) -> AsyncIterator[None]:
        """Waits until the prompt may ask for its grant; inside, it asks, then computes."""
        self._waiting.append(turn)
        self._advance()
        try:
            await turn.come.wait()
            yield
        finally:
            self._leave(turn)
            self._advance()

    def granted(self, turn: Turn) -> None:
        """The prompt has its grant: from here to the end of its turn it is ahead of the computing."""
        self._asking[turn.peer] -= 1
        self._granted.add(turn)
        self._ahead_tokens += turn.num_tokens
        self._advance()

    def _leave(self, turn: Turn) -> None:
        if turn in self._granted:
            self._granted.remove(turn)
            self._ahead_tokens -= turn.num_tokens
        elif turn.come.is_set():
            self._asking[turn.peer] -= 1
        else:
            self._waiting.remove(turn)

    def _advance(self) -> None:
        if self._ahead_tokens >= self._max_ahead_tokens:
            return
        now, rate = time.monotonic(), self._prefill_rate()
        self._waiting.sort(key=lambda t: response_ratio(now - t.came, t.num_tokens / rate), reverse=True)
        for turn in list(self._waiting):
            if self._asking[turn.peer] < self._max_asking_per_peer:
                self._waiting.remove(turn)
                self._asking[turn.peer] += 1
                turn.come.set()
