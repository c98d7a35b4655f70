"""How a request's tokens are chosen and when they end, and the limits of all that."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from router.errors import invalid
from router.grammar import Grammar, check_grammar

MAX_TEMPERATURE = 2.0
MAX_STOP_TOKENS = 128
SEEDS = 2**64
# The OpenAI API's.
MAX_PENALTY = 2.0
MAX_REPETITION_PENALTY = 2.0
MAX_LOGIT_BIAS = 100.0
MAX_LOGIT_BIASES = 1024
# Every sample takes a place in the decode worker's batch.
MAX_SAMPLES = 16
MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class Limits:
    """What the model and its workers can do. None: unknown, not checked here."""

    vocab_size: int | None
    max_model_len: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDraft:
    """What a client asked, unchecked. None: not said."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    n: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """Checked and complete, but for the seed.

    Attributes:
        temperature: 0 is greedy; to `MAX_TEMPERATURE`.
        top_k: keep the k likeliest; 0 keeps all.
        top_p: keep the likeliest that add up to this probability, in (0, 1].
        min_p: keep tokens at least this fraction as likely as the likeliest, in [0, 1].
        seed: 64 bits. None: the router draws one.
        max_tokens: of each sample; at least 1; with the prompt at most the model's context.
        min_tokens: no stop token before this many; at most `max_tokens`.
        stop_token_ids: at most `MAX_STOP_TOKENS`.
        ignore_eos: the model's own end-of-sequence tokens do not end the text.
        presence_penalty, frequency_penalty: in +-`MAX_PENALTY`; 0 changes nothing.
        repetition_penalty: over 0, to `MAX_REPETITION_PENALTY`; 1 changes nothing.
        logit_bias: token id to what is added to its logit, in +-`MAX_LOGIT_BIAS`; at most
            `MAX_LOGIT_BIASES` of them.
        n: samples of the prompt, 1 to `MAX_SAMPLES`.
        logprobs: how many of the likeliest tokens are told with every generated one, 0 to `MAX_LOGPROBS`.
            None: no log probabilities at all.
        prompt_logprobs: the same of the prompt's tokens.
        grammar: what the text must be.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int | None
    max_tokens: int
    min_tokens: int
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float]
    n: int
    logprobs: int | None
    prompt_logprobs: int | None
    grammar: Grammar | None


def check_sampling(draft: SamplingDraft, num_prompt_tokens: int, limits: Limits) -> SamplingOptions:
    """
    Raises:
        RequestError: INVALID_ARGUMENT, naming the first field that is out of its range.
    """
    max_tokens = _max_tokens(draft.max_tokens, num_prompt_tokens, limits)
    penalty = (0.0, -MAX_PENALTY, MAX_PENALTY)
    return SamplingOptions(
        temperature=_in_range("temperature", draft.temperature, 1.0, 0.0, MAX_TEMPERATURE),
        top_k=_top_k(draft.top_k),
        top_p=_over_zero("top_p", draft.top_p, 1.0),
        min_p=_in_range("min_p", draft.min_p, 0.0, 0.0, 1.0),
        seed=_seed(draft.seed),
        max_tokens=max_tokens,
        min_tokens=_min_tokens(draft.min_tokens, max_tokens),
        stop_token_ids=_stop_token_ids(draft.stop_token_ids, limits),
        ignore_eos=draft.ignore_eos,
        presence_penalty=_in_range("presence_penalty", draft.presence_penalty, *penalty),
        frequency_penalty=_in_range("frequency_penalty", draft.frequency_penalty, *penalty),
        repetition_penalty=_over_zero("repetition_penalty", draft.repetition_penalty, MAX_REPETITION_PENALTY),
        logit_bias=_logit_bias(draft.logit_bias, limits),
        n=_samples(draft.n),
        logprobs=_logprobs("logprobs", draft.logprobs),
        prompt_logprobs=_logprobs("prompt_logprobs", draft.prompt_logprobs),
        grammar=check_grammar(draft.grammar),
    )


