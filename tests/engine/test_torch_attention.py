"""Attention over pages against attention written down as its definition, in every form."""

import pytest
import torch
from torch import Tensor

from engine.attention.attention import PLAIN, AttentionForm
from engine.attention.torch_attention import TorchAttention
from engine.batch import DecodeRows, PrefillRows, StepBatch
from engine.kv_cache import KVCache
from engine.kv_layout import KVLayout, TensorLayout
from tests.engine.model_steps import CPU

NUM_HEADS, KEY_DIM, VALUE_DIM = 4, 8, 6
# Rows of one step: context, of which the last `rows` are computed now. Single rows decode.
DECODING = (1, 15, 16, 17, 90, 300, 41)
CHUNKS = ((70, 70), (40, 7), (200, 130), (33, 2))


class Step:
    """One layer's Q, K and V of some sequences over shuffled blocks, the earlier K and V in the cache."""

    def __init__(self, num_kv_heads: int, block_size: int) -> None:
        torch.manual_seed(0)
        self.lengths = [(n, 1) for n in DECODING] + list(CHUNKS)
        shapes = ((NUM_HEADS, KEY_DIM), (num_kv_heads, KEY_DIM), (num_kv_heads, VALUE_DIM))
        self.sequences = [[torch.randn(n, *shape) for shape in shapes] for n, _ in self.lengths]
        # The second layer is of another shape, as in models that mix them.
        layers = ((num_kv_heads, KEY_DIM, VALUE_DIM), (1, 4, 4))
        layout = KVLayout(
            "fingerprint",
            "float32",
            block_size,
            tuple(
                (TensorLayout("key", h, k, "float32"), TensorLayout("value", h, v, "float32"))
                for h, k, v in layers
            ),
        )
        needed = [-(-n // block_size) for n, _ in self.lengths]
        self.cache = KVCache(layout, sum(needed) + 2, CPU)
        # Not block 0: it fills up the tables of shorter sequences.
        self.tables = (1 + torch.randperm(sum(needed))).split(needed)
        self.block_size = block_size
        for table, (_, key, value) in zip(self.tables, self.sequences, strict=True):
            slots = self._slots(table, 0, key.shape[0])
            self.cache.scatter(0, 0, slots, key)
            self.cache.scatter(0, 1, slots, value)

    def _slots(self, table: Tensor, start: int, end: int) -> Tensor:
        positions = torch.arange(start, end)
        return table[positions // self.block_size] * self.block_size + positions % self.block_size

    def batch(self) -> StepBatch:
        width = max(len(t) for t in self.tables[: len(DECODING)])
        tables = torch.zeros(len(DECODING), width, dtype=torch.int64)
        for row, table in enumerate(self.tables[: len(DECODING)]):
            tables[row, : len(table)] = table
        prefill, first = [], len(DECODING)
        for (context, rows), table in zip(CHUNKS, self.tables[len(DECODING) :], strict=True):
            prefill.append(PrefillRows(first, rows, context, table))
            first += rows
        positions = torch.cat([torch.arange(n - rows, n) for n, rows in self.lengths])
        slots = [self._slots(t, n - rows, n) for t, (n, rows) in zip(self.tables, self.lengths, strict=True)]
        return StepBatch(
            token_ids=positions,
            positions=positions,
            slots=torch.cat(slots),
            decode=DecodeRows(tables, torch.tensor(DECODING), max(DECODING)),
            prefill=tuple(prefill),
            sampled_rows=torch.arange(0),
        )

    def attend(self, form: AttentionForm) -> Tensor:
        step = TorchAttention().prepare(self.batch(), self.cache)
        rows = zip(self.sequences, self.lengths, strict=True)
        query, key, value = map(
            torch.cat, zip(*([t[n - count :] for t in ts] for ts, (n, count) in rows), strict=True)
        )
        num_tokens = query.shape[0]
        step.write(1, torch.ones(num_tokens, 1, 4), torch.ones(num_tokens, 1, 4))
        step.write(0, key, value)
        other = step.attend(1, torch.ones(num_tokens, 2, 4), *[torch.ones(num_tokens, 1, 4)] * 2)
        assert other.shape == (num_tokens, 8)
        return step.attend(0, query, key, value, form)

    def expected(self, form: AttentionForm) -> Tensor:
        rows = zip(self.sequences, self.lengths, strict=True)
        return torch.cat([_defined(*tensors, form)[n - count :] for tensors, (n, count) in rows])


def _defined(query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
    repeats = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(repeats, 1) for t in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * (form.scale or KEY_DIM**-0.5)
    if form.logit_cap is not None:
        scores = form.logit_cap * torch.tanh(scores / form.logit_cap)
    place = torch.arange(len(query))
    distance = place.unsqueeze(1) - place
    visible = (distance >= 0) & (distance < (form.window or len(query)))
    scores = scores.masked_fill(~visible, float("-inf")).exp()
    total = scores.sum(-1, keepdim=True)
    if form.sinks is not None:
        total = total + form.sinks.exp().view(-1, 1, 1)
    return torch.einsum("hqk,khd->qhd", scores / total, value).flatten(1)


WINDOWS = [AttentionForm(window=window) for window in (1, 2, 15, 16, 17, 63, 64, 65, 150, 299, 300, 5000)]
FORMS = [
    PLAIN,
    AttentionForm(scale=0.7),
    AttentionForm(logit_cap=2.0),
    AttentionForm(sinks=torch.tensor([0.0, 1.0, -2.0, 3.0])),
    AttentionForm(scale=0.7, window=20, logit_cap=1.5, sinks=torch.tensor([0.0, 1.0, -2.0, 3.0])),
]


@pytest.mark.parametrize("form", WINDOWS + FORMS, ids=str)
@pytest.mark.parametrize(("num_kv_heads", "block_size"), [(2, 16), (4, 5), (1, 1)])
def test_attends_as_defined(form: AttentionForm, num_kv_heads: int, block_size: int):
    step = Step(num_kv_heads, block_size)
    torch.testing.assert_close(step.attend(form), step.expected(form), rtol=1e-4, atol=1e-5)


def test_blocks_before_the_window_are_not_read():
    step, form = Step(2, 16), AttentionForm(window=20)
    before = step.attend(form)
    for table, (n, rows) in zip(step.tables, step.lengths, strict=True):
        hidden = table[: max(0, n - rows + 1 - 20) // 16]
        for tensor in (0, 1):
            step.cache.pages(0, tensor)[hidden] = float("nan")
    assert torch.equal(step.attend(form), before)
