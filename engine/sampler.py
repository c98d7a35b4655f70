"""The next token of each row: a pure function of logits, parameters, seed, sample and token index."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from engine.grammar import keep_allowed
from engine.logit_adjustments import adjust
from engine.logprobs import LogprobTensors, TokenLogprobs, token_logprobs
from engine.request import SamplingParams
from engine.sampling_state import SamplingState

_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """What a row's next token depends on beside its logits.

    Attributes:
        sample: which of the request's samples.
        index: the place that the token will have among the generated ones.
        banned: token ids that must not come now; a grammar that allows no others is stronger.
        state: penalties and grammar after the tokens so far; None if there are none.
    """

    params: SamplingParams
    sample: int
    index: int
    banned: frozenset[int]
    state: SamplingState | None = None


class Sampled(NamedTuple):
    """Still on the device.

    Attributes:
        tokens: [num_rows] int64.
        logprob_rows: the rows that ask for log probabilities.
        logprobs: of these rows' tokens, in their order; None if there are none.
    """

    tokens: Tensor
    logprob_rows: tuple[int, ...]
    logprobs: LogprobTensors | None

    def read(self) -> list[tuple[int, TokenLogprobs | None]]:
        """Waits for the device. The token of each row, and its log probabilities if the row asks."""
        tokens = self.tokens.tolist()
        told = self.logprobs.read() if self.logprobs is not None else []
        by_row = dict(zip(self.logprob_rows, told, strict=True))
        return [(token, by_row.get(row)) for row, token in enumerate(tokens)]


def sample_rows(logits: Tensor, rows: Sequence[SamplingRow]) -> Sampled:
    """The next token of each row of `logits` [num_rows, vocab] float32, which is overwritten.

    The log probabilities are those of the logits as they come.
    """
    asking = [row for row, spec in enumerate(rows) if spec.params.logprobs is not None]
    raw = logits[asking] if asking else None
    tokens = sample_tokens(logits, rows)
    if raw is None:
        return Sampled(tokens, (), None)
    counts = [rows[row].params.logprobs or 0 for row in asking]
    return Sampled(tokens, tuple(asking), token_logprobs(raw, tokens[asking], counts))


def sample_tokens(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """[num_rows, vocab] float32 logits, which are overwritten, to [num_rows] int64 token ids.

    Penalties and biases, bans, the grammar; then temperature, top-k, top-p and min-p, each over what
    the one before left (the order of transformers); then the Gumbel-max trick: the noise makes the largest
    sum a draw from the softmax.
    """
    _restrict(logits, rows)
    drawn = [row for row, spec in enumerate(rows) if spec.params.temperature > 0]
    tokens = logits.argmax(dim=-1)
    if drawn:
        specs = [rows[row] for row in drawn]
        kept = _keep_likely(logits[drawn], [spec.params for spec in specs])
        tokens[drawn] = (kept.double() + gumbel_noise(specs, kept.shape[-1], kept.device)).argmax(dim=-1)
    return tokens


def _restrict(logits: Tensor, rows: Sequence[SamplingRow]) -> None:
    """Changes and drops logits, in place, only in the rows that ask for it."""
    states = [(row, spec.state) for row, spec in enumerate(rows) if spec.state is not None]
    adjusted = [(row, state.adjustments) for row, state in states if state.adjustments is not None]
    if adjusted:
        adjust(logits, [row for row, _ in adjusted], [adjustments.current() for _, adjustments in adjusted])
    matched = [(row, state.matcher) for row, state in states if state.matcher is not None]
    if matched:
        allowed = [matcher.allowed(rows[row].banned) for row, matcher in matched]
        keep_allowed(logits, [row for row, _ in matched], allowed)
    for row, spec in enumerate(rows):
        if spec.banned and (spec.state is None or spec.state.matcher is None):
            logits[row, list(spec.banned)] = -torch.inf


def _keep_likely(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Logits over temperature, -inf where top-k, top-p or min-p drop a token."""
    scaled = logits / _column([p.temperature for p in params], logits.device)
    vocab = scaled.shape[-1]
    ks = [p.top_k if 0 < p.top_k < vocab else vocab for p in params]
    if min(ks) < vocab:
        largest = scaled.topk(max(k for k in ks if k < vocab), dim=-1).values
        kth = [
            largest[row, k - 1] if k < vocab else scaled.new_tensor(-torch.inf) for row, k in enumerate(ks)
        ]
        scaled = scaled.masked_fill(scaled < torch.stack(kth)[:, None], -torch.inf)
    if min(p.top_p for p in params) < 1:
        ordered, order = scaled.sort(dim=-1, descending=True)
        probs = ordered.softmax(dim=-1)
        before = probs.cumsum(dim=-1) - probs
        dropped = before >= _column([p.top_p for p in params], logits.device)
        dropped[:, 0] = False
        scaled = scaled.masked_fill(torch.zeros_like(dropped).scatter(-1, order, dropped), -torch.inf)
    if max(p.min_p for p in params) > 0:
        floor = scaled.amax(dim=-1, keepdim=True) + _column([p.min_p for p in params], logits.device).log()
        scaled = scaled.masked_fill(scaled < floor, -torch.inf)
    return scaled


def _column(values: Sequence[float], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)[:, None]


def gumbel_noise(rows: Sequence[SamplingRow], vocab: int, device: torch.device) -> Tensor:
    """[num_rows, vocab] float64. The bits behind it are integers: the same on every device.

    Each value is a hash of (seed, sample, index, token id), so a draw does not depend on what else is
    in the batch, nor on what was drawn before.
    """
    keys = [_row_key(row.params.seed, row.sample, row.index) for row in rows]
    low = torch.tensor([key & _MASK32 for key in keys], device=device)[:, None]
    high = torch.tensor([key >> 32 for key in keys], device=device)[:, None]
    ids = torch.arange(vocab, device=device)
    bits = _mix32(_mix32(ids ^ low) ^ high)
    uniform = (bits.double() + 0.5) * 2.0**-32
    return -(-uniform.log()).log()


def _row_key(seed: int, sample: int, index: int) -> int:
    """64 bits of (seed, sample, index), by the finalizer of SplitMix64 (Steele et al., 2014)."""
    key = seed & _MASK64
    for word in (sample, index):
        key = (key + 0x9E3779B97F4A7C15 * (word + 1)) & _MASK64
        key = ((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
        key = ((key ^ (key >> 27)) * 0x94D049BB133111EB) & _MASK64
        key ^= key >> 31
    return key


def _mix32(bits: Tensor) -> Tensor:
    """Scrambles 32-bit values held in int64 (the finalizer of MurmurHash3, Appleby).

    A product of two 32-bit values may wrap in int64; its low 32 bits, all that is kept, are right.
    """
    bits = ((bits ^ (bits >> 16)) * 0x85EBCA6B) & _MASK32
    bits = ((bits ^ (bits >> 13)) * 0xC2B2AE35) & _MASK32
    return bits ^ (bits >> 16)
