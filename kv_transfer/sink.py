"""What takes in a hand-off at the receiver: the decode worker, as `inbound` sees it."""

import asyncio
from collections.abc import Sequence
from typing import Protocol

from engine.kv_layout import KVLayout
from kv_transfer.frame import KVSlice
from kv_transfer.messages import Drop, Open


class HandoffRefused(Exception):
    """The Push is not allowed. The attempt that it names, if there is one, is untouched by it."""


class UnknownSession(HandoffRefused):
    """The router's session is not connected, or ended while the Push waited for its Submit."""


class NumberOver(HandoffRefused):
    """The number was seen and is not live any more, or another Push has it."""


class WrongSecret(HandoffRefused):
    """It is not the attempt's secret. Compare with `hmac.compare_digest`."""


class WrongEpoch(HandoffRefused):
    """The Push is meant for another life of this worker."""


class Leaving(HandoffRefused):
    """The worker takes no new hand-off."""


class HandoffDropped(Exception):
    """A sink cannot go on with its attempt."""

    def __init__(self, drop: Drop) -> None:
        super().__init__(drop.detail)
        self.drop = drop


class HandoffSink(Protocol):
    """One attempt's place at the receiver.

    After `HandoffDoor.authorize` has returned it, exactly one of two things happens, once: `admit` returns,
    or `release` is called. All methods are called on the event loop, `reserve` first, then `scatter` as
    often as frames come, then `admit`. `reserve`, `scatter` and `admit` may raise HandoffDropped; any other
    error counts as DropCause.INTERNAL. Either way `release` follows.

    Attributes:
        dropped: the sink resolves it when its own side gives the attempt up (the router cancelled, its
            session ended, the worker leaves, the engine failed). `release` follows with that Drop, unless
            `admit` was called before: then the attempt's end is the engine's business, and an `admit` that
            finds the sequence gone raises HandoffDropped.
    """

    dropped: asyncio.Future[Drop]

    async def reserve(self) -> int:
        """Ends when the engine holds blocks for the whole prompt. Cancelled when the hand-off ends before.

        Returns:
            How many first tokens' KV these blocks hold already.
        """
        ...

    async def scatter(self, slices: Sequence[KVSlice]) -> None:
        """Ends when the engine has copied one frame's bytes into its pages; the views are valid until then.

        Several calls can be under way at once. They cover no token of a layer twice and none outside the
        prompt.
        """
        ...

    async def admit(self, first_tokens: tuple[int, ...], kv_bytes: int) -> None:
        """Every layer of every token is scattered: ends when a sample runs for each first token."""
        ...

    def release(self, drop: Drop) -> None:
        """Frees what is held or asked for, and tells the router the outcome. No scatter is under way."""
        ...


class HandoffDoor(Protocol):
    """Knows which attempts a hand-off may come for."""

    async def authorize(self, opening: Open, layout: KVLayout) -> HandoffSink:
        """Gives a Push its attempt's place, and to no other Push after that.

        `layout`: of what comes; it may have another block size or, if the service converts, other dtypes
        than the receiver's.

        Waits for a Submit that has not come, as long as its session lives; cancelled when the Push ends
        before. Claims the attempt and returns without an await between, so that a cancellation never loses
        a claimed one.

        Raises:
            HandoffRefused: as one of its kinds.
        """
        ...
