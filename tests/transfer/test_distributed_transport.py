"""gloo: groups that break, strangers, and waits that must end."""

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest
import torch

from kv_transfer.bulk import TransportFailed
from kv_transfer.distributed_transport import DistributedTransport, GroupReader, GroupWriter
from kv_transfer.messages import Accepted
from kv_transfer.peers import PeerAddress
from kv_transfer.transport_choice import TransportName, Transports, transports_for
from protos import kv_pb2
from tests.transfer.conftest import EPOCH, SLOTS, Receiver, Wire
from tests.transfer.prompts import Prompt, frame_of, make_layout, on_host

TOKEN = b"of this pair"
GLOO = DistributedTransport("gloo", SLOTS, "127.0.0.1", torch.device("cpu"))


@pytest.fixture
def transport() -> TransportName:
    return "gloo"


@pytest.fixture
async def ends() -> AsyncIterator[tuple[GroupWriter, GroupReader]]:
    """Both ends of one pair."""
    accepted = await GLOO.accept(kv_pb2.BulkOpen())
    accepted.ready.token = TOKEN
    offer = await GLOO.offer(make_layout())
    reader, writer = await asyncio.gather(accepted.connect(), offer.connect(accepted.ready))
    yield writer, reader
    writer.close()
    reader.close()


async def test_payloads_arrive_in_the_order_in_which_they_were_begun(
    ends: tuple[GroupWriter, GroupReader],
) -> None:
    writer, reader = ends
    payloads = [bytes([n]) * (1000 + n) * 3 for n in range(6)]
    sent = [writer.start(slot, frame_of(payload, 3)) for slot, payload in enumerate(payloads)]
    came = [reader.start(slot, len(payload)) for slot, payload in enumerate(payloads)]
    assert [bytes(on_host(await each)) for each in came] == payloads
    await asyncio.gather(*(each.left for each in sent))


async def test_a_wait_for_what_never_comes_ends_when_its_own_end_closes(
    ends: tuple[GroupWriter, GroupReader],
) -> None:
    _, reader = ends
    waiting = [reader.start(slot, 1000) for slot in range(3)]
    reader.close()
    for each in waiting:
        with pytest.raises(TransportFailed):
            await each


async def test_a_wait_for_what_never_comes_ends_when_the_other_end_closes(
    ends: tuple[GroupWriter, GroupReader],
) -> None:
    writer, reader = ends
    waiting = reader.start(0, 1000)
    writer.close()
    with pytest.raises(TransportFailed):
        await waiting


async def test_a_send_that_nobody_receives_ends_when_its_own_end_closes(
    ends: tuple[GroupWriter, GroupReader],
) -> None:
    writer, _ = ends
    unread = writer.start(0, frame_of(bytes(1 << 20))).left
    writer.close()
    with pytest.raises(TransportFailed):
        await unread


async def test_what_is_begun_after_a_failure_fails_at_once(ends: tuple[GroupWriter, GroupReader]) -> None:
    writer, _ = ends
    writer.close()
    with pytest.raises(TransportFailed):
        await writer.start(0, frame_of(b"late")).left


async def test_a_stranger_who_comes_first_forms_no_pair() -> None:
    accepted = await GLOO.accept(kv_pb2.BulkOpen())
    accepted.ready.token = TOKEN
    connecting = asyncio.ensure_future(accepted.connect())
    with socket.create_connection(("127.0.0.1", accepted.ready.group_store.port)) as stranger:
        stranger.sendall(b"x" * len(TOKEN))
        with pytest.raises(TransportFailed, match="stranger"):
            await connecting


def break_pair(receiver: Receiver) -> None:
    """Its group goes under the receiver's feet."""
    (bulk,) = receiver.service._bulks.values()
    bulk._reader.close()


async def test_a_broken_pair_is_built_again_and_another_is_not_touched(
    wire: Wire, prompt: Prompt, transports: Transports
) -> None:
    """Conformance 17."""
    other = await Receiver.start(prompt.layout, transports)
    beside = Wire(prompt, other, wire.peers, other.address)
    for each in (wire, beside):
        await each.submit(1)
        assert await each.hand_off(1) == Accepted(prompt.kv_bytes)
    untouched = await wire.peers.acquire(PeerAddress(other.address, EPOCH))

    break_pair(wire.receiver)
    await wire.submit(2)
    broken = await wire.hand_off(2)
    assert not isinstance(broken, Accepted)
    await wire.submit(3)
    assert await wire.hand_off(3) == Accepted(prompt.kv_bytes)

    assert untouched.is_usable
    assert await wire.peers.acquire(PeerAddress(other.address, EPOCH)) is untouched
    await beside.submit(4)
    assert await beside.hand_off(4) == Accepted(prompt.kv_bytes)
    await other.stop()


def test_nccl_on_a_cpu_is_refused_where_it_is_forced() -> None:
    with pytest.raises(ValueError, match="nccl"):
        transports_for("nccl", SLOTS)
