"""The second turn of a conversation: its prefix is on both workers, so only what is new is computed and sent.

The baseline is the first turn, in the same run: the same cluster and a prompt as long that nobody has seen.
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
class Turn:
    """`ttft_s`: from the call to the first token."""

    ttft_s: float
    token_ids: tuple[int, ...]
    kv_bytes: int


def take_turn(stub: inference_pb2_grpc.InferenceStub, prompt: Sequence[int], num_output: int) -> Turn:
    sampling = inference_pb2.SamplingParams(temperature=0, max_tokens=num_output, ignore_eos=True)
    request = inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=list(prompt)), sampling=sampling
    )
    started = time.perf_counter()
    ttft_s = 0.0
    token_ids: list[int] = []
    kv_bytes = 0
    for response in stub.Generate(request, timeout=600):
        ttft_s = ttft_s or time.perf_counter() - started
        token_ids += response.token_ids
        kv_bytes = response.served_by.kv_bytes
    return Turn(ttft_s, tuple(token_ids), kv_bytes)


def main(
    model: Annotated[str, typer.Option(help="smollm2-135m, a local folder or a hub id.")] = "smollm2-135m",
    prompt: Annotated[int, typer.Option(help="Tokens of the first turn.")] = 2000,
    output: Annotated[int, typer.Option(help="Tokens of its answer.")] = 32,
    question: Annotated[int, typer.Option(help="Tokens that the second turn adds.")] = 32,
    conversations: Annotated[int, typer.Option(help="Of which the medians are taken.")] = 5,
    json: Annotated[Path | None, typer.Option(help="Also write the figures here.")] = None,
) -> None:
    """TTFT of a conversation's second turn over its first's, through one prefill and one decode worker."""
    cores = sorted(os.sched_getaffinity(0))
    chance = random.Random(0)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(chance.randrange(1000, 5000) for _ in range(count))

    firsts: list[Turn] = []
    seconds: list[Turn] = []
    with (
        tempfile.TemporaryDirectory() as logs,
        running_cluster(model, Path(logs), pin=cores) as cluster,
        grpc.insecure_channel(cluster.router.grpc) as channel,
    ):
        stub = inference_pb2_grpc.InferenceStub(channel)
        take_turn(stub, tokens(100), output)
        for _ in range(conversations):
            said = tokens(prompt)
            firsts.append(take_turn(stub, said, output))
            said = (*said, *firsts[-1].token_ids, *tokens(question))
            seconds.append(take_turn(stub, said, output))
    report = Report(
        f"{model}, 1 prefill and 1 decode worker, a core each; medians of {conversations}",
        ("turn", "prompt tokens", "TTFT ms", "KV handed over, MB", "of the first turn's TTFT"),
    )
    base = median(turn.ttft_s for turn in firsts)
    for name, turns, length in (
        ("first", firsts, prompt),
        ("second", seconds, prompt + output + question),
    ):
        ttft = median(turn.ttft_s for turn in turns)
        report.rows.append((name, length, ttft * 1e3, turns[-1].kv_bytes / 1e6, ttft / base))
    report.print()
    if json is not None:
        report.write(json)


if __name__ == "__main__":
    typer.run(main)
