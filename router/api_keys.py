"""The API keys that a router accepts, from a file that is read again when it changes."""

import hashlib
import hmac
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

logger = logging.getLogger(__name__)

_YAML = (".yaml", ".yml")


class KeyFileError(ValueError):
    """The file cannot be read as keys. The message names the file and the place, and tells no key."""


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """What a key may use of one router. None: no limit.

    Attributes:
        tokens_per_minute: of prompts and answers together.
    """

    max_concurrent_requests: int | None = None
    tokens_per_minute: int | None = None


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key as the router keeps it: whoever sees the router's memory cannot use it elsewhere.

    Attributes:
        name: for logs.
        sha256: of the key, 32 bytes.
    """

    name: str
    sha256: bytes = field(repr=False)
    limits: KeyLimits = KeyLimits()


# Of every client, where no key is asked for.
ANONYMOUS = ApiKey("anonymous", b"")


class _Entry(BaseModel):
    """One key in a YAML file."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    name: Annotated[str, Field(min_length=1, max_length=128)]
    key: Annotated[str, Field(min_length=1)] | None = None
    sha256: Annotated[str, Field(pattern="^[0-9a-fA-F]{64}$")] | None = None
    max_concurrent_requests: Annotated[int, Field(ge=1)] | None = None
    tokens_per_minute: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _has_one_form(self) -> Self:
        if (self.key is None) == (self.sha256 is None):
            raise ValueError("give either key or sha256")
        return self

    def api_key(self) -> ApiKey:
        digest = _digest(self.key) if self.key is not None else bytes.fromhex(self.sha256 or "")
        return ApiKey(self.name, digest, KeyLimits(self.max_concurrent_requests, self.tokens_per_minute))


_ENTRIES = TypeAdapter(list[_Entry])


@dataclass(frozen=True, slots=True)
class _Version:
    """Differs when a file has been written or replaced."""

    modified_ns: int
    size: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> "_Version":
        stat = path.stat()
        return cls(stat.st_mtime_ns, stat.st_size, stat.st_ino)


class KeyRing:
    """The keys of a file, as it is at the moment of each request."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
            KeyFileError: it cannot be read, or holds no key.
        """
        self._path = path
        self._keys = read_keys(path)
        self._version: _Version | None = _Version.of(path)

    def find(self, presented: str) -> ApiKey | None:
        """The key that a client has presented. The time it takes tells nothing of the keys."""
        self._read_again_if_changed()
        digest = _digest(presented)
        found = None
        for key in self._keys:
            if hmac.compare_digest(key.sha256, digest):
                found = key
        return found

    def _read_again_if_changed(self) -> None:
        """A file that cannot be read leaves the keys as they were: it may be half written."""
        try:
            version = _Version.of(self._path)
        except OSError:
            version = None
        if version == self._version:
            return
        self._version = version
        try:
            self._keys = read_keys(self._path)
            logger.info("read %d API keys", len(self._keys))
        except KeyFileError as error:
            logger.error("the API keys stay as they were: %s", error)


def read_keys(path: Path) -> tuple[ApiKey, ...]:
    """Keys of a YAML file (*.yaml, *.yml), or of one with a key on each line, `#` beginning a comment.

    Raises:
        KeyFileError: see there.
    """
    text = _read(path)
    if path.suffix in _YAML:
        keys = [entry.api_key() for entry in _entries(path, text)]
    else:
        keys = [ApiKey(f"line {number}", _digest(key)) for number, key in _lines(text).items()]
    if not keys:
        raise KeyFileError(f"API keys: {path} holds none")
    if len({key.sha256 for key in keys}) < len(keys):
        raise KeyFileError(f"API keys: {path} holds a key twice")
    return tuple(keys)


def first_plain_key(path: Path) -> str | None:
    """A key of the file as a client shows it. None: the file keeps only digests.

    Raises:
        KeyFileError: see there.
    """
    text = _read(path)
    if path.suffix in _YAML:
        return next((entry.key for entry in _entries(path, text) if entry.key is not None), None)
    return next(iter(_lines(text).values()), None)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise KeyFileError(f"API keys: {path} cannot be read: {type(error).__name__}") from error


def _lines(text: str) -> dict[int, str]:
    """Keys by the number of their line."""
    lines = enumerate((line.strip() for line in text.splitlines()), start=1)
    return {number: line for number, line in lines if line and not line.startswith("#")}


def _entries(path: Path, text: str) -> list[_Entry]:
    try:
        return _ENTRIES.validate_python(yaml.safe_load(text) or [])
    except yaml.YAMLError as error:
        # Its own message quotes the file.
        raise KeyFileError(f"API keys: {path} is not YAML") from error
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise KeyFileError(f"API keys: {path}: {place}: {first['msg']}") from error


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
