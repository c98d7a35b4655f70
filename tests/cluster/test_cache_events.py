"""A router's session is told which prefixes a worker has: a snapshot, then every change."""

from hashlib import blake2b
from pathlib import Path

import grpc
import numpy as np
import pytest

from engine.engine import Engine
from protos import PROTOCOL_VERSION, worker_pb2, worker_pb2_grpc
from tests.cluster.local_cluster import LocalCluster, local_cluster, token_request
from tests.engine.engines import prompt_of

BLOCK_SIZE = 16


@pytest.fixture
async def cluster(tiny_model: Path):
    # Ten blocks: prompts push each other out of the cache.
    async with local_cluster(tiny_model, kv_cache_bytes=10 * BLOCK_SIZE * 768) as running:
        yield running


class CacheWatch:
    """A session that only listens to cache events."""

    def __init__(self, channel: grpc.aio.Channel, session: str) -> None:
        self._call = worker_pb2_grpc.WorkerStub(channel).Connect()
        self._session = session
        self._next = 0
        self.num_snapshots = 0
        self.names: set[bytes] = set()

    async def start(self) -> None:
        hello = worker_pb2.Hello(protocol_version=PROTOCOL_VERSION, session=self._session)
        await self._call.write(worker_pb2.RouterMessage(hello=hello))
        await self.follow_until(lambda: self._next > 0)
        assert self.num_snapshots == 1

    async def follow_until(self, is_enough) -> None:
        while not is_enough():
            message = await self._call.read()
            if message.HasField("cache"):
                self._hear(message.cache)

    def _hear(self, event: worker_pb2.CacheEvent) -> None:
        assert event.number == self._next
        self._next += 1
        if event.is_snapshot:
            self.num_snapshots += 1
            self.names = set()
        self.names |= set(event.stored)
        self.names -= set(event.removed)

    async def ask_again(self) -> None:
        """Forgets all, and follows until there is a snapshot."""
        self.names = set()
        await self._call.write(worker_pb2.RouterMessage(cache_query=worker_pb2.CacheQuery()))
        asked_after = self.num_snapshots
        await self.follow_until(lambda: self.num_snapshots > asked_after)


def names_of(prompt: tuple[int, ...]) -> set[bytes]:
    """As worker.proto defines them."""
    names: list[bytes] = [b""]
    for start in range(0, len(prompt) - BLOCK_SIZE + 1, BLOCK_SIZE):
        tokens = np.array(prompt[start : start + BLOCK_SIZE], "<i8").tobytes()
        names.append(blake2b(tokens, digest_size=16, key=names[-1]).digest())
    return set(names[1:])


async def test_a_session_begins_with_all_there_is_and_follows_every_change(cluster: LocalCluster):
    worker = cluster.decode[0]
    first, second = prompt_of(50, seed=1), prompt_of(130, seed=2)
    await cluster.generate(token_request(first, 2, ignore_eos=True))
    async with grpc.aio.insecure_channel(worker.address) as channel:
        watch = CacheWatch(channel, "watch")
        await watch.start()
        assert watch.names == names_of(first)
        await cluster.generate(token_request(second, 2, ignore_eos=True))
        there = set(await worker.engine.call(Engine.cached_names))
        assert names_of(second) <= there
        assert not names_of(first) <= there
        await watch.follow_until(lambda: watch.names == there)


async def test_a_session_that_lost_track_asks_for_all_there_is(cluster: LocalCluster):
    worker = cluster.decode[0]
    prompt = prompt_of(50, seed=1)
    async with grpc.aio.insecure_channel(worker.address) as channel:
        watch = CacheWatch(channel, "watch")
        await watch.start()
        await cluster.generate(token_request(prompt, 2, ignore_eos=True))
        await watch.ask_again()
        assert watch.names == names_of(prompt)
