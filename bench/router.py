"""What a router costs: its doors before workers that answer from a script, beside bare servers.

The router, and each bare server in its turn, has one core to itself; the clients and the scripted workers
share another. A server that is not saturated shows its cost in the processor time that it took: "tokens/s a
core" is tokens per second of it, and the ratio to the bare server compares those. Every token is a message of
its own ("messages a token" says so). What is bare: a grpc.aio echo that reads and writes a message for every
token, and an SSE writer on uvicorn that writes the same bytes over and over, so that all it costs is the
socket. "FastAPI SSE" is what an ordinary server costs: it makes each event's JSON, and streams it as FastAPI
has it.
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

import psutil
import typer
import uvloop

from bench.door_clients import (
    Shape,
    Tally,
    at_echo,
    at_fastapi,
    at_grpc_door,
    at_http_door,
    at_sse_writer,
    at_worker,
)
from bench.processes import ServerProcess, wait_connected
from bench.report import Report

Client = Callable[[str, Shape], Awaitable[Tally]]

# Few enough tokens a second that clients and workers keep up on the one core that they share.
TOKEN_SHAPES = {
    1: Shape(streams=1, requests=40, tokens=32, step_ms=2),
    100: Shape(streams=100, requests=2, tokens=192, step_ms=30),
    2000: Shape(streams=2000, requests=1, tokens=64, step_ms=700),
}
# Two tokens: the shortest answer that is handed off.
REQUEST_SHAPE = Shape(streams=32, requests=30, tokens=2, step_ms=1)
WARM_UP = Shape(streams=4, requests=4, tokens=8, step_ms=1)


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one server under one shape. `memory_bytes`: more than before, at its most, for each stream."""

    tally: Tally
    wall_s: float
    cpu_s: float
    memory_bytes: float

    @property
    def tokens_a_core(self) -> float:
        return self.tally.tokens / self.cpu_s

    @property
    def requests_a_core(self) -> float:
        return self.tally.requests / self.cpu_s

    @property
    def ttft_ms(self) -> float:
        return median(self.tally.ttft_s) * 1e3


async def measure(client: Client, address: str, shape: Shape, pid: int) -> Figures:
    await client(address, WARM_UP)
    process = psutil.Process(pid)
    idle_bytes = most_bytes = process.memory_info().rss

    async def watch() -> None:
        nonlocal most_bytes
        while True:
            most_bytes = max(most_bytes, process.memory_info().rss)
            await asyncio.sleep(0.1)

    watching = asyncio.create_task(watch())
    before, started = process.cpu_times(), time.perf_counter()
    tally = await client(address, shape)
    wall_s, after = time.perf_counter() - started, process.cpu_times()
    watching.cancel()
    cpu_s = after.user + after.system - before.user - before.system
    return Figures(tally, wall_s, cpu_s, (most_bytes - idle_bytes) / shape.streams)


@contextmanager
def script(arguments: Sequence[str], core: int) -> Iterator[tuple[dict[str, str], int]]:
    """A server of bench/ on a core of its own: the addresses that it prints, and its process id."""
    process = subprocess.Popen([sys.executable, "-m", *arguments], stdout=subprocess.PIPE)
    try:
        os.sched_setaffinity(process.pid, {core})
        assert process.stdout is not None
        yield json.loads(process.stdout.readline()), process.pid
    finally:
        process.terminate()
        process.wait()


@contextmanager
def router(model: str, step_ms: float, cores: tuple[int, int], logs: Path) -> Iterator[ServerProcess]:
    """A router on the first core, its workers on the second."""
    with script(["bench.scripted_worker", "--model", model, "--step-ms", str(step_ms)], cores[1]) as (at, _):
        options = ["--model", model, "--model-name", model, "--prefill", at["prefill"]]
        options += ["--decode", at["decode"], "--max-inflight-prompt-tokens", "1000000"]
        with ServerProcess("router", options, logs / "router.log") as server:
            for task in Path(f"/proc/{server.pid}/task").iterdir():
                os.sched_setaffinity(int(task.name), {cores[0]})
            server.wait_ready()
            wait_connected(server, 2)
            yield server


