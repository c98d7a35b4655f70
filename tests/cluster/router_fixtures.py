"""Scripted workers and a router before them, as fixtures."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from protos.worker_pb2 import ROLE_DECODE, ROLE_PREFILL
from router.router_server import RouterServer
from tests.cluster.router_bench import running_router
from tests.cluster.scripted_worker import ScriptedWorker


@dataclass(frozen=True)
class Cluster:
    router: RouterServer
    prefill: ScriptedWorker
    decode: ScriptedWorker


@pytest.fixture
async def scripted_prefill() -> AsyncIterator[ScriptedWorker]:
    async with ScriptedWorker(ROLE_PREFILL, "p0") as worker:
        yield worker


@pytest.fixture
async def scripted_decode() -> AsyncIterator[ScriptedWorker]:
    async with ScriptedWorker(ROLE_DECODE, "d0") as worker:
        yield worker


@pytest.fixture
async def scripted(
    tiny_model: Path, scripted_prefill: ScriptedWorker, scripted_decode: ScriptedWorker
) -> AsyncIterator[Cluster]:
    """One prefill and one decode worker, both connected."""
    async with running_router(tiny_model, prefill=[scripted_prefill], decode=[scripted_decode]) as router:
        yield Cluster(router, scripted_prefill, scripted_decode)
