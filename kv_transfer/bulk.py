"""Ways for the frames beside gRPC: slots of the receiver that the sender writes with a credit for each.

One *bulk* serves one pair of workers for one pair epoch. Its words go over the gRPC stream `Bulk`
(bulk_sender.py, bulk_receiver.py, the same for all); a BulkTransport is how the bytes get into the slots.
"""

import asyncio
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple, Protocol

from engine.kv_layout import KVLayout
from kv_transfer.frame import Frame, Payload
from protos import kv_pb2


class TransportFailed(Exception):
    """A bulk cannot be set up, or its bytes do not move. It is torn down, and never used again."""


@dataclass(frozen=True, slots=True)
class SlotTerms:
    """Slots of one bulk. Together they are all that it stages, on either side."""

    num_slots: int
    slot_bytes: int


class Memory(Enum):
    """Where payloads lie: what a way for frames takes, and what it delivers."""

    HOST = auto()
    # Of the engine.
    DEVICE = auto()


class Departure(NamedTuple):
    """A payload on its way into a slot. Neither is ever cancelled: what was begun moves, and is announced.

    Attributes:
        checksum: the frame is announced as soon as it is known; in the order in which frames were begun.
        left: ends when the frame's memory is read no more, or with TransportFailed; not before `checksum`.
    """

    checksum: asyncio.Future[int]
    left: asyncio.Future[None]


class SlotWriter(Protocol):
    """The slots of one bulk, at the sender."""

    @property
    def memory(self) -> Memory: ...

    def start(self, slot: int, frame: Frame) -> Departure:
        """Begins to move a payload into a slot that a credit is in hand for.

        The bytes of a hand-off that is over move all the same.
        """
        ...

    def close(self) -> None:
        """Gives everything up. A frame that is being moved is held for that moment."""
        ...


class SlotReader(Protocol):
    """The slots of one bulk, at the receiver."""

    def start(self, slot: int, payload_bytes: int) -> asyncio.Future[Payload]:
        """Begins to receive a payload. Called in the order of the announcements, for every one of them.

        Returns:
            Ends with the bytes, a view that stays valid until the slot's credit goes back, or with
            TransportFailed. Never cancelled.
        """
        ...

    def close(self) -> None:
        """Gives everything up. Views that are still held stay readable; what they show is worth nothing."""
        ...


class BulkOffer(Protocol):
    """What a sender has ready for one pair and epoch, before its receiver has chosen."""

    @property
    def proto(self) -> kv_pb2.TransportOffer: ...

    async def connect(self, ready: kv_pb2.BulkReady) -> SlotWriter:
        """The receiver accepted, and says so with `ready`.

        Raises:
            TransportFailed: see there.
        """
        ...

    def discard(self) -> None:
        """It is not wanted, or was not connected. Allowed after `connect`, where it does nothing."""
        ...


class BulkAcceptance(Protocol):
    """What a receiver has ready for one pair and epoch.

    Attributes:
        ready: what the sender is told of it; its token is filled in by who sends it.
    """

    @property
    def ready(self) -> kv_pb2.BulkReady: ...

    async def connect(self) -> SlotReader:
        """`ready` was sent.

        Raises:
            TransportFailed: see there.
        """
        ...

    def discard(self) -> None:
        """It was not connected. Allowed after `connect`, where it does nothing."""
        ...


class BulkTransport(Protocol):
    """One way for frames, as a worker has it; both of its ends.

    Attributes:
        name: as in the configuration and on the wire.
    """

    @property
    def name(self) -> str: ...

    async def offer(self, layout: KVLayout) -> BulkOffer | None:
        """For the sender of a pair. None: this machine cannot do it, or a slot holds no block of a layer."""
        ...

    async def refusal(self, offer: kv_pb2.TransportOffer) -> str | None:
        """For the receiver, in the handshake: why this offer cannot be taken up, or None. Keeps nothing."""
        ...

    async def accept(self, opening: kv_pb2.BulkOpen) -> BulkAcceptance:
        """For the receiver, later: takes up what it did not refuse.

        Raises:
            TransportFailed: see there.
        """
        ...
