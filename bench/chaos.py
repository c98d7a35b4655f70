"""Workers of both roles are killed, stopped and restarted at random under streams whose texts are known.

The baseline is the same streams in the same run before anything is disturbed. Exits with 1 when a text
differs or a request gets an error; fails when a block is not free at the end.
"""

import asyncio
import json as json_module
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import grpc
import httpx
import typer

from bench.processes import ClusterProcesses, ServerProcess, running_cluster
from bench.report import Report
from bench.transcript import Transcript, token_request, transcribe, transcribe_all
from protos import inference_pb2_grpc
from protos.inference_pb2 import GenerateRequest, Grammar, SamplingParams
from tests.tiny_models import make_tiny_model

# A worker that is silent for longer is lost to the router: short, so that a stopped one is.
STALL_LIMIT_S = 2.0
# While workers are few nobody is refused: every client waits for its text.
ROUTER_OPTIONS = (
    *("--stall-limit-s", str(STALL_LIMIT_S)),
    *("--rejoin-limit-s", "60"),
    *("--max-expected-ttft-s", "3600"),
)
# Told to leave, it moves what it has after that.
WORKER_OPTIONS = ("--dtype", "float32", "--drain-limit-s", "0.5", "--kv-cache-bytes", str(1 << 30))
_SCHEMA = json_module.dumps(
    {"type": "array", "items": {"enum": ["north", "wind", "house"]}, "minItems": 30, "maxItems": 40}
)


def mixed_requests(count: int, output: int, seed: int = 0) -> list[GenerateRequest]:
    """Greedy and seeded, with penalties, of two samples, and of a JSON schema, in turn."""
    chance = random.Random(seed)
    seeded = {"temperature": 1.0, "ignore_eos": True}
    kinds: list[Callable[[int], SamplingParams]] = [
        lambda n: SamplingParams(temperature=0, max_tokens=output, ignore_eos=True),
        lambda n: SamplingParams(max_tokens=output, seed=n, top_p=0.9, **seeded),
        lambda n: SamplingParams(max_tokens=output, seed=n, n=2, **seeded),
        lambda n: SamplingParams(max_tokens=output, seed=n, grammar=Grammar(json_schema=_SCHEMA)),
        lambda n: SamplingParams(max_tokens=output, seed=n, presence_penalty=1.0, **seeded),
    ]
    return [
        token_request(
            [chance.randrange(10, 300) for _ in range(chance.randrange(20, 400))],
            kinds[n % len(kinds)](n),
        )
        for n in range(count)
    ]


@dataclass(slots=True)
class Disturbances:
    """Disturbs workers at random; one of them, of whichever role, is always left alone.

    Attributes:
        counts: of each kind.
    """

    cluster: ClusterProcesses
    chance: random.Random
    counts: Counter[str] = field(default_factory=Counter)
    _busy: set[ServerProcess] = field(default_factory=set)

    async def run_until(self, end_s: float, pause_s: float) -> None:
        """
        Args:
            end_s: when the last one may begin, `time.monotonic` seconds.
            pause_s: from one to the next, in the mean.
        """
        async with asyncio.TaskGroup() as group:
            while time.monotonic() < end_s:
                free = [worker for worker in self.cluster.workers if worker not in self._busy]
                if len(free) > 1:
                    victim = self.chance.choice(free)
                    self._busy.add(victim)
                    group.create_task(self._disturb(victim))
                await asyncio.sleep(self.chance.expovariate(1 / pause_s))

    async def _disturb(self, victim: ServerProcess) -> None:
        kind = self.chance.choice(("kill", "stop", "leave"))
        self.counts[kind] += 1
        match kind:
            case "kill":
                victim.kill()
                await asyncio.to_thread(victim.start_again)
            case "stop":
                victim.signal(signal.SIGSTOP)
                await asyncio.sleep(self.chance.uniform(0.5, 2) * STALL_LIMIT_S)
                victim.signal(signal.SIGCONT)
            case _:
                victim.signal(signal.SIGTERM)
                await asyncio.to_thread(victim.wait)
                await asyncio.to_thread(victim.start_again)
        await connected(self.cluster.router, victim)
        self._busy.discard(victim)


async def workers_of(router: ServerProcess) -> list[dict]:
    """What the router knows of its workers."""
    async with httpx.AsyncClient(base_url=f"http://{router.ready['http']}") as client:
        return (await client.get("/workers")).json()


async def connected(router: ServerProcess, worker: ServerProcess) -> None:
    """Returns when the router has a session with a worker that has just spoken."""
    while not any(
        each["address"] == worker.grpc and each["state"] == "connected" and each["silent_s"] < 1
        for each in await workers_of(router)
    ):
        pass


async def all_free(cluster: ClusterProcesses) -> None:
    """Returns when every worker is connected and every block of it is free."""
    while not all(
        each["state"] == "connected"
        and each["free_blocks"] == each["num_blocks"]
        and each["num_running"] == each["num_waiting"] == each["in_flight"] == 0
        for each in await workers_of(cluster.router)
    ):
        pass


async def retries_of(router: ServerProcess) -> dict[str, int]:
    """Attempts that were followed by another, by cause."""
    async with httpx.AsyncClient(base_url=f"http://{router.ready['http']}") as client:
        lines = (await client.get("/metrics")).text.splitlines()
    name = "baton_request_retries_total{"
    found = [line.split() for line in lines if line.startswith(name)]
    return {label.split('"')[1]: int(float(value)) for label, value in found}


