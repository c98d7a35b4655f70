"""Where the pieces of a request go in the moment in which they come."""

from typing import Protocol

from router.completion import Piece


class PieceSink(Protocol):
    """A way past the task that waits for a request's outputs: it need not be woken for every token."""

    async def prepare(self) -> None:
        """The request is with its workers, and nothing has come: now is the time for what can be done before.

        Not called again when it is tried again.
        """
        ...

    def take(self, piece: Piece) -> bool:
        """Offered a piece only when all outputs before it are dealt with. False: it is yielded instead."""
        ...
