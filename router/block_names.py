"""The names of a prompt's full blocks, as worker.proto defines them for CacheEvent."""

import sys
from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b

_NAME_BYTES = 16
# blake2b's longest key.
_MAX_KEY_BYTES = 64


def block_names(tokens: Sequence[int], block_size: int, salt: str) -> Iterator[bytes]:
    """One after the other, made when it is asked for: a prompt that nobody has costs one.

    Args:
        salt: the request's `cache_salt`.
    """
    key = salt.encode()
    if len(key) > _MAX_KEY_BYTES:
        key = blake2b(key, digest_size=32).digest()
    for start in range(0, len(tokens) - block_size + 1, block_size):
        content = array("q", tokens[start : start + block_size])
        if sys.byteorder == "big":
            content.byteswap()
        key = blake2b(content, digest_size=_NAME_BYTES, key=key).digest()
        yield key
