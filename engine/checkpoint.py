"""The weights of a Hugging Face folder, and what identifies them."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.model_config import CorruptCheckpoint, UnsupportedModel

_SINGLE_FILE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_WEIGHT_DTYPES = frozenset({"F16", "BF16", "F32", "F64"})
# They say who wrote the file, not what the model computes.
_COSMETIC_FIELDS = frozenset({"transformers_version", "_name_or_path"})
_NUM_SAMPLES = 64
_SAMPLE_BYTES = 4096


class Checkpoint:
    """Reads a folder's safetensors, tensor by tensor, into their last dtype and place.

    The files are mapped, so what it takes beside the results is the page cache's. Every read is noted:
    `check_all_read` finds weights that the model would silently ignore.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        """Raises:
        CorruptCheckpoint: no weights, or a damaged file.
        """
        self._folder = folder
        self._dtype = dtype
        self._device = device
        self._file_of: dict[str, safe_open] = {}
        for path in _weight_files(folder):
            file = _open(path)
            self._file_of |= dict.fromkeys(file.keys(), file)
        self._unread = set(self._file_of)

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Raises:
        CorruptCheckpoint: the tensor is missing, has another shape or cannot be read.
        UnsupportedModel: it is not made of floating-point numbers.
        """
        return self.read_fused([name], [shape])

    def read_fused(self, names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> Tensor:
        """Like `read`, several tensors below each other: [sum of first dimensions, ...]."""
        num_rows = sum(shape[0] for shape in shapes)
        fused = torch.empty((num_rows, *shapes[0][1:]), dtype=self._dtype, device=self._device)
        parts = fused.split([shape[0] for shape in shapes])
        for part, name in zip(parts, names, strict=True):
            self._copy(name, part)
        return fused

    def _copy(self, name: str, target: Tensor) -> None:
        file = self._file_of.get(name)
        if file is None:
            raise CorruptCheckpoint(f"{self._folder}: there is no tensor {name}")
        try:
            described = file.get_slice(name)
            shape, dtype = tuple(described.get_shape()), described.get_dtype()
            if shape != target.shape:
                raise CorruptCheckpoint(
                    f"{self._folder}: {name} is {list(shape)}, its config.json says {list(target.shape)}"
                )
            if dtype not in _WEIGHT_DTYPES:
                raise UnsupportedModel(
                    f"{self._folder}: {name} holds {dtype}; only float weights are supported"
                )
            target.copy_(file.get_tensor(name))
        except SafetensorError as error:
            raise CorruptCheckpoint(f"{self._folder}: {name}: {error}") from error
        self._unread.discard(name)

    def check_all_read(self, ignored: Sequence[str]) -> None:
        """Raises:
        CorruptCheckpoint: a tensor was never read whose name ends with none of `ignored`.
        """
        left = sorted(name for name in self._unread if not name.endswith(tuple(ignored)))
        if left:
            raise CorruptCheckpoint(
                f"{self._folder}: {len(left)} tensors do not belong to this architecture, such as {left[0]}"
            )


def model_fingerprint(folder: Path) -> str:
    """Hex digest of a model: equal folders have equal ones, on every host.

    Of config.json (parsed; who wrote it left out), and of every weights file its name, size, header (each
    tensor's name, dtype, shape, place) and 64 samples of 4 KiB spread evenly: milliseconds for any size.
    Two fine-tunes differ everywhere; a change of a few bytes can go unseen.

    Raises:
        CorruptCheckpoint: a file is missing or damaged.
    """
    digest = hashlib.blake2b(digest_size=16)
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        kept = {key: value for key, value in config.items() if key not in _COSMETIC_FIELDS}
        digest.update(json.dumps(kept, sort_keys=True).encode())
        for path in _weight_files(folder):
            digest.update(path.name.encode())
            for piece in _samples(path):
                digest.update(piece)
    except (OSError, ValueError, AttributeError) as error:
        raise CorruptCheckpoint(f"{folder}: {error}") from error
    return digest.hexdigest()


def _samples(path: Path) -> list[bytes]:
    size = path.stat().st_size
    with path.open("rb") as file:
        header_bytes = min(int.from_bytes(file.read(8), "little"), size)
        pieces = [size.to_bytes(8, "little"), file.read(header_bytes)]
        body = size - 8 - header_bytes
        for sample in range(_NUM_SAMPLES):
            file.seek(8 + header_bytes + max(0, body - _SAMPLE_BYTES) * sample // (_NUM_SAMPLES - 1))
            pieces.append(file.read(_SAMPLE_BYTES))
    return pieces


def _weight_files(folder: Path) -> list[Path]:
    """The one file, or those that the index names, sorted by name."""
    if (folder / _SINGLE_FILE).is_file():
        return [folder / _SINGLE_FILE]
    index = folder / _INDEX
    if not index.is_file():
        raise CorruptCheckpoint(f"{folder}: neither {_SINGLE_FILE} nor {_INDEX}; other formats are not read")
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        paths = [folder / name for name in names]
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CorruptCheckpoint(f"{index}: {error!r}") from error
    for path in paths:
        if not path.is_file():
            raise CorruptCheckpoint(f"{path}: no such file, though {_INDEX} names it")
    return paths


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CorruptCheckpoint(f"{path}: {error}") from error
