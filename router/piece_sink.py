"""Where the pieces of a request go in the moment in which they come."""

from collections.abc import Callable

from router.completion import Piece

# A way past the task that waits for a request's outputs: a stream need not be woken for every token.
# Offered a piece only when all outputs before it are dealt with. False: it did not take it.
PieceSink = Callable[[Piece], bool]
