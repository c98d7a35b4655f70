"""From the death of a worker to the next token of its streams: what `kill -9` costs.

The baselines are of the same run and undisturbed: the time to the first token of such a prompt, and the time
between two tokens. After a decode worker's death a prefill worker has the KV of the prompt, and computes what
was written; after a prefill worker's another one computes the prompt.
"""

import asyncio
import random
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Annotated

import grpc
import httpx
import typer

from bench.chaos import connected
from bench.processes import ClusterProcesses, ServerProcess, running_cluster
from bench.report import Report
from bench.transcript import Transcript, token_request, transcribe
from protos import inference_pb2_grpc
from protos.inference_pb2 import GenerateRequest, SamplingParams

# Tokens that are written before a decode worker is killed, and after.
BEFORE, AFTER = 64, 16


@dataclass(frozen=True, slots=True)
class Recovery:
    """
    Attributes:
        pause_s: from the kill to the next token.
        prefill_s: what went into computing tokens again, from the moment that a worker was asked to.
    """

    pause_s: float
    prefill_s: float


class Experiment:
    """Streams of one prompt length, of which some lose a worker."""

    def __init__(
        self, cluster: ClusterProcesses, channel: grpc.aio.Channel, http: httpx.AsyncClient, num_prompt: int
    ) -> None:
        self._cluster = cluster
        self._http = http
        self._stub = inference_pb2_grpc.InferenceStub(channel)
        self._num_prompt = num_prompt
        self._chance = random.Random(num_prompt)

    def _request(self) -> GenerateRequest:
        """Of a prompt that nobody has seen."""
        prompt = [self._chance.randrange(1000, 5000) for _ in range(self._num_prompt)]
        sampling = SamplingParams(temperature=0, max_tokens=BEFORE + AFTER, ignore_eos=True)
        return token_request(prompt, sampling)

    async def undisturbed(self) -> tuple[float, Transcript]:
        """The time to the first token, and all."""
        started = time.monotonic()
        transcript = await transcribe(self._stub, self._request())
        return transcript.arrivals_s[0] - started, transcript

    async def lose_decode_worker(self) -> Recovery:
        """After `BEFORE` tokens."""
        transcript, started_s, killed_s = Transcript(), time.monotonic(), 0.0
        victim: ServerProcess | None = None
        async for response in self._stub.Generate(self._request(), timeout=300):
            transcript.add(response)
            if victim is None and transcript.num_tokens >= BEFORE:
                victim = await self._busy(self._cluster.decode)
                assert victim is not None
                killed_s = time.monotonic()
                victim.kill()
        pause_s = next(each for each in transcript.arrivals_s if each > killed_s) - killed_s
        assert victim is not None
        await self._restart(victim)
        return Recovery(pause_s, _first_tokens_s(transcript) - (transcript.arrivals_s[0] - started_s))

    async def lose_prefill_worker(self, ttft_s: float, undisturbed: Transcript) -> Recovery:
        """Half way to the first token; again if that was too late."""
        while True:
            running = asyncio.create_task(transcribe(self._stub, self._request()))
            await asyncio.sleep(ttft_s / 2)
            victim = await self._busy(self._cluster.prefill)
            killed_s = time.monotonic()
            if victim is not None:
                victim.kill()
                transcript = await running
                await self._restart(victim)
                return Recovery(transcript.arrivals_s[0] - killed_s, _first_tokens_s(undisturbed))
            await running

    async def _busy(self, workers: tuple[ServerProcess, ...]) -> ServerProcess | None:
        """The one that has the stream."""
        statuses = {each["address"]: each for each in (await self._http.get("/workers")).json()}
        return next((worker for worker in workers if statuses[worker.grpc]["in_flight"]), None)

    async def _restart(self, victim: ServerProcess) -> None:
        await asyncio.to_thread(victim.start_again)
        await connected(self._cluster.router, victim)


def _first_tokens_s(transcript: Transcript) -> float:
    """To the first token of every attempt: all of the stages before it."""
    times = transcript.last.stage_times
    return times.door_s + times.queue_s + times.prefill_s


async def measure(cluster: ClusterProcesses, num_prompt: int, repeats: int, report: Report) -> None:
    """Adds a row for each role."""
    async with (
        grpc.aio.insecure_channel(cluster.router.grpc) as channel,
        httpx.AsyncClient(base_url=f"http://{cluster.router.ready['http']}") as http,
    ):
        experiment = Experiment(cluster, channel, http, num_prompt)
        await experiment.undisturbed()
        calm = [await experiment.undisturbed() for _ in range(repeats)]
        ttft_s = median(ttft for ttft, _ in calm)
        by_prefill = sorted((each for _, each in calm), key=lambda each: each.last.stage_times.prefill_s)
        transcript = by_prefill[repeats // 2]
        between_s = median(later - earlier for earlier, later in pairwise(transcript.arrivals_s))
        lost = {
            "prefill": [await experiment.lose_prefill_worker(ttft_s, transcript) for _ in range(repeats)],
            "decode": [await experiment.lose_decode_worker() for _ in range(repeats)],
        }
    for role, recoveries in lost.items():
        pause_s = median(each.pause_s for each in recoveries)
        again_s = median(each.prefill_s for each in recoveries)
        report.rows.append(
            (
                role,
                num_prompt,
                BEFORE if role == "decode" else 0,
                pause_s * 1e3,
                max(each.pause_s for each in recoveries) * 1e3,
                again_s * 1e3,
                again_s / pause_s,
                ttft_s * 1e3,
                between_s * 1e3,
            )
        )


def main(
    model: Annotated[str, typer.Option(help="smollm2-135m, a local folder or a hub id.")] = "smollm2-135m",
    prompt: Annotated[list[int], typer.Option(help="Tokens of the prompt. May be repeated.")] = [128, 1024],  # noqa: B006
    repeats: Annotated[int, typer.Option(help="Kills of each role, of which the median is taken.")] = 3,
    json: Annotated[Path | None, typer.Option(help="Also write the figures here.")] = None,
) -> None:
    """Kills the worker that has a stream, of each role, and measures the pause."""
    report = Report(
        f"{model}, 2 prefill and 2 decode workers, one stream; medians of {repeats}. From the kill to the "
        "next token, and what of it is computing tokens again; TTFT and ITL are undisturbed.",
        (
            "killed",
            "prompt",
            "output",
            "pause ms",
            "worst ms",
            "prefill ms",
            "its share",
            "TTFT ms",
            "ITL ms",
        ),
    )
    with (
        tempfile.TemporaryDirectory() as logs,
        running_cluster(model, Path(logs), prefill=2, decode=2) as cluster,
    ):
        for num_prompt in prompt:
            asyncio.run(measure(cluster, num_prompt, repeats, report))
    report.print()
    if json is not None:
        report.write(json)


if __name__ == "__main__":
    typer.run(main)
