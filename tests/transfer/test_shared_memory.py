"""What only shm can get wrong: whose memory it is, what is left of it, and what becomes of its slots."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kv_transfer.bulk import SlotTerms
from kv_transfer.messages import Accepted, Drop, DropCause
from kv_transfer.outbound import HandoffEnded
from kv_transfer.peers import PeerAddress, PeerPool
from kv_transfer.shared_memory import SharedMemoryTransport
from kv_transfer.transport_choice import Transports, transports_for
from protos import kv_pb2
from tests.transfer.conftest import EPOCH, SLOTS, Receiver, Wire
from tests.transfer.prompts import Prompt, make_layout
from tests.transfer.proxy import Proxy
from tests.transfer.tampering import Tampering


@pytest.fixture
def transports() -> Transports:
    """Of a worker that has no GPU."""
    return transports_for("auto", SLOTS)


async def transport_of(wire: Wire) -> str:
    """The way that the pair's next hand-off will go."""
    address = PeerAddress(wire.address, EPOCH)
    peer = await wire.peers.acquire(address)
    await wire.peers.release(address, peer)
    return peer.transport


def open_segments() -> int:
    """How many descriptors of segments this process has: a mapping has one too."""
    links = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            links.append(str(entry.readlink()))
        except FileNotFoundError:  # the one that listed them
            continue
    return sum("baton-kv" in link for link in links)


@pytest.fixture
async def other_receiver(prompt: Prompt, transports: Transports) -> AsyncIterator[Receiver]:
    receiver = await Receiver.start(prompt.layout, transports)
    yield receiver
    await receiver.stop()


async def test_auto_takes_shared_memory_on_one_machine(wire: Wire) -> None:
    assert await transport_of(wire) == "shm"


async def test_nothing_is_left_of_a_pair_that_closed(wire: Wire) -> None:
    before = open_segments()
    await wire.submit()
    await wire.hand_off()
    assert open_segments() > before
    await wire.peers.close()
    await wire.receiver.service.close()
    while open_segments() != before:  # noqa: ASYNC110
        # Both ends close on their own; what stays open keeps the test waiting until its time is over.
        await asyncio.sleep(0)


async def test_nothing_is_left_of_offers_that_were_not_taken(wire: Wire) -> None:
    before = open_segments()
    offer = await SharedMemoryTransport(SLOTS).offer(wire.prompt.layout)
    assert offer is not None and open_segments() > before
    offer.discard()
    del offer
    assert open_segments() == before


def changed_nonce(offered: kv_pb2.SharedMemory) -> None:
    offered.nonce = os.urandom(len(offered.nonce))


def no_nonce(offered: kv_pb2.SharedMemory) -> None:
    offered.nonce = b""


def somebody_elses_file(offered: kv_pb2.SharedMemory) -> None:
    offered.fd = 0


def no_such_process(offered: kv_pb2.SharedMemory) -> None:
    offered.pid = 2**22 + 1


def larger_than_it_is(offered: kv_pb2.SharedMemory) -> None:
    offered.num_slots += 1


@pytest.mark.parametrize(
    "change",
    [changed_nonce, no_nonce, somebody_elses_file, no_such_process, larger_than_it_is],
    ids=lambda change: change.__name__,
)
async def test_memory_that_is_not_the_senders_is_refused(prompt: Prompt, change) -> None:
    transport = SharedMemoryTransport(SLOTS)
    offer = await transport.offer(prompt.layout)
    assert offer is not None and await transport.refusal(offer.proto) is None
    changed = kv_pb2.TransportOffer.FromString(offer.proto.SerializeToString())
    change(changed.memory)
    assert "cannot be mapped" in (await transport.refusal(changed) or "")
    offer.discard()


async def test_a_slot_that_holds_no_token_of_a_layer_is_not_offered() -> None:
    layout = make_layout(num_heads=32, head_dim=64)
    assert await SharedMemoryTransport(SlotTerms(4, 8192)).offer(layout) is None


def as_if_from_another_machine(sent: bytes) -> bytes:
    request = kv_pb2.HandshakeRequest.FromString(sent)
    for offer in request.transports:
        offer.memory.nonce = b"somewhere else"
    return request.SerializeToString()


async def test_between_machines_auto_takes_grpc(wire: Wire, proxy: Proxy) -> None:
    proxy.alter["Handshake"] = as_if_from_another_machine
    sink = await wire.submit()
    assert await wire.hand_off() == Accepted(wire.prompt.kv_bytes)
    assert wire.prompt.equals(sink.kv)
    assert await transport_of(wire) == "grpc"


