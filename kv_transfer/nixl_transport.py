"""nixl: one-sided writes into slots of the receiver's memory, by NVIDIA's transfer library over UCX.

An optional extra (`pip install baton[nixl]`). UCX finds the best way between two machines itself: RDMA, TCP,
or memory that processes share. It does not encrypt, and trusts the network.

Each pair and epoch has an agent of its own at both ends, which its thread alone drives; with each write comes
a notice that names the slot.
"""

import asyncio
import importlib.util
import mmap
import os
import secrets
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from engine.kv_layout import KVLayout
from kv_transfer.bulk import Departure, Memory, SlotTerms
from kv_transfer.frame import Frame, Payload, checksum
from kv_transfer.promises import Promises, in_thread, kept
from protos import kv_pb2

# Between two looks at what is under way.
_POLL_S = 50e-6
# For one payload, once it is announced.
_WAIT_LIMIT_S = 30.0
# What a notice says.
_SLOT = struct.Struct("<I")


def is_available() -> bool:
    return importlib.util.find_spec("nixl") is not None


def _make_agent() -> Any:
    # Its own level would tell every agent, on standard output.
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    # An extra, and slow to import.
    from nixl._api import nixl_agent, nixl_agent_config  # pyright: ignore[reportMissingImports]

    # A progress thread of its own would spin.
    return nixl_agent(f"baton-{secrets.token_hex(8)}", nixl_agent_config(enable_prog_thread=False))


class RegisteredSlots:
    """Memory that an agent may read and write.

    It is mapped for good: a late write of a pair that broke must not fall into memory that somebody else was
    given meanwhile. `discard` gives the pages back, not the addresses.
    """

    def __init__(self, agent: Any, terms: SlotTerms) -> None:
        self._memory = mmap.mmap(-1, terms.num_slots * terms.slot_bytes)
        self._slots = np.frombuffer(self._memory, np.uint8).reshape(terms.num_slots, terms.slot_bytes)
        self.address = self._slots.ctypes.data
        self._slot_bytes = terms.slot_bytes
        self._agent = agent
        self._registered = agent.register_memory([(self.address, self._slots.nbytes, 0, "")], "DRAM")

    def __getitem__(self, slot: int) -> np.ndarray:
        return self._slots[slot]

    def at(self, slot: int) -> int:
        """The slot's address."""
        return self.address + slot * self._slot_bytes

    def discard(self) -> None:
        self._agent.deregister_memory(self._registered)
        self._memory.madvise(mmap.MADV_DONTNEED)
        _ABANDONED.append(self._memory)


# What stays mapped.
_ABANDONED: list[mmap.mmap] = []


class NixlTransport:
    """See BulkTransport."""

    name = "nixl"

    def __init__(self, terms: SlotTerms) -> None:
        self._terms = terms

    async def offer(self, layout: KVLayout) -> "NixlOffer":
        return NixlOffer()

    async def refusal(self, offer: kv_pb2.TransportOffer) -> str | None:
        return None

    async def accept(self, opening: kv_pb2.BulkOpen) -> "NixlAcceptance":
        return await in_thread(lambda: NixlAcceptance(self._terms), "register memory")


class NixlAcceptance:
    """See BulkAcceptance."""

    def __init__(self, terms: SlotTerms) -> None:
        self._agent = _make_agent()
        self._slots = RegisteredSlots(self._agent, terms)
        self._is_connected = False
        self.ready = kv_pb2.BulkReady(
            num_slots=terms.num_slots,
            slot_bytes=terms.slot_bytes,
            nixl=kv_pb2.NixlSlots(agent=self._agent.get_agent_metadata(), address=self._slots.address),
        )

    async def connect(self) -> "NixlReader":
        self._is_connected = True
        return NixlReader(self._agent, self._slots)

    def discard(self) -> None:
        if not self._is_connected:
            self._slots.discard()


class NixlOffer:
    """See BulkOffer."""

    proto = kv_pb2.TransportOffer(name=NixlTransport.name)

    async def connect(self, ready: kv_pb2.BulkReady) -> "NixlWriter":
        agent, staging, peer = await in_thread(partial(self._join, ready), "join a pair")
        return NixlWriter(agent, staging, peer, lambda slot: ready.nixl.address + slot * ready.slot_bytes)

    def discard(self) -> None:
        """Nothing is kept."""

    def _join(self, ready: kv_pb2.BulkReady) -> tuple[Any, RegisteredSlots, str]:
        agent = _make_agent()
        staging = RegisteredSlots(agent, SlotTerms(ready.num_slots, ready.slot_bytes))
        return agent, staging, agent.add_remote_agent(ready.nixl.agent)


