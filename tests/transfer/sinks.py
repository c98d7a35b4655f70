"""A receiver that keeps KV in numpy arrays: a real door and real sinks, for tests of the wire."""

import asyncio
import hmac
from collections.abc import Sequence

from engine.kv_layout import KVLayout
from kv_transfer.frame import KVSlice
from kv_transfer.messages import Drop, Open, TransferId
from kv_transfer.sink import NumberOver, UnknownSession, WrongEpoch, WrongSecret
from tests.transfer.prompts import empty_kv, write_slice


def open_gate() -> asyncio.Event:
    gate = asyncio.Event()
    gate.set()
    return gate


class MemorySink:
    """One attempt. A gate that is cleared holds the engine up there; the events say what was reached.

    Attributes:
        kv: by layer and tensor, [num_tokens, bytes of a row] uint8.
        outcomes: all that were reported; a right hand-off reports one.
        ended: resolves with the first of them.
        cached_tokens: what it says to have already.
    """

    def __init__(self, layout: KVLayout, num_tokens: int) -> None:
        loop = asyncio.get_running_loop()
        self.dropped: asyncio.Future[Drop] = loop.create_future()
        self._layout = layout
        self.kv = empty_kv(layout, num_tokens)
        self.outcomes: list[Drop | tuple[int, int]] = []
        self.ended: asyncio.Future[Drop | tuple[int, int]] = loop.create_future()
        self.holds_blocks = False
        self.cached_tokens = 0
        self.scattering = 0
        self.reserve_gate, self.scatter_gate, self.admit_gate = open_gate(), open_gate(), open_gate()
        self.asked, self.first_scatter, self.admitting = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.layer_0_came = asyncio.Event()

    async def reserve(self) -> int:
        self.asked.set()
        await self.reserve_gate.wait()
        self.holds_blocks = True
        return self.cached_tokens

    async def scatter(self, slices: Sequence[KVSlice]) -> None:
        assert self.holds_blocks, "a scatter outside the grant"
        self.first_scatter.set()
        self.scattering += 1
        await self.scatter_gate.wait()
        assert self.holds_blocks, "a late write"
        for piece in slices:
            write_slice(self.kv, piece, self._layout)
            if piece.layer == 0:
                self.layer_0_came.set()
        self.scattering -= 1

    async def admit(self, first_tokens: tuple[int, ...], kv_bytes: int) -> None:
        self.admitting.set()
        await self.admit_gate.wait()
        self._end((first_tokens[0], kv_bytes))

    def release(self, drop: Drop) -> None:
        assert not self.scattering, "freed under a scatter"
        self.holds_blocks = False
        self._end(drop)

    def _end(self, outcome: Drop | tuple[int, int]) -> None:
        self.outcomes.append(outcome)
        if not self.ended.done():
            self.ended.set_result(outcome)


class MemoryDoor:
    """Sessions, and the attempts that were submitted in them."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.sinks: dict[TransferId, MemorySink] = {}
        self.waiting = asyncio.Event()
        self._secrets: dict[TransferId, bytes] = {}
        self._claimed: set[TransferId] = set()
        self._sessions: set[str] = set()
        self._highest: dict[str, int] = {}
        self._changed = asyncio.Condition()

    async def connect(self, session: str) -> None:
        async with self._changed:
            self._sessions.add(session)
            self._highest[session] = 0
            self._changed.notify_all()

    async def disconnect(self, session: str) -> None:
        async with self._changed:
            self._sessions.remove(session)
            self._changed.notify_all()

    async def submit(self, transfer: TransferId, secret: bytes, sink: MemorySink) -> None:
        async with self._changed:
            self._secrets[transfer] = secret
            self.sinks[transfer] = sink
            self._highest[transfer.session] = transfer.number
            self._changed.notify_all()

    async def authorize(self, opening: Open, layout: KVLayout) -> MemorySink:
        transfer = opening.transfer
        if opening.receiver_epoch != self.epoch:
            raise WrongEpoch(f"epoch: {self.epoch} here, the Push is for {opening.receiver_epoch}")
        async with self._changed:
            while transfer.session in self._sessions and transfer.number > self._highest[transfer.session]:
                self.waiting.set()
                await self._changed.wait()
            if transfer.session not in self._sessions:
                raise UnknownSession(f"session {transfer.session} is not connected")
            if transfer not in self._secrets or transfer in self._claimed:
                raise NumberOver(f"number {transfer.number} is over")
            if not hmac.compare_digest(self._secrets[transfer], opening.secret):
                raise WrongSecret(f"wrong secret for {transfer}")
            self._claimed.add(transfer)
            return self.sinks[transfer]
