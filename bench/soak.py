"""`python -m bench.soak`: hand-offs between two workers, disturbed at random, and what is left of them.

Both workers, the tiny model and the network between them are real and in this process. A disturbance is a
fault at a point of the protocol (delay, drop, duplicate, reorder, damage, cut), a cancel of one leg or of
both, or none. Every text is compared with that of the same prompt undisturbed; at the end every block must
be free, and memory and descriptors as before.
"""

import asyncio
import gc
import os
import random
import resource
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Annotated

import typer

from bench.report import Report
from decode_worker.server import DecodeWorker
from engine.engine import Engine
from kv_transfer.transport_choice import TransportName
from prefill_worker.server import PrefillWorker
from protos import worker_pb2
from tests.cluster.bare_session import BareSession, Told, bare_session, submit_message, submit_pair
from tests.engine.engines import prompt_of
from tests.tiny_models import make_tiny_model
from tests.transfer.fault_injection import Effect, Fault, Point
from tests.transfer.faulty_links import FaultyPeers
from worker.config import WorkerConfig
from worker.server import WorkerServer

# A router gives up what has not ended by then.
DEADLINE_S = 1.0
MAX_TOKENS = 6
NUM_PROMPTS = 48
AT_ONCE = 16


class WrongBooks(AssertionError):
    """Something is left, or a text is wrong."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """What this process holds."""

    rss_bytes: int
    descriptors: int

    @classmethod
    def now(cls) -> "Footprint":
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return cls(pages * resource.getpagesize(), len(os.listdir("/proc/self/fd")))  # noqa: PTH208


@dataclass(slots=True)
class Tally:
    """How the hand-offs ended.

    Attributes:
        ends: by disturbance and outcome.
        before: after the first tenth, when everything that grows once has grown.
    """

    ends: Counter[tuple[str, str]] = field(default_factory=Counter)
    kv_bytes: int = 0
    before: Footprint | None = None
    after: Footprint | None = None


@dataclass(slots=True)
class Soak:
    """Two workers, a session with each, and a stream of disturbed hand-offs."""

    prefill: WorkerServer
    decode: WorkerServer
    sending: BareSession
    receiving: BareSession
    peers: FaultyPeers
    chance: random.Random
    texts: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)
    tally: Tally = field(default_factory=Tally)
    numbers: count = field(default_factory=count)
    # Numbers must come to the workers in order.
    submitting: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def run(self, num_handoffs: int) -> Tally:
        """
        Raises:
            WrongBooks: see there.
        """
        await self._learn_texts()
        first = max(1, num_handoffs // 10)
        await self._run_many(first)
        await self.check_clean()
        self.tally.before = Footprint.now()
        await self._run_many(num_handoffs - first)
        await self.check_clean()
        self.tally.after = Footprint.now()
        return self.tally

    async def _run_many(self, num_handoffs: int) -> None:
        left = iter(range(num_handoffs))

        async def run_in_turn() -> None:
            for _ in left:
                await self._run_one()

        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(run_in_turn())

    async def _learn_texts(self) -> None:
        """What the receiver writes alone, for every prompt."""
        for seed in range(NUM_PROMPTS):
            prompt = prompt_of(self.chance.randint(1, 300), seed=seed)
            message = submit_message(next(self.numbers), prompt, MAX_TOKENS, cache_salt="undisturbed")
            message.local.SetInParent()
            told = await self.receiving.submit(message)
            await told.over.wait()
            self.texts[prompt] = told.text

    async def _run_one(self) -> None:
        prompt = self.chance.choice([*self.texts])
        faults = self._faults()
        async with self.submitting:
            number = next(self.numbers)
            if faults:
                self.peers.plans[number] = faults
            # Half of them find nothing in the prefix caches.
            salt = str(number) if self.chance.random() < 0.5 else ""
            message = submit_message(number, prompt, MAX_TOKENS, cache_salt=salt)
            at = self.decode.address
            sent, received = await submit_pair(number, self.sending, self.receiving, at, message)
        cancelled = await self._cancel_at_random(number, received) if not faults else ""
        is_over = await self._wait_over(received)
        # What is over at its receiver is of no use at its sender; a cancel of what is over does nothing.
        await self.sending.cancel(number)
        await self.receiving.cancel(number)
        self.peers.plans.pop(number, None)
        self._check(prompt, sent, received)
        self._count(faults, cancelled, received, is_over)
        self.sending.forget(number)
        self.receiving.forget(number)

    def _faults(self) -> tuple[Fault, ...]:
        if self.chance.random() < 0.5:
            return ()
        return tuple(
            Fault(
                self.chance.choice([*Point]),
                self.chance.choice([*Effect]),
                self.chance.choice((0, 0, 0, 1, 2)),
            )
            for _ in range(self.chance.choice((1, 1, 2)))
        )

    async def _cancel_at_random(self, number: int, received: Told) -> str:
        who = self.chance.choice(("", "", "sender", "receiver", "both"))
        if not who:
            return ""
        wait_s = self.chance.choice((0.0, 0.002, 0.01, 0.03))
        with_limit = asyncio.wait_for(received.over.wait(), wait_s)
        try:
            await with_limit
        except TimeoutError:
            if who != "receiver":
                await self.sending.cancel(number)
            if who != "sender":
                await self.receiving.cancel(number)
        return who

    async def _wait_over(self, received: Told) -> bool:
        try:
            await asyncio.wait_for(received.over.wait(), DEADLINE_S)
        except TimeoutError:
            return False
        return True

    def _check(self, prompt: tuple[int, ...], sent: Told, received: Told) -> None:
        expected = self.texts[prompt]
        for told in (sent, received):
            if told.text != expected[: len(told.text)]:
                raise WrongBooks(f"prompt of {len(prompt)}: {told.text}, undisturbed {expected}")
        if self.receiving.doubled:
            raise WrongBooks(f"several outcomes of {self.receiving.doubled}")
        if received.finished and received.text != expected:
            raise WrongBooks(f"finished with {received.text}, undisturbed {expected}")

    def _count(self, faults: Sequence[Fault], cancelled: str, received: Told, is_over: bool) -> None:
        outcome = received.outcomes[0] if received.outcomes else None
        if isinstance(outcome, worker_pb2.Admitted):
            self.tally.kv_bytes += outcome.kv_bytes
            name = "finished" if is_over else "cut short"
        elif outcome is not None:
            name = worker_pb2.DropCause.Name(outcome.cause).removeprefix("DROP_CAUSE_").lower()
        else:
            name = "cancelled" if cancelled else "given up"
        self.tally.ends[_disturbance(faults, cancelled), name] += 1

    async def check_clean(self) -> None:
        """Returns when no worker has anything of any hand-off.

        Raises:
            WrongBooks: something is left after 30 s.
        """
        while driving := self.peers._tasks:
            await asyncio.wait(driving)
        for worker in (self.prefill, self.decode):
            try:
                async with asyncio.timeout(30):
                    while not await _is_clean(worker):
                        await worker.legs.wait_empty()
            except TimeoutError:
                load = await worker.engine.call(Engine.load)
                raise WrongBooks(f"{worker.worker_id}: {len(worker.legs)} legs, {load}") from None


def _disturbance(faults: Sequence[Fault], cancelled: str) -> str:
    effects = {fault.effect.value for fault in faults}
    if len(effects) > 1:
        return "two effects"
    return next(iter(effects), f"cancel: {cancelled}" if cancelled else "none")


async def _is_clean(worker: WorkerServer) -> bool:
    await worker.engine.call(Engine.check_integrity)
    load = await worker.engine.call(Engine.load)
    is_idle = load.num_running == load.num_waiting == len(worker.legs) == 0
    return is_idle and load.free_blocks == load.num_blocks


@asynccontextmanager
async def soaking(
    model: Path, transport: TransportName, seed: int, device: str = "cpu"
) -> AsyncIterator[Soak]:
    """Two workers of a model, ready for disturbed hand-offs."""
    config = WorkerConfig(
        model_path=model,
        dtype="float32",
        device=device,
        # A few of the prompts only: grants wait for blocks.
        kv_cache_bytes=1 << 20,
        step_tokens=64,
        kv_transport=transport,
        # Several frames to a prompt.
        max_frame_bytes=16 << 10,
    )
    async with AsyncExitStack() as stack:
        workers: list[WorkerServer] = []
        for kind in (PrefillWorker, DecodeWorker):
            workers.append(await kind.start(config))
            stack.push_async_callback(workers[-1].stop)
        prefill, decode = workers
        await prefill._peers.close()
        peers = FaultyPeers(prefill.layout, prefill.worker_id, prefill.epoch, prefill._transports)
        prefill._peers = peers
        sending = await stack.enter_async_context(bare_session(prefill.address, "from"))
        receiving = await stack.enter_async_context(bare_session(decode.address, "to"))
        yield Soak(prefill, decode, sending, receiving, peers, random.Random(seed))


async def soak(
    model: Path, transport: TransportName, num_handoffs: int, seed: int, device: str = "cpu"
) -> Tally:
    async with soaking(model, transport, seed, device) as run:
        return await run.run(num_handoffs)


def report_of(title: str, tally: Tally) -> Report:
    outcomes = sorted({outcome for _, outcome in tally.ends})
    report = Report(title, ("disturbance", *outcomes))
    for disturbance in sorted({disturbance for disturbance, _ in tally.ends}):
        report.rows.append((disturbance, *(tally.ends[disturbance, outcome] for outcome in outcomes)))
    totals = [sum(n for (_, end), n in tally.ends.items() if end == outcome) for outcome in outcomes]
    report.rows.append(("all", *totals))
    report.baselines["KV handed over, MB"] = tally.kv_bytes / 1e6
    for when, footprint in (("after a tenth", tally.before), ("at the end", tally.after)):
        assert footprint is not None
        report.baselines[f"resident memory {when}, MB"] = footprint.rss_bytes / 1e6
        report.baselines[f"open descriptors {when}"] = footprint.descriptors
    return report


def main(
    handoffs: Annotated[int, typer.Option("--count", help="Hand-offs.")] = 10_000,
    transport: Annotated[str, typer.Option(help="auto, shm, ipc, nccl, gloo, nixl or grpc.")] = "auto",
    seed: Annotated[int, typer.Option(help="Of the disturbances.")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    json: Annotated[Path | None, typer.Option(help="Also writes the figures there.")] = None,
) -> None:
    """Raises WrongBooks if anything is left or wrong at the end."""
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(Path(folder) / "tiny-llama")
        tally = asyncio.run(soak(model, transport, handoffs, seed, device))  # pyright: ignore[reportArgumentType]
    report = report_of(f"{handoffs} disturbed hand-offs over {transport}, seed {seed}", tally)
    report.print()
    if json is not None:
        report.write(json)


if __name__ == "__main__":
    typer.run(main)
