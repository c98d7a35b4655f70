"""A model over an 8-bit cache: near to itself over a float one, and the same however its KV came there."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.kv_layout import TensorLayout
from tests.engine.engines import Run, prompt_of, request, tiny_engine
from tests.engine.model_steps import BLOCK_SIZE, ModelSteps, Rows, model_of, random_tokens
from tests.tiny_decoders import make_tiny_decoder
from tests.tiny_models import FAMILIES, make_tiny_model

PROMPT = 150
KV_DTYPES = pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
MODEL_DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
# Measured: 0.014 to 0.06 and 0.06 to 0.22. The tiny models' attention is sharper than that of real ones.
LOGIT_ERROR = {"int8": 0.1, "fp8": 0.4}


def steps_of(folder: Path, kv_dtype: str | None, dtype: torch.dtype = torch.float32) -> ModelSteps:
    return ModelSteps(model_of(folder, dtype), random_tokens(PROMPT), kv_dtype=kv_dtype)


def size(logits: Tensor) -> float:
    return logits.square().mean().sqrt().item()


@KV_DTYPES
@MODEL_DTYPES
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_stay_close_to_those_over_a_float_cache(
    tmp_path: Path, family: str, dtype: torch.dtype, kv_dtype: str
):
    folder = make_tiny_model(tmp_path, family)
    exact = steps_of(folder, None, dtype).prefill(0, PROMPT, 40)
    error = size(steps_of(folder, kv_dtype, dtype).prefill(0, PROMPT, 40) - exact)
    assert 0 < error < LOGIT_ERROR[kv_dtype] * size(exact - exact.mean(-1, keepdim=True))


@KV_DTYPES
@pytest.mark.parametrize("family", ["cohere2", "gpt_bigcode"])
def test_windows_and_other_layer_shapes_stay_close_too(tmp_path: Path, family: str, kv_dtype: str):
    folder = make_tiny_decoder(tmp_path, family)
    exact = steps_of(folder, None).prefill(0, PROMPT, 40)
    steps = steps_of(folder, kv_dtype)
    steps.prefill(0, 100, 40)
    decoded = torch.cat([steps.step(Rows(0, i, i + 1)) for i in range(100, PROMPT)])
    error = size(decoded - exact[100:])
    assert 0 < error < LOGIT_ERROR[kv_dtype] * size(exact - exact.mean(-1, keepdim=True))


@KV_DTYPES
@pytest.mark.parametrize("chunk", [1, 7, 16, 149])
def test_a_prompts_chunks_change_the_logits_far_less_than_its_quantization(
    tiny_model: Path, kv_dtype: str, chunk: int
):
    """A token attends to what the cache gives back, in its own chunk too."""
    exact = steps_of(tiny_model, None).prefill(0, PROMPT, PROMPT)
    whole = steps_of(tiny_model, kv_dtype).prefill(0, PROMPT, PROMPT)
    chunked = steps_of(tiny_model, kv_dtype).prefill(0, PROMPT, chunk)
    # A rounding error may put a value into the neighbouring step, so they are not equal.
    assert size(chunked - whole) < 0.05 * size(whole - exact)


@KV_DTYPES
def test_an_engine_fits_more_tokens_into_the_same_memory(tiny_model: Path, kv_dtype: str):
    # A head's 16 values have 4 bytes each, or 1 each and a scale of 2; 3 layers, K and V, 2 heads.
    memory = 9 * BLOCK_SIZE * 3 * 2 * 2 * 64
    exact = tiny_engine(tiny_model, kv_cache_bytes=memory)
    small = tiny_engine(tiny_model, kv_cache_bytes=memory, kv_dtype=kv_dtype)
    assert (exact.load().num_blocks, small.load().num_blocks) == (9, 9 * 64 // 18)
    assert small.layout.dtype == kv_dtype
    assert small.layout.layers[2] == (
        TensorLayout("key", 2, 16, kv_dtype),
        TensorLayout("value", 2, 16, kv_dtype),
        TensorLayout("key_scale", 2, 1, "bfloat16"),
        TensorLayout("value_scale", 2, 1, "bfloat16"),
    )


@KV_DTYPES
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_prefix_hit_gives_the_text_of_a_computed_prefix(tiny_model: Path, kv_dtype: str, dtype: str):
    engine = tiny_engine(tiny_model, kv_dtype=kv_dtype, dtype=dtype)
    run = Run(engine)
    for name in ("computed", "found"):
        engine.submit(request(name, prompt_of(90), 20, sampling={"ignore_eos": True}))
        run.to_end()
    assert engine.load().prefix_hit_tokens >= 80
    assert run.tokens["found"] == run.tokens["computed"]
    assert len(run.tokens["found"]) == 20
