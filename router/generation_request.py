"""The one request that both doors make, and the limits it is held to.

A door turns its wire format into a `RequestDraft`; `GenerationRequest` is the draft after every check,
with its prompt as token ids and nothing left to default but the seed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from router.api_keys import ANONYMOUS, ApiKey
from router.chat_template import ChatMessage
from router.errors import invalid
from router.sampling_options import Limits, SamplingDraft, SamplingOptions, check_token_ids

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_CACHE_SALT_CHARS = 256


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """
    Attributes:
        add_special_tokens: those that the tokenizer puts around it.
    """

    text: str
    add_special_tokens: bool = True


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


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestDraft:
    """What a client asked, unchecked.

    Attributes:
        model: empty: the one that is served.
        markup: special tokens that stay in the text.
        api_key: the client's.
        priority: requests with a lower one go to the workers earlier.
        arrival_s: on `time.monotonic`'s clock; `arrival_unix_s` is the same moment since the epoch.
    """

    request_id: str
    model: str
    prompt: Prompt
    sampling: SamplingDraft
    stop: tuple[str, ...] = ()
    markup: tuple[str, ...] = ()
    cache_salt: str = ""
    api_key: ApiKey = ANONYMOUS
    priority: int = 0
    arrival_s: float
    arrival_unix_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A request that a worker can run as it is.

    Attributes:
        prompt: at least one token id.
        stop: the text ends before the first of these: at most `MAX_STOP_STRINGS` of 1 to
            `MAX_STOP_CHARS` characters.
        markup: special tokens that stay in the text.
        cache_salt: only requests with the same one share cached prefixes; at most `MAX_CACHE_SALT_CHARS`.
    """

    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingOptions
    stop: tuple[str, ...]
    markup: tuple[str, ...]
    cache_salt: str
    arrival_s: float
    arrival_unix_s: float


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
    check_token_ids(field, token_ids, limits)
    return tuple(token_ids)


def check_cache_salt(salt: str) -> str:
    """
    Raises:
        RequestError: INVALID_ARGUMENT, it is too long.
    """
    if len(salt) > MAX_CACHE_SALT_CHARS:
        raise invalid("cache_salt", f"has at most {MAX_CACHE_SALT_CHARS} characters, got {len(salt)}")
    return salt
