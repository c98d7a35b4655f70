"""What the workers of an attempt say of one sample, merged."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from protos import inference_pb2, worker_pb2
from router.completion import FinishReason, Token, TokenLogprobs
from router.sampling_options import SamplingOptions
from router.token_merge import TokenMerge


class Tokens(NamedTuple):
    """A gapless run of one sample. `logprobs`: None, they were not asked for."""

    sample: int
    first_index: int
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs] | None = None


@dataclass(frozen=True, slots=True)
class SampleFinished:
    """All tokens of the sample are out."""

    sample: int
    reason: FinishReason


class SampleCourse:
    """The tokens of one sample in order, then its end.

    With log probabilities asked for, a token counts from the worker that says them too: a decode worker
    repeats the prefill worker's first token without.
    """

    __slots__ = ("_finish", "_is_abandoned", "_logprobs", "_merge", "_options", "_sample", "num_taken")

    def __init__(self, sample: int, first_index: int, options: SamplingOptions) -> None:
        self._sample = sample
        self._options = options
        self._merge = TokenMerge(first_index, options.max_tokens)
        # Of tokens that were not taken, by index.
        self._logprobs: dict[int, TokenLogprobs] = {}
        self._finish: FinishReason | None = None
        self._is_abandoned = False
        self.num_taken = 0

    @property
    def is_over(self) -> bool:
        """A worker has said its end, though tokens may be missing; or nobody wants more of it."""
        return self._is_abandoned or self._finish is not None

    @property
    def is_going_on(self) -> bool:
        """Neither over nor with a gap: as it is after nearly every token."""
        return self._finish is None and not self._is_abandoned and not self._merge.has_gap

    @property
    def has_gap(self) -> bool:
        return self._merge.has_gap and not self._is_abandoned

    @property
    def next_index(self) -> int:
        return self._merge.next_index

    def hear(self, event: worker_pb2.SequenceTokens) -> bool:
        """Whether that brought a new token."""
        token_ids = event.token_ids[:]
        if self._options.logprobs is None:
            return self._merge.add(event.index, token_ids)
        if len(event.logprobs) == len(token_ids):
            self._keep_logprobs(event)
            return self._merge.add(event.index, token_ids)
        self._merge.announce(event.index + len(token_ids))
        return False

    def _keep_logprobs(self, event: worker_pb2.SequenceTokens) -> None:
        """As of the tokens, the first word counts."""
        for at, scores in enumerate(event.logprobs, start=event.index):
            if self._merge.wants(at):
                self._logprobs.setdefault(at, token_logprobs(scores))

    def finish(self, reason: FinishReason) -> None:
        """The first word for it counts."""
        if self._finish is None:
            self._finish = reason

    def abandon(self) -> None:
        """Nothing more of it is wanted."""
        self._is_abandoned = True

    def take(self) -> Tokens | SampleFinished | None:
        """What is new: tokens first. The end may be taken more than once."""
        if self._is_abandoned:
            return None
        index, token_ids = self._merge.take()
        if token_ids:
            num_tokens = len(token_ids)
            self.num_taken += num_tokens
            if self._options.logprobs is None:
                return Tokens(self._sample, index, token_ids)
            return Tokens(self._sample, index, token_ids, self._take_logprobs(index, num_tokens))
        if self._finish is not None and not self._merge.has_gap:
            return SampleFinished(self._sample, self._finish)
        return None

    def _take_logprobs(self, index: int, num_tokens: int) -> Sequence[TokenLogprobs]:
        return [self._logprobs.pop(at) for at in range(index, index + num_tokens)]


def token_logprobs(scores: inference_pb2.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(scores.logprob, tuple(zip(scores.top_token_ids, scores.top_logprobs, strict=False)))


def scored_tokens(
    token_ids: Sequence[int], scores: Sequence[inference_pb2.TokenLogprobs]
) -> tuple[Token, ...]:
    """A prompt with its log probabilities: the first token's are empty on the wire, and none."""
    rest = zip(token_ids[1:], scores[1:], strict=True)
    return (Token(token_ids[0]), *(Token(id_, token_logprobs(each)) for id_, each in rest))
