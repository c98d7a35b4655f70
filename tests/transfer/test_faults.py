"""Every way in which a hand-off can end badly, at every point of it: one outcome, nothing held after it."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import grpc
import pytest

from kv_transfer.compatibility import PROTOCOL_VERSION, layout_to_proto
from kv_transfer.grpc_transport import FRAMES_METHOD, frames_metadata
from kv_transfer.messages import Accepted, Drop, DropCause, TransferId
from kv_transfer.outbound import HandoffEnded, HandoffOutbound
from kv_transfer.peers import PeerPool
from kv_transfer.sender import Closed
from kv_transfer.transport_choice import Transports
from protos import kv_pb2, kv_pb2_grpc
from tests.transfer.conftest import EPOCH, SESSION, Receiver, Wire, offer
from tests.transfer.prompts import Prompt, make_layout
from tests.transfer.proxy import Proxy
from tests.transfer.sinks import MemorySink
from tests.transfer.tampering import Tampering


@dataclass(slots=True)
class Scene:
    """A hand-off under way. `opening` ends with the grant."""

    wire: Wire
    sink: MemorySink
    outbound: HandoffOutbound
    opening: asyncio.Task[int]


async def blocks_asked(scene: Scene) -> None:
    scene.sink.reserve_gate.clear()
    await scene.sink.asked.wait()


async def granted(scene: Scene) -> None:
    await scene.opening


async def first_chunk_arrived(scene: Scene) -> None:
    await scene.opening
    for piece in scene.wire.prompt.pieces(16):
        if piece.token_start == 0:
            offer(scene.outbound, piece)
    await scene.sink.layer_0_came.wait()


async def credits_used_up(scene: Scene) -> None:
    """The engine copies nothing: frames wait on both sides."""
    scene.sink.scatter_gate.clear()
    await scene.opening
    scene.wire.offer_all(scene.outbound)
    await scene.sink.first_scatter.wait()


async def committed_but_not_complete(scene: Scene) -> None:
    scene.sink.scatter_gate.clear()
    await scene.opening
    scene.wire.offer_all(scene.outbound)
    scene.outbound.commit((7,))
    await scene.sink.first_scatter.wait()


async def admitting(scene: Scene) -> None:
    scene.sink.admit_gate.clear()
    await scene.opening
    scene.wire.offer_all(scene.outbound)
    scene.outbound.commit((7,))
    await scene.sink.admitting.wait()


Point = Callable[[Scene], Awaitable[None]]
BEFORE_THE_COMMIT: list[Point] = [
    blocks_asked,
    granted,
    first_chunk_arrived,
    credits_used_up,
    committed_but_not_complete,
]
at_every_point = pytest.mark.parametrize("point", BEFORE_THE_COMMIT, ids=lambda point: point.__name__)


async def reach(wire: Wire, point: Point) -> Scene:
    sink, outbound = await wire.submit(), wire.outbound()
    scene = Scene(wire, sink, outbound, asyncio.create_task(outbound.open()))
    await point(scene)
    return scene


async def end_of(scene: Scene) -> tuple[Accepted | Drop | Closed, Drop]:
    """Both outcomes, after the engine has done what it was asked to; nothing is held on either side."""
    scene.sink.scatter_gate.set()
    received = await scene.sink.ended
    sent = await scene.outbound.outcome
    await scene.outbound.released
    await asyncio.wait({scene.opening})
    if scene.opening.exception() is not None:
        assert isinstance(scene.opening.exception(), HandoffEnded)
    assert not scene.sink.holds_blocks
    assert scene.sink.outcomes == [received]
    assert isinstance(received, Drop)
    return sent, received


@at_every_point
async def test_the_sender_cancels(wire: Wire, point: Point) -> None:
    """Conformance 2, 16."""
    scene = await reach(wire, point)
    scene.outbound.cancel()
    sent, received = await end_of(scene)
    assert isinstance(sent, Closed)
    assert received.cause is DropCause.CANCELLED


@at_every_point
async def test_the_receiver_cancels(wire: Wire, point: Point) -> None:
    """Conformance 2, 16."""
    scene = await reach(wire, point)
    scene.sink.dropped.set_result(Drop(DropCause.CANCELLED, "the router cancelled"))
    sent, received = await end_of(scene)
    assert isinstance(sent, Drop) and "the router cancelled" in sent.detail
    assert received == Drop(DropCause.CANCELLED, "the router cancelled")


@at_every_point
async def test_the_wire_breaks(wire: Wire, proxy: Proxy, point: Point) -> None:
    """Conformance 2."""
    scene = await reach(wire, point)
    await proxy.die()
    sent, received = await end_of(scene)
    assert isinstance(sent, Drop) and sent.cause is DropCause.PUSH_BROKEN
    assert received.cause is DropCause.PUSH_BROKEN


@at_every_point
async def test_the_sender_dies(wire: Wire, point: Point) -> None:
    """Conformance 2: its pool closes with a hand-off under way."""
    scene = await reach(wire, point)
    await wire.peers.close()
    sent, received = await end_of(scene)
    assert isinstance(sent, Drop)
    assert received.cause is DropCause.PUSH_BROKEN


@at_every_point
async def test_the_receiver_stops(wire: Wire, point: Point) -> None:
    """Conformance 2."""
    scene = await reach(wire, point)
    stopping = asyncio.create_task(wire.receiver.service.close())
    sent, received = await end_of(scene)
    await stopping
    assert isinstance(sent, Drop)
    assert received.cause is DropCause.PUSH_BROKEN


@pytest.mark.parametrize("end", ["sender cancels", "receiver cancels", "wire breaks"])
async def test_after_a_complete_commit_the_sequence_runs(wire: Wire, proxy: Proxy, end: str) -> None:
    """Conformance 3: Commit, cancel and stream end together, and an acknowledgement that is lost."""
    scene = await reach(wire, admitting)
    match end:
        case "sender cancels":
            scene.outbound.cancel()
        case "receiver cancels":
            scene.sink.dropped.set_result(Drop(DropCause.CANCELLED, "too late"))
        case _:
            await proxy.die()
    scene.sink.admit_gate.set()
    await scene.sink.ended
    await scene.outbound.outcome
    await scene.outbound.released
    assert scene.sink.outcomes == [(7, wire.prompt.kv_bytes)]
    assert wire.prompt.equals(scene.sink.kv)


async def test_a_flipped_bit_is_found_and_told_to_both_sides(wire: Wire, proxy: Proxy) -> None:
    """Conformance 18."""
    Tampering(proxy).damage()
    scene = await reach(wire, granted)
    wire.offer_all(scene.outbound)
    sent, received = await end_of(scene)
    assert isinstance(sent, Drop) and sent.cause is DropCause.DAMAGED
    assert received.cause is DropCause.DAMAGED


async def test_a_sink_that_was_given_up_before_its_push_is_asked_for_nothing(wire: Wire) -> None:
    """Conformance 2: its blocks would come after they were freed."""
    sink = wire.make_sink()
    sink.dropped.set_result(Drop(DropCause.CANCELLED, "the router cancelled"))
    await wire.submit(sink=sink)
    assert "the router cancelled" in await refusal(wire.outbound())
    assert not sink.asked.is_set()
    assert sink.outcomes == [Drop(DropCause.CANCELLED, "the router cancelled")]


async def test_a_sink_that_raises_ends_the_hand_off(wire: Wire) -> None:
    class BrokenSink(MemorySink):
        async def scatter(self, slices: object) -> None:
            raise RuntimeError("the engine's thread is dead")

    sink = await wire.submit(sink=BrokenSink(wire.prompt.layout, wire.prompt.num_tokens))
    outbound = wire.outbound()
    await outbound.open()
    wire.offer_all(outbound)
    assert await sink.ended == Drop(DropCause.INTERNAL, 'RuntimeError("the engine\'s thread is dead")')
    assert isinstance(await outbound.outcome, Drop)


async def refusal(outbound: HandoffOutbound) -> str:
    with pytest.raises(HandoffEnded) as ended:
        await outbound.open()
    await outbound.released
    assert isinstance(ended.value.outcome, Drop)
    return ended.value.outcome.detail


async def test_a_wrong_secret_is_refused_and_leaves_the_attempt_untouched(wire: Wire) -> None:
    sink = await wire.submit()
    assert "PERMISSION_DENIED" in await refusal(wire.outbound(secret=b"guessed"))
    assert not sink.outcomes
    assert await wire.hand_off() == Accepted(wire.prompt.kv_bytes)


async def test_an_unknown_session_is_refused(wire: Wire) -> None:
    """Conformance 3."""
    assert "NOT_FOUND" in await refusal(wire.outbound(session="nobody"))


async def test_a_number_that_is_over_is_refused(wire: Wire) -> None:
    """Conformance 3: a Push after its attempt's end."""
    sink = await wire.submit()
    await wire.hand_off()
    assert "ABORTED" in await refusal(wire.outbound())
    assert len(sink.outcomes) == 1


