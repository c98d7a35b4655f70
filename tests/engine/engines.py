"""Engines over the tiny model, and ways to run them to the end."""

from collections.abc import Iterable
from pathlib import Path

from engine.batch import KVListener
from engine.config import EngineConfig
from engine.engine import Engine
from engine.loading import load_engine
from engine.request import EngineRequest, SamplingParams, SequenceId
from engine.step_result import EndedSequence, HeldSequence, SampledToken, StepResult
from tests.device import DEVICE


def tiny_engine(folder: Path, listener: KVListener | None = None, **options) -> Engine:
    defaults = {"dtype": "float32", "device": str(DEVICE), "kv_cache_bytes": 32 << 20}
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
    """Steps an engine and gathers what comes, by the sequence's name; further samples as "name#1"."""

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
            self.tokens.setdefault(sample_name(token), []).append(token.token)
        self.ended |= {sample_name(e): e for e in result.ended}
        self.held |= {h.sequence_id: h for h in result.held}
        self.engine.check_integrity()
        return result

    def to_end(self) -> dict[str, list[int]]:
        while self.step() is not None:
            pass
        return self.tokens


def sample_name(of: SampledToken | EndedSequence) -> str:
    return f"{of.sequence_id}#{of.sample}" if of.sample else of.sequence_id


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    """Token ids that look random, without the special ones."""
    return tuple(2 + (seed * 7919 + i * 2654435761 % 2**32 // 7 + i * i) % 380 for i in range(length))
