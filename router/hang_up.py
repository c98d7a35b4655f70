"""Work for an HTTP client that ends when the client goes away."""

import asyncio
from collections.abc import Coroutine

from starlette.types import Receive


async def until_hang_up(receive: Receive, work: Coroutine[None, None, None]) -> None:
    """Does `work`, which is cancelled as soon as the client closes the connection.

    Args:
        receive: of a request whose body is read: all that still can come is the disconnect.

    Raises:
        Whatever `work` raises.
    """
    task = asyncio.current_task()
    assert task is not None
    has_hung_up = False

    async def watch() -> None:
        nonlocal has_hung_up
        while (await receive())["type"] != "http.disconnect":
            pass
        has_hung_up = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        await work
    except asyncio.CancelledError:
        # Cancelled by anybody else besides, it is for them.
        if not has_hung_up or task.uncancel() > 0:
            raise
    finally:
        watcher.cancel()
