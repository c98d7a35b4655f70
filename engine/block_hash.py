"""Names for the content of full blocks: equal names, equal tokens from the sequence's start."""

from collections.abc import Sequence
from hashlib import blake2b
from typing import NewType

import numpy as np

BlockHash = NewType("BlockHash", bytes)

_HASH_BYTES = 16


def extend_hashes(hashes: list[BlockHash], tokens: Sequence[int], block_size: int, salt: str) -> None:
    """Appends the names of the full blocks of `tokens` that `hashes` does not have yet.

    A name is a hash of the block's tokens and of the name before it, the first one's of `salt`: it stands
    for the whole prefix. Cryptographic, so that nobody can make a prompt that hits another's blocks.
    """
    for index in range(len(hashes), len(tokens) // block_size):
        parent = hashes[-1] if hashes else salt.encode()
        content = np.array(tokens[index * block_size : (index + 1) * block_size], np.int64).tobytes()
        hashes.append(BlockHash(blake2b(content, digest_size=_HASH_BYTES, key=_key(parent)).digest()))


def _key(parent: bytes) -> bytes:
    """blake2b takes keys of up to 64 bytes; a longer salt is hashed first."""
    return parent if len(parent) <= 64 else blake2b(parent, digest_size=32).digest()
