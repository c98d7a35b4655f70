"""Through the whole cluster the text is the reference's, whatever the lengths and the company."""

import time
from pathlib import Path

import pytest

from protos import inference_pb2
from tests.cluster.local_cluster import LocalCluster, local_cluster, together, token_request
from tests.engine.engines import prompt_of
from tests.reference import NearTies, Reference

BLOCK_SIZE, STEP_TOKENS = 16, 64


@pytest.fixture
async def cluster(tiny_model: Path):
    async with local_cluster(tiny_model, step_tokens=STEP_TOKENS, block_size=BLOCK_SIZE) as running:
        yield running
        await running.wait_clean()


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> Reference:
    return Reference(tiny_model)


def around(size: int, multiples: int) -> set[int]:
    """Every length next to a multiple of `size`."""
    return {size * n + d for n in range(1, multiples + 1) for d in (-1, 0, 1)}


LENGTHS = sorted({1, 2, 3} | around(BLOCK_SIZE, 5) | around(STEP_TOKENS, 4) | {500, 1000, 1999, 2000})


async def test_alone_every_length_gives_the_reference_text(cluster: LocalCluster, reference: Reference):
    ties = NearTies(allowed=1)
    for length in LENGTHS:
        prompt = prompt_of(length, seed=length)
        answer = await cluster.generate(token_request(prompt, 8))
        ties.check(answer.token_ids, reference.greedy(prompt, 8))
        assert (answer.last.served_by.prefill_worker, answer.last.served_by.decode_worker) == (
            "prefill-0",
            "decode-0",
        )


async def test_sixteen_at_once_give_the_reference_texts(cluster: LocalCluster, reference: Reference):
    ties = NearTies(allowed=1)
    for start in range(0, len(LENGTHS), 16):
        prompts = [prompt_of(length, seed=length + 1) for length in LENGTHS[start : start + 16]]
        answers = await together(cluster, [token_request(prompt, 24) for prompt in prompts])
        for prompt, answer in zip(prompts, answers, strict=True):
            ties.check(answer.token_ids, reference.greedy(prompt, 24))


async def test_the_decode_worker_computes_no_prompt_and_receives_what_the_layout_says(cluster: LocalCluster):
    lengths = (1, 16, 40, 129)
    for length in lengths:
        answer = await cluster.generate(token_request(prompt_of(length, seed=length), 5, ignore_eos=True))
        assert answer.last.served_by.kv_bytes == length * cluster.decode[0].layout.token_bytes
    prefill, decode = await cluster.loads()
    assert decode.computed_prompt_tokens == 0
    assert prefill.computed_prompt_tokens == sum(lengths)
    report = cluster.decode[0].monitor.report(legs_before_engine=0, tokens_before_engine=0)
    # 3 layers, K and V, 2 heads of 16 in float32.
    assert report.kv_bytes_received == sum(lengths) * 3 * 2 * 2 * 16 * 4


async def test_one_wanted_token_needs_no_hand_off(cluster: LocalCluster, reference: Reference):
    """Conformance 6."""
    answer = await cluster.generate(token_request(prompt_of(20), 1))
    assert answer.token_ids == reference.greedy(prompt_of(20), 1).tokens
    assert answer.last.finish_reason == inference_pb2.FINISH_REASON_LENGTH
    assert answer.last.served_by.kv_bytes == 0
    assert (answer.last.usage.prompt_tokens, answer.last.usage.completion_tokens) == (20, 1)


async def test_a_stop_token_as_the_first_ends_the_request_there(cluster: LocalCluster, reference: Reference):
    """Conformance 7."""
    first = reference.greedy(prompt_of(30), 1).tokens[0]
    answer = await cluster.generate(token_request(prompt_of(30), 10, stop_token_ids=[first]))
    assert answer.token_ids == (first,)
    assert answer.last.finish_reason == inference_pb2.FINISH_REASON_STOP
    assert answer.last.served_by.kv_bytes == 0


async def test_a_stop_string_ends_the_text_before_it(cluster: LocalCluster, reference: Reference):
    """Conformance 7 and 12: nothing of it leaks, nothing before it is lost, nothing after it counts."""
    whole = await cluster.generate(token_request(prompt_of(30), 40, ignore_eos=True))
    stop = whole.text[8:11]
    request = token_request(prompt_of(30), 40, ignore_eos=True)
    request.stop.append(stop)
    answer = await cluster.generate(request)
    assert answer.text == whole.text[: whole.text.index(stop)]
    assert answer.last.finish_reason == inference_pb2.FINISH_REASON_STOP
    assert answer.last.usage.completion_tokens < 40


async def test_min_tokens_is_kept_across_the_hand_off(cluster: LocalCluster, reference: Reference):
    """Conformance 8."""
    text = reference.greedy(prompt_of(30), 3, ignore_eos=True).tokens
    answer = await cluster.generate(token_request(prompt_of(30), 10, stop_token_ids=list(text), min_tokens=5))
    assert not set(answer.token_ids[:5]) & set(text)
    assert len(answer.token_ids) >= 5


@pytest.mark.parametrize("top_p", [1.0, 0.9])
async def test_a_seed_gives_the_same_text_on_one_worker_and_on_two(tiny_model: Path, top_p: float):
    """Conformance 11."""
    request = token_request(prompt_of(30), 20, temperature=1.0, top_p=top_p, seed=123, ignore_eos=True)
    async with local_cluster(tiny_model) as pair, local_cluster(tiny_model, prefill=0) as alone:
        company = [token_request(prompt_of(50, seed=i), 20, temperature=1.0, seed=i) for i in range(6)]
        handed_off, *_ = await together(pair, [request, *company])
        local = await alone.generate(request)
        assert handed_off.last.served_by.kv_bytes > 0
        assert local.last.served_by.prefill_worker == "decode-0"
        assert handed_off.token_ids == local.token_ids


async def test_the_stage_times_are_parts_of_what_the_client_waited(cluster: LocalCluster):
    started = time.monotonic()
    answer = await cluster.generate(token_request(prompt_of(200), 20, ignore_eos=True))
    waited = time.monotonic() - started
    times = answer.last.stage_times
    stages = [getattr(times, field.name) for field in times.DESCRIPTOR.fields]
    assert len(stages) == 6
    assert all(0 < stage < waited for stage in stages)


async def test_prompts_at_the_models_limit(cluster: LocalCluster, reference: Reference):
    """Conformance 8: exactly the limit, one under, one over, and empty."""
    limit = 4096
    answer = await cluster.generate(token_request(prompt_of(limit - 1), 1))
    assert answer.token_ids == reference.greedy(prompt_of(limit - 1), 1).tokens
    for prompt, max_tokens in ((prompt_of(limit), 1), (prompt_of(limit - 1), 2), ((), 1)):
        with pytest.raises(Exception, match="INVALID_ARGUMENT"):
            await cluster.generate(token_request(prompt, max_tokens))
