"""The one request that both doors make, and the limits it is held to.

A door turns its wire format into a `RequestDraft`; `GenerationRequest` is the draft after every check,
with its prompt as token ids and nothing left to default but the seed.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from router.chat_template import ChatMessage
from router.errors import invalid

MAX_TEMPERATURE = 2.0
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKENS = 128
SEEDS = 2**64


@dataclass(frozen=True, slots=True)
class TextPrompt:
    text: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """
    Attributes:
        tools: what may be called, as the chat template gets it.
        answer_start: what the answer already says.
    """

    messages: tuple[ChatMessage, ...]
    tools: tuple[Mapping[str, object], ...] = ()
    answer_start: str = ""


Prompt = TextPrompt | TokenPrompt | ChatPrompt


class GrammarForm(Enum):
    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the generated text must be; the workers judge `text`, which a JSON_OBJECT does without."""

    form: GrammarForm
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDraft:
    """How a client wants its tokens chosen and ended, unchecked. None: not said."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    grammar: Grammar | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestDraft:
    """What a client asked, unchecked.

    Attributes:
        model: empty: the one that is served.
        markup: special tokens that stay in the text.
        arrival_s: on `time.monotonic`'s clock; `arrival_unix_s` is the same moment since the epoch.
    """

    request_id: str
    model: str
    prompt: Prompt
    sampling: SamplingDraft
    stop: tuple[str, ...] = ()
    markup: tuple[str, ...] = ()
    arrival_s: float
    arrival_unix_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """How tokens are chosen and when they end: checked and complete, but for the seed.

    Attributes:
        temperature: 0 is greedy; to `MAX_TEMPERATURE`.
        top_k: keep the k likeliest; 0 keeps all.
        top_p: keep the likeliest that add up to this probability, in (0, 1].
        min_p: keep tokens at least this fraction as likely as the likeliest, in [0, 1].
        seed: 64 bits. None: the router draws one.
        max_tokens: at least 1; with the prompt at most the model's context.
        min_tokens: no stop token before this many; at most `max_tokens`.
        stop_token_ids: at most `MAX_STOP_TOKENS`.
        ignore_eos: the model's own end-of-sequence tokens do not end the text.
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
    grammar: Grammar | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A request that a worker can run as it is.

    Attributes:
        prompt: at least one token id.
        stop: the text ends before the first of these: at most `MAX_STOP_STRINGS` of 1 to
            `MAX_STOP_CHARS` characters.
        markup: special tokens that stay in the text.
    """

    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingOptions
    stop: tuple[str, ...]
    markup: tuple[str, ...]
    arrival_s: float
    arrival_unix_s: float


@dataclass(frozen=True, slots=True)
class Limits:
    """What the model and its workers can do. None: unknown, not checked here."""

    vocab_size: int | None
    max_model_len: int | None


def check_stop(stop: Sequence[str]) -> tuple[str, ...]:
    """
    Raises:
        RequestError: INVALID_ARGUMENT, too many stop strings, or an empty or a too long one.
    """
    if len(stop) > MAX_STOP_STRINGS:
        raise invalid("stop", f"at most {MAX_STOP_STRINGS} strings, got {len(stop)}")
    for text in stop:
        if not 1 <= len(text) <= MAX_STOP_CHARS:
            raise invalid("stop", f"each string must have 1 to {MAX_STOP_CHARS} characters, got {len(text)}")
    return tuple(dict.fromkeys(stop))


def check_prompt(field: str, token_ids: Sequence[int], limits: Limits) -> tuple[int, ...]:
    """
    Args:
        field: what the client calls the prompt.

    Raises:
        RequestError: INVALID_ARGUMENT, it is empty, leaves no room for one token, or names a token
            that does not exist.
    """
    if not token_ids:
        raise invalid(field, "must have at least one token")
    if limits.max_model_len is not None and len(token_ids) >= limits.max_model_len:
        raise invalid(
            field,
            f"has {len(token_ids)} tokens; the model's context of {limits.max_model_len} "
            "must leave room for one more",
        )
    _check_token_ids(field, token_ids, limits)
    return tuple(token_ids)


def check_sampling(draft: SamplingDraft, num_prompt_tokens: int, limits: Limits) -> SamplingOptions:
    """
    Raises:
        RequestError: INVALID_ARGUMENT, naming the first field that is out of its range.
    """
    temperature = _in_range("temperature", draft.temperature, 1.0, 0.0, MAX_TEMPERATURE)
    top_p = _in_range("top_p", draft.top_p, 1.0, 0.0, 1.0)
    if top_p == 0:
        raise invalid("top_p", "must be above 0")
    min_p = _in_range("min_p", draft.min_p, 0.0, 0.0, 1.0)
    top_k = draft.top_k or 0
    if not 0 <= top_k < 2**31:
        raise invalid("top_k", f"must be at least 0 (0 keeps all tokens), got {top_k}")
    if draft.seed is not None and not -(SEEDS // 2) <= draft.seed < SEEDS:
        raise invalid("seed", "must fit into 64 bits")
    max_tokens = _max_tokens(draft.max_tokens, num_prompt_tokens, limits)
    min_tokens = draft.min_tokens or 0
    if not 0 <= min_tokens <= max_tokens:
        raise invalid("min_tokens", f"must be 0 to max_tokens ({max_tokens}), got {min_tokens}")
    if len(draft.stop_token_ids) > MAX_STOP_TOKENS:
        raise invalid("stop_token_ids", f"at most {MAX_STOP_TOKENS}, got {len(draft.stop_token_ids)}")
    _check_token_ids("stop_token_ids", draft.stop_token_ids, limits)
    return SamplingOptions(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=None if draft.seed is None else draft.seed % SEEDS,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop_token_ids=draft.stop_token_ids,
        ignore_eos=draft.ignore_eos,
        grammar=draft.grammar,
    )


def _in_range(field: str, value: float | None, default: float, low: float, high: float) -> float:
    if value is None:
        return default
    if math.isnan(value) or not low <= value <= high:
        raise invalid(field, f"must be {low:g} to {high:g}, got {value:g}")
    return float(value)


def _max_tokens(wanted: int | None, num_prompt_tokens: int, limits: Limits) -> int:
    room = None if limits.max_model_len is None else limits.max_model_len - num_prompt_tokens
    if wanted is None:
        if room is None:
            raise invalid("max_tokens", "must be given: the model's context is not known yet")
        return room
    if not 1 <= wanted < 2**31:
        raise invalid("max_tokens", f"must be at least 1, got {wanted}")
    if room is not None and wanted > room:
        raise invalid(
            "max_tokens",
            f"{wanted} with a prompt of {num_prompt_tokens} tokens is over the model's context "
            f"of {limits.max_model_len}; at most {room}",
        )
    return wanted


def _check_token_ids(field: str, token_ids: Sequence[int], limits: Limits) -> None:
    bound = 2**32 if limits.vocab_size is None else limits.vocab_size
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= bound):
        wrong = next(id_ for id_ in token_ids if not 0 <= id_ < bound)
        raise invalid(field, f"token ids must be 0 to {bound - 1}, got {wrong}")
