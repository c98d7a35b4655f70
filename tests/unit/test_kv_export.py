"""K and V on their way from the engine's thread to the loop, also where a device must be waited for."""

import asyncio
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from engine.request import SequenceId
from kv_transfer.bulk import Memory
from worker.kv_export import KVExport

NAME = SequenceId("a")


class SlowDevice:
    """A device that computes and copies when it is let."""

    def __init__(self) -> None:
        self.may_go_on = threading.Event()

    def to_host(self, packed: Tensor) -> tuple[Tensor, Callable[[], None]]:
        host = torch.zeros_like(packed)

        def wait() -> None:
            self.may_go_on.wait()
            host.copy_(packed)

        return host, wait

    def computed(self, packed: Tensor) -> Callable[[], None]:
        return lambda: self.may_go_on.wait() and None


def packed(value: int) -> Tensor:
    return torch.full((3,), value, dtype=torch.uint8)


async def test_pieces_come_in_order_and_not_after_a_detach() -> None:
    export, came = KVExport(asyncio.get_running_loop()), []
    export.attach(NAME, lambda *piece: came.append((*piece[:3], bytes(piece[3]))), Memory.HOST)
    for layer in range(3):
        await asyncio.to_thread(export.on_layer, NAME, layer, 4, 7, packed(layer))
    await asyncio.to_thread(export.on_layer, SequenceId("other"), 0, 4, 7, packed(9))
    await asyncio.sleep(0)
    assert came == [(layer, 4, 7, bytes([layer] * 3)) for layer in range(3)]
    export.detach(NAME)
    await asyncio.to_thread(export.on_layer, NAME, 3, 4, 7, packed(3))
    await asyncio.sleep(0)
    assert len(came) == 3


@pytest.mark.parametrize("memory", Memory)
async def test_what_follows_waits_for_the_device(memory: Memory) -> None:
    export, device = KVExport(asyncio.get_running_loop()), SlowDevice()
    export.wait_for(device, staging_bytes=100)
    came: list[bytes | str] = []
    delivered = asyncio.Event()
    export.attach(NAME, lambda *piece: came.append(bytes(piece[3])), memory)
    for layer in range(3):
        export.on_layer(NAME, layer, 0, 1, packed(layer))
    export.when_delivered(lambda: (came.append("commit"), delivered.set()))
    await asyncio.sleep(0.02)
    assert not came
    device.may_go_on.set()
    await delivered.wait()
    assert came == [bytes(3), bytes([1] * 3), bytes([2] * 3), "commit"]
    export.close()


async def test_beyond_its_room_on_the_device_kv_waits_on_the_host() -> None:
    export, device = KVExport(asyncio.get_running_loop()), SlowDevice()
    device.may_go_on.set()
    export.wait_for(device, staging_bytes=7)
    came: list[Tensor] = []
    export.attach(NAME, lambda *piece: came.append(piece[3]), Memory.DEVICE)

    async def stays(value: int) -> bool:
        piece, delivered = packed(value), asyncio.Event()
        export.on_layer(NAME, 0, 0, 1, piece)
        export.when_delivered(delivered.set)
        await delivered.wait()
        assert came[-1].tolist() == [value] * 3
        return came[-1].data_ptr() == piece.data_ptr()

    assert [await stays(value) for value in range(4)] == [True, True, False, False]
    came.clear()
    assert [await stays(value) for value in range(4)] == [True, True, False, False]
    export.close()
