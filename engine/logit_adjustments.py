"""Penalties and biases of one sequence: what changes its logits before a token is drawn."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.request import SamplingParams

# Room for tokens to come, at first; doubled as they come.
_GROWTH = 32


def adjusts_logits(params: SamplingParams) -> bool:
    has_penalty = params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1
    return bool(has_penalty or params.logit_bias)


class Adjustments(NamedTuple):
    """The tokens whose logits change: x / factor if x is positive, else x * factor, then + offset.

    Attributes:
        token_ids: [num_tokens] int64, each once.
        factors: [num_tokens] float32.
        offsets: [num_tokens] float32.
    """

    token_ids: np.ndarray
    factors: np.ndarray
    offsets: np.ndarray


@dataclass(slots=True)
class _Place:
    column: int
    count: int
    bias: float


class LogitAdjustments:
    """The adjustments of one sequence, kept up token by token.

    Repetition as in Keskar et al., 2019 (CTRL), over prompt and generated tokens; presence and frequency
    over the generated ones only, as the OpenAI API defines them.
    """

    def __init__(self, params: SamplingParams, prompt: Sequence[int]) -> None:
        self._params = params
        self._places: dict[int, _Place] = {}
        biases = dict(params.logit_bias)
        repeated = set(prompt) if params.repetition_penalty != 1 else set()
        size = len(biases) + len(repeated) + _GROWTH
        self._token_ids = np.zeros(size, np.int64)
        self._factors = np.ones(size, np.float32)
        self._offsets = np.zeros(size, np.float32)
        for token, bias in biases.items():
            self._offsets[self._place(token, bias).column] = bias
        for token in repeated:
            self._factors[self._place(token).column] = params.repetition_penalty

    def _place(self, token: int, bias: float = 0.0) -> _Place:
        place = self._places.get(token)
        if place is None:
            if len(self._places) == len(self._token_ids):
                self._grow()
            place = self._places[token] = _Place(len(self._places), 0, bias)
            self._token_ids[place.column] = token
        return place

    def _grow(self) -> None:
        more = len(self._token_ids)
        self._token_ids = np.concatenate([self._token_ids, np.zeros(more, np.int64)])
        self._factors = np.concatenate([self._factors, np.ones(more, np.float32)])
        self._offsets = np.concatenate([self._offsets, np.zeros(more, np.float32)])

    def generated(self, tokens: Iterable[int]) -> None:
        """Counts tokens that came."""
        params = self._params
        for token in tokens:
            place = self._place(token)
            place.count += 1
            penalty = params.frequency_penalty * place.count + params.presence_penalty
            self._offsets[place.column] = place.bias - penalty
            self._factors[place.column] = params.repetition_penalty

    def current(self) -> Adjustments:
        used = len(self._places)
        return Adjustments(self._token_ids[:used], self._factors[:used], self._offsets[:used])


def adjust(logits: Tensor, rows: Sequence[int], adjustments: Sequence[Adjustments]) -> None:
    """Adjusts these rows of `logits` [num_rows, vocab] float32 in place."""
    device = logits.device
    lengths = [len(a.token_ids) for a in adjustments]
    at = torch.from_numpy(np.repeat(rows, lengths)).to(device)
    token_ids, factors, offsets = (
        torch.from_numpy(np.concatenate(columns)).to(device) for columns in zip(*adjustments, strict=True)
    )
    chosen = logits[at, token_ids]
    logits[at, token_ids] = torch.where(chosen > 0, chosen / factors, chosen * factors) + offsets
