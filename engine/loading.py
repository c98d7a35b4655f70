"""An engine from a model's folder."""

import psutil
import torch

from engine.attention.torch_attention import TorchAttention
from engine.batch import KVListener
from engine.checkpoint import model_fingerprint
from engine.config import EngineConfig
from engine.engine import Engine, EngineLimits
from engine.kv_cache import KVCache
from engine.kv_conversion import in_dtype
from engine.kv_layout import DTYPES, KVLayout
from engine.llama import LlamaModel
from engine.llama_config import llama_config
from engine.model import Model
from engine.model_config import ModelConfig, ModelError, read_model_config

_CPU_SHARE, _CPU_LIMIT_BYTES = 0.15, 4 << 30
_GPU_SHARE = 0.85


def load_engine(config: EngineConfig, listener: KVListener | None = None) -> Engine:
    """Reads the model and takes the memory for its KV blocks.

    Raises:
        UnsupportedModel, CorruptCheckpoint: the model cannot be run.
        ModelError: not one sequence fits into the memory for KV, or the device is not there.
    """
    model_config = read_model_config(config.model_path)
    device = _device(config.device)
    dtype = _dtype(config.dtype, model_config, device)
    max_model_len = _max_model_len(config, model_config)
    model = load_model(model_config, dtype=DTYPES[dtype], device=device, max_positions=max_model_len)
    layout = _layout(config, dtype, model)
    num_blocks = (config.kv_cache_bytes or _default_kv_bytes(device)) // (
        layout.token_bytes * config.block_size
    )
    if num_blocks == 0:
        raise ModelError(
            f"kv_cache_bytes: a block of {config.block_size} tokens needs "
            f"{layout.token_bytes * config.block_size} bytes"
        )
    return Engine(
        model,
        KVCache(layout, num_blocks, device),
        model_config.eos_token_ids,
        EngineLimits(max_model_len, config.step_tokens, config.max_running, config.local_prefill_step_tokens),
        listener,
        _wire_layout(config, layout),
    )


def _layout(config: EngineConfig, dtype: str, model: Model) -> KVLayout:
    """`dtype`: what the model computes in."""
    fingerprint = model_fingerprint(config.model_path)
    layout = KVLayout(fingerprint, dtype, config.block_size, model.kv_tensors)
    return layout if config.kv_dtype == "auto" else in_dtype(layout, config.kv_dtype)


def _wire_layout(config: EngineConfig, cached: KVLayout) -> KVLayout:
    if config.kv_wire_dtype in ("cached", cached.dtype):
        return cached
    if config.kv_dtype != "auto":
        raise ModelError(
            f"kv_wire_dtype: {config.kv_wire_dtype} cannot be made of {config.kv_dtype}, which kv_dtype is"
        )
    return in_dtype(cached, config.kv_wire_dtype)


def load_model(config: ModelConfig, *, dtype: torch.dtype, device: torch.device, max_positions: int) -> Model:
    """The lean decoder where it can, else transformers' own modules.

    Raises:
        UnsupportedModel, CorruptCheckpoint: the model cannot be run.
    """
    lean = llama_config(config)
    if lean is None:
        # Not above: transformers' modeling code takes seconds to import, which the lean path need not pay.
        from engine.transformers_model import TransformersModel

        return TransformersModel.load(
            config, dtype=dtype, device=device, attention=TorchAttention(), max_positions=max_positions
        )
    return LlamaModel.load(
        config.folder,
        lean,
        dtype=dtype,
        device=device,
        attention=TorchAttention(),
        max_positions=max_positions,
    )


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ModelError(f"device: {name} is none; auto, cpu, cuda and cuda:N are") from error
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and not torch.cuda.is_available()):
        raise ModelError(f"device: {name} is not available here")
    return device


def _dtype(wanted: str, model: ModelConfig, device: torch.device) -> str:
    """The checkpoint's own if the device computes it fast, else float32, which all do."""
    if wanted != "auto":
        return wanted
    if model.checkpoint_dtype == "float32" or device.type == "cuda":
        return model.checkpoint_dtype
    has_bfloat16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return "bfloat16" if model.checkpoint_dtype == "bfloat16" and has_bfloat16 else "float32"


def _max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    wanted = config.max_model_len or model.max_model_len
    if wanted > model.max_model_len:
        raise ModelError(f"max_model_len: {wanted} is over the model's limit of {model.max_model_len}")
    return wanted


def _default_kv_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * _GPU_SHARE)
    return min(int(psutil.virtual_memory().total * _CPU_SHARE), _CPU_LIMIT_BYTES)