async def test_a_second_push_is_refused_and_the_first_goes_on(wire: Wire) -> None:
    """Conformance 3."""
    sink, outbound = await wire.submit(), wire.outbound()
    await outbound.open()
    assert "ABORTED" in await refusal(wire.outbound())
    wire.offer_all(outbound)
    outbound.commit((7,))
    assert isinstance(await outbound.outcome, Accepted)
    assert wire.prompt.equals(sink.kv)


async def test_a_push_to_another_life_is_refused(wire: Wire) -> None:
    """Conformance 15."""
    detail = await refusal(wire.outbound(epoch=99))
    assert str(EPOCH) in detail and "99" in detail


async def test_a_push_to_nobody_fails(prompt: Prompt, peers: PeerPool) -> None:
    gone = await Receiver.start(prompt.layout)
    await gone.stop()
    assert "UNAVAILABLE" in await refusal(Wire(prompt, gone, peers, gone.address).outbound())


@pytest.mark.parametrize(
    ("theirs", "values"),
    [
        (make_layout(dtype="bfloat16"), ("dtype", "float32", "bfloat16")),
        (make_layout(head_dim=8), ("layers[0]", "heads of 4", "heads of 8")),
        (make_layout(num_layers=4), ("number of layers", "3", "4")),
    ],
)
async def test_a_differing_layout_is_refused_with_both_values(
    wire: Wire, theirs, values: tuple[str, ...]
) -> None:
    """Conformance 19."""
    other = PeerPool(theirs, "prefill-2", epoch=6)
    prompt = Prompt.random(theirs, 40)
    sink = await wire.submit()
    detail = await refusal(Wire(prompt, wire.receiver, other, wire.address, wire.secret).outbound())
    assert "FAILED_PRECONDITION" in detail
    assert all(value in detail for value in values)
    assert not sink.outcomes
    await other.close()


