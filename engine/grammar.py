"""What a generated text must be."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A grammar over a model's tokens."""
