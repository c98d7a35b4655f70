"""GGUF files of the user's."""

import hashlib
import re
from pathlib import Path

from model_store.errors import CorruptFile, UnknownModel

_MAGIC = b"GGUF"
_SPLIT = re.compile(r"-\d{5}-of-\d{5}$")
_HEAD_BYTES = 4 << 20
_NUM_SAMPLES = 64
_SAMPLE_BYTES = 4096


def is_gguf_path(model: str) -> bool:
    """Whether `model` is meant as the path of a GGUF file, there or not."""
    return model.endswith(".gguf")


def conversion_name(path: Path) -> str:
    """What a file's conversion is kept under: its name, and a digest of what is in it.

    Of the size, the first 4 MiB (what describes the model) and 64 samples of 4 KiB spread evenly:
    milliseconds for any size. A change of a few bytes in the weights can go unseen.

    Raises:
        UnknownModel: there is no such file, or it is one part of several.
        CorruptFile: it is no GGUF, or cannot be read.
    """
    if not path.is_file():
        raise UnknownModel(f"There is no file {path}.")
    if _SPLIT.search(path.stem):
        raise UnknownModel(f"{path} is one part of several: merge them first, `llama-gguf-split --merge`.")
    try:
        return f"{path.stem}-{_digest(path)}"
    except OSError as error:
        raise CorruptFile(f"{path} cannot be read: {error}.") from error


def _digest(path: Path) -> str:
    size = path.stat().st_size
    digest = hashlib.blake2b(str(size).encode(), digest_size=8)
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
        if not head.startswith(_MAGIC):
            raise CorruptFile(f"{path} is not a GGUF file.")
        digest.update(head)
        for sample in range(_NUM_SAMPLES):
            file.seek(max(0, size - _SAMPLE_BYTES) * sample // (_NUM_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
