"""Hand-offs between two ends on loopback, over every way for frames."""

import asyncio

import pytest

from kv_transfer.messages import Accepted, CloseReason, Drop, DropCause
from kv_transfer.outbound import HandoffEnded
from kv_transfer.peers import PeerPool
from kv_transfer.sender import Closed
from kv_transfer.transport_choice import Transports
from tests.transfer.conftest import SESSION, Receiver, Wire, offer
from tests.transfer.prompts import Prompt, make_layout
from tests.transfer.proxy import Proxy
from tests.transfer.tampering import Tampering


@pytest.mark.parametrize("chunk_tokens", [1, 7, 40])
async def test_the_kv_arrives_as_it_was(wire: Wire, chunk_tokens: int) -> None:
    sink, outbound = await wire.submit(), wire.outbound()
    await outbound.open()
    wire.offer_all(outbound, chunk_tokens)
    outbound.commit((7,))
    assert await outbound.outcome == Accepted(wire.prompt.kv_bytes)
    await outbound.released
    assert sink.outcomes == [(7, wire.prompt.kv_bytes)]
    assert wire.prompt.equals(sink.kv)


async def test_layers_of_megabytes_arrive_split_by_tokens(transports: Transports) -> None:
    prompt = Prompt.random(make_layout(num_layers=2, num_heads=4, head_dim=64), 1500)
    receiver = await Receiver.start(prompt.layout, transports)
    peers = PeerPool(prompt.layout, "prefill-1", epoch=5, transports=transports)
    wire = Wire(prompt, receiver, peers, receiver.address)
    sink, outbound = await wire.submit(), wire.outbound()
    await outbound.open()
    wire.offer_all(outbound, 1500)
    outbound.commit((7,))
    await outbound.outcome
    assert prompt.equals(sink.kv)
    await peers.close()
    await receiver.stop()


async def test_sixteen_at_once_arrive(wire: Wire) -> None:
    sinks = [await wire.submit(number) for number in range(1, 17)]
    outcomes = await asyncio.gather(*(wire.hand_off(number) for number in range(1, 17)))
    assert outcomes == [Accepted(wire.prompt.kv_bytes)] * 16
    assert all(wire.prompt.equals(sink.kv) for sink in sinks)
    assert [sink.outcomes for sink in sinks] == [[(n, wire.prompt.kv_bytes)] for n in range(1, 17)]


async def test_the_first_layer_arrives_while_the_sender_still_computes(wire: Wire) -> None:
    sink, outbound = await wire.submit(), wire.outbound()
    await outbound.open()
    for piece in wire.prompt.pieces(16):
        if piece.token_start == 0:
            offer(outbound, piece)
    await sink.layer_0_came.wait()
    assert not sink.outcomes
    outbound.cancel()
    await sink.ended


async def test_a_push_before_its_submit_waits_for_it(wire: Wire) -> None:
    """Conformance 3."""
    outbound = wire.outbound()
    opening = asyncio.create_task(outbound.open())
    await wire.receiver.door.waiting.wait()
    sink = await wire.submit()
    await opening
    wire.offer_all(outbound)
    outbound.commit((7,))
    assert await outbound.outcome == Accepted(wire.prompt.kv_bytes)
    assert wire.prompt.equals(sink.kv)


async def test_a_push_that_waits_for_a_submit_ends_with_its_session(wire: Wire) -> None:
    """Conformance 3."""
    opening = asyncio.create_task(wire.outbound().open())
    await wire.receiver.door.waiting.wait()
    await wire.receiver.door.disconnect(SESSION)
    with pytest.raises(HandoffEnded, match="NOT_FOUND"):
        await opening


async def test_the_grant_waits_for_blocks(wire: Wire) -> None:
    sink, outbound = await wire.submit(), wire.outbound()
    sink.reserve_gate.clear()
    opening = asyncio.create_task(outbound.open())
    await sink.asked.wait()
    assert not opening.done()
    sink.reserve_gate.set()
    await opening
    outbound.cancel()
    await sink.ended


