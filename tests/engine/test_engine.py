from pathlib import Path

import numpy as np
import pytest

from engine.engine import Engine
from engine.model_config import ModelError
from engine.request import FinishReason, InvalidRequest, KVSource, RunUntil, SequenceId
from tests.engine.engines import Run, prompt_of, request, tiny_engine
from tests.engine.kv_pieces import Wire
from tests.reference import NearTies, Reference


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> Reference:
    return Reference(tiny_model)


def all_free(engine: Engine) -> bool:
    load = engine.load()
    return load.free_blocks == load.num_blocks and load.num_running == load.num_waiting == 0


@pytest.mark.parametrize("step_tokens", [1, 7, 16, 512])
def test_greedy_text_equals_the_reference_whatever_the_chunk_size(tiny_model, reference, step_tokens):
    run = Run(tiny_engine(tiny_model, step_tokens=step_tokens))
    prompts = {f"p{n}": prompt_of(n, seed=n) for n in (1, 2, 15, 16, 17, 31, 32, 33, 100)}
    for name, prompt in prompts.items():
        run.engine.submit(request(name, prompt, max_tokens=20))
    texts = run.to_end()
    ties = NearTies(allowed=1)
    for name, prompt in prompts.items():
        ties.check(texts[name], reference.greedy(prompt, 20))
    assert all_free(run.engine)


def test_a_sequence_joins_a_running_batch_without_changing_it(tiny_model, reference):
    run = Run(tiny_engine(tiny_model, step_tokens=16))
    run.engine.submit(request("early", prompt_of(20), max_tokens=40))
    for _ in range(10):
        run.step()
    run.engine.submit(request("late", prompt_of(70, seed=1), max_tokens=10))
    texts = run.to_end()
    NearTies(0).check(texts["early"], reference.greedy(prompt_of(20), 40))
    NearTies(0).check(texts["late"], reference.greedy(prompt_of(70, seed=1), 10))


def test_continues_a_request_from_its_tokens(tiny_model, reference):
    """Conformance 20: whoever generated the first tokens, the rest is the same."""
    prompt, whole = prompt_of(21), reference.greedy(prompt_of(21), 16, ignore_eos=True)
    run = Run(tiny_engine(tiny_model))
    sampling = {"ignore_eos": True}
    run.engine.submit(request("a", prompt, 16, generated=whole.tokens[:9], sampling=sampling))
    result = run.step()
    assert result is not None and result.tokens[0].index == 9
    assert tuple(run.to_end()["a"]) == whole.tokens[9:]


@pytest.mark.parametrize("split", [1, 5, 11])
def test_seeded_sampling_continues_with_the_same_tokens(tiny_model, split):
    """Conformance 11."""
    sampling = {"temperature": 1.0, "top_p": 0.95, "seed": 2**64 - 1, "ignore_eos": True}
    whole = Run(tiny_engine(tiny_model))
    whole.engine.submit(request("a", prompt_of(9), 12, sampling=sampling))
    text = whole.to_end()["a"]
    rest = Run(tiny_engine(tiny_model))
    rest.engine.submit(request("b", prompt_of(30), 12, sampling=sampling))
    rest.engine.submit(request("a", prompt_of(9), 12, generated=tuple(text[:split]), sampling=sampling))
    assert rest.to_end()["a"] == text[split:]


def hand_off(wire: Wire, prefilled: Run, to: Run, *names: str) -> None:
    to.engine.admit()
    wire.deliver(to.engine, prefilled.engine.wire_layout)
    for name in names:
        to.tokens[name] = [*prefilled.held[name].first_tokens]
        assert to.engine.begin_decode(name, prefilled.held[name].first_tokens) == []


def test_a_handed_off_sequence_goes_on_as_if_it_had_never_moved(tiny_model, reference):
    wire = Wire()
    prefill = Run(tiny_engine(tiny_model, wire, step_tokens=16))
    decode = Run(tiny_engine(tiny_model, step_tokens=16))
    prompts = {f"p{n}": prompt_of(n, seed=n) for n in (1, 16, 17, 50)}
    decode.engine.submit(request("own", prompt_of(40, seed=9), 12))
    decode.step()
    for name, prompt in prompts.items():
        prefill.engine.submit(request(name, prompt, 15, run_until=RunUntil.FIRST_TOKEN))
        decode.engine.submit(request(name, prompt, 15, kv_source=KVSource.HANDOFF))
    prefill.to_end()
    computed = decode.engine.load().computed_prompt_tokens
    hand_off(wire, prefill, decode, *prompts)
    texts = decode.to_end()
    for name, prompt in {**prompts, "own": prompt_of(40, seed=9)}.items():
        NearTies(0).check(texts[name], reference.greedy(prompt, len(texts[name])))
    assert decode.engine.load().computed_prompt_tokens - computed == 40 - 16
    for name in prompts:
        assert prefill.engine.remove(SequenceId(name))
    assert all_free(prefill.engine)
    assert all_free(decode.engine)


