"""One bulk at its receiver: hands announced frames to their hand-offs, and gives slots back."""

import asyncio
import contextlib
import logging
from dataclasses import dataclass

import grpc

from kv_transfer.bulk import SlotReader, SlotTerms, TransportFailed
from kv_transfer.device_sealer import DeviceSealer
from kv_transfer.frame import DamagedFrame, Frame, Payload, checksum
from kv_transfer.messages import DropCause, TransferId
from kv_transfer.transport import LinkBroken
from protos import kv_pb2

log = logging.getLogger(__name__)

BulkContext = grpc.aio.ServicerContext[kv_pb2.BulkMessage, kv_pb2.BulkReply]


class SlotArrival:
    """A frame that lies in a slot (kv_transfer.transport.Arrival).

    The sender can still write the slot: so the checksum is taken after the scatter, over the same bytes.
    """

    def __init__(self, bulk: "BulkReceiver", announced: kv_pb2.FrameAnnounced, payload: Payload) -> None:
        self._bulk = bulk
        self._slot = announced.slot
        self._checksum = announced.checksum
        self.frame = Frame(
            announced.number,
            announced.layer_start,
            announced.layer_count,
            announced.token_start,
            announced.token_count,
            (payload,),
        )

    async def check(self) -> None:
        try:
            found = await self._bulk.checksum(self.frame)
        except TransportFailed as error:
            raise LinkBroken(DropCause.PUSH_BROKEN, str(error)) from error
        if found != self._checksum:
            raise DamagedFrame(f"{self.frame}: the checksum does not match the bytes")

    def release(self) -> None:
        self._bulk.give_back(self._slot)


@dataclass(frozen=True, slots=True)
class _Coming:
    announced: kv_pb2.FrameAnnounced
    payload: asyncio.Future[Payload]


class BulkInbox:
    """The frames of one hand-off, between its bulk and its link.

    Attributes:
        broken: resolves, with a detail, when the bulk ends before the hand-off.
    """

    def __init__(self, bulk: "BulkReceiver", transfer: TransferId) -> None:
        self.broken: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._bulk = bulk
        self._transfer = transfer
        self._coming: asyncio.Queue[_Coming | None] = asyncio.Queue()

    async def read(self) -> SlotArrival | None:
        """The next frame, or None after the last.

        Raises:
            TransportFailed: the bulk is broken.
        """
        coming = await self._coming.get()
        if coming is None:
            return None
        return await self._bulk.arrive(coming)

    def close(self) -> None:
        """The hand-off is over: what it did not read, and what still comes, goes to scrap."""
        self._bulk.detach(self._transfer)
        while not self._coming.empty():
            coming = self._coming.get_nowait()
            if coming is not None:
                self._bulk.scrap(coming)

    def put(self, coming: _Coming | None) -> None:
        self._coming.put_nowait(coming)