async def test_a_far_protocol_version_is_refused_with_both_values(wire: Wire) -> None:
    """Conformance 19."""
    async with grpc.aio.insecure_channel(wire.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match=r"protocol_version: \d+ here, 77 there"):
            await kv_pb2_grpc.KvTransferStub(channel).Handshake(
                kv_pb2.HandshakeRequest(protocol_version=77, layout=layout_to_proto(wire.prompt.layout))
            )


async def test_the_next_protocol_version_is_let_in(wire: Wire, transports: Transports) -> None:
    """Conformance 19: protocol N talks to N-1."""
    async with grpc.aio.insecure_channel(wire.address) as channel:
        reply = await kv_pb2_grpc.KvTransferStub(channel).Handshake(
            kv_pb2.HandshakeRequest(
                protocol_version=PROTOCOL_VERSION + 1,
                layout=layout_to_proto(wire.prompt.layout),
                transports=[
                    offer.proto for t in transports.bulk if (offer := await t.offer(wire.prompt.layout))
                ]
                or [kv_pb2.TransportOffer(name="grpc")],
            )
        )
    assert reply.epoch == EPOCH


async def open_frames(wire: Wire, transfer: TransferId, secret: bytes) -> grpc.StatusCode:
    """Somebody's stream of frames: how it is refused, before anything of it is read."""
    async with grpc.aio.insecure_channel(wire.address) as channel:
        return await channel.stream_unary(FRAMES_METHOD)(metadata=frames_metadata(transfer, secret)).code()


async def test_a_strangers_frames_are_refused_and_the_hand_off_goes_on(wire: Wire) -> None:
    scene = await reach(wire, granted)
    stranger = await open_frames(wire, TransferId(SESSION, 1), b"guessed")
    assert stranger is grpc.StatusCode.PERMISSION_DENIED
    wire.offer_all(scene.outbound)
    scene.outbound.commit((7,))
    assert isinstance(await scene.outbound.outcome, Accepted)
    assert wire.prompt.equals(scene.sink.kv)


async def test_frames_after_the_end_are_refused(wire: Wire) -> None:
    """Conformance 1, 3."""
    await wire.submit()
    await wire.hand_off()
    assert await open_frames(wire, TransferId(SESSION, 1), wire.secret) is grpc.StatusCode.ABORTED


async def test_a_push_that_does_not_begin_with_open_is_refused(wire: Wire) -> None:
    async with grpc.aio.insecure_channel(wire.address) as channel:
        call = kv_pb2_grpc.KvTransferStub(channel).Push()
        await call.write(kv_pb2.PushMessage(commit=kv_pb2.Commit(num_frames=1)))
        assert await call.code() is grpc.StatusCode.ABORTED
