"""One bulk at its sender: announces frames, and keeps the credits."""

import asyncio
import logging
from functools import partial
from typing import Self

import grpc

from kv_transfer.bulk import BulkOffer, SlotTerms, SlotWriter, TransportFailed
from kv_transfer.frame import Frame
from kv_transfer.messages import TransferId
from protos import kv_pb2, kv_pb2_grpc

log = logging.getLogger(__name__)

BulkCall = grpc.aio.StreamStreamCall[kv_pb2.BulkMessage, kv_pb2.BulkReply]


class BulkSender:
    """The frames of all hand-offs of one pair and epoch.

    Invariant: a slot is free here, or written and announced and not given back, never both; so no more is
    under way than the receiver has slots for.

    Attributes:
        memory: where the payloads of its frames must lie.
        broken: resolves, with a detail, when the pair must be built again; not by `close`.
    """

    def __init__(self, transport: str, call: BulkCall, writer: SlotWriter, ready: kv_pb2.BulkReady) -> None:
        self.transport = transport
        self.token = ready.token
        self.memory = writer.memory
        self.terms = SlotTerms(ready.num_slots, ready.slot_bytes)
        self.broken: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._call = call
        self._writer = writer
        # Last in, first out: what was used a moment ago is still in the processor's cache.
        # None: no slot will come.
        self._free: asyncio.LifoQueue[int | None] = asyncio.LifoQueue()
        for slot in reversed(range(ready.num_slots)):
            self._free.put_nowait(slot)
        self._held: set[int] = set()
        self._is_closed = False
        self._outbox = kv_pb2.BulkMessage()
        self._has_words = asyncio.Event()
        self._tasks = (
            asyncio.create_task(self._read_replies()),
            asyncio.create_task(self._write_words()),
        )

    @classmethod
    async def open(
        cls, control: grpc.aio.Channel, offer: BulkOffer, opening: kv_pb2.BulkOpen, limit_s: float
    ) -> Self:
        """Sets a bulk up with the receiver that chose the offer.

        Raises:
            TransportFailed: the offer is discarded.
        """
        call = kv_pb2_grpc.KvTransferStub(control).Bulk()
        try:
            async with asyncio.timeout(limit_s):
                await call.write(kv_pb2.BulkMessage(open=opening))
                reply = await call.read()
                if not isinstance(reply, kv_pb2.BulkReply) or not reply.ready.num_slots:
                    raise TransportFailed(f"{(await call.code()).name}: {await call.details()}")
                writer = await offer.connect(reply.ready)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError) as error:
            raise TransportFailed(f"{opening.transport.name} could not be set up: {error}") from error
        except BaseException:
            call.cancel()
            raise
        finally:
            offer.discard()
        return cls(opening.transport.name, call, writer, reply.ready)

    async def write(self, transfer: TransferId, frame: Frame) -> asyncio.Future[None]:
        """Waits for a slot, and begins to move a frame into it.

        Returns:
            Ends when the frame's memory is read no more, or with TransportFailed. Not to be cancelled.

        Raises:
            TransportFailed: the pair is broken.
        """
        slot = await self._take_slot()
        try:
            departure = self._writer.start(slot, frame)
        except TransportFailed as error:
            self._break(str(error))
            raise
        departure.left.add_done_callback(self._on_left)
        if departure.checksum.done():
            self._announce(transfer, slot, frame, departure.checksum)
        else:
            departure.checksum.add_done_callback(partial(self._announce, transfer, slot, frame))
        # Words that are known go out before the next frame is begun.
        await asyncio.sleep(0)
        return departure.left

    def _on_left(self, left: asyncio.Future[None]) -> None:
        if (error := left.exception()) is not None:
            self._break(str(error))

    def finish(self, transfer: TransferId) -> None:
        """No frame of that hand-off comes after this."""
        self._outbox.finished.append(kv_pb2.TransferId(session=transfer.session, number=transfer.number))
        self._has_words.set()

    async def close(self) -> None:
        """Ends the pair's epoch at both ends."""
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._call.cancel()
        self._writer.close()
        self._free.put_nowait(None)

    async def _take_slot(self) -> int:
        slot = await self._free.get()
        if slot is None:
            self._free.put_nowait(None)
            raise TransportFailed("the pair is broken")
        return slot

    def _announce(self, transfer: TransferId, slot: int, frame: Frame, checksum: asyncio.Future[int]) -> None:
        if checksum.exception() is not None:
            return  # `_on_left` breaks the pair
        self._held.add(slot)
        self._outbox.frames.append(
            kv_pb2.FrameAnnounced(
                transfer=kv_pb2.TransferId(session=transfer.session, number=transfer.number),
                slot=slot,
                number=frame.number,
                layer_start=frame.layer_start,
                layer_count=frame.layer_count,
                token_start=frame.token_start,
                token_count=frame.token_count,
                payload_bytes=frame.payload_bytes,
                checksum=checksum.result(),
            )
        )
        self._has_words.set()

    async def _write_words(self) -> None:
        """What gathers while a message is being written goes with the next."""
        while True:
            await self._has_words.wait()
            self._has_words.clear()
            words, self._outbox = self._outbox, kv_pb2.BulkMessage()
            try:
                await self._call.write(words)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
                self._break(f"the stream Bulk broke: {error!r}")
                return

    async def _read_replies(self) -> None:
        try:
            while isinstance(reply := await self._call.read(), kv_pb2.BulkReply):
                for slot in reply.free_slots:
                    self._take_back(slot)
            self._break("the receiver ended the stream Bulk")
        except (grpc.aio.AioRpcError, TransportFailed) as error:
            self._break(f"the stream Bulk broke: {error}")

    def _take_back(self, slot: int) -> None:
        if slot not in self._held:
            raise TransportFailed(f"the receiver gave back slot {slot}, which was not announced")
        self._held.remove(slot)
        self._free.put_nowait(slot)

    def _break(self, detail: str) -> None:
        if self.broken.done() or self._is_closed:
            return
        log.warning("%s: the pair broke: %s", self.transport, detail)
        self.broken.set_result(detail)
        self._call.cancel()
        self._writer.close()
        self._free.put_nowait(None)
