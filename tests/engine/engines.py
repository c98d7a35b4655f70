"""Engines over the tiny model, and ways to run them to the end."""

from collections.abc import Iterable
from pathlib import Path

from engine.batch import KVListener
from engine.config import EngineConfig
from engine.engine import Engine, EndedSequence, HeldSequence, StepResult
from engine.loading import load_engine
from engine.request import EngineRequest, SamplingParams, SequenceId


def tiny_engine(folder: Path, listener: KVListener | None = None, **options) -> Engine:
    defaults = {"dtype": "float32", "device": "cpu", "kv_cache_bytes": 32 << 20}
    return load_engine(EngineConfig(model_path=folder, **{**defaults, **options}), listener)


def request(name: str, prompt: Iterable[int], max_tokens: int = 8, **fields) -> EngineRequest:
    sampling = {"temperature": 0.0, "max_tokens": max_tokens, **fields.pop("sampling", {})}
    return EngineRequest(
        sequence_id=SequenceId(name),
        prompt=tuple(prompt),
        sampling=SamplingParams(**sampling),
        arrival_s=fields.pop("arrival_s", 0.0),
        **fields,
    )


class Run:
    """Steps an engine and gathers what comes."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, EndedSequence] = {}
        self.held: dict[str, HeldSequence] = {}
        self.num_steps = 0

    def step(self) -> StepResult | None:
        self.engine.admit()
        launched = self.engine.launch()
        if launched is None:
            return None
        result = self.engine.collect(launched)
        self.num_steps += 1
        for token in result.tokens:
            texts = self.tokens.setdefault(token.sequence_id, [])
            texts.append(token.token)
        self.ended |= {e.sequence_id: e for e in result.ended}
        self.held |= {h.sequence_id: h for h in result.held}
        self.engine.check_integrity()
        return result

    def to_end(self) -> dict[str, list[int]]:
        while self.step() is not None:
            pass
        return self.tokens


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    """Token ids that look random, without the special ones."""
    return tuple(2 + (seed * 7919 + i * 2654435761 % 2**32 // 7 + i * i) % 380 for i in range(length))
