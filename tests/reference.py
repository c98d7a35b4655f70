"""What is right: the same weights run by transformers, float32, greedy."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

# Two best logits closer than this may change places between batch shapes.
NEAR_TIE = 1e-4


@dataclass(frozen=True, slots=True)
class Continuation:
    """`gaps[i]`: how far the second best logit was behind the best when token i was chosen."""

    tokens: tuple[int, ...]
    gaps: tuple[float, ...]


class Reference:
    """transformers' `generate` on the model of a folder."""

    def __init__(self, folder: Path) -> None:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._model = cast("PreTrainedModel", model).eval()

    def greedy(self, prompt: Sequence[int], max_tokens: int, *, ignore_eos: bool = False) -> Continuation:
        ids = torch.tensor([list(prompt)])
        with torch.inference_mode():
            out = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_tokens,
                do_sample=False,
                eos_token_id=None if ignore_eos else self._model.generation_config.eos_token_id,
                output_logits=True,
                return_dict_in_generate=True,
            )
        top = [step[0].float().topk(2).values for step in out.logits]
        return Continuation(
            tuple(out.sequences[0, len(prompt) :].tolist()), tuple((t[0] - t[1]).item() for t in top)
        )

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """[num_tokens, vocab] float32: row i is of what follows tokens[: i + 1]."""
        with torch.inference_mode():
            return self._model(torch.tensor([list(tokens)])).logits[0].float()


class NearTies:
    """Counts the texts that differ from the reference where it was itself undecided; allows a few."""

    def __init__(self, allowed: int) -> None:
        self._allowed = allowed
        self.count = 0

    def check(self, tokens: Sequence[int], reference: Continuation) -> None:
        """Raises:
        AssertionError: the tokens differ where the reference was decided, or too many near-ties so far.
        """
        if tuple(tokens) == reference.tokens:
            return
        pairs = zip(tokens, reference.tokens, strict=False)
        place = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
        assert place is not None, f"{len(tokens)} tokens, the reference has {len(reference.tokens)}"
        gap = reference.gaps[place]
        assert gap < NEAR_TIE, (
            f"token {place} is {tokens[place]}, the reference has {reference.tokens[place]}, {gap:.2e} ahead"
        )
        self.count += 1
        assert self.count <= self._allowed, f"{self.count} near-ties"
