"""What comes back for a request: the outputs of its samples, then one end."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"


class TokenLogprobs(NamedTuple):
    """Of one token: its own log probability, and the (id, log probability) of the likeliest in its place,
    best first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


class Token(NamedTuple):
    """`logprobs` is None where they were not asked for."""

    id: int
    logprobs: TokenLogprobs | None = None


def tokens_of(token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] | None) -> tuple[Token, ...]:
    if logprobs is None:
        return tuple(map(Token, token_ids))
    return tuple(map(Token, token_ids, logprobs))


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of the prompt, tokens that were delivered, and prompt tokens that were not computed."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def __add__(self, other: "Usage") -> "Usage":
        """Of one prompt and another."""
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.cached_tokens + other.cached_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Where the request's time went, in seconds: the stages of inference.proto."""

    door_s: float = 0.0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    decode_wait_s: float = 0.0
    decode_s: float = 0.0

    def __add__(self, other: "StageTimes") -> "StageTimes":
        """Of one attempt after another."""
        return StageTimes(
            door_s=self.door_s + other.door_s,
            queue_s=self.queue_s + other.queue_s,
            prefill_s=self.prefill_s + other.prefill_s,
            transfer_s=self.transfer_s + other.transfer_s,
            decode_wait_s=self.decode_wait_s + other.decode_wait_s,
            decode_s=self.decode_s + other.decode_s,
        )


@dataclass(frozen=True, slots=True)
class ServedBy:
    """Worker ids, "" for the one that did not decode; `kv_bytes` is 0 without a hand-off.

    Of several attempts the last one's.
    """

    prefill_worker: str
    decode_worker: str
    kv_bytes: int


@dataclass(frozen=True, slots=True)
class ScoredPrompt:
    """The prompt with its log probabilities (the first token has none). Comes first, if it was asked for."""

    tokens: tuple[Token, ...]


class Piece(NamedTuple):
    """A sample's next tokens and the text that they made final, which can lag behind them.

    Attributes:
        first_index: the place of the first of `token_ids` among the sample's generated tokens.
        starts: where the text of each of `token_ids` begins in the sample's text.
        logprobs: as many as `token_ids`. None: they were not asked for.
    """

    sample: int
    first_index: int
    token_ids: Sequence[int]
    starts: Sequence[int]
    text: str
    logprobs: Sequence[TokenLogprobs] | None = None

    @property
    def tokens(self) -> Sequence[Token]:
        return tokens_of(self.token_ids, self.logprobs)


@dataclass(frozen=True, slots=True)
class SampleEnd:
    """A sample's last output.

    Attributes:
        num_tokens: generated tokens in all.
        text: was held back until now.
        at_stop_string: the text ends before a stop string; tokens that start at its end are part of it.
    """

    sample: int
    num_tokens: int
    text: str
    finish_reason: FinishReason
    at_stop_string: bool


@dataclass(frozen=True, slots=True)
class End:
    """Comes once, last. `last` is the end of the sample that ended last."""

    last: SampleEnd
    usage: Usage
    stage_times: StageTimes
    served_by: ServedBy


Output = ScoredPrompt | Piece | SampleEnd | End