@pytest.mark.parametrize("block_size", [1, 7, 64])
def test_the_two_engines_may_have_blocks_of_different_sizes(tiny_model, reference, block_size):
    wire = Wire()
    prefill = Run(tiny_engine(tiny_model, wire, step_tokens=16))
    decode = Run(tiny_engine(tiny_model, block_size=block_size))
    prompt = prompt_of(45)
    prefill.engine.submit(request("a", prompt, 15, run_until=RunUntil.FIRST_TOKEN))
    decode.engine.submit(request("a", prompt, 15, kv_source=KVSource.HANDOFF))
    prefill.to_end()
    hand_off(wire, prefill, decode, "a")
    text = decode.to_end()["a"]
    NearTies(0).check(text, reference.greedy(prompt, 15))


@pytest.mark.parametrize("kv_wire_dtype", ["bfloat16", "int8", "fp8"])
def test_kv_may_be_compressed_on_its_way(tiny_model, kv_wire_dtype):
    wire = Wire()
    prefill = Run(tiny_engine(tiny_model, wire, kv_wire_dtype=kv_wire_dtype))
    decode = Run(tiny_engine(tiny_model))
    sent = prefill.engine.wire_layout
    assert sent.dtype == kv_wire_dtype
    assert sent.token_bytes <= decode.engine.layout.token_bytes / 2
    prefill.engine.submit(request("a", prompt_of(45), 15, run_until=RunUntil.FIRST_TOKEN))
    decode.engine.submit(request("a", prompt_of(45), 15, kv_source=KVSource.HANDOFF))
    prefill.to_end()
    decode.engine.admit()
    wire.deliver(decode.engine, sent)
    assert sum(len(packed) for *_, packed in wire.pieces) == 45 * sent.token_bytes
    blocks = [engine._sequences[SequenceId("a")][0].block_table for engine in (prefill.engine, decode.engine)]
    for layer in range(3):
        ours, theirs = (
            run.engine._cache.pages(layer, 1)[table[:2]]
            for run, table in zip((prefill, decode), blocks, strict=True)
        )
        assert 0 < (ours - theirs).abs().max() < 0.1 * ours.abs().max()


def test_a_quantized_cache_cannot_be_sent_in_another_dtype(tiny_model):
    with pytest.raises(ModelError, match="kv_wire_dtype"):
        tiny_engine(tiny_model, kv_dtype="int8", kv_wire_dtype="fp8")


def test_changed_kv_changes_the_text(tiny_model):
    """The decode side really reads what was handed off."""
    wire = Wire()
    prefill, decode = Run(tiny_engine(tiny_model, wire)), Run(tiny_engine(tiny_model))
    prefill.engine.submit(request("a", prompt_of(20), 12, run_until=RunUntil.FIRST_TOKEN))
    decode.engine.submit(request("a", prompt_of(20), 12, kv_source=KVSource.HANDOFF))
    prefill.to_end()
    *place, packed = wire.pieces[0]
    half = len(packed) // 2
    # V with its signs turned.
    wire.pieces[0] = (*place, packed[:half] + (-np.frombuffer(packed[half:], np.float32)).tobytes())
    hand_off(wire, prefill, decode, "a")
    alone = Run(tiny_engine(tiny_model))
    alone.engine.submit(request("a", prompt_of(20), 12))
    assert decode.to_end()["a"] != alone.to_end()["a"]


def test_a_held_sequence_keeps_its_blocks_until_it_is_removed(tiny_model):
    run = Run(tiny_engine(tiny_model))
    run.engine.submit(request("a", prompt_of(20), 12, run_until=RunUntil.FIRST_TOKEN))
    run.to_end()
    load = run.engine.load()
    assert load.num_blocks - load.free_blocks == 2
    assert run.engine.remove(SequenceId("a"))
    assert all_free(run.engine)


def test_one_wanted_token_ends_a_prefill_instead_of_holding_it(tiny_model):
    """Conformance 6."""
    run = Run(tiny_engine(tiny_model))
    run.engine.submit(request("a", prompt_of(20), 1, run_until=RunUntil.FIRST_TOKEN))
    assert len(run.to_end()["a"]) == 1
    assert run.ended["a"].reason is FinishReason.LENGTH
    assert not run.held
    assert all_free(run.engine)


def test_a_stop_token_ends_the_sequence_with_it(tiny_model, reference):
    """Conformance 7."""
    text = reference.greedy(prompt_of(20), 10, ignore_eos=True).tokens
    stop = {"stop_token_ids": frozenset({text[4]}), "ignore_eos": True}
    run = Run(tiny_engine(tiny_model))
    run.engine.submit(request("a", prompt_of(20), 10, sampling=stop))
    assert tuple(run.to_end()["a"]) == text[: text.index(text[4]) + 1]
    assert run.ended["a"].reason is FinishReason.STOP


