"""Text to token ids and back, as the model's folder says."""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

import tokenizers

from router.chat_template import ChatMessage, ChatTemplate, load_chat_template
from router.errors import invalid

# Longer texts are tokenized in a thread: below it a token stream waits less than a millisecond for it.
INLINE_CHARS = 2048
# The same, of what is done to each of many tokens.
INLINE_TOKENS = 512

_SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")


T = TypeVar("T")


class Tokenizer:
    """The tokenizer and the chat template of one model."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str],
        chat_template: ChatTemplate | None,
    ) -> None:
        self._backend = backend
        self._chat_template = chat_template
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenize")
        added = backend.get_added_tokens_decoder()
        flagged = {id_ for id_, token in added.items() if token.special}
        named = {id_ for token in special_tokens.values() if (id_ := backend.token_to_id(token)) is not None}
        self.special_ids: frozenset[int] = frozenset(flagged | named)
        # Such decoders judge a run of byte tokens as a whole: see Detokenizer.
        decoder = json.loads(backend.to_str())["decoder"] or {}
        self.byte_fallback_ids: frozenset[int] = _byte_fallback_ids(backend, json.dumps(decoder))
        # Written as they are, not in the characters of bytes.
        self._added_ids = frozenset(added)
        self._bytes_of_char = _bytes_of_char(json.dumps(decoder))
        # Whether a text is the bytes of its tokens, one after the other.
        self.is_byte_level: bool = decoder.get("type") == "ByteLevel"
        self._known_bytes: dict[int, bytes] = {}
        # Of tokens that begin and end between characters: Utf8Detokenizer remembers them here.
        self.whole_texts: dict[int, str] = {}

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """Reads tokenizer.json, tokenizer_config.json and the chat template of a Hugging Face folder.

        Raises:
            ValueError: the folder has no tokenizer.json, or a file is damaged.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"{folder} has no tokenizer.json")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the binding raises nothing narrower
            raise ValueError(f"{path} is damaged: {error}") from error
        backend.no_padding()
        backend.no_truncation()
        config = read_json_object(folder / "tokenizer_config.json")
        special_tokens = _special_tokens({**read_json_object(folder / "special_tokens_map.json"), **config})
        return cls(backend, special_tokens, load_chat_template(folder, config, special_tokens))

    async def encode_text(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """The ids of a raw prompt.

        Args:
            add_special_tokens: those that tokenizer.json adds around it. `add_bos_token` in
                tokenizer_config.json does not count where there is a tokenizer.json: transformers reads a
                folder the same way.
        """
        return await self._encode(text, add_special_tokens=add_special_tokens)

    async def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, object]] = (),
        answer_start: str = "",
        *,
        add_generation_prompt: bool = True,
    ) -> tuple[int, ...]:
        """The ids of a conversation. The template writes every special token itself, BOS included.

        Args:
            answer_start: what the answer already says.
            add_generation_prompt: ends with the opening of the assistant's next turn.

        Raises:
            RequestError: INVALID_ARGUMENT, there is no template, or it refuses the messages or the tools.
        """
        template = self._chat_template
        if template is None:
            raise invalid("messages", "the model has no chat template; send a prompt instead")
        length = sum(len(message.content) + len(message.tool_calls) * INLINE_CHARS for message in messages)
        render = partial(template.render, messages, tools, add_generation_prompt=add_generation_prompt)
        if length <= INLINE_CHARS and not tools:
            text = render()
        else:
            text = await self._in_thread(render)
        return await self._encode(text + answer_start, add_special_tokens=False)

    async def _encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        def encode() -> tuple[int, ...]:
            # `encode` would hold the interpreter's lock for as long as it runs; `encode_batch` does not.
            (encoding,) = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)
            return tuple(encoding.ids)

        return encode() if len(text) <= INLINE_CHARS else await self._in_thread(encode)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def decode(self, token_ids: Sequence[int], shown: frozenset[int] = frozenset()) -> str:
        """The text of generated tokens: special tokens that are not `shown` are left out."""
        kept = [id_ for id_ in token_ids if id_ not in self.special_ids or id_ in shown]
        return self._backend.decode(kept, skip_special_tokens=False)

    def prompt_text(self, token_ids: Sequence[int]) -> str:
        """The text of a prompt that came as tokens, special tokens included."""
        return self._backend.decode(list(token_ids), skip_special_tokens=False)

    async def decode_prompt(self, token_ids: Sequence[int]) -> str:
        """`prompt_text`, of however many tokens."""

        def decode() -> str:
            # Without the interpreter's lock, as `encode_batch`.
            (text,) = self._backend.decode_batch([list(token_ids)], skip_special_tokens=False)
            return text

        return decode() if len(token_ids) <= INLINE_TOKENS else await self._in_thread(decode)

    async def names(self, token_ids: Sequence[int]) -> list[str]:
        """The vocabulary's entries, as they are. "" for a token that it does not name."""

        def look_up() -> list[str]:
            return [self._backend.id_to_token(id_) or "" for id_ in token_ids]

        return look_up() if len(token_ids) <= INLINE_TOKENS else await self._in_thread(look_up)

    def token_text(self, token_id: int) -> str:
        """Of one token alone, a special token by its name. U+FFFD stands for a part of a character."""
        return self._backend.decode([token_id], skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        """What the token stands for in UTF-8: the bytes of several tokens can make one character."""
        name = self._backend.id_to_token(token_id) or ""
        if token_id in self.byte_fallback_ids:
            return bytes.fromhex(name[3:5])
        if token_id not in self._added_ids and name and all(char in self._bytes_of_char for char in name):
            return bytes(self._bytes_of_char[char] for char in name)
        return self.token_text(token_id).encode()

    def known_bytes(self, token_id: int) -> bytes:
        """`token_bytes`, remembered: a vocabulary is all that can come."""
        known = self._known_bytes.get(token_id)
        if known is None:
            known = self._known_bytes[token_id] = self.token_bytes(token_id)
        return known

    def special_ids_of(self, tokens: Sequence[str]) -> frozenset[int]:
        """Those of `tokens` that are special."""
        return self.special_ids & {self._backend.token_to_id(token) for token in tokens}

    @property
    def tool_template(self) -> str:
        """The text of the chat template that has tools; "" without one."""
        return "" if self._chat_template is None else self._chat_template.tool_source

    def has_token(self, text: str) -> bool:
        return self._backend.token_to_id(text) is not None

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def read_json_object(path: Path) -> dict[str, object]:
    """The object in a file, {} when there is no such file.

    Raises:
        ValueError: the file is not a JSON object.
    """
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} is not a JSON object")
    return value


def _special_tokens(config: Mapping[str, object]) -> dict[str, str]:
    """Name to token, from values that are a string or an object with `content`."""
    found: dict[str, str] = {}
    for name in _SPECIAL_TOKEN_NAMES:
        match config.get(name):
            case str() as token:
                found[name] = token
            case {"content": str() as token}:
                found[name] = token
    return found


def _byte_fallback_ids(backend: tokenizers.Tokenizer, decoder: str) -> frozenset[int]:
    """Ids of `<0x00>` to `<0xFF>` where the tokenizer's decoder turns them into bytes."""
    if '"ByteFallback"' not in decoder:
        return frozenset()
    ids = (backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
    return frozenset(id_ for id_ in ids if id_ is not None)


def _bytes_of_char(decoder: str) -> dict[str, int]:
    """What byte each character of a byte-level token stands for; {} for other tokenizers.

    The table is GPT-2's: printable Latin-1 characters stand for themselves, the other bytes in order for
    the characters from U+0100 on.
    """
    if '"ByteLevel"' not in decoder:
        return {}
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + place): byte for place, byte in enumerate(others)}