def main(
    model: Annotated[str, typer.Option(help="Of which the tokenizer is used.")] = "smollm2-135m",
    streams: Annotated[list[int] | None, typer.Option(help="1, 100, 2000. Default: all.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the figures here.")] = None,
) -> None:
    """Requests/s, tokens/s and time to first token of a router on one core, and of bare servers."""
    available = sorted(os.sched_getaffinity(0))
    cores = (available[0], available[-1])
    os.sched_setaffinity(0, {cores[1]})
    report = Report(
        "A router on one core, 32-token prompts",
        (
            "server",
            "streams",
            "tokens/s",
            "messages a token",
            "tokens/s a core",
            "of bare",
            "TTFT p50 ms",
            "added ms",
            "KB a stream",
        ),
    )
    with tempfile.TemporaryDirectory() as logs:
        uvloop.run(_worker_ttft(report, model, cores))
        for shape in [TOKEN_SHAPES[count] for count in streams or TOKEN_SHAPES]:
            uvloop.run(_token_rows(report, model, shape, cores, Path(logs)))
        uvloop.run(_request_rates(report, model, cores, Path(logs)))
    report.print()
    if json_file is not None:
        report.write(json_file)


async def _worker_ttft(report: Report, model: str, cores: tuple[int, int]) -> None:
    """Part of what a router adds to a stream that is alone."""
    shape = TOKEN_SHAPES[1]
    command = ["bench.scripted_worker", "--model", model, "--step-ms", str(shape.step_ms)]
    with script(command, cores[1]) as (at, _):
        tally = await at_worker(at["prefill"], shape)
    report.baselines["TTFT of the workers without a router, ms"] = median(tally.ttft_s) * 1e3


async def _token_rows(report: Report, model: str, shape: Shape, cores: tuple[int, int], logs: Path) -> None:
    with script(["bench.bare_server"], cores[0]) as (at, pid):
        echo = await measure(at_echo, at["grpc"], shape, pid)
        writer = await measure(at_sse_writer, at["http"], shape, pid)
        usual = await measure(at_fastapi, at["http"], shape, pid)
    with router(model, shape.step_ms, cores, logs) as server:
        over_grpc = await measure(at_grpc_door, server.grpc, shape, server.pid)
        over_http = await measure(at_http_door, server.ready["http"], shape, server.pid)
    for name, figures, bare in (
        ("grpc.aio echo", echo, echo),
        ("router, gRPC", over_grpc, echo),
        ("SSE writer", writer, writer),
        ("FastAPI SSE", usual, writer),
        ("router, SSE", over_http, writer),
    ):
        report.rows.append(
            (
                name,
                shape.streams,
                figures.tally.tokens / figures.wall_s,
                figures.tally.messages / figures.tally.tokens,
                figures.tokens_a_core,
                figures.tokens_a_core / bare.tokens_a_core,
                figures.ttft_ms,
                figures.ttft_ms - bare.ttft_ms,
                figures.memory_bytes / 1e3,
            )
        )


async def _request_rates(report: Report, model: str, cores: tuple[int, int], logs: Path) -> None:
    with script(["bench.bare_server"], cores[0]) as (at, pid):
        echo = await measure(at_echo, at["grpc"], REQUEST_SHAPE, pid)
        writer = await measure(at_sse_writer, at["http"], REQUEST_SHAPE, pid)
    with router(model, REQUEST_SHAPE.step_ms, cores, logs) as server:
        over_grpc = await measure(at_grpc_door, server.grpc, REQUEST_SHAPE, server.pid)
        over_http = await measure(at_http_door, server.ready["http"], REQUEST_SHAPE, server.pid)
    for name, figures in (
        ("grpc.aio echo", echo),
        ("router, gRPC", over_grpc),
        ("SSE writer", writer),
        ("router, SSE", over_http),
    ):
        report.baselines[f"requests/s a core, two tokens each, {name}"] = figures.requests_a_core


if __name__ == "__main__":
    typer.run(main)
