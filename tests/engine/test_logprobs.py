import pytest
import torch

from engine.logprobs import PromptLogprobs, TokenLogprobs, token_logprobs


def test_they_are_the_log_softmax_of_the_logits():
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0)) * 4
    expected = logits.log_softmax(-1)
    tokens = torch.tensor([3, 0, 49, 7])
    told = token_logprobs(logits, tokens, [0, 3, 50, 80]).read()
    for row, (each, count) in enumerate(zip(told, (0, 3, 50, 50), strict=True)):
        assert each.logprob == pytest.approx(expected[row, tokens[row]].item(), abs=1e-5)
        best = expected[row].topk(count)
        assert each.top_token_ids == tuple(best.indices.tolist())
        assert each.top_logprobs == pytest.approx(best.values.tolist(), abs=1e-5)


def told(count: int) -> list[TokenLogprobs]:
    return [TokenLogprobs(-float(i), (), ()) for i in range(count)]


def test_a_prompt_is_gathered_from_chunks_and_what_was_computed_again_counts_once():
    """Conformance 20: a sequence that gave up its blocks computes its prompt again."""
    gathering = PromptLogprobs(10, 0)
    assert gathering.positions(0, 4) == range(4)
    gathering.add(range(4), told(4))
    assert gathering.complete() is None
    assert gathering.positions(0, 6) == range(4, 6)
    gathering.add(range(4, 6), told(2))
    assert gathering.positions(6, 12) == range(6, 9)
    gathering.add(range(6, 9), told(3))
    assert gathering.complete() == (*told(4), *told(2), *told(3))
    assert len(gathering.positions(9, 12)) == 0


def test_a_prompt_of_one_token_has_none():
    gathering = PromptLogprobs(1, 5)
    assert len(gathering.positions(0, 1)) == 0
    assert gathering.complete() == ()
