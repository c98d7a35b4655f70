"""Work for an HTTP client that ends when the client goes away."""

import asyncio
from collections.abc import Coroutine

from starlette.types import Receive


async def until_hang_up(receive: Receive, work: Coroutine[None, None, None]) -> None:
    """Runs `work`, cancelled as soon as the client closes the connection.

    Args:
        receive: of a request whose body is read: all that still can come is the disconnect.

    Raises:
        Whatever `work` raises.
    """
    worker = asyncio.create_task(work)
    watcher = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait({worker, watcher}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        watcher.cancel()
        if not worker.done():
            worker.cancel()
        await asyncio.wait({worker, watcher})
    if not worker.cancelled():
        worker.result()


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
