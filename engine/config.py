"""What an engine can be told."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class EngineConfig(BaseModel):
    """One model on one device."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model_path: Path = Field(
        description="A local Hugging Face folder: config.json, *.safetensors, tokenizer.json."
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto",
        description="Of weights and activations. auto: the checkpoint's, if the device computes it fast.",
    )
    device: str = Field(default="auto", description="auto, cpu, cuda or cuda:N. auto: a GPU if there is one.")
    kv_dtype: Literal["auto", "int8", "fp8"] = Field(
        default="auto",
        description="Of K and V in the cache, and in hand-offs unless kv_wire_dtype says otherwise; the "
        "same in both pools, or the receiver needs kv_conversion. auto: the model's. "
        "int8, fp8: a scale for each token and head beside 8-bit values, about half of bfloat16's bytes.",
    )
    kv_wire_dtype: Literal["cached", "bfloat16", "int8", "fp8"] = Field(
        default="cached",
        description="Of K and V that this worker hands off. cached: as they are. Others are compressed on "
        "the way (int8, fp8: about half of bfloat16's bytes), and the receiver needs kv_conversion.",
    )
    block_size: int = Field(default=16, ge=1, le=256, description="Tokens in a KV block.")
    kv_cache_bytes: int | None = Field(
        default=None,
        ge=1,
        description="Memory for KV blocks. Default: 15 % of the machine's memory and at most 4 GiB on a CPU, "
        "85 % of what is free beside the weights on a GPU.",
    )
    max_model_len: int | None = Field(
        default=None,
        ge=1,
        description="Prompt and output together, in tokens. Default: the model's own limit.",
    )
    step_tokens: int = Field(
        default=512,
        ge=1,
        description="Token budget of a step: one for each running sequence, then prompt chunks.",
    )
    local_prefill_step_tokens: int = Field(
        default=128,
        ge=1,
        description="Of the budget, for prompt chunks in a step in which streams decode: it bounds what a "
        "prompt adds to the time between their tokens.",
    )
    max_running: int = Field(default=128, ge=1, description="Sequences that hold blocks at the same time.")

    @property
    def cached_kv_dtype(self) -> str:
        """A dtype, or "auto": the checkpoint's."""
        return self.dtype if self.kv_dtype == "auto" else self.kv_dtype

    @property
    def sent_kv_dtype(self) -> str:
        """See `cached_kv_dtype`."""
        return self.cached_kv_dtype if self.kv_wire_dtype == "cached" else self.kv_wire_dtype
