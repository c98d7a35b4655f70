"""What of a request's TTFT is transfer that nothing hides, by prompt length and transport, on real workers.

Baseline of the same run: grpc. (Mooncake's paper gives 1.2 to 4.2 % for its own; the first token leaves here
from the prefill worker, so the transfer delays the second one.)
"""

import os
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

import grpc
import typer

from bench.processes import running_cluster
from bench.report import Report
from protos import inference_pb2, inference_pb2_grpc


@dataclass(frozen=True, slots=True)
class Measured:
    """Attributes:
    transfer_s: first token sampled to commit accepted.
    """

    ttft_s: float
    prefill_s: float
    transfer_s: float
    kv_bytes: int


def measure(stub: inference_pb2_grpc.InferenceStub, prompt: Sequence[int]) -> Measured:
    request = inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=list(prompt)),
        sampling=inference_pb2.SamplingParams(temperature=0, max_tokens=4, ignore_eos=True),
    )
    started = time.perf_counter()
    ttft_s = 0.0
    responses = []
    for response in stub.Generate(request, timeout=600):
        ttft_s = ttft_s or time.perf_counter() - started
        responses.append(response)
    last = responses[-1]
    if not last.served_by.kv_bytes:
        raise RuntimeError("a prompt was not handed off")
    times = last.stage_times
    return Measured(ttft_s, times.prefill_s, times.transfer_s, last.served_by.kv_bytes)


def main(
    model: Annotated[str, typer.Option(help="smollm2-135m, a local folder or a hub id.")] = "smollm2-135m",
    transports: Annotated[str, typer.Option(help="Comma-separated.")] = "grpc,shm,gloo",
    lengths: Annotated[str, typer.Option(help="Prompt tokens.")] = "128,512,2048,4096",
    repeats: Annotated[int, typer.Option(help="Of which the medians are taken.")] = 5,
    device: Annotated[str, typer.Option(help="cpu (a core for each worker) or cuda.")] = "cpu",
    json: Annotated[Path | None, typer.Option(help="Also write the figures here.")] = None,
) -> None:
    """Exposed transfer as a share of TTFT."""
    chance = random.Random(0)
    report = Report(
        f"{model}, 1 prefill and 1 decode worker on {device}; medians of {repeats}",
        ("transport", "prompt", "KV MB", "TTFT ms", "prefill ms", "exposed transfer ms", "of TTFT"),
    )
    for transport in transports.split(","):
        with (
            tempfile.TemporaryDirectory() as logs,
            running_cluster(
                model,
                Path(logs),
                pin=sorted(os.sched_getaffinity(0)) if device == "cpu" else (),
                worker_options=["--kv-transport", transport, "--device", device],
                router_options=["--decode-prefill-tokens", "0", "--loaded-prefill-s", "1e9"],
            ) as cluster,
            grpc.insecure_channel(cluster.router.grpc) as channel,
        ):
            stub = inference_pb2_grpc.InferenceStub(channel)
            for length in (100, *map(int, lengths.split(","))):
                runs = [
                    measure(stub, [chance.randrange(1000, 5000) for _ in range(length)])
                    for _ in range(repeats)
                ]
                if length != 100:
                    report.rows.append((transport, length, *_medians(runs)))
    report.print()
    if json is not None:
        report.write(json)


def _medians(runs: Sequence[Measured]) -> tuple[float, ...]:
    ttft_s = median(run.ttft_s for run in runs)
    transfer_s = median(run.transfer_s for run in runs)
    prefill_s = median(run.prefill_s for run in runs)
    return (runs[0].kv_bytes / 1e6, ttft_s * 1e3, prefill_s * 1e3, transfer_s * 1e3, transfer_s / ttft_s)


if __name__ == "__main__":
    typer.run(main)
