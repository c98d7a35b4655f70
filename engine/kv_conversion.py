"""K and V from one layout's dtypes to another's."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from engine.kv_layout import CACHED_DTYPES, KVLayout, TensorLayout
from engine.kv_quantization import LARGEST, dequantize, quantize, quantized_layers

Rows = tuple[Tensor, ...]


def in_dtype(layout: KVLayout, dtype: str) -> KVLayout:
    """The layout of the same K and V in another dtype.

    Args:
        layout: not quantized.
        dtype: a key of `CACHED_DTYPES`.
    """
    if CACHED_DTYPES[dtype] in LARGEST:
        layers = quantized_layers(layout.layers, dtype)
    else:
        layers = tuple(tuple(replace(form, dtype=dtype) for form in tensors) for tensors in layout.layers)
    return replace(layout, dtype=dtype, layers=layers)


def plain(tensors: Sequence[TensorLayout]) -> tuple[TensorLayout, ...]:
    """K and V of a layer without their scales."""
    return tuple(tensors[: len(tensors) // 2]) if _is_quantized(tensors) else tuple(tensors)


def convertible(source: Sequence[TensorLayout], target: Sequence[TensorLayout]) -> bool:
    """Whether they are the same K and V, whatever their dtypes."""
    known = all(form.dtype in CACHED_DTYPES for form in (*source, *target))
    return known and _shapes(source) == _shapes(target)


def _shapes(tensors: Sequence[TensorLayout]) -> list[tuple[str, int, int]]:
    return [(form.name, form.num_heads, form.head_dim) for form in plain(tensors)]


def convert(rows: Rows, source: Sequence[TensorLayout], target: Sequence[TensorLayout]) -> Rows:
    """
    Args:
        rows: a layer's tensors as `source` says, each [num_tokens, num_heads, head_dim].
        target: the same K and V, in other dtypes.
    """
    if [form.dtype for form in source] == [form.dtype for form in target]:
        return rows
    values = _values(rows) if _is_quantized(source) else rows
    if not _is_quantized(target):
        return tuple(value.to(form.torch_dtype) for value, form in zip(values, target, strict=True))
    pairs = [quantize(value, form.torch_dtype) for value, form in zip(values, plain(target), strict=True)]
    return (*(stored for stored, _ in pairs), *(scale for _, scale in pairs))


def _is_quantized(tensors: Sequence[TensorLayout]) -> bool:
    return bool(tensors) and tensors[0].torch_dtype in LARGEST


def _values(rows: Rows) -> Rows:
    """float32."""
    half = len(rows) // 2
    return tuple(map(_dequantized, rows[:half], rows[half:]))


def _dequantized(stored: Tensor, scale: Tensor) -> Tensor:
    head_dim = stored.shape[-1]
    out = torch.empty(stored.numel() // head_dim, head_dim, device=stored.device)
    return dequantize(stored.reshape(-1, head_dim), scale.reshape(-1, 1), out).view(stored.shape)
