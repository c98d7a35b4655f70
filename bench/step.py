"""The engine alone: how far its steps are from what the machine allows.

The floor of a step is the larger of the bytes that it must read (weights and KV) over the read rate,
and its FLOPs over the matmul rate at its row count, both measured in the same run. A prefill's FLOPs
are the linears without the head, and causal attention.
"""

import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Annotated, Literal

import torch
import typer
from rich.progress import track

import model_store
from bench.machine import matmul_rate, read_rate
from bench.report import Report
from engine.config import EngineConfig
from engine.engine import Engine
from engine.llama_config import LlamaConfig, llama_config
from engine.loading import load_engine
from engine.model_config import read_model_config
from engine.request import EngineRequest, SamplingParams, SequenceId

DECODE_STEPS = 16


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """FLOPs and bytes of a model, from its shape alone."""

    config: LlamaConfig
    dtype: torch.dtype

    @property
    def linear_weights(self) -> int:
        """Elements of all linears but the head."""
        c = self.config
        attention = c.hidden_size * c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads)
        return c.num_layers * (attention + 3 * c.hidden_size * c.intermediate_size)

    @property
    def head_weights(self) -> int:
        return self.config.vocab_size * self.config.hidden_size

    def attention_flops(self, queries_times_keys: float) -> float:
        c = self.config
        return 4 * c.num_layers * c.num_heads * c.head_dim * queries_times_keys

    def decode_bytes(self, batch: int, context: int) -> int:
        weights = (self.linear_weights + self.head_weights) * self.dtype.itemsize
        c = self.config
        kv_token = 2 * c.num_layers * c.num_kv_heads * c.head_dim * self.dtype.itemsize
        return weights + batch * context * kv_token

    def decode_flops(self, batch: int, context: int) -> float:
        linears = 2 * batch * (self.linear_weights + self.head_weights)
        return linears + self.attention_flops(batch * context)

    def prefill_flops(self, batch: int, prompt: int) -> float:
        return batch * (2 * self.linear_weights * prompt + self.attention_flops(prompt * prompt / 2))


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds: of the whole prefill, and the median of decode steps."""

    prefill_s: float
    decode_s: float


def run_engine(engine: Engine, batch: int, prompt: int) -> Measured:
    """Prefills `batch` prompts of random tokens, then decodes them together."""
    generator = torch.Generator().manual_seed(batch * prompt)
    for number in range(batch):
        tokens = torch.randint(100, 1000, (prompt,), generator=generator).tolist()
        sampling = SamplingParams(temperature=0, max_tokens=DECODE_STEPS + batch * 8, ignore_eos=True)
        engine.submit(
            EngineRequest(
                sequence_id=SequenceId(f"s{number}"),
                prompt=tuple(tokens),
                sampling=sampling,
                arrival_s=number,
                # No cell finds another's prompts in the prefix cache.
                cache_salt=f"{batch}x{prompt}",
            )
        )
    engine.admit()
    start = time.perf_counter()
    while engine.load().waiting_prompt_tokens:
        step(engine)
    prefill_s = time.perf_counter() - start
    steps = [step(engine) for _ in range(DECODE_STEPS)]
    for number in range(batch):
        engine.remove(SequenceId(f"s{number}"))
    return Measured(prefill_s, median(steps[1:]))


def step(engine: Engine) -> float:
    launched = engine.launch()
    if launched is None:
        raise RuntimeError("the engine has nothing to do: its blocks are too few for the cell")
    return engine.collect(launched).duration_s


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def main(
    model: Annotated[str, typer.Option(help="smollm2-135m, a local folder or a hub id.")] = "smollm2-135m",
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Of weights and KV.")] = "bfloat16",
    batches: Annotated[str, typer.Option(help="Sequences side by side, separated by commas.")] = "1,8,32",
    prompts: Annotated[str, typer.Option(help="Tokens of each prompt.")] = "128,512,2048",
    step_tokens: Annotated[int, typer.Option(help="Token budget of a step.")] = 512,
    threads: Annotated[int | None, typer.Option(help="Threads that compute. Default: torch's.")] = None,
    json: Annotated[Path | None, typer.Option(help="Also write the figures here.")] = None,
) -> None:
    """Decode step time and prefill time of one engine, on the CPU, over their floors."""
    if threads:
        torch.set_num_threads(threads)
    folder = model_store.resolve(model)
    config = llama_config(read_model_config(folder))
    if config is None:
        raise typer.BadParameter(f"{model}: only the Llama family's costs are known", param_hint="--model")
    costs = ModelCosts(config, getattr(torch, dtype))
    cells = [(batch, prompt) for batch in numbers(batches) for prompt in numbers(prompts)]
    most_tokens = max(batch * (prompt + DECODE_STEPS + batch * 8 + 16) for batch, prompt in cells)
    engine = load_engine(
        EngineConfig(
            model_path=folder,
            dtype=dtype,
            device="cpu",
            step_tokens=step_tokens,
            kv_cache_bytes=most_tokens * (costs.decode_bytes(1, 1) - costs.decode_bytes(1, 0)),
        )
    )
    rate = read_rate()
    flop_rate = cache(lambda rows: matmul_rate(rows, costs.dtype))
    run_engine(engine, 1, 32)
    report = Report(
        f"{folder.name}, {dtype}, {torch.get_num_threads()} threads",
        ("batch", "prompt", "decode ms", "floor ms", "decode/floor", "prefill s", "floor s", "prefill/floor"),
    )
    for batch, prompt in track(cells, description="batch x prompt", transient=True):
        measured = run_engine(engine, batch, prompt)
        rows = min(step_tokens, batch * prompt)
        decode_floor = max(
            costs.decode_bytes(batch, prompt) / rate, costs.decode_flops(batch, prompt) / flop_rate(batch)
        )
        prefill_floor = max(
            costs.linear_weights * costs.dtype.itemsize / rate,
            costs.prefill_flops(batch, prompt) / flop_rate(rows),
        )
        report.rows.append(
            (
                batch,
                prompt,
                measured.decode_s * 1e3,
                decode_floor * 1e3,
                measured.decode_s / decode_floor,
                measured.prefill_s,
                prefill_floor,
                measured.prefill_s / prefill_floor,
            )
        )
    report.baselines["memory read, GB/s"] = rate / 1e9
    for rows in sorted({min(step_tokens, b * p) for b, p in cells} | {b for b, _ in cells}):
        report.baselines[f"matmul of {rows} rows, GFLOP/s"] = flop_rate(rows) / 1e9
    report.print()
    if json is not None:
        report.write(json)


if __name__ == "__main__":
    typer.run(main)
