"""Any faults on real links, over every way for frames: the books are right, and the next hand-off works."""

import asyncio

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kv_transfer.messages import Accepted, Drop, DropCause, Grant
from kv_transfer.outbound import HandoffEnded, HandoffOutbound
from kv_transfer.transport_choice import TransportName, transports_for
from tests.device import DEVICE
from tests.transfer.conftest import SLOTS, Receiver, Wire
from tests.transfer.fault_injection import Effect, Fault, Point
from tests.transfer.faulty_links import FaultyPeers
from tests.transfer.prompts import Prompt, make_layout
from tests.transfer.sinks import MemorySink

PROMPT = Prompt.random(make_layout(), 40)
# What waits longer for something that was lost is given up by its router.
DEADLINE_S = 0.3

FAULTS = st.builds(Fault, st.sampled_from(Point), st.sampled_from(Effect), st.integers(0, 3))


async def run_disturbed(wire: Wire, sink: MemorySink) -> HandoffOutbound:
    """A hand-off to its end at both ends, whatever that is."""
    outbound = wire.outbound(1)
    try:
        async with asyncio.timeout(DEADLINE_S):
            await outbound.open()
            wire.offer_all(outbound)
            outbound.commit((7,))
            await asyncio.wait({outbound.outcome})
            await asyncio.shield(sink.ended)
    except (HandoffEnded, TimeoutError):
        outbound.cancel()
        if not sink.dropped.done():
            sink.dropped.set_result(Drop(DropCause.CANCELLED, "the deadline"))
    await asyncio.wait({outbound.outcome, outbound.released}, return_when=asyncio.ALL_COMPLETED)
    return outbound


async def disturb(transport: TransportName, faults: list[Fault]) -> None:
    transports = transports_for(transport, SLOTS, device=DEVICE)
    receiver = await Receiver.start(PROMPT.layout, transports, terms=Grant(4, 700))
    peers = FaultyPeers(PROMPT.layout, "prefill-1", 5, transports)
    wire = Wire(PROMPT, receiver, peers, receiver.address)
    try:
        peers.plans[1] = tuple(faults)
        sink = await wire.submit(1)
        outbound = await run_disturbed(wire, sink)
        if sink.asked.is_set():
            await sink.ended
            check_receiver(sink, outbound)
        await wire.submit(2)
        assert await wire.hand_off(2) == Accepted(PROMPT.kv_bytes)
    finally:
        await peers.close()
        await receiver.stop()


def check_receiver(sink: MemorySink, outbound: HandoffOutbound) -> None:
    (outcome,) = sink.outcomes
    if isinstance(outcome, Drop):
        assert not sink.holds_blocks
        # A sink that was written to without a grant, or freed under a scatter, fails with this.
        assert outcome.cause is not DropCause.INTERNAL, outcome
        assert not isinstance(outbound.outcome.result(), Accepted)
    else:
        assert outcome == (7, PROMPT.kv_bytes)
        assert PROMPT.equals(sink.kv)


@pytest.mark.parametrize("transport", ["grpc", "shm", "ipc", "gloo"])
@given(faults=st.lists(FAULTS, min_size=1, max_size=3))
@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
def test_whatever_happens_on_a_link_the_books_are_right(
    transport: TransportName, faults: list[Fault]
) -> None:
    """Conformance 1, 2, 3, 17, 18."""
    asyncio.run(disturb(transport, faults))


@pytest.mark.parametrize("transport", ["grpc", "shm", "ipc", "gloo"])
@pytest.mark.parametrize("point", Point, ids=lambda point: point.value)
@pytest.mark.parametrize("effect", Effect, ids=lambda effect: effect.value)
def test_every_fault_at_every_point(transport: TransportName, point: Point, effect: Effect) -> None:
    """Conformance 1, 2, 3, 17, 18."""
    asyncio.run(disturb(transport, [Fault(point, effect)]))
