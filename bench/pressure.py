"""What a shortage of KV blocks costs: 32 requests over blocks for a quarter of their need.

The baseline is the same requests, in the same run, over blocks for all of them.
"""

import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer

import model_store
from bench.report import Report
from engine.config import EngineConfig
from engine.engine import Engine
from engine.loading import load_engine
from engine.request import EngineRequest, SamplingParams, SequenceId


@dataclass(frozen=True, slots=True)
class Outcome:
    """`texts`: the generated tokens of each request."""

    seconds: float
    texts: dict[str, tuple[int, ...]]
    num_preemptions: int
    recomputed_tokens: int


def make_requests(count: int, prompts: tuple[int, int], outputs: tuple[int, int]) -> list[EngineRequest]:
    """Of mixed lengths, each uniform in its range."""
    chance = random.Random(0)
    return [
        EngineRequest(
            sequence_id=SequenceId(f"s{number}"),
            prompt=tuple(chance.randrange(1000, 5000) for _ in range(chance.randint(*prompts))),
            sampling=SamplingParams(temperature=0, max_tokens=chance.randint(*outputs), ignore_eos=True),
            arrival_s=number,
        )
        for number in range(count)
    ]


def run(engine: Engine, requests: list[EngineRequest]) -> Outcome:
    """All at once, to the end of the last."""
    texts: dict[str, list[int]] = {request.sequence_id: [] for request in requests}
    for request in requests:
        engine.submit(request)
    started = time.perf_counter()
    engine.admit()
    while (launched := engine.launch()) is not None:
        for token in engine.collect(launched).tokens:
            texts[token.sequence_id].append(token.token)
        engine.admit()
    seconds = time.perf_counter() - started
    load = engine.load()
    recomputed = load.computed_prompt_tokens - sum(len(request.prompt) for request in requests)
    return Outcome(
        seconds, {name: tuple(text) for name, text in texts.items()}, load.num_preemptions, recomputed
    )


def main(
    model: Annotated[str, typer.Option(help="smollm2-135m, a local folder or a hub id.")] = "smollm2-135m",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    requests: Annotated[int, typer.Option(help="How many, all at once.")] = 32,
    share: Annotated[float, typer.Option(help="Of the blocks that all need together.")] = 0.25,
    threads: Annotated[int | None, typer.Option(help="Threads that compute. Default: torch's.")] = None,
    json: Annotated[Path | None, typer.Option(help="Also write the figures here.")] = None,
) -> None:
    """Throughput with too few KV blocks over throughput with enough, and whether the texts are the same."""
    if threads:
        torch.set_num_threads(threads)
    folder = model_store.resolve(model)
    asked = make_requests(requests, prompts=(32, 256), outputs=(32, 96))
    need = sum(-(-(len(r.prompt) + r.sampling.max_tokens) // 16) for r in asked)

    def engine_with(num_blocks: int) -> Engine:
        config = EngineConfig.model_validate({"model_path": folder, "dtype": dtype, "device": "cpu"})
        token_bytes = load_engine(config.model_copy(update={"kv_cache_bytes": 1 << 24})).layout.token_bytes
        return load_engine(config.model_copy(update={"kv_cache_bytes": num_blocks * 16 * token_bytes}))

    report = Report(
        f"{folder.name}, {dtype}, {requests} requests at once, {torch.get_num_threads()} threads",
        ("blocks", "output tok/s", "of the baseline", "preemptions", "tokens computed again", "same texts"),
    )
    baseline = run(engine_with(need), asked)
    for num_blocks, outcome in (
        (need, baseline),
        (int(need * share), run(engine_with(int(need * share)), asked)),
    ):
        tokens = sum(len(text) for text in outcome.texts.values())
        same = sum(outcome.texts[name] == text for name, text in baseline.texts.items())
        report.rows.append(
            (
                num_blocks,
                tokens / outcome.seconds,
                baseline.seconds / outcome.seconds,
                outcome.num_preemptions,
                max(0, outcome.recomputed_tokens),
                f"{same} of {requests}",
            )
        )
    report.print()
    if json is not None:
        report.write(json)


if __name__ == "__main__":
    typer.run(main)
