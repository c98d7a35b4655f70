"""What the attention layers of a transformers model do, found by running it once."""

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from engine.attention.attention import AttentionForm
from engine.model_config import UnsupportedModel

_NAME = "baton_probe"
# The last three are the same token at the same position: they may only differ if a layer looks at its
# neighbours, or counts positions itself, anywhere outside attention.
_FIRST_TOKEN, _NUM_TWINS = 0, 3
_TWIN_POSITION = 7

# Said to every kernel; none changes what is computed from Q, K and V.
_HARMLESS = frozenset(
    {
        *("dropout", "is_causal", "position_ids", "cache_position", "position_embeddings", "layer_idx"),
        *("use_cache", "cache", "past_key_values", "return_dict", "logits_to_keep", "input_ids"),
        *("output_attentions", "output_hidden_states", "output_router_logits"),
        *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx", "cu_seqlens"),
    }
)
_UNDERSTOOD = frozenset({"scaling", "sliding_window", "softcap", "s_aux"})


@dataclass(frozen=True, slots=True)
class ProbedLayer:
    """An attention layer. `module`: what it gives as itself when it calls attention."""

    module: nn.Module
    num_kv_heads: int
    key_dim: int
    value_dim: int
    form: AttentionForm


@dataclass(frozen=True, slots=True)
class ProbedModel:
    """`layers`: in the order in which they attend. `vocab_size`: of the logits."""

    layers: tuple[ProbedLayer, ...]
    vocab_size: int


@dataclass(frozen=True, slots=True)
class _SeenMask:
    """Stands for a causal mask. `window`: as in `AttentionForm`."""

    window: int | None


class _OtherMask:
    """Stands for a mask that is neither causal nor a sliding window."""


class MaskFunction(Protocol):
    """transformers' form of a mask: whether the query at `q_idx` sees the key at `kv_idx`."""

    def __call__(self, batch_idx: Tensor, head_idx: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor: ...


class _Probe:
    """Gathers the layers while the model runs."""

    def __init__(self, max_positions: int) -> None:
        self.max_positions = max_positions
        self.layers: list[ProbedLayer] = []
        # Kept alive, so that equal addresses mean the same tensor.
        self._keys: list[Tensor] = []

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: object,
        options: Mapping[str, object],
    ) -> Tensor:
        """Every token attends to itself alone: [1, num_tokens, num_heads, value_dim]."""
        layer = f"attention layer {len(self.layers)}"
        self._check_tensors(layer, module, query, key, value)
        self._keys.append(key)
        form = _form(layer, query.shape[1], mask, options)
        self.layers.append(ProbedLayer(module, key.shape[1], key.shape[-1], value.shape[-1], form))
        return value.repeat_interleave(query.shape[1] // key.shape[1], dim=1).transpose(1, 2).contiguous()

    def _check_tensors(
        self, layer: str, module: nn.Module, query: Tensor, key: Tensor, value: Tensor
    ) -> None:
        num_tokens = 1 + _NUM_TWINS
        if any(known.module is module for known in self.layers):
            raise UnsupportedModel(f"{layer} is an earlier one again")
        if any(known.data_ptr() == key.data_ptr() for known in self._keys):
            raise UnsupportedModel(f"{layer} shares the K and V of an earlier one")
        if (
            not (query.shape[2] == key.shape[2] == value.shape[2] == num_tokens)
            or query.shape[1] % key.shape[1]
        ):
            shapes = ", ".join(str(list(t.shape)) for t in (query, key, value))
            raise UnsupportedModel(
                f"{layer} attends to other tokens than its own step's: Q, K, V are {shapes}"
            )
        for tensor in (query, key, value):
            check_twins(layer, tensor[0].transpose(0, 1))


_PROBE: ContextVar[_Probe] = ContextVar("probe")


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: object, **options: object
) -> tuple[Tensor, None]:
    return _PROBE.get().attend(module, query, key, value, attention_mask, options), None


def _mask(*, mask_function: MaskFunction, **_: object) -> _SeenMask | _OtherMask:
    """Finds out what a mask function means by asking it, at a few positions, what it sees of all others."""
    end = _PROBE.get().max_positions
    seen = {
        last: _num_seen(mask_function, last) for last in (end - 1, end - 2, end // 2, end // 3) if last >= 0
    }
    widest = seen[end - 1]
    if any(found is None or widest is None or found != min(widest, last + 1) for last, found in seen.items()):
        return _OtherMask()
    return _SeenMask(None if widest == end else widest)


def _num_seen(mask_function: MaskFunction, last: int) -> int | None:
    """How many tokens the one at `last` sees, if they are the ones up to itself; None: they are not."""
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.int64)
    tokens = torch.arange(last + 2).view(1, 1, 1, -1)
    seen = mask_function(zero, zero, zero + last, tokens).expand(1, 1, 1, last + 2).view(-1)
    num_seen = int(seen.sum())
    return num_seen if num_seen and bool(seen[last + 1 - num_seen : last + 1].all()) else None


