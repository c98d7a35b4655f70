"""A model's folder: config.json, *.safetensors, tokenizer.json. Checked without reading the weights."""

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer

from model_store.errors import CorruptFile, IncompleteFolder

WEIGHTS_INDEX = "model.safetensors.index.json"


def check_folder(folder: Path) -> None:
    """Finds what would stop a worker or a router from starting on this folder, in well under a second.

    Raises:
        IncompleteFolder: no config.json, no weights or not all of them, or no tokenizer.json.
        CorruptFile: one of them is cut short, or is not what its name says.
    """
    _read_json_object(_required(folder, "config.json"))
    for path in _weight_files(folder):
        _check_weights(path)
    _check_tokenizer(_required(folder, "tokenizer.json"))


def _required(folder: Path, name: str) -> Path:
    path = folder / name
    if not path.is_file():
        raise IncompleteFolder(
            f"{folder} has no {name}: a model's folder holds config.json, *.safetensors and tokenizer.json."
        )
    return path


def _weight_files(folder: Path) -> list[Path]:
    index = folder / WEIGHTS_INDEX
    if index.is_file():
        return [_required(folder, name) for name in _shard_names(index)]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise IncompleteFolder(
            f"{folder} has no weights: a model's folder holds config.json, *.safetensors and tokenizer.json."
        )
    return files


def _shard_names(index: Path) -> list[str]:
    weight_map = _read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CorruptFile(f"{index} has no weight_map.")
    return sorted({str(name) for name in weight_map.values()})


def _read_json_object(path: Path) -> dict[str, object]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CorruptFile(f"{path} is not JSON: {error}.") from error
    if not isinstance(content, dict):
        raise CorruptFile(f"{path} is not a JSON object.")
    return content


def _check_weights(path: Path) -> None:
    try:
        with safe_open(path, framework="numpy"):  # compares the header with the file's length
            pass
    except SafetensorError as error:
        raise CorruptFile(f"{path} is not a whole safetensors file: {error}.") from error


def _check_tokenizer(path: Path) -> None:
    try:
        Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing narrower
        raise CorruptFile(f"{path} is not a tokenizer: {error}.") from error
