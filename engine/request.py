"""What an engine is asked, and how it ends."""

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, NewType

if TYPE_CHECKING:
    from engine.grammar import CompiledGrammar

SequenceId = NewType("SequenceId", str)


class InvalidRequest(ValueError):
    """The request can never run on this engine. The message names the field and its limit."""


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"


class KVSource(Enum):
    """Where the KV of a sequence's prompt comes from."""

    COMPUTE = "compute"
    HANDOFF = "handoff"


class RunUntil(Enum):
    """How far an engine takes a sequence."""

    END = "end"
    # The blocks stay held after the first token, until `Engine.release`: they are handed off.
    FIRST_TOKEN = "first_token"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when they end. Complete: nothing is left to default by the time it is here.

    Attributes:
        temperature: 0 is greedy.
        top_k: keep the k likeliest; 0 keeps all.
        top_p: keep the likeliest that add up to this probability, in (0, 1].
        min_p: keep tokens at least this fraction as likely as the likeliest, in [0, 1].
        seed: of the counter-based noise, 64 bits.
        max_tokens: generated tokens in all, those of earlier attempts included.
        min_tokens: no stop token before this many generated tokens.
        stop_token_ids: end the sequence, beside the model's own.
        ignore_eos: the model's own end-of-sequence tokens do not end it.
        presence_penalty: subtracted once from the logit of every generated token.
        frequency_penalty: subtracted for every time that a token was generated.
        repetition_penalty: logits of tokens of the prompt and generated are divided by it if positive,
            multiplied if negative; over 0, 1 changes nothing.
        logit_bias: (token id, what is added to its logit), each token once.
        logprobs: how many of the likeliest tokens to tell with every sampled one; None tells nothing.
        prompt_logprobs: the same of every prompt token but the first.
        n: samples of the prompt.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """All of a request: any engine can go on from here.

    Attributes:
        prompt: token ids, at least one.
        generated: tokens that earlier attempts sampled; the next one's index is their number.
        arrival_s: when the request came to the router, seconds since the Unix epoch; orders the queue.
        sample: which of the request's samples; part of the noise's key.
        grammar: what the generated text must be.
        cache_salt: only requests with the same one share cached prefixes.
        export_from: the receiver of a hand-off has the KV of the tokens before this one.
    """

    sequence_id: SequenceId
    prompt: tuple[int, ...]
    generated: tuple[int, ...] = ()
    sampling: SamplingParams
    arrival_s: float
    sample: int = 0
    kv_source: KVSource = KVSource.COMPUTE
    run_until: RunUntil = RunUntil.END
    grammar: "CompiledGrammar | None" = None
    cache_salt: str = ""
    export_from: int = 0
