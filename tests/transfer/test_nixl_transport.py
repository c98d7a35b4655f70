"""nixl: host memory, waits that must end, and pairs that break."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from kv_transfer.bulk import TransportFailed
from kv_transfer.nixl_transport import NixlReader, NixlTransport, NixlWriter, is_available
from protos import kv_pb2
from tests.transfer.conftest import SLOTS
from tests.transfer.prompts import frame_of, make_layout, on_host

pytestmark = pytest.mark.skipif(not is_available(), reason="the extra nixl is missing")


@pytest.fixture
async def ends() -> AsyncIterator[tuple[NixlWriter, NixlReader]]:
    """Both ends of one pair."""
    accepted = await NixlTransport(SLOTS).accept(kv_pb2.BulkOpen())
    offer = await NixlTransport(SLOTS).offer(make_layout())
    reader, writer = await asyncio.gather(accepted.connect(), offer.connect(accepted.ready))
    yield writer, reader
    writer.close()
    reader.close()


async def test_payloads_come_whatever_is_first_the_write_or_its_announcement(
    ends: tuple[NixlWriter, NixlReader],
) -> None:
    writer, reader = ends
    payloads = [bytes([n]) * (1000 + n) * 3 for n in range(6)]
    for order in (range(6), reversed(range(6))):
        sent = [writer.start(slot, frame_of(payload, 3)) for slot, payload in enumerate(payloads)]
        first = reader.start(0, len(payloads[0]))
        await first
        # By now others have come that nobody waits for yet.
        came = {slot: reader.start(slot, len(payloads[slot])) for slot in order if slot}
        assert all([bytes(on_host(await each)) == payloads[slot] for slot, each in came.items()])
        await asyncio.gather(*(each.left for each in sent))


async def test_a_wait_for_what_never_comes_ends_when_its_own_end_closes(
    ends: tuple[NixlWriter, NixlReader],
) -> None:
    _, reader = ends
    waiting = [reader.start(slot, 1000) for slot in range(3)]
    reader.close()
    for each in waiting:
        with pytest.raises(TransportFailed):
            await each


async def test_what_is_begun_after_the_close_fails_at_once(ends: tuple[NixlWriter, NixlReader]) -> None:
    writer, reader = ends
    writer.close()
    reader.close()
    with pytest.raises(TransportFailed):
        await writer.start(0, frame_of(b"late")).left
    with pytest.raises(TransportFailed):
        await reader.start(0, 4)


async def test_a_view_stays_readable_after_the_close(ends: tuple[NixlWriter, NixlReader]) -> None:
    writer, reader = ends
    arriving = reader.start(0, 6)
    await writer.start(0, frame_of(b"abcdef")).left
    view = on_host(await arriving)
    assert bytes(view) == b"abcdef"
    reader.close()
    await asyncio.sleep(0.05)
    assert len(bytes(view)) == 6
