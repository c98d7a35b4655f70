"""What a transport is: an ordered control stream, and bulk writes for which the sender holds credits."""

import asyncio
from typing import Protocol

from kv_transfer.frame import Frame
from kv_transfer.messages import Drop, DropCause, ReceiverMessage, SenderMessage


class LinkBroken(Exception):
    """The link carries this hand-off no more."""

    def __init__(self, cause: DropCause, detail: str) -> None:
        super().__init__(detail)
        self.cause = cause
        self.detail = detail


class PeerLost(LinkBroken):
    """The peer cannot be reached, or leaves: its connection is not to be used again."""


class SenderLink(Protocol):
    """One hand-off as its sender sees the transport."""

    async def send(self, message: SenderMessage) -> None:
        """Puts a message on the control stream; messages arrive in order.

        Raises:
            LinkBroken: with what the receiver said, if it said something.
        """
        ...

    async def receive(self) -> ReceiverMessage:
        """The next message of the control stream.

        Raises:
            LinkBroken: the stream ended, also when it ended well.
        """
        ...

    async def write_frame(self, frame: Frame) -> asyncio.Future[None]:
        """Begins to send a frame, for which a credit is in hand; others may be under way.

        Returns:
            Ends when the frame's memory is read no more, or with LinkBroken.

        Raises:
            LinkBroken: see `send`.
        """
        ...

    async def finish_frames(self) -> None:
        """Says that no frame comes any more."""
        ...

    def abort(self) -> None:
        """Gives the link up. What still runs of the other methods ends; no memory is read after that."""
        ...


class Arrival(Protocol):
    """A frame at its receiver, and the memory that it lies in.

    Attributes:
        frame: its one part is a view of that memory.
    """

    @property
    def frame(self) -> Frame: ...

    async def check(self) -> None:
        """Called after the payload was scattered: were the bytes right all the while?

        Raises:
            DamagedFrame: they are not what was sent.
            LinkBroken: that cannot be told any more.
        """
        ...

    def release(self) -> None:
        """Nothing reads the frame any more; its memory goes back. Called once."""
        ...


class ReceiverLink(Protocol):
    """One hand-off as its receiver sees the transport.

    Attributes:
        broken: resolves, with a detail, when the transport knows of the end before a read tells it.
    """

    broken: asyncio.Future[str]

    async def send(self, message: ReceiverMessage) -> None:
        """Puts a message on the control stream.

        Raises:
            LinkBroken: the sender is gone.
        """
        ...

    async def receive(self) -> SenderMessage:
        """The next message of the control stream.

        Raises:
            LinkBroken: the stream ended, or what came is no message.
        """
        ...

    async def read_frame(self) -> Arrival | None:
        """The next frame, or None after the last one.

        Raises:
            DamagedFrame: the bytes are not what was sent.
            LinkBroken: the stream broke.
        """
        ...

    def end(self, drop: Drop | None) -> None:
        """Ends both streams. None: the hand-off was accepted. Only the first call counts."""
        ...