AttentionInterface.register(_NAME, _attention)
AttentionMaskInterface.register(_NAME, _mask)


def _form(layer: str, num_heads: int, mask: object, options: Mapping[str, object]) -> AttentionForm:
    if not isinstance(mask, _SeenMask):
        what = (
            "a mask that is not a sliding window"
            if isinstance(mask, _OtherMask)
            else "a mask of its own making"
        )
        raise UnsupportedModel(f"{layer} has {what}")
    given = {name for name, value in options.items() if value is not None}
    unknown = sorted(given - _HARMLESS - _UNDERSTOOD)
    if unknown:
        raise UnsupportedModel(f"{layer} asks attention for {', '.join(unknown)}")
    sinks = options.get("s_aux")
    if sinks is not None and not (isinstance(sinks, Tensor) and sinks.shape == (num_heads,)):
        raise UnsupportedModel(f"{layer} has attention sinks that are not one logit for each head")
    return AttentionForm(_number(options, "scaling"), mask.window, _number(options, "softcap"), sinks)


def _number(options: Mapping[str, object], name: str) -> float | None:
    value = options.get(name)
    if value is None:
        return None
    if not isinstance(value, int | float):
        raise UnsupportedModel(f"attention's {name} is {type(value).__name__}, not a number")
    return float(value)


def check_twins(what: str, rows: Tensor) -> None:
    """Compares what came out of the twins: [num_tokens, ...].

    Raises:
        UnsupportedModel: they differ by more than rounding.
    """
    first, *others = rows[-_NUM_TWINS:].float()
    allowed = (1e-4 if rows.dtype == torch.float32 else 2e-2) * float(first.abs().max())
    if any(float((other - first).abs().max()) > allowed for other in others):
        raise UnsupportedModel(
            f"{what} depends on other tokens than attention sees, or on where a token is in its step"
        )


def probe(model: PreTrainedModel, max_positions: int) -> ProbedModel:
    """Runs four tokens through the model, each attending to itself alone.

    What cannot be served over pages shows here, whatever the architecture: masks that are no sliding
    windows, layers that share KV, unknown requests to attention, and state that flows from token to token
    beside attention (recurrent and convolution layers) or positions that are not those given.

    Args:
        max_positions: how long a sequence can be: a window of that size is none.

    Raises:
        UnsupportedModel: the reason.
    """
    current = _Probe(max_positions)
    model.set_attn_implementation(_NAME)
    reset = _PROBE.set(current)
    try:
        logits = _run(model, max_positions)
    finally:
        _PROBE.reset(reset)
    _check_layers(model, len(current.layers))
    check_twins("the model", logits)
    vocab_size = min(_num_embeddings(model), logits.shape[-1])
    return ProbedModel(tuple(current.layers), vocab_size)


def _num_embeddings(model: PreTrainedModel) -> int:
    embedding = model.get_input_embeddings()
    if not isinstance(embedding.weight, Tensor):
        raise UnsupportedModel("its embedding is no matrix")
    return embedding.weight.shape[0]


@torch.inference_mode()
def _run(model: PreTrainedModel, max_positions: int) -> Tensor:
    """[num_tokens, vocab_size] logits of the probe's tokens."""
    tokens = [_FIRST_TOKEN, *[_num_embeddings(model) // 2] * _NUM_TWINS]
    positions = [0, *[min(_TWIN_POSITION, max_positions - 1)] * _NUM_TWINS]
    return model(
        input_ids=torch.tensor([tokens], device=model.device),
        position_ids=torch.tensor([positions], device=model.device),
        # Without one, transformers takes equal positions for the starts of packed sequences.
        attention_mask=torch.ones(1, len(tokens), dtype=torch.int64, device=model.device),
        use_cache=False,
    ).logits[0]


def _check_layers(model: PreTrainedModel, num_attending: int) -> None:
    config = model.config.get_text_config(decoder=True)
    if num_attending != config.num_hidden_layers:
        raise UnsupportedModel(
            f"{num_attending} of its {config.num_hidden_layers} layers attend through transformers' "
            "attention interface, the others in a way of their own or not at all"
        )
    if getattr(model, "_is_stateful", False):
        raise UnsupportedModel("it keeps a state beside its KV")
    if getattr(config, "num_kv_shared_layers", None):
        raise UnsupportedModel("layers share their KV")
