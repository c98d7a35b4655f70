import math

import pytest
import torch

from engine.request import SamplingParams
from engine.sampler import SamplingRow, gumbel_noise, sample_tokens

VOCAB = 50


def row(index: int = 0, sample: int = 0, banned: frozenset[int] = frozenset(), **params) -> SamplingRow:
    return SamplingRow(SamplingParams(max_tokens=100, **params), sample, index, banned)


def logits(num_rows: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def drawn(scores: torch.Tensor, count: int = 4000, **params) -> torch.Tensor:
    """[vocab] how often each token came in `count` draws from the same logits."""
    rows = [row(index, seed=7, **params) for index in range(count)]
    return torch.bincount(sample_tokens(scores.repeat(count, 1), rows), minlength=VOCAB)


def test_temperature_zero_takes_the_largest_logit():
    scores = logits(3)
    tokens = sample_tokens(scores.clone(), [row(temperature=0)] * 3)
    assert tokens.tolist() == scores.argmax(-1).tolist()


def test_draws_follow_the_softmax():
    scores = logits()
    counts = drawn(scores, 20_000)
    expected = scores[0].softmax(-1) * 20_000
    assert ((counts - expected).abs() <= 5 * expected.sqrt() + 5).all()


def test_a_draw_is_the_same_alone_and_in_any_batch():
    """Conformance 11: a seeded token does not depend on what else is in the step."""
    scores = logits(8)
    rows = [row(i, sample=i % 3, seed=i * 11, temperature=0.5 + i / 4, top_k=i * 3) for i in range(8)]
    together = sample_tokens(scores.clone(), rows).tolist()
    alone = [sample_tokens(scores[i : i + 1].clone(), [rows[i]]).item() for i in range(8)]
    reverse = sample_tokens(scores.flip(0).clone(), rows[::-1]).tolist()[::-1]
    assert together == alone == reverse


@pytest.mark.parametrize("change", [{"seed": 1}, {"index": 1}, {"sample": 1}])
def test_noise_changes_with_seed_index_and_sample(change):
    device = torch.device("cpu")
    base = gumbel_noise([row(seed=0, index=0, sample=0)], 1000, device)
    other = gumbel_noise([row(**{"seed": 0, "index": 0, "sample": 0, **change})], 1000, device)
    correlation = torch.corrcoef(torch.cat([base, other]))[0, 1]
    assert abs(correlation) < 0.15


def murmur3_finalizer(x: int) -> int:
    x = (x ^ (x >> 16)) * 0x85EBCA6B % 2**32
    x = (x ^ (x >> 13)) * 0xC2B2AE35 % 2**32
    return x ^ (x >> 16)


def test_noise_equals_its_definition_in_integers_of_any_size():
    """No product is spoilt by the 64 bits of the tensors, for no seed: the same on every device."""
    key, seed = 2**64 - 3, 2**64 - 3
    for word in (2, 5):
        key = (key + 0x9E3779B97F4A7C15 * (word + 1)) % 2**64
        key = (key ^ (key >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        key = (key ^ (key >> 27)) * 0x94D049BB133111EB % 2**64
        key ^= key >> 31
    bits = [murmur3_finalizer(murmur3_finalizer(i ^ (key % 2**32)) ^ (key >> 32)) for i in range(1000)]
    expected = [-math.log(-math.log((b + 0.5) / 2**32)) for b in bits]
    noise = gumbel_noise([row(5, sample=2, seed=seed)], 1000, torch.device("cpu"))
    assert noise[0].tolist() == pytest.approx(expected, rel=1e-12)


def test_top_k_keeps_only_the_likeliest():
    scores = logits()
    kept = set(drawn(scores, top_k=3, temperature=5.0).nonzero().flatten().tolist())
    assert kept == set(scores[0].topk(3).indices.tolist())


def test_top_p_keeps_the_smallest_set_that_reaches_p():
    scores = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05] + [1e-9] * (VOCAB - 4)]))
    kept = set(drawn(scores, top_p=0.75).nonzero().flatten().tolist())
    assert kept == {0, 1}


def test_top_p_keeps_the_likeliest_however_small_p_is():
    assert drawn(logits(), 50, top_p=1e-9).nonzero().flatten().tolist() == [logits()[0].argmax().item()]


def test_min_p_drops_what_is_far_below_the_likeliest():
    scores = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05] + [1e-9] * (VOCAB - 4)]))
    kept = set(drawn(scores, min_p=0.25).nonzero().flatten().tolist())
    assert kept == {0, 1, 2}


def test_banned_tokens_never_come():
    best = logits()[0].argmax().item()
    tokens = sample_tokens(logits(), [row(temperature=0, banned=frozenset({best}))])
    assert tokens.item() == logits()[0].topk(2).indices[1].item()


def test_rows_with_and_without_noise_mix_in_a_step():
    scores = logits(2)
    tokens = sample_tokens(scores.clone(), [row(temperature=0), row(temperature=1.0, seed=3)])
    assert tokens[0] == scores[0].argmax()
    assert tokens[1] == sample_tokens(scores[1:].clone(), [row(temperature=1.0, seed=3)])[0]


def test_no_rows_give_no_tokens():
    assert sample_tokens(torch.empty(0, VOCAB), []).shape == (0,)
