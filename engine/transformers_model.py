"""Any decoder that transformers implements over its attention interface."""

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel

from engine.attention.attention import Attention, AttentionForm, StepAttention
from engine.attention_probe import ProbedModel, probe
from engine.batch import LayerHook, StepBatch
from engine.checkpoint import Checkpoint
from engine.kv_cache import KVCache
from engine.kv_layout import TensorLayout
from engine.model_config import CorruptCheckpoint, ModelConfig, UnsupportedModel

# It has no mask of the same name, so transformers builds none.
_NAME = "baton_paged"
_LAYER = "baton_layer"


class _Step(NamedTuple):
    attention: StepAttention
    hook: LayerHook | None


class _CurrentStep:
    """Where the layers of one model find the step that runs."""

    def __init__(self) -> None:
        self._step: _Step | None = None

    @contextmanager
    def during(self, step: _Step) -> Iterator[None]:
        self._step = step
        try:
            yield
        finally:
            self._step = None

    def get(self) -> _Step:
        assert self._step is not None, "a layer attends outside of a step"
        return self._step


class _PagedLayer:
    """An attention layer's way to its pages; its module carries it as `_LAYER`."""

    def __init__(self, index: int, form: AttentionForm, dtype: torch.dtype, current: _CurrentStep) -> None:
        self._index = index
        self._form = form
        self._dtype = dtype
        self._current = current

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """All [1, heads, num_tokens, head_dim], the result [1, num_tokens, num_heads, head_dim]."""
        query, key, value = (t[0].transpose(0, 1).to(self._dtype) for t in (query, key, value))
        attention, hook = self._current.get()
        attention.write(self._index, key, value)
        if hook is not None:
            hook(self._index)
        attended = attention.attend(self._index, query, key, value, self._form)
        return attended.view(1, *query.shape[:2], value.shape[-1])


def _paged_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **_: object
) -> tuple[Tensor, None]:
    return cast("_PagedLayer", getattr(module, _LAYER)).attend(query, key, value), None


AttentionInterface.register(_NAME, _paged_attention)


class TransformersModel:
    """Implements `engine.model.Model` with transformers' own modules: right for many, fast for none.

    A step is one row of all its tokens with their positions. Only attention can tell sequences apart, and
    `engine.attention_probe` has made sure that only attention needs to.
    """

    def __init__(self, model: PreTrainedModel, probed: ProbedModel, attention: Attention) -> None:
        self._model = model
        self._probed = probed
        self._attention = attention
        self._current = _CurrentStep()
        self._selects_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        for index, layer in enumerate(probed.layers):
            setattr(layer.module, _LAYER, _PagedLayer(index, layer.form, model.dtype, self._current))
        model.set_attn_implementation(_NAME)

    @classmethod
    def load(
        cls,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        attention: Attention,
        max_positions: int,
    ) -> "TransformersModel":
        """Reads the weights.

        Raises:
            CorruptCheckpoint: they are missing, damaged or do not fit the configuration.
            UnsupportedModel: the architecture cannot run over a paged cache; the message says why.
        """
        folder = config.folder
        Checkpoint(folder, dtype, device)  # raises when files are missing or damaged
        model = _read_model(config, dtype).eval()
        nn.Module.to(model, device)
        try:
            probed = probe(model, max_positions)
        # A model that does not follow transformers' interfaces fails in a way of its own.
        except Exception as error:
            raise UnsupportedModel(f"{folder}: {config.architecture} is not supported: {error}") from error
        return cls(model, probed, attention)

    @property
    def vocab_size(self) -> int:
        return self._probed.vocab_size

    @property
    def device(self) -> torch.device:
        return self._model.device

    @property
    def dtype(self) -> torch.dtype:
        return self._model.dtype

    @property
    def kv_tensors(self) -> tuple[tuple[TensorLayout, ...], ...]:
        dtype = str(self.dtype).removeprefix("torch.")
        return tuple(
            (
                TensorLayout("key", layer.num_kv_heads, layer.key_dim, dtype),
                TensorLayout("value", layer.num_kv_heads, layer.value_dim, dtype),
            )
            for layer in self._probed.layers
        )

    @torch.inference_mode()
    def forward(self, batch: StepBatch, cache: KVCache, hook: LayerHook | None) -> Tensor:
        rows = {"logits_to_keep": batch.sampled_rows} if self._selects_rows else {}
        with self._current.during(_Step(self._attention.prepare(batch, cache), hook)):
            logits: Tensor = self._model(
                input_ids=batch.token_ids.unsqueeze(0),
                position_ids=batch.positions.unsqueeze(0),
                use_cache=False,
                **rows,
            ).logits[0]
        if not self._selects_rows:
            logits = logits.index_select(0, batch.sampled_rows)
        return logits[:, : self.vocab_size].float()


def _read_model(config: ModelConfig, dtype: torch.dtype) -> PreTrainedModel:
    folder = config.folder
    try:
        model, report = _from_pretrained(folder, dtype)
    except ImportError as error:
        raise UnsupportedModel(f"{folder}: {config.architecture} is not supported: {error}") from error
    # transformers raises whatever its readers raise.
    except Exception as error:
        raise CorruptCheckpoint(f"{folder}: {error}") from error
    for what, names in report.items():
        if names:
            raise CorruptCheckpoint(f"{folder}: {len(names)} tensors are {what}, such as {min(names)}")
    return model


def _from_pretrained(folder: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, dict[str, list[str]]]:
    """The model, and the names of tensors that do not fit it, by what is wrong with them."""
    # With `output_loading_info` it returns a pair, which its annotation does not know.
    model, report = cast(
        "tuple[PreTrainedModel, Mapping[str, Iterable[object]]]",
        AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        ),
    )
    kinds = ("missing", "unexpected", "mismatched")
    return model, {kind: [str(name) for name in report[f"{kind}_keys"]] for kind in kinds}
