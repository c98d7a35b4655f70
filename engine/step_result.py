"""What an engine tells of its steps."""

from dataclasses import dataclass
from typing import NamedTuple

from engine.logprobs import TokenLogprobs
from engine.prompt_rows import ToldPromptLogprobs
from engine.request import FinishReason, SequenceId
from engine.sequence import StageMarks


@dataclass(frozen=True, slots=True)
class GrantedSequence:
    """`cached_tokens`: its first tokens whose KV is in its blocks already."""

    sequence_id: SequenceId
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class SampledToken:
    """`index`: its place among the sample's generated tokens. `logprobs`: None if nobody asked."""

    sequence_id: SequenceId
    sample: int
    index: int
    token: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class EndedSequence:
    """A sample that has its end; its blocks are free.

    Attributes:
        is_last: no other sample of the request is left.
        cached_tokens: prompt tokens that were not computed here.
    """

    sequence_id: SequenceId
    sample: int
    reason: FinishReason
    is_last: bool
    marks: StageMarks
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class HeldSequence:
    """A request whose samples have their first tokens and that keeps its blocks until `Engine.remove`.

    Attributes:
        cached_tokens: prompt tokens that were not computed here.
    """

    sequence_id: SequenceId
    first_tokens: tuple[int, ...]
    marks: StageMarks
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step brought. Every ended or held sequence's last tokens are also in `tokens`."""

    tokens: tuple[SampledToken, ...]
    ended: tuple[EndedSequence, ...]
    held: tuple[HeldSequence, ...]
    prompt_logprobs: tuple[ToldPromptLogprobs, ...]
    num_prompt_tokens: int
    duration_s: float


class EngineLoad(NamedTuple):
    """How busy an engine is. The totals count from its start. Cached blocks count as free."""

    num_running: int
    num_waiting: int
    waiting_prompt_tokens: int
    num_blocks: int
    free_blocks: int
    computed_prompt_tokens: int
    generated_tokens: int
    num_preemptions: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