async def test_a_forced_transport_that_is_impossible_is_refused_with_both_lists(
    wire: Wire, proxy: Proxy, prompt: Prompt
) -> None:
    proxy.alter["Handshake"] = as_if_from_another_machine
    peers = PeerPool(prompt.layout, "prefill-2", epoch=6, transports=transports_for("shm", SLOTS))
    forced = Wire(prompt, wire.receiver, peers, wire.address)
    with pytest.raises(HandoffEnded, match=r"kv_transport: shm, grpc here, shm there; shm: .*nonce"):
        await forced.outbound().open()
    await peers.close()


async def test_slots_come_back_whatever_became_of_their_hand_offs(wire: Wire) -> None:
    """More hand-offs end half-way than there are slots; then one goes through."""
    for number in range(1, 3 * SLOTS.num_slots):
        sink = await wire.submit(number)
        outbound = wire.outbound(number)
        await outbound.open()
        wire.offer_all(outbound)
        if number % 2:
            outbound.cancel()
        else:
            sink.dropped.set_result(Drop(DropCause.CANCELLED, "not wanted"))
        await sink.ended
        await outbound.released
    sink = await wire.submit(99)
    assert await wire.hand_off(99) == Accepted(wire.prompt.kv_bytes)
    assert wire.prompt.equals(sink.kv)


async def test_a_pair_that_breaks_is_rebuilt_and_touches_no_other(
    wire: Wire, other_receiver: Receiver, prompt: Prompt
) -> None:
    """Conformance 17."""
    other = Wire(prompt, other_receiver, wire.peers, other_receiver.address)
    other_sink, other_outbound = await other.submit(), other.outbound()
    await other_outbound.open()
    broken_sink, broken = await wire.submit(), wire.outbound()
    await broken.open()

    for bulk in wire.receiver.service._running_bulks:
        bulk.cancel()
    await broken_sink.ended
    await broken.outcome

    other.offer_all(other_outbound)
    other_outbound.commit((7,))
    assert isinstance(await other_outbound.outcome, Accepted)
    assert prompt.equals(other_sink.kv)
    await wire.submit(2)
    assert isinstance(await wire.hand_off(2), Accepted)
    assert await transport_of(wire) == "shm"


async def test_what_fails_always_gives_way_to_grpc(wire: Wire, proxy: Proxy) -> None:
    """Conformance 17."""
    Tampering(proxy).damage()
    proxy.alter["Frames"] = bytes
    number, outcome = 0, None
    while not isinstance(outcome, Accepted):
        number += 1
        sink = await wire.submit(number)
        outcome = await wire.hand_off(number)
        await sink.ended
    assert number > 1
    assert await transport_of(wire) == "grpc"


async def test_an_announcement_without_a_credit_breaks_the_pair(wire: Wire, proxy: Proxy) -> None:
    """A slot is not written before the last frame in it was given back."""

    def announce_twice(sent: bytes) -> bytes:
        message = kv_pb2.BulkMessage.FromString(sent)
        message.frames.extend(list(message.frames))
        return message.SerializeToString()

    proxy.alter["Bulk"] = announce_twice
    sink = await wire.submit()
    outcome = await wire.hand_off()
    assert isinstance(outcome, Drop)
    assert "without a credit" in outcome.detail
    assert isinstance(await sink.ended, Drop)


async def test_a_slot_is_not_given_back_while_the_engine_copies_it(wire: Wire) -> None:
    """Conformance 1: a hand-off is cancelled in the middle of a copy; others fill every slot meanwhile."""
    slow = await wire.submit(1)
    slow.scatter_gate.clear()
    outbound = wire.outbound(1)
    await outbound.open()
    wire.offer_all(outbound)
    await slow.first_scatter.wait()
    outbound.cancel()
    others = [await wire.submit(number) for number in range(2, 8)]
    outcomes = await asyncio.gather(*(wire.hand_off(number) for number in range(2, 8)))
    assert all(isinstance(outcome, Accepted) for outcome in outcomes)
    slow.scatter_gate.set()
    await slow.ended
    written = [kv.any() for tensors in slow.kv for kv in tensors]
    assert any(written)
    for kv, right in zip(slow.kv, wire.prompt.kv, strict=True):
        for rows, right_rows in zip(kv, right, strict=True):
            came = rows.any(axis=1)
            assert (rows[came] == right_rows[came]).all()
    assert all(wire.prompt.equals(sink.kv) for sink in others)