def test_min_tokens_keeps_stop_tokens_away(tiny_model, reference):
    """Conformance 8."""
    first = reference.greedy(prompt_of(20), 1, ignore_eos=True).tokens[0]
    run = Run(tiny_engine(tiny_model))
    sampling = {"stop_token_ids": frozenset({first}), "min_tokens": 6}
    run.engine.submit(request("a", prompt_of(20), 10, sampling=sampling))
    text = run.to_end()["a"]
    assert first not in text[:6]
    assert len(text) >= 6


def test_the_models_own_end_of_sequence_ends_it_unless_ignored(tiny_model, tmp_path):
    engine = tiny_engine(tiny_model)
    probe = Run(engine)
    probe.engine.submit(request("a", prompt_of(20), 10, sampling={"ignore_eos": True}))
    text = probe.to_end()["a"]
    engine._eos = frozenset({text[3]})
    run = Run(engine)
    run.engine.submit(request("ends", prompt_of(20), 10))
    run.engine.submit(request("goes on", prompt_of(20), 10, sampling={"ignore_eos": True}))
    texts = run.to_end()
    assert texts["ends"] == text[: text.index(text[3]) + 1]
    assert texts["goes on"] == text


@pytest.mark.parametrize("steps", range(6))
def test_a_removed_sequence_frees_its_blocks_at_any_time(tiny_model, steps):
    run = Run(tiny_engine(tiny_model, step_tokens=16))
    for name in ("a", "b"):
        run.engine.submit(request(name, prompt_of(40), 10))
    for _ in range(steps):
        run.step()
    for name in ("a", "b"):
        assert run.engine.remove(SequenceId(name))
    run.engine.check_integrity()
    assert all_free(run.engine)


def test_a_sequence_removed_while_its_step_runs_is_skipped(tiny_model):
    engine = tiny_engine(tiny_model)
    engine.submit(request("a", prompt_of(20)))
    engine.submit(request("b", prompt_of(20)))
    engine.admit()
    launched = engine.launch()
    assert launched is not None
    engine.remove(SequenceId("a"))
    result = engine.collect(launched)
    assert [t.sequence_id for t in result.tokens] == ["b"]


def test_more_requests_than_blocks_all_finish(tiny_model, reference):
    run = Run(tiny_engine(tiny_model, kv_cache_bytes=70_000))
    for n in range(20):
        run.engine.submit(request(f"p{n}", prompt_of(10 + n, seed=n), 10, arrival_s=n))
    texts = run.to_end()
    for n in range(20):
        NearTies(0).check(texts[f"p{n}"], reference.greedy(prompt_of(10 + n, seed=n), 10))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"prompt": ()}, "prompt"),
        ({"prompt": (5, 100_000)}, "prompt"),
        ({"prompt": (5,), "max_tokens": 100_000}, "max_tokens"),
        ({"prompt": (5, 6), "max_tokens": 4096 - 1}, "max_tokens"),
        ({"prompt": (5, 6), "max_tokens": 2, "generated": (7, 8)}, "max_tokens"),
    ],
)
def test_a_request_that_can_never_run_is_refused_with_the_field(tiny_model, fields, named):
    engine = tiny_engine(tiny_model)
    with pytest.raises(InvalidRequest, match=named):
        engine.submit(request("a", **fields))
    assert all_free(engine)


def test_a_request_larger_than_all_blocks_is_refused(tiny_model):
    with pytest.raises(InvalidRequest, match="blocks"):
        tiny_engine(tiny_model, kv_cache_bytes=70_000).submit(request("a", prompt_of(3), 4000))


def test_a_prompt_up_to_the_models_limit_runs(tiny_model):
    """Conformance 8."""
    run = Run(tiny_engine(tiny_model, max_model_len=100))
    run.engine.submit(request("a", prompt_of(99), 1))
    assert len(run.to_end()["a"]) == 1


def test_an_import_beyond_the_prompt_is_refused(tiny_model):
    engine = tiny_engine(tiny_model)
    engine.submit(request("a", prompt_of(20), kv_source=KVSource.HANDOFF))
    engine.admit()
    with pytest.raises(ValueError, match="20"):
        engine.import_kv(SequenceId("a"), engine.wire(engine.layout), 0, 16, 21, bytes(5 * 256))


def test_an_import_for_a_sequence_that_is_gone_writes_nothing(tiny_model):
    engine = tiny_engine(tiny_model)
    assert not engine.import_kv(SequenceId("gone"), engine.wire(engine.layout), 0, 0, 1, bytes(256))