@dataclass(slots=True)
class ChaosOutcome:
    """
    Attributes:
        wrong: what differed, a line each.
        tokens_per_s, undisturbed_tokens_per_s: of all streams together.
        pauses_s: between two messages of a stream, all of them.
    """

    disturbances: Counter[str]
    retries: dict[str, int] = field(default_factory=dict)
    num_requests: int = 0
    wrong: list[str] = field(default_factory=list)
    tokens_per_s: float = 0.0
    undisturbed_tokens_per_s: float = 0.0
    pauses_s: list[float] = field(default_factory=list)

    def add(self, transcript: Transcript, expected: Transcript) -> None:
        self.num_requests += 1
        self.wrong += transcript.differences(expected)
        self.pauses_s += [later - earlier for earlier, later in pairwise(transcript.arrivals_s)]


async def run_chaos(
    cluster: ClusterProcesses,
    requests: Sequence[GenerateRequest],
    *,
    seconds: float,
    pause_s: float,
    seed: int,
) -> ChaosOutcome:
    """Every request runs again and again, one at a time, while workers are disturbed; then until it is over.

    Raises:
        TimeoutError: a block is not free a minute after the end.
    """
    async with grpc.aio.insecure_channel(cluster.router.grpc) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        started = time.monotonic()
        expected = await transcribe_all(stub, list(requests))
        calm_s = time.monotonic() - started
        disturbances = Disturbances(cluster, random.Random(seed))
        outcome = ChaosOutcome(disturbances.counts)
        outcome.undisturbed_tokens_per_s = sum(each.num_tokens for each in expected) / calm_s
        started = time.monotonic()
        end_s = started + seconds
        streams = [_stream(stub, *pair, end_s, outcome) for pair in zip(requests, expected, strict=True)]
        tokens, _ = await asyncio.gather(asyncio.gather(*streams), disturbances.run_until(end_s, pause_s))
        outcome.tokens_per_s = sum(tokens) / (time.monotonic() - started)
        outcome.retries = await retries_of(cluster.router)
        async with asyncio.timeout(60):
            await all_free(cluster)
    return outcome


async def _stream(
    stub: inference_pb2_grpc.InferenceStub,
    request: GenerateRequest,
    expected: Transcript,
    end_s: float,
    outcome: ChaosOutcome,
) -> int:
    """One client. Returns how many tokens it got."""
    num_tokens = 0
    turn = 0
    while time.monotonic() < end_s:
        # Not what is cached: prompts are computed and handed over again.
        fresh = GenerateRequest()
        fresh.CopyFrom(request)
        fresh.cache_salt = str(turn := turn + 1)
        try:
            transcript = await transcribe(stub, fresh)
        except (grpc.aio.AioRpcError, ValueError) as error:
            outcome.wrong.append(str(error))
            continue
        num_tokens += transcript.num_tokens
        outcome.add(transcript, expected)
    return num_tokens


def main(
    model: Annotated[
        str | None,
        typer.Option(help="smollm2-135m, a local folder or a hub id. Default: a tiny one of random weights."),
    ] = None,
    seconds: Annotated[float, typer.Option(help="Of disturbances.")] = 120,
    pause: Annotated[float, typer.Option(help="Between two disturbances, in the mean, in seconds.")] = 3,
    streams: Annotated[int, typer.Option(help="Clients at once.")] = 16,
    output: Annotated[int, typer.Option(help="Tokens of an answer.")] = 600,
    prefill: Annotated[int, typer.Option(help="Prefill workers.")] = 2,
    decode: Annotated[int, typer.Option(help="Decode workers.")] = 2,
    seed: Annotated[int, typer.Option(help="Of the disturbances.")] = 0,
    json: Annotated[Path | None, typer.Option(help="Also write the figures here.")] = None,
) -> None:
    """Kills, stops and restarts workers at random under streams, and compares every text."""
    with (
        tempfile.TemporaryDirectory() as logs,
        running_cluster(
            model or str(make_tiny_model(Path(logs) / "tiny")),
            Path(logs),
            prefill=prefill,
            decode=decode,
            worker_options=WORKER_OPTIONS,
            router_options=ROUTER_OPTIONS,
        ) as cluster,
    ):
        requests = mixed_requests(streams, output)
        outcome = asyncio.run(run_chaos(cluster, requests, seconds=seconds, pause_s=pause, seed=seed))
    report = Report(
        f"{model or 'tiny'}, {prefill} prefill and {decode} decode workers, {streams} streams, "
        f"{seconds:g} s: {dict(outcome.disturbances)}; attempts that failed: {outcome.retries}",
        ("requests", "wrong", "tok/s", "of undisturbed", "pause p50 ms", "p99 ms", "longest s"),
    )
    pauses = sorted(outcome.pauses_s)
    report.rows.append(
        (
            outcome.num_requests,
            len(outcome.wrong),
            outcome.tokens_per_s,
            outcome.tokens_per_s / outcome.undisturbed_tokens_per_s,
            pauses[len(pauses) // 2] * 1e3,
            pauses[len(pauses) * 99 // 100] * 1e3,
            pauses[-1],
        )
    )
    report.baselines["undisturbed, tok/s"] = outcome.undisturbed_tokens_per_s
    report.print()
    for line in outcome.wrong[:10]:
        print(line[:500])
    if json is not None:
        report.write(json)
    sys.exit(1 if outcome.wrong else 0)


if __name__ == "__main__":
    typer.run(main)
