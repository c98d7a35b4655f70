"""Processes of both roles are killed, stopped and told to leave at random under sixteen streams."""

import asyncio
from pathlib import Path

import pytest

from bench.chaos import ROUTER_OPTIONS, WORKER_OPTIONS, mixed_requests, run_chaos
from bench.processes import ClusterProcesses, running_cluster


@pytest.fixture
def cluster(tiny_model: Path, tmp_path: Path):
    options = {"worker_options": WORKER_OPTIONS, "router_options": ROUTER_OPTIONS}
    with running_cluster(tiny_model, tmp_path, prefill=2, decode=2, **options) as running:
        yield running


def test_every_text_is_the_undisturbed_one_and_every_block_free_at_the_end(cluster: ClusterProcesses) -> None:
    """Conformance 2, 11, 13 to 15, and 20."""
    requests = mixed_requests(16, 300)
    outcome = asyncio.run(run_chaos(cluster, requests, seconds=20, pause_s=2, seed=1))
    assert outcome.wrong == []
    assert outcome.num_requests >= 16
    assert sum(outcome.retries.values()) > 0
