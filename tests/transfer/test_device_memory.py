"""What only ways for frames on a device can get wrong: the digest, whose memory it is, what is left of it."""

import asyncio
import os
import sys
from typing import TypeVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer import device_memory
from kv_transfer.bulk import Departure, Memory, SlotTerms, SlotWriter, TransportFailed
from kv_transfer.bulk_sender import BulkSender
from kv_transfer.device_digest import device_digest
from kv_transfer.device_memory import DeviceMemoryTransport
from kv_transfer.device_sealer import DeviceSealer
from kv_transfer.frame import Frame, checksum
from kv_transfer.messages import Accepted, Drop
from kv_transfer.peers import PeerAddress
from kv_transfer.promises import then
from kv_transfer.transport_choice import TransportName, transports_for
from protos import kv_pb2
from tests.device import DEVICE
from tests.transfer.conftest import EPOCH, SLOTS, Wire
from tests.transfer.prompts import make_layout

T = TypeVar("T")
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
async def test_memory_that_is_not_the_senders_is_refused(change) -> None:
    transport = DeviceMemoryTransport(SLOTS, DEVICE)
    offer = await transport.offer(make_layout())
    assert offer is not None and await transport.refusal(offer.proto) is None
    changed = kv_pb2.TransportOffer.FromString(offer.proto.SerializeToString())
    change(changed.device_memory)
    assert "cannot be mapped" in (await transport.refusal(changed) or "")
    offer.discard()


async def test_a_slot_that_holds_no_block_of_a_layer_is_not_offered() -> None:
    layout = make_layout(num_heads=32, head_dim=64)
    assert await DeviceMemoryTransport(SlotTerms(4, 8192), DEVICE).offer(layout) is None


async def test_without_cudas_bindings_another_way_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    transport = DeviceMemoryTransport(SLOTS, torch.device("cuda"))
    assert await transport.offer(make_layout()) is None
    offered = kv_pb2.TransportOffer(name="ipc", device_memory=kv_pb2.DeviceMemory(handle=bytes(64)))
    assert "cuda-bindings is not installed" in (await transport.refusal(offered) or "")


async def test_other_slots_than_were_offered_are_not_written() -> None:
    offer = await DeviceMemoryTransport(SLOTS, DEVICE).offer(make_layout())
    assert offer is not None
    larger = kv_pb2.BulkReady(num_slots=SLOTS.num_slots, slot_bytes=2 * SLOTS.slot_bytes)
    with pytest.raises(TransportFailed, match="other slots"):
        await offer.connect(larger)


class LateWriter:
    """A SlotWriter that is slow to say anything (kv_transfer.bulk)."""

    memory = Memory.DEVICE

    def __init__(self, writer: SlotWriter) -> None:
        self._writer = writer

    def start(self, slot: int, frame: Frame) -> Departure:
        sealing, leaving = self._writer.start(slot, frame)
        return Departure(then(sealing, late), then(leaving, late))

    def close(self) -> None:
        self._writer.close()


def late(result: T) -> asyncio.Future[T]:
    return asyncio.ensure_future(asyncio.sleep(0.002, result))


async def bulk_of(wire: Wire) -> BulkSender:
    """The one of the pair's next hand-off."""
    address = PeerAddress(wire.address, EPOCH)
    peer = await wire.peers.acquire(address)
    await wire.peers.release(address, peer)
    assert isinstance(peer._frames, BulkSender)
    return peer._frames


async def test_frames_sealed_late_are_announced_before_their_hand_off_is_finished(
    wire: Wire,
) -> None:
    bulk = await bulk_of(wire)
    bulk._writer = LateWriter(bulk._writer)
    sinks = [await wire.submit(number) for number in (1, 2, 3)]
    outcomes = await asyncio.gather(*(wire.hand_off(number) for number in (1, 2, 3)))
    assert outcomes == [Accepted(wire.prompt.kv_bytes)] * 3
    assert all(wire.prompt.equals(sink.kv) for sink in sinks)


async def test_a_device_that_fails_under_a_pair_costs_that_pair(wire: Wire) -> None:
    bulk = await bulk_of(wire)
    bulk._writer._sealer._promises.fail("the device failed")
    sink = await wire.submit(1)
    assert isinstance(await wire.hand_off(1), Drop)
    assert isinstance(await sink.ended, Drop)
    sink = await wire.submit(2)
    assert await wire.hand_off(2) == Accepted(wire.prompt.kv_bytes)
    assert wire.prompt.equals(sink.kv)
    assert await bulk_of(wire) is not bulk


async def test_nothing_is_left_of_a_pair_that_closed(wire: Wire) -> None:
    before = set(device_memory._own)
    await wire.submit()
    assert await wire.hand_off() == Accepted(wire.prompt.kv_bytes)
    assert len(set(device_memory._own) - before) == 1
    await wire.peers.close()
    await wire.receiver.service.close()
    while set(device_memory._own) - before:  # noqa: ASYNC110
        # Both ends close on their own; what stays keeps the test waiting until its time is over.
        await asyncio.sleep(0.01)
