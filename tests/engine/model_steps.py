"""Drives a model without an engine: any rows of any sequences in one step, over shuffled blocks."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from torch import Tensor

from engine.batch import DecodeRows, LayerHook, PrefillRows, StepBatch
from engine.kv_cache import KVCache
from engine.kv_layout import KVLayout
from engine.kv_quantization import quantized_layers
from engine.loading import load_model
from engine.model import Model
from engine.model_config import read_model_config

BLOCK_SIZE = 16
CPU = torch.device("cpu")


class Rows(NamedTuple):
    """Tokens [start, end) of a sequence; a single one is a decode row."""

    sequence: int
    start: int
    end: int


def model_of(folder: Path, dtype: torch.dtype = torch.float32) -> Model:
    config = read_model_config(folder)
    return load_model(config, dtype=dtype, device=CPU, max_positions=config.max_model_len)


class ModelSteps:
    """A model, its cache and a few sequences of known tokens."""

    def __init__(
        self,
        model: Model,
        sequences: Sequence[Tensor],
        block_size: int = BLOCK_SIZE,
        kv_dtype: str | None = None,
    ) -> None:
        """`kv_dtype`: int8 or fp8; None: the model's dtype."""
        self.model = model
        self.sequences = sequences
        self.block_size = block_size
        needed = [-(-len(tokens) // block_size) for tokens in sequences]
        layers = quantized_layers(model.kv_tensors, kv_dtype) if kv_dtype else model.kv_tensors
        layout = KVLayout("fingerprint", layers[0][0].dtype, block_size, layers)
        self.cache = KVCache(layout, sum(needed) + 3, model.device)
        shuffled = torch.randperm(self.cache.num_blocks, generator=torch.Generator().manual_seed(1))
        self.tables = shuffled[: sum(needed)].split(needed)

    def slots(self, rows: Rows) -> Tensor:
        positions = torch.arange(rows.start, rows.end)
        return self.tables[rows.sequence][positions // self.block_size] * self.block_size + (
            positions % self.block_size
        )

    def step(
        self, *steps: Rows, sampled: Sequence[int] | None = None, hook: LayerHook | None = None
    ) -> Tensor:
        """Logits of all rows, or of the `sampled` ones. Single tokens come first."""
        decode = [rows for rows in steps if rows.end - rows.start == 1]
        chunks = steps[len(decode) :]
        ends = torch.tensor([rows.end - rows.start for rows in steps]).cumsum(0).tolist()
        batch = StepBatch(
            token_ids=torch.cat([self.sequences[r.sequence][r.start : r.end] for r in steps]),
            positions=torch.cat([torch.arange(r.start, r.end) for r in steps]),
            slots=torch.cat([self.slots(r) for r in steps]),
            decode=self._decode_rows(decode) if decode else None,
            prefill=tuple(
                PrefillRows(
                    end - (r.end - r.start),
                    r.end - r.start,
                    r.end,
                    self.tables[r.sequence][: -(-r.end // self.block_size)],
                )
                for r, end in zip(chunks, ends[len(decode) :], strict=True)
            ),
            sampled_rows=torch.arange(ends[-1])
            if sampled is None
            else torch.tensor(sampled, dtype=torch.int64),
        )
        return self.model.forward(batch, self.cache, hook)

    def _decode_rows(self, decode: Sequence[Rows]) -> DecodeRows:
        context_lens = [rows.end for rows in decode]
        tables = torch.zeros(len(decode), -(-max(context_lens) // self.block_size), dtype=torch.int64)
        for row, rows in enumerate(decode):
            used = -(-rows.end // self.block_size)
            tables[row, :used] = self.tables[rows.sequence][:used]
        return DecodeRows(tables, torch.tensor(context_lens), max(context_lens))

    def prefill(self, sequence: int, end: int, chunk: int) -> Tensor:
        """Logits [end, vocab_size] of a sequence's first tokens, computed `chunk` at a time."""
        starts = range(0, end, chunk)
        return torch.cat([self.step(Rows(sequence, s, min(s + chunk, end))) for s in starts])


def random_tokens(*lengths: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, 384, (length,), generator=generator) for length in lengths]


class ReferenceModel:
    """transformers' own model of the same folder."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        self._model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)

    @torch.inference_mode()
    def logits(self, tokens: Tensor) -> Tensor:
        """[num_tokens, vocab_size] float32."""
        return self._model(tokens.unsqueeze(0)).logits[0].float()
