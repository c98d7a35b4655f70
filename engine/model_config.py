"""What a model's Hugging Face folder says of it, whatever its family."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from engine.kv_layout import DTYPES

# Beyond the original length their angles depend on the length of the sequence: cached keys would not stay
# valid, and the sequences of a step would change each other's.
_LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})

JsonObject: TypeAlias = Mapping[str, object]


class ModelError(Exception):
    """The model cannot be served. The message says why, and names the file."""


class UnsupportedModel(ModelError):
    """The model is sound but needs something that this engine does not have."""


class CorruptCheckpoint(ModelError):
    """A file of the model is missing, damaged, or contradicts another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder that transformers implements.

    Attributes:
        folder: which it was read from.
        architecture: transformers' name of its class.
        max_model_len: positions that the model knows and this engine can serve, in tokens.
        checkpoint_dtype: a key of `DTYPES`.
        hf_config: as transformers reads config.json.
    """

    folder: Path
    architecture: str
    eos_token_ids: frozenset[int]
    max_model_len: int
    checkpoint_dtype: str
    hf_config: PreTrainedConfig


def read_model_config(folder: Path) -> ModelConfig:
    """Reads config.json and generation_config.json.

    Raises:
        CorruptCheckpoint: the folder or config.json is missing, or a file does not say what it must.
        UnsupportedModel: it is no decoder of text that transformers has code for, or it is quantized.
    """
    if not folder.is_dir():
        raise CorruptCheckpoint(f"{folder}: no such folder")
    raw = _read_json(folder / "config.json")
    names = raw.get("architectures")
    if not isinstance(names, list) or not names:
        raise CorruptCheckpoint(f"{folder / 'config.json'}: names no architecture")
    if raw.get("quantization_config") is not None:
        raise UnsupportedModel(f"{folder}: quantized checkpoints are not supported")
    config = _hf_config(folder, raw)
    try:
        return ModelConfig(
            folder=folder,
            architecture=_architecture(folder, names, config),
            eos_token_ids=_eos_token_ids(folder, config),
            max_model_len=_max_model_len(folder, config),
            checkpoint_dtype=_checkpoint_dtype(config),
            hf_config=config,
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CorruptCheckpoint(f"{folder / 'config.json'}: {error!r}") from error


def _read_json(path: Path) -> JsonObject:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CorruptCheckpoint(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise CorruptCheckpoint(f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise CorruptCheckpoint(f"{path}: not a JSON object")
    return value


def _hf_config(folder: Path, raw: JsonObject) -> PreTrainedConfig:
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    # transformers raises whatever its validators raise, plain Exception subclasses among them.
    except Exception as error:
        if "auto_map" in raw:
            raise UnsupportedModel(
                f"{folder}: {raw.get('model_type')} needs code of its own, and no model's code is run here"
            ) from error
        raise CorruptCheckpoint(f"{folder / 'config.json'}: {error}") from error


def _architecture(folder: Path, names: list[object], config: PreTrainedConfig) -> str:
    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    if config.is_encoder_decoder:
        reason = "it has an encoder, and only decoders are served"
    elif any(isinstance(getattr(config, name, None), PreTrainedConfig) for name in config.sub_configs):
        reason = "it is not a model of text alone"
    elif known is None or known not in names:
        reason = f"transformers' decoder of type {config.model_type} is {known or 'missing'}"
    else:
        return known
    raise UnsupportedModel(f"{folder}: architecture {names[0]} is not supported: {reason}")


def rope_parameters(config: PreTrainedConfig) -> list[JsonObject]:
    """Every set of RoPE parameters of a model: none, one, or one for each type of layer."""
    found = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in found.values() if isinstance(value, Mapping)]
    return nested or ([found] if found else [])


def _max_model_len(folder: Path, config: PreTrainedConfig) -> int:
    """With YaRN `max_position_embeddings` may be the unscaled model's; the product is what it is for."""
    limit = getattr(config, "max_position_embeddings", None)
    if limit is None:
        raise UnsupportedModel(f"{folder}: {config.model_type} does not say how many positions it knows")
    for parameters in rope_parameters(config):
        rope_type = parameters.get("rope_type")
        original, factor = parameters.get("original_max_position_embeddings"), parameters.get("factor")
        if rope_type == "yarn" and isinstance(original, int) and isinstance(factor, int | float):
            limit = max(limit, int(original * factor))
        if rope_type in _LENGTH_DEPENDENT_ROPE and isinstance(original, int):
            limit = min(limit, original)
    return limit


def _eos_token_ids(folder: Path, config: PreTrainedConfig) -> frozenset[int]:
    """generation_config.json's when it names some, else config.json's; none is allowed."""
    path = folder / "generation_config.json"
    eos = _read_json(path).get("eos_token_id") if path.is_file() else None
    if eos is None:
        eos = getattr(config, "eos_token_id", None)
    found = [] if eos is None else eos if isinstance(eos, list) else [eos]
    ids = [i for i in found if isinstance(i, int)]
    if len(ids) != len(found):
        raise CorruptCheckpoint(f"{folder}: eos_token_id is {eos}, not token ids")
    return frozenset(ids)


def _checkpoint_dtype(config: PreTrainedConfig) -> str:
    name = str(config.dtype).removeprefix("torch.")
    return name if name in DTYPES else "float32"
