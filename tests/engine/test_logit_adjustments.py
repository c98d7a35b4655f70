"""Penalties and biases against transformers' own processors, and against their formulas."""

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from engine.logit_adjustments import LogitAdjustments, adjust
from engine.request import SamplingParams

VOCAB = 60
PROMPT = (3, 5, 5, 9, 40)
GENERATED = (9, 9, 9, 11, 3, 50)


def scores(num_rows: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def adjustments(generated: tuple[int, ...] = GENERATED, **params) -> LogitAdjustments:
    made = LogitAdjustments(SamplingParams(max_tokens=100, **params), PROMPT)
    made.generated(generated)
    return made


def adjusted(logits: torch.Tensor, **params) -> torch.Tensor:
    changed = logits.clone()
    adjust(changed, [0], [adjustments(**params).current()])
    return changed


@pytest.mark.parametrize("penalty", [0.5, 1.3, 2.0])
def test_repetition_is_over_prompt_and_generated_as_transformers_has_it(penalty):
    logits = scores()
    ids = torch.LongTensor([[*PROMPT, *GENERATED]])
    expected = RepetitionPenaltyLogitsProcessor(penalty)(ids, logits.clone())
    assert torch.allclose(adjusted(logits, repetition_penalty=penalty), expected, rtol=1e-6)


def test_frequency_counts_generated_tokens_and_presence_does_not():
    """Of the OpenAI API: logit - count * frequency - (count > 0) * presence."""
    logits = scores()
    counts = torch.bincount(torch.tensor(GENERATED), minlength=VOCAB).float()
    expected = logits - counts * 0.7 - (counts > 0).float() * -0.4
    assert torch.allclose(adjusted(logits, frequency_penalty=0.7, presence_penalty=-0.4), expected, atol=1e-6)


def test_biases_are_added_also_to_tokens_that_came():
    logits = scores()
    expected = logits.clone()
    expected[0, 9] += 4 - 3 * 0.5
    expected[0, [11, 3, 50]] -= 0.5
    expected[0, 20] -= 100
    bias = ((9, 4.0), (20, -100.0))
    assert torch.allclose(adjusted(logits, logit_bias=bias, frequency_penalty=0.5), expected, atol=1e-6)


def test_repetition_comes_before_the_other_penalties():
    logits = scores()
    ids = torch.LongTensor([[*PROMPT, *GENERATED]])
    counts = torch.bincount(torch.tensor(GENERATED), minlength=VOCAB).float()
    expected = RepetitionPenaltyLogitsProcessor(1.5)(ids, logits.clone()) - (counts > 0).float()
    expected[0, 5] += 2
    changed = adjusted(logits, repetition_penalty=1.5, presence_penalty=1.0, logit_bias=((5, 2.0),))
    assert torch.allclose(changed, expected, atol=1e-6)


def test_tokens_counted_one_by_one_or_at_once_give_the_same():
    params = {"frequency_penalty": 0.3, "presence_penalty": 0.2, "repetition_penalty": 1.1}
    long_text = tuple((i * 7) % VOCAB for i in range(500))
    one_by_one = adjustments((), **params)
    for token in long_text:
        one_by_one.generated([token])
    at_once = adjustments(long_text, **params)
    logits = scores()
    changed = [logits.clone(), logits.clone()]
    for each, made in zip(changed, (one_by_one, at_once), strict=True):
        adjust(each, [0], [made.current()])
    assert torch.equal(*changed)


def test_only_the_rows_that_ask_change():
    logits = scores(4)
    changed = logits.clone()
    adjust(changed, [2, 0], [adjustments(presence_penalty=1.0).current(), adjustments((1,)).current()])
    assert torch.equal(changed[[1, 3]], logits[[1, 3]])
    assert torch.equal(changed[2], adjusted(logits[2:3], presence_penalty=1.0)[0])
    assert torch.equal(changed[0], logits[0])
