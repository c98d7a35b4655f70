"""Work for an HTTP client that ends when the client goes away."""

import asyncio
from collections.abc import Callable, Coroutine

from starlette.types import Receive, Scope

from router.http_connection import HANG_UP


async def until_hang_up(scope: Scope, receive: Receive, work: Coroutine[None, None, None]) -> None:
    """Does `work`, which is cancelled as soon as the client closes the connection.

    Args:
        scope, receive: of a request whose body is read: all that still can come is the disconnect.

    Raises:
        Whatever `work` raises.
    """
    task = asyncio.current_task()
    assert task is not None
    has_hung_up = False

    def hang_up() -> None:
        nonlocal has_hung_up
        has_hung_up = True
        task.cancel()

    extension = scope.get("extensions", {}).get(HANG_UP)
    forget = _watch(receive, hang_up) if extension is None else extension["hang_up"].tell(hang_up)
    try:
        await work
    except asyncio.CancelledError:
        # Cancelled by anybody else besides, it is for them.
        if not has_hung_up or task.uncancel() > 0:
            raise
    finally:
        forget()


def _watch(receive: Receive, hang_up: Callable[[], None]) -> Callable[[], object]:
    """Under a server that tells only who waits for it. Returns what ends that."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        hang_up()

    return asyncio.create_task(watch()).cancel