async def test_a_hand_off_that_ends_at_its_first_token_says_so(wire: Wire) -> None:
    sink, outbound = await wire.submit(), wire.outbound()
    await outbound.open()
    wire.offer_all(outbound)
    outbound.close(CloseReason.ENDED_AT_FIRST_TOKEN)
    assert await outbound.outcome == Closed(CloseReason.ENDED_AT_FIRST_TOKEN)
    assert await sink.ended == sink.outcomes[0]
    assert [drop.cause for drop in sink.outcomes if isinstance(drop, Drop)] == [
        DropCause.ENDED_AT_FIRST_TOKEN
    ]
    await outbound.released


# What gloo moves passes no proxy.
@pytest.mark.parametrize("transport", ["grpc", "shm"], indirect=True)
async def test_an_altered_and_resealed_frame_is_believed(wire: Wire, proxy: Proxy) -> None:
    """What comes over the wire is what the receiver's pages hold: no other way leads there."""
    Tampering(proxy).forge()
    sink = await wire.submit()
    assert await wire.hand_off() == Accepted(wire.prompt.kv_bytes)
    assert not wire.prompt.equals(sink.kv)


async def test_a_receiver_comes_back_on_its_address_under_another_epoch(
    prompt: Prompt, peers: PeerPool, transports: Transports
) -> None:
    """Conformance 15: one pool serves both lives, and the old epoch is refused."""
    first = await Receiver.start(prompt.layout, transports, epoch=1)
    wire = Wire(prompt, first, peers, first.address)
    await wire.submit()
    assert isinstance(await wire.hand_off(epoch=1), Accepted)
    await first.stop()

    second = await Receiver.start(prompt.layout, transports, epoch=2, port=first.port)
    wire = Wire(prompt, second, peers, second.address)
    await wire.submit()
    assert isinstance(await wire.hand_off(epoch=2), Accepted)
    with pytest.raises(HandoffEnded, match="epoch"):
        await wire.hand_off(epoch=1)
    await second.stop()


async def test_a_connection_that_broke_is_rebuilt(
    prompt: Prompt, peers: PeerPool, transports: Transports
) -> None:
    """Conformance 17: a hand-off finds its connection dead; the next one works."""
    receiver = await Receiver.start(prompt.layout, transports)
    outbound = Wire(prompt, receiver, peers, receiver.address).outbound()
    opening = asyncio.create_task(outbound.open())
    await receiver.door.waiting.wait()
    await receiver.stop()
    with pytest.raises(HandoffEnded):
        await opening
    await outbound.released

    again = await Receiver.start(prompt.layout, transports, port=receiver.port)
    wire = Wire(prompt, again, peers, again.address)
    await wire.submit()
    assert isinstance(await wire.hand_off(), Accepted)
    await again.stop()


@pytest.mark.parametrize("cached_tokens", [16, 39, 40])
async def test_only_what_the_receiver_lacks_travels(wire: Wire, cached_tokens: int) -> None:
    sink, outbound = await wire.submit(), wire.outbound()
    sink.cached_tokens = cached_tokens
    for layer, tensors in enumerate(wire.prompt.kv):
        for tensor, rows in enumerate(tensors):
            sink.kv[layer][tensor][:cached_tokens] = rows[:cached_tokens]
    assert await outbound.open() == cached_tokens
    for piece in wire.prompt.pieces(1):
        if piece.token_start >= cached_tokens:
            offer(outbound, piece)
    outbound.commit((7,))
    sent = (wire.prompt.num_tokens - cached_tokens) * wire.prompt.layout.token_bytes
    assert await outbound.outcome == Accepted(sent)
    assert wire.prompt.equals(sink.kv)


async def test_what_the_receiver_has_already_is_not_to_be_offered(wire: Wire) -> None:
    sink, outbound = await wire.submit(), wire.outbound()
    sink.cached_tokens = 16
    await outbound.open()
    with pytest.raises(ValueError, match="tokens 16 to 40"):
        wire.offer_all(outbound)
    outbound.cancel()
