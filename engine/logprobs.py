"""Log probabilities of tokens, before temperature, penalties and all that drops tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Of one token. The likeliest tokens of its place come best first."""

    logprob: float
    top_token_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


class LogprobTensors(NamedTuple):
    """`TokenLogprobs` of several places, still on the device.

    Attributes:
        logprobs: [num_places] float32.
        top_token_ids: [num_places, most] int64.
        top_logprobs: [num_places, most] float32.
        counts: how many of the likeliest each place wants, at most `most`.
    """

    logprobs: Tensor
    top_token_ids: Tensor
    top_logprobs: Tensor
    counts: tuple[int, ...]

    def read(self) -> list[TokenLogprobs]:
        """Waits for the device."""
        ids, tops = self.top_token_ids.tolist(), self.top_logprobs.tolist()
        return [
            TokenLogprobs(logprob, tuple(ids[row][:count]), tuple(tops[row][:count]))
            for row, (logprob, count) in enumerate(zip(self.logprobs.tolist(), self.counts, strict=True))
        ]


def token_logprobs(logits: Tensor, tokens: Tensor, counts: Sequence[int]) -> LogprobTensors:
    """The log probabilities of `tokens` [num_places] int64, each under its row of `logits`
    [num_places, vocab] float32, and of the `counts[row]` likeliest tokens of the row.
    """
    normalizer = logits.logsumexp(dim=-1, keepdim=True)
    chosen = logits.gather(-1, tokens[:, None]) - normalizer
    top = logits.topk(min(max(counts), logits.shape[-1]), dim=-1)
    return LogprobTensors(chosen[:, 0], top.indices, top.values - normalizer, tuple(counts))


class PromptLogprobs:
    """Gathers the log probabilities of one prompt while it is computed, in whatever chunks.

    Args:
        num_prompt_tokens: of the prompt, at least one.
        num_top: how many of the likeliest each place wants.
    """

    def __init__(self, num_prompt_tokens: int, num_top: int) -> None:
        self.num_top = num_top
        self._num_wanted = num_prompt_tokens - 1
        self._gathered: list[TokenLogprobs] = []

    def positions(self, token_start: int, token_end: int) -> range:
        """Of tokens [token_start, token_end), those whose logits speak of a prompt token not gathered yet."""
        first = max(token_start, len(self._gathered))
        return range(first, max(first, min(token_end, self._num_wanted)))

    def add(self, positions: range, logprobs: Sequence[TokenLogprobs]) -> None:
        """`positions`: as `positions` gave them, in the order of the steps."""
        if len(positions) != len(logprobs) or (positions and positions.start != len(self._gathered)):
            raise AssertionError(f"{len(logprobs)} log probabilities for {positions} of the prompt")
        self._gathered += logprobs

    def complete(self) -> tuple[TokenLogprobs, ...] | None:
        """One for every prompt token but the first; None while some are missing."""
        if len(self._gathered) < self._num_wanted:
            return None
        return tuple(self._gathered)
