"""What a smaller dtype of weights, of the KV cache or of KV on the wire costs in accuracy, on real text.

The text is the reference documentation of the Python language, as the standard library carries it
(`pydoc_data.topics`), so it is on every machine; windows of it are taken at even distances. Every variant
reads the same tokens, chunk after chunk, and is compared with float32, the baseline: how much higher its
perplexity is, the mean absolute difference of its logits, how often it has the same most likely token.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics
from typing import Annotated

import numpy as np
import torch
import torch.nn.functional as F
import typer
from rich.progress import track
from tokenizers import Tokenizer
from torch import Tensor

import model_store
from bench.report import Report
from engine.batch import PrefillRows, StepBatch
from engine.kv_cache import KVCache
from engine.kv_conversion import in_dtype
from engine.kv_layout import DTYPES, KVLayout
from engine.kv_wire import KVWire, kv_wire
from engine.loading import load_model
from engine.model import Model
from engine.model_config import read_model_config

BLOCK_SIZE = 16
CHUNK_TOKENS = 256
CPU = torch.device("cpu")


@dataclass(slots=True)
class Score:
    """Sums over scored tokens.

    Attributes:
        loss: of negative log likelihoods, in nats.
        difference: of the mean absolute differences of a token's logits from float32's.
        same_best: tokens whose most likely successor is float32's.
    """

    num_tokens: int = 0
    loss: float = 0.0
    difference: float = 0.0
    same_best: int = 0

    def add(self, logits: Tensor, baseline: Tensor, successors: Tensor) -> None:
        """`logits`, `baseline`: [num_tokens, vocab_size] float32; `successors`: [num_tokens] int64."""
        self.num_tokens += len(successors)
        self.loss += F.cross_entropy(logits, successors, reduction="sum").item()
        self.difference += (logits - baseline).abs().mean(-1).sum().item()
        self.same_best += int((logits.argmax(-1) == baseline.argmax(-1)).sum())

    @property
    def perplexity(self) -> float:
        return float(torch.tensor(self.loss / self.num_tokens, dtype=torch.float64).exp())


@dataclass(frozen=True, slots=True)
class Variant:
    """A model with a cache for one window.

    Attributes:
        kv: what the report says of its K and V.
        wire: by which every computed chunk is handed off before the next one reads it; None: none is.
        token_bytes: of what is cached, or handed off.
    """

    model: Model
    kv: str
    cache: KVCache
    wire: KVWire | None
    token_bytes: int
    score: Score = field(default_factory=Score)

    @classmethod
    def of(cls, model: Model, window_tokens: int, kv_dtype: str, wire_dtype: str | None = None) -> "Variant":
        """`kv_dtype`, `wire_dtype`: keys of `CACHED_DTYPES`."""
        exact = KVLayout("", model.kv_tensors[0][0].dtype, BLOCK_SIZE, model.kv_tensors)
        layout = exact if kv_dtype == exact.dtype else in_dtype(exact, kv_dtype)
        cache = KVCache(layout, -(-window_tokens // BLOCK_SIZE), CPU)
        if wire_dtype is None:
            return cls(model, kv_dtype, cache, None, layout.token_bytes)
        sent = in_dtype(layout, wire_dtype)
        return cls(model, f"{kv_dtype}, sent in {wire_dtype}", cache, kv_wire(cache, sent), sent.token_bytes)

    def logits(self, window: Tensor, start: int, end: int) -> Tensor:
        """[end - start, vocab_size] of the window's tokens [start, end), the earlier ones being cached."""
        positions = torch.arange(start, end)
        blocks = torch.arange(-(-end // BLOCK_SIZE))
        logits = self.model.forward(
            StepBatch(
                token_ids=window[start:end],
                positions=positions,
                slots=positions,
                decode=None,
                prefill=(PrefillRows(0, end - start, end, blocks),),
                sampled_rows=torch.arange(end - start),
            ),
            self.cache,
            None,
        )
        if self.wire is not None:
            self._hand_off(self.wire, blocks.numpy(), start, end)
        return logits

    def _hand_off(self, wire: KVWire, blocks: np.ndarray, start: int, end: int) -> None:
        """There and back."""
        place = wire.at(blocks, start, end)
        for layer in range(len(self.cache.layout.layers)):
            place.unpack(layer, place.pack(layer).numpy().data)


def windows(folder: Path, num_windows: int, window_tokens: int) -> Iterator[Tensor]:
    """[window_tokens + 1] int64 each, from places at even distances in the text."""
    text = "\n".join(dict.fromkeys(topics[name] for name in sorted(topics)))
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    distance = (len(ids) - window_tokens - 1) // num_windows
    for number in range(num_windows):
        yield torch.tensor(ids[number * distance :][: window_tokens + 1])


def read_window(variants: list[Variant], window: Tensor) -> None:
    """The first variant is the baseline."""
    for start in range(0, len(window) - 1, CHUNK_TOKENS):
        end = min(start + CHUNK_TOKENS, len(window) - 1)
        successors = window[start + 1 : end + 1]
        baseline = variants[0].logits(window, start, end)
        variants[0].score.add(baseline, baseline, successors)
        for variant in variants[1:]:
            variant.score.add(variant.logits(window, start, end), baseline, successors)


def main(
    model: Annotated[str, typer.Option(help="smollm2-135m, a local folder or a hub id.")] = "smollm2-135m",
    num_windows: Annotated[int, typer.Option(min=1, help="Pieces of text.")] = 4,
    window_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each.")] = 1024,
    json: Annotated[Path | None, typer.Option(help="Also write the figures here.")] = None,
) -> None:
    """Perplexity and logits of float32 and bfloat16, each with its KV as it is, in int8 and in fp8, in the
    cache or on the wire only.
    """
    folder = model_store.resolve(model)
    config = read_model_config(folder)
    models = [
        load_model(config, dtype=DTYPES[dtype], device=CPU, max_positions=window_tokens)
        for dtype in ("float32", "bfloat16")
    ]
    variants = [variant for m in models for variant in variants_of(m, window_tokens)]
    texts = list(windows(folder, num_windows, window_tokens))
    for window in track(texts, description="windows", transient=True):
        read_window(variants, window)
    report = report_of(variants, folder.name)
    report.print()
    if json is not None:
        report.write(json)


def variants_of(model: Model, window_tokens: int) -> Iterator[Variant]:
    exact = str(model.dtype).removeprefix("torch.")
    for kv_dtype in (exact, "int8", "fp8"):
        yield Variant.of(model, window_tokens, kv_dtype)
    for wire_dtype in ("int8", "fp8"):
        yield Variant.of(model, window_tokens, exact, wire_dtype)


def report_of(variants: list[Variant], name: str) -> Report:
    baseline = variants[0].score
    report = Report(
        f"{name}, {baseline.num_tokens} tokens of Python {sys.version_info.major}.{sys.version_info.minor}'s "
        "language reference",
        (
            "weights",
            "KV",
            "perplexity",
            "+%",
            "logit error",
            "top-1 %",
            "bytes/token",
        ),
        baselines={"float32 perplexity": baseline.perplexity},
    )
    for variant in variants:
        score, dtype = variant.score, str(variant.model.dtype).removeprefix("torch.")
        report.rows.append(
            (
                dtype,
                variant.kv,
                f"{score.perplexity:.4f}",
                f"{(score.perplexity / baseline.perplexity - 1) * 100:.3f}",
                f"{score.difference / score.num_tokens:.4f}",
                f"{score.same_best / score.num_tokens * 100:.2f}",
                variant.token_bytes,
            )
        )
    return report


if __name__ == "__main__":
    typer.run(main)
