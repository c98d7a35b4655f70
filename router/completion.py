"""What comes back for a request: pieces of text, then one end."""

from dataclasses import dataclass
from enum import Enum


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of the prompt, and tokens that were delivered."""

    prompt_tokens: int
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Where the request's time went, in seconds: the stages of inference.proto."""

    door_s: float = 0.0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    decode_wait_s: float = 0.0
    decode_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ServedBy:
    """Worker ids, "" for the one that did not decode; `kv_bytes` is 0 without a hand-off."""

    prefill_worker: str
    decode_worker: str
    kv_bytes: int


@dataclass(frozen=True, slots=True)
class Piece:
    """The next tokens and the text that they made final, which can lag behind them.

    Attributes:
        index: the place of the first of `token_ids` among the generated tokens.
    """

    index: int
    token_ids: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True)
class End:
    """Comes once, last. `text` was held back until now."""

    text: str
    finish_reason: FinishReason
    usage: Usage
    stage_times: StageTimes
    served_by: ServedBy