def check_token_ids(name: str, token_ids: Sequence[int], limits: Limits) -> None:
    """
    Raises:
        RequestError: INVALID_ARGUMENT, one is not in the model's vocabulary.
    """
    bound = 2**32 if limits.vocab_size is None else limits.vocab_size
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= bound):
        wrong = next(id_ for id_ in token_ids if not 0 <= id_ < bound)
        raise invalid(name, f"token ids must be 0 to {bound - 1}, got {_short(wrong)}")


def _in_range(name: str, value: float | None, default: float, low: float, high: float) -> float:
    if value is None:
        return default
    if math.isnan(value) or not low <= value <= high:
        raise invalid(name, f"must be {low:g} to {high:g}, got {value:g}")
    return float(value)


def _over_zero(name: str, value: float | None, high: float) -> float:
    """1 if it is not said."""
    checked = _in_range(name, value, 1.0, 0.0, high)
    if checked == 0:
        raise invalid(name, "must be above 0")
    return checked


def _top_k(wanted: int | None) -> int:
    top_k = wanted or 0
    if not 0 <= top_k < 2**31:
        raise invalid("top_k", f"must be at least 0 (0 keeps all tokens), got {_short(top_k)}")
    return top_k


def _seed(wanted: int | None) -> int | None:
    if wanted is None:
        return None
    if not -(SEEDS // 2) <= wanted < SEEDS:
        raise invalid("seed", "must fit into 64 bits")
    return wanted % SEEDS


def _max_tokens(wanted: int | None, num_prompt_tokens: int, limits: Limits) -> int:
    room = None if limits.max_model_len is None else limits.max_model_len - num_prompt_tokens
    if wanted is None:
        if room is None:
            raise invalid("max_tokens", "must be given: the model's context is not known yet")
        return room
    if not 1 <= wanted < 2**31:
        raise invalid("max_tokens", f"must be at least 1, got {_short(wanted)}")
    if room is not None and wanted > room:
        raise invalid(
            "max_tokens",
            f"{wanted} with a prompt of {num_prompt_tokens} tokens is over the model's context "
            f"of {limits.max_model_len}; at most {room}",
        )
    return wanted


def _min_tokens(wanted: int | None, max_tokens: int) -> int:
    min_tokens = wanted or 0
    if not 0 <= min_tokens <= max_tokens:
        raise invalid("min_tokens", f"must be 0 to max_tokens ({max_tokens}), got {_short(min_tokens)}")
    return min_tokens


def _stop_token_ids(token_ids: tuple[int, ...], limits: Limits) -> tuple[int, ...]:
    if len(token_ids) > MAX_STOP_TOKENS:
        raise invalid("stop_token_ids", f"at most {MAX_STOP_TOKENS}, got {len(token_ids)}")
    check_token_ids("stop_token_ids", token_ids, limits)
    return token_ids


def _logit_bias(biases: Mapping[int, float], limits: Limits) -> Mapping[int, float]:
    if len(biases) > MAX_LOGIT_BIASES:
        raise invalid("logit_bias", f"at most {MAX_LOGIT_BIASES} tokens, got {len(biases)}")
    check_token_ids("logit_bias", list(biases), limits)
    return {
        id_: _in_range("logit_bias", bias, 0.0, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
        for id_, bias in biases.items()
    }


def _samples(wanted: int | None) -> int:
    n = 1 if wanted is None else wanted
    if not 1 <= n <= MAX_SAMPLES:
        raise invalid("n", f"must be 1 to {MAX_SAMPLES}, got {_short(n)}")
    return n


def _logprobs(name: str, wanted: int | None) -> int | None:
    if wanted is not None and not 0 <= wanted <= MAX_LOGPROBS:
        raise invalid(name, f"must be 0 to {MAX_LOGPROBS}, got {_short(wanted)}")
    return wanted


def _short(value: int) -> str:
    """For a message, however long the client's number is."""
    text = str(value)
    return text if len(text) <= 20 else f"{text[:17]}..."