class BulkReceiver:
    """The frames of all hand-offs of one pair and epoch. `run` is its whole life.

    Invariant: every announced slot is given back exactly once, when nothing reads it any more, whatever
    became of its hand-off.
    """

    def __init__(self, reader: SlotReader, terms: SlotTerms) -> None:
        self._reader = reader
        self._terms = terms
        self._inboxes: dict[TransferId, BulkInbox] = {}
        self._announced: set[int] = set()
        self._free: list[int] = []
        self._has_free = asyncio.Event()
        self._scrapping: set[asyncio.Task[None]] = set()
        # Takes the checksums of what lies on a device.
        self._sealer: DeviceSealer | None = None
        # What is wrong with the pair, once something is.
        self._failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def checksum(self, frame: Frame) -> int:
        """
        Raises:
            TransportFailed: the bulk is broken, or the device that the frame lies on.
        """
        if not frame.is_on_device:
            return checksum(frame)
        if self._sealer is None:
            self._sealer = DeviceSealer(frame.device_parts[0].device)
            if self._failed.done():
                self._sealer.close()
        return (await self._sealer.seal(frame)).checksum

    def attach(self, transfer: TransferId) -> BulkInbox:
        """Frames of that hand-off go there from now on. Its `close` ends that."""
        inbox = BulkInbox(self, transfer)
        self._inboxes[transfer] = inbox
        return inbox

    def detach(self, transfer: TransferId) -> None:
        self._inboxes.pop(transfer, None)

    async def run(self, context: BulkContext) -> None:
        """Returns when the sender ended the stream; it, an error or a cancellation breaks the pair.

        Raises:
            TransportFailed: the sender broke the rules, or bytes do not move.
        """
        writing = asyncio.create_task(self._write_replies(context))
        reading = asyncio.create_task(self._read_messages(context))
        try:
            await asyncio.wait({reading, self._failed}, return_when=asyncio.FIRST_COMPLETED)
            if self._failed.done():
                raise TransportFailed(self._failed.result())
            reading.result()
        finally:
            reading.cancel()
            writing.cancel()
            self._fail("the stream Bulk ended")

    async def _read_messages(self, context: BulkContext) -> None:
        try:
            while isinstance(message := await context.read(), kv_pb2.BulkMessage):
                self._take(message)
        except grpc.aio.BaseError as error:
            log.info("the stream Bulk broke: %s", error)
        except TransportFailed as error:
            self._fail(str(error))

    def give_back(self, slot: int) -> None:
        self._announced.remove(slot)
        self._free.append(slot)
        # A quarter at a time: fewer messages, and the sender does not run out.
        if len(self._free) >= max(1, self._terms.num_slots // 4):
            self._has_free.set()

    async def arrive(self, coming: _Coming) -> SlotArrival:
        """
        Raises:
            TransportFailed: the bytes do not come.
        """
        try:
            return SlotArrival(self, coming.announced, await asyncio.shield(coming.payload))
        except asyncio.CancelledError:
            self.scrap(coming)
            raise

    def scrap(self, coming: _Coming) -> None:
        """Nobody wants the frame, but its bytes must come before the slot can be written again."""
        task = asyncio.create_task(self._scrap(coming))
        self._scrapping.add(task)
        task.add_done_callback(self._scrapping.discard)

    async def _scrap(self, coming: _Coming) -> None:
        # Without its bytes the pair is broken, and its slots are worth nothing.
        with contextlib.suppress(TransportFailed):
            await coming.payload
        self.give_back(coming.announced.slot)

    def _take(self, message: kv_pb2.BulkMessage) -> None:
        for announced in message.frames:
            self._check(announced)
            self._announced.add(announced.slot)
            payload = self._reader.start(announced.slot, announced.payload_bytes)
            payload.add_done_callback(self._on_payload)
            coming = _Coming(announced, payload)
            inbox = self._inboxes.get(_transfer_id(announced.transfer))
            if inbox is None:
                self.scrap(coming)
            else:
                inbox.put(coming)
        for transfer in message.finished:
            inbox = self._inboxes.get(_transfer_id(transfer))
            if inbox is not None:
                inbox.put(None)

    def _on_payload(self, payload: asyncio.Future[Payload]) -> None:
        if (error := payload.exception()) is not None:
            self._fail(str(error))

    def _check(self, announced: kv_pb2.FrameAnnounced) -> None:
        if announced.slot >= self._terms.num_slots or announced.slot in self._announced:
            raise TransportFailed(f"slot {announced.slot} was announced without a credit")
        if announced.payload_bytes > self._terms.slot_bytes:
            raise TransportFailed(
                f"{announced.payload_bytes} bytes were announced in a slot of {self._terms.slot_bytes}"
            )

    async def _write_replies(self, context: BulkContext) -> None:
        while True:
            await self._has_free.wait()
            self._has_free.clear()
            slots, self._free = self._free, []
            try:
                await context.write(kv_pb2.BulkReply(free_slots=slots))
            except grpc.aio.BaseError:
                return  # `run` reads why

    def _fail(self, detail: str) -> None:
        """Every hand-off hears of it before any of them is told to its sender. Only the first call counts."""
        if self._failed.done():
            return
        self._failed.set_result(detail)
        self._reader.close()
        if self._sealer is not None:
            self._sealer.close()
        for inbox in self._inboxes.values():
            if not inbox.broken.done():
                inbox.broken.set_result(detail)


def _transfer_id(transfer: kv_pb2.TransferId) -> TransferId:
    return TransferId(transfer.session, transfer.number)