class _Driver:
    """The thread that drives one agent.

    Args:
        look: sees to what is under way; False: nothing is.
    """

    def __init__(self, name: str, look: Callable[[], bool], on_failure: Callable[[str], None]) -> None:
        self._look = look
        self._on_failure = on_failure
        self._work: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def do(self, work: Callable[[], object]) -> None:
        """From any thread; in order."""
        self._work.put(work)

    def end(self, last: Callable[[], object]) -> None:
        """Ends the thread with `last`. Only the first call counts."""
        self._work.put(last)
        self._work.put(None)

    def _run(self) -> None:
        is_busy = False
        while True:
            try:
                work = self._work.get(timeout=_POLL_S if is_busy else None)
            except Empty:
                work = _nothing
            if work is None:
                return
            try:
                work()
                is_busy = self._look()
            # The library has errors of its own, without a common base.
            except Exception as error:
                is_busy = False
                self._on_failure(str(error).partition("\n")[0])


def _nothing() -> None:
    pass


class NixlWriter:
    """See SlotWriter: a copy into staging memory, which is written from there."""

    memory = Memory.HOST

    def __init__(self, agent: Any, staging: RegisteredSlots, peer: str, remote: Callable[[int], int]) -> None:
        """
        Args:
            remote: the address of a slot at the receiver.
        """
        self._agent = agent
        self._staging = staging
        self._peer = peer
        self._remote = remote
        self._moving: Promises[None] = Promises()
        self._under_way: deque[tuple[Any, asyncio.Future[None], float]] = deque()
        self._driver = _Driver("kv send", self._look, self._moving.fail_from_thread)

    def start(self, slot: int, frame: Frame) -> Departure:
        moved = self._moving.make()
        if not moved.done():
            frame.copy_payload(self._staging[slot])
            self._driver.do(partial(self._post, slot, frame.payload_bytes, moved))
        return Departure(kept(checksum(frame)), moved)

    def close(self) -> None:
        self._moving.fail("the pair is closed")
        self._driver.end(self._discard)

    def _post(self, slot: int, num_bytes: int, moved: asyncio.Future[None]) -> None:
        here = self._agent.get_xfer_descs([(self._staging.at(slot), num_bytes, 0)], "DRAM")
        there = self._agent.get_xfer_descs([(self._remote(slot), num_bytes, 0)], "DRAM")
        write = self._agent.initialize_xfer("WRITE", here, there, self._peer, _SLOT.pack(slot))
        self._under_way.append((write, moved, time.monotonic() + _WAIT_LIMIT_S))
        self._agent.transfer(write)

    def _look(self) -> bool:
        while self._under_way:
            write, moved, limit_s = self._under_way[0]
            state = self._agent.check_xfer_state(write)
            if state == "ERR" or time.monotonic() > limit_s:
                raise RuntimeError(f"a write ended with {state}")
            if state != "DONE":
                return True
            self._under_way.popleft()
            self._agent.release_xfer_handle(write)
            self._moving.keep(moved, None)
        return False

    def _discard(self) -> None:
        for write, _, _ in self._under_way:
            self._agent.release_xfer_handle(write)
        self._under_way.clear()
        self._agent.remove_remote_agent(self._peer)
        self._staging.discard()


@dataclass(frozen=True, slots=True)
class _Awaited:
    """A payload that was announced. `limit_s`: `time.monotonic()` seconds."""

    arrived: asyncio.Future[Payload]
    num_bytes: int
    limit_s: float


class NixlReader:
    """See SlotReader: a frame is there when its notice is."""

    def __init__(self, agent: Any, slots: RegisteredSlots) -> None:
        self._agent = agent
        self._slots = slots
        self._coming: Promises[Payload] = Promises()
        # By slot.
        self._awaited: dict[int, _Awaited] = {}
        # Notices that overtook their announcements.
        self._early: set[int] = set()
        self._driver = _Driver("kv receive", self._look, self._coming.fail_from_thread)

    def start(self, slot: int, payload_bytes: int) -> asyncio.Future[Payload]:
        arrived = self._coming.make()
        if not arrived.done():
            self._driver.do(partial(self._await, slot, payload_bytes, arrived))
        return arrived

    def close(self) -> None:
        self._coming.fail("the pair is closed")
        self._driver.end(self._slots.discard)

    def _await(self, slot: int, num_bytes: int, arrived: asyncio.Future[Payload]) -> None:
        self._awaited[slot] = _Awaited(arrived, num_bytes, time.monotonic() + _WAIT_LIMIT_S)
        if slot in self._early:
            self._early.remove(slot)
            self._arrive(slot)

    def _look(self) -> bool:
        for notices in self._agent.get_new_notifs().values():
            for notice in notices:
                (slot,) = _SLOT.unpack(notice)
                if slot in self._awaited:
                    self._arrive(slot)
                else:
                    self._early.add(slot)
        now = time.monotonic()
        if any(now > awaited.limit_s for awaited in self._awaited.values()):
            raise RuntimeError("a payload that was announced does not come")
        return bool(self._awaited)

    def _arrive(self, slot: int) -> None:
        awaited = self._awaited.pop(slot)
        self._coming.keep(awaited.arrived, self._slots[slot][: awaited.num_bytes].data)
