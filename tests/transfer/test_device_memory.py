"""What only ways for frames on a device can get wrong: the digest, whose memory it is, what is left of it."""

import asyncio
import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer import device_memory
from kv_transfer.bulk import SlotTerms, TransportFailed
from kv_transfer.device_digest import device_digest
from kv_transfer.device_memory import DeviceMemoryTransport
from kv_transfer.device_sealer import DeviceSealer
from kv_transfer.frame import Frame, checksum
from kv_transfer.messages import Accepted
from kv_transfer.transport_choice import TransportName, transports_for
from protos import kv_pb2
from tests.device import DEVICE
from tests.transfer.conftest import SLOTS, Wire
from tests.transfer.prompts import make_layout

PAYLOADS = st.binary(min_size=1, max_size=70)


@pytest.fixture
def transport() -> TransportName:
    return "ipc"


def on_device(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(DEVICE)


def device_frame(*parts: bytes) -> Frame:
    return Frame(3, 0, 2, 4, 1, tuple(on_device(part) for part in parts))


@given(data=PAYLOADS, at=st.integers(0, 10**6), mask=st.integers(1, 255))
def test_the_digest_tells_any_changed_byte(data: bytes, at: int, mask: int) -> None:
    changed = bytearray(data)
    changed[at % len(data)] ^= mask
    assert device_digest(on_device(data)) != device_digest(on_device(bytes(changed)))


@given(data=PAYLOADS, offset=st.integers(0, 7))
def test_the_digest_is_the_bytes_wherever_they_lie(data: bytes, offset: int) -> None:
    within = on_device(bytes(offset) + data)[offset:]
    assert device_digest(within) == device_digest(on_device(data))


def test_swapped_words_are_told() -> None:
    assert device_digest(on_device(b"abcdefgh")) != device_digest(on_device(b"efghabcd"))


async def test_a_frame_is_sealed_in_one_piece_with_what_its_receiver_finds() -> None:
    sealer = DeviceSealer(DEVICE)
    slot = torch.zeros(16, dtype=torch.uint8, device=DEVICE)
    frame = device_frame(b"abc", b"defgh")
    for into in (slot, None):
        payload, sealed = await sealer.seal(frame, into)
        assert bytes(payload.tolist()) == b"abcdefgh"
        assert sealed == checksum(device_frame(b"abcdefgh"))
        assert sealed != checksum(device_frame(b"abcdefgi"))
    assert bytes(slot.tolist()) == b"abcdefgh" + bytes(8)
    sealer.close()
    with pytest.raises(TransportFailed):
        await sealer.seal(frame)


async def test_auto_takes_ipc_on_gpus_before_shm() -> None:
    assert transports_for("auto", SLOTS, device=torch.device("cuda")).names == ("ipc", "shm", "grpc")
    assert transports_for("auto", SLOTS).names == ("shm", "grpc")


def changed_nonce(offered: kv_pb2.DeviceMemory) -> None:
    offered.nonce = os.urandom(len(offered.nonce))


def no_nonce(offered: kv_pb2.DeviceMemory) -> None:
    offered.nonce = b""


def larger_than_it_is(offered: kv_pb2.DeviceMemory) -> None:
    offered.num_slots += 1


@pytest.mark.parametrize(
    "change", [changed_nonce, no_nonce, larger_than_it_is], ids=lambda change: change.__name__
)
def test_memory_that_is_not_the_senders_is_refused(change) -> None:
    transport = DeviceMemoryTransport(SLOTS, DEVICE)
    offer = transport.offer(make_layout())
    assert offer is not None and transport.refusal(offer.proto) is None
    changed = kv_pb2.TransportOffer.FromString(offer.proto.SerializeToString())
    change(changed.device_memory)
    assert "cannot be mapped" in (transport.refusal(changed) or "")
    offer.discard()


def test_a_slot_that_holds_no_block_of_a_layer_is_not_offered() -> None:
    layout = make_layout(num_heads=32, head_dim=64)
    assert DeviceMemoryTransport(SlotTerms(4, 8192), DEVICE).offer(layout) is None


async def test_nothing_is_left_of_a_pair_that_closed(wire: Wire) -> None:
    await wire.submit()
    assert await wire.hand_off() == Accepted(wire.prompt.kv_bytes)
    assert len(device_memory._own) == 1
    await wire.peers.close()
    await wire.receiver.service.close()
    while device_memory._own:  # noqa: ASYNC110
        # Both ends close on their own; what stays keeps the test waiting until its time is over.
        await asyncio.sleep(0.01)
