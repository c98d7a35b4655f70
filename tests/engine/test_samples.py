"""n > 1: one prefill, n texts over shared blocks."""

import pytest

from engine.engine import Engine
from engine.request import KVSource, RunUntil, SequenceId
from tests.engine.engines import Run, prompt_of, request, tiny_engine
from tests.engine.kv_pieces import Wire
from tests.engine.test_engine import all_free

N = 4
SAMPLING = {"temperature": 1.0, "seed": 5, "ignore_eos": True}


def texts_alone(tiny_model, prompt: tuple[int, ...], max_tokens: int) -> list[list[int]]:
    """Each sample by itself, in an engine that has seen nothing."""
    texts = []
    for sample in range(N):
        run = Run(tiny_engine(tiny_model))
        run.engine.submit(request("a", prompt, max_tokens, sample=sample, sampling=SAMPLING))
        run.to_end()
        texts += run.tokens.values()
    return texts


def of_samples(run: Run, name: str) -> list[list[int]]:
    return [run.tokens[name], *(run.tokens[f"{name}#{sample}"] for sample in range(1, N))]


@pytest.mark.parametrize("length", [1, 15, 16, 17, 40])
def test_each_sample_is_what_it_would_be_alone(tiny_model, length):
    """Conformance 10."""
    run = Run(tiny_engine(tiny_model, step_tokens=16))
    run.engine.submit(request("a", prompt_of(length), 30, sampling=SAMPLING | {"n": N}))
    run.to_end()
    assert of_samples(run, "a") == texts_alone(tiny_model, prompt_of(length), 30)
    assert [run.ended[name].is_last for name in run.ended].count(True) == 1
    assert run.engine.load().computed_prompt_tokens == length
    assert all_free(run.engine)


def test_samples_share_the_blocks_of_the_prompt(tiny_model):
    run = Run(tiny_engine(tiny_model))
    run.engine.submit(request("a", prompt_of(100), 10, sampling=SAMPLING | {"n": N}))
    run.step()
    run.step()
    load = run.engine.load()
    # Six full blocks together, and one that each goes on writing.
    assert load.num_blocks - load.free_blocks == 6 + N


def test_samples_that_push_each_other_out_of_the_blocks_come_out_the_same(tiny_model):
    """Conformance 5 and 10."""
    run = Run(tiny_engine(tiny_model, kv_cache_bytes=10 * 16 * 768))
    run.engine.submit(request("a", prompt_of(40), 60, sampling=SAMPLING | {"n": N}))
    run.to_end()
    assert of_samples(run, "a") == texts_alone(tiny_model, prompt_of(40), 60)
    assert run.engine.load().num_preemptions > 0
    assert all_free(run.engine)


@pytest.mark.parametrize("length", [16, 37])
def test_one_hand_off_carries_all_samples(tiny_model, length):
    """Conformance 10: one prefill, one transfer, n texts."""
    wire = Wire()
    prefill, decode = Run(tiny_engine(tiny_model, wire)), Run(tiny_engine(tiny_model))
    sampling = SAMPLING | {"n": N}
    prefill.engine.submit(
        request("a", prompt_of(length), 20, sampling=sampling, run_until=RunUntil.FIRST_TOKEN)
    )
    decode.engine.submit(request("a", prompt_of(length), 20, sampling=sampling, kv_source=KVSource.HANDOFF))
    decode.engine.admit()
    prefill.to_end()
    wire.deliver(decode.engine)
    first_tokens = prefill.held["a"].first_tokens
    assert decode.engine.begin_decode(SequenceId("a"), first_tokens) == []
    decode.to_end()
    rest = of_samples(decode, "a")
    assert [[first, *text] for first, text in zip(first_tokens, rest, strict=True)] == texts_alone(
        tiny_model, prompt_of(length), 20
    )
    assert prefill.engine.remove(SequenceId("a"))
    assert all_free(prefill.engine)
    assert all_free(decode.engine)


def test_samples_that_all_end_at_their_first_token_need_no_hand_off(tiny_model):
    run = Run(tiny_engine(tiny_model))
    sampling = SAMPLING | {"n": N}
    run.engine.submit(request("a", prompt_of(20), 1, sampling=sampling, run_until=RunUntil.FIRST_TOKEN))
    run.to_end()
    assert len(run.ended) == N
    assert not run.held
    assert all_free(run.engine)


def test_a_sample_whose_first_token_ends_it_ends_at_the_receiver(tiny_model):
    wire = Wire()
    prefill, decode = Run(tiny_engine(tiny_model, wire)), Run(tiny_engine(tiny_model))
    first = texts_alone(tiny_model, prompt_of(20), 5)[1][0]
    sampling = SAMPLING | {"n": N, "stop_token_ids": frozenset({first})}
    prefill.engine.submit(request("a", prompt_of(20), 5, sampling=sampling, run_until=RunUntil.FIRST_TOKEN))
    decode.engine.submit(request("a", prompt_of(20), 5, sampling=sampling, kv_source=KVSource.HANDOFF))
    decode.engine.admit()
    prefill.to_end()
    first_tokens = prefill.held["a"].first_tokens
    ended = decode.engine.begin_decode(SequenceId("a"), first_tokens)
    assert [e.sample for e in ended] == [i for i, token in enumerate(first_tokens) if token == first]
    decode.to_end()
    assert all_free(decode.engine)


@pytest.mark.parametrize("steps", range(5))
def test_removing_a_request_frees_all_its_samples(tiny_model, steps):
    run = Run(tiny_engine(tiny_model, step_tokens=16))
    run.engine.submit(request("a", prompt_of(30), 10, sampling=SAMPLING | {"n": N}))
    for _ in range(steps):
        run.step()
    run.engine.remove(SequenceId("a"))
    run.engine.check_integrity()
    assert all_free(run.engine)


def test_more_first_tokens_than_samples_are_refused(tiny_model):
    engine: Engine = tiny_engine(tiny_model)
    engine.submit(request("a", prompt_of(5), kv_source=KVSource.HANDOFF))
    engine.admit()
    with pytest.raises(ValueError, match="samples"):
        engine.begin_decode(SequenceId("a"), (1, 2))
