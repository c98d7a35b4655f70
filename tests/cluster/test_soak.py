"""A few hundred of the hand-offs of `python -m bench.soak`."""

from pathlib import Path

import pytest

from bench.soak import soak
from kv_transfer.transport_choice import TransportName


@pytest.mark.parametrize(("transport", "seed"), [("grpc", 1), ("shm", 2), ("gloo", 3), ("ipc", 4)])
async def test_disturbed_hand_offs_leave_nothing_behind_and_no_wrong_text(
    tiny_model: Path, transport: TransportName, seed: int
):
    """Conformance 1, 2, 3, 13, 17, 18, 23: `soak` raises for a wrong text, a second outcome, a block held."""
    tally = await soak(tiny_model, transport, 120, seed)
    assert tally.before is not None and tally.after is not None
    # A few connections may be on their way out.
    assert tally.after.descriptors <= tally.before.descriptors + 12
    assert sum(tally.ends.values()) == 120
    assert tally.kv_bytes > 0
