"""What every token passes gives the same as the plain way."""

import asyncio
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from router.bucket_counter import BucketCounter
from router.chat_sample import Delta
from router.chunk_template import ChunkTemplate
from router.detokenizer import Detokenizer
from router.openai_answer import AnswerHead, ChatShape, EchoedPrompt, TextShape
from router.plain_counter import PlainCounter
from router.tokenizer import Tokenizer
from router.tool_parsers.plain import PlainParser
from router.utf8_detokenizer import Utf8Detokenizer
from router.wake_up import WakeUp


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    tokenizer = Tokenizer.load(tiny_model)
    assert tokenizer.is_byte_level
    return tokenizer


def pieces(tokenizer: Tokenizer, kind: type[Detokenizer | Utf8Detokenizer], ids: list[int]) -> list[str]:
    detokenizer = kind(tokenizer)
    return [*(detokenizer.push(id_) for id_ in ids), detokenizer.finish()]


@given(token_ids=st.lists(st.integers(0, 383), max_size=60))
def test_bytes_of_any_tokens_are_the_text_decoded_at_once(tokenizer: Tokenizer, token_ids: list[int]) -> None:
    assert "".join(pieces(tokenizer, Utf8Detokenizer, token_ids)) == tokenizer.decode(token_ids)


@given(text=st.text(max_size=30))
def test_bytes_of_a_text_come_as_its_tokens_do(tokenizer: Tokenizer, text: str) -> None:
    ids = list(tokenizer._backend.encode(text.replace("\ufffd", "")).ids)
    assert pieces(tokenizer, Utf8Detokenizer, ids) == pieces(tokenizer, Detokenizer, ids)


def test_special_tokens_have_no_bytes_unless_they_are_shown(tokenizer: Tokenizer) -> None:
    (special,) = tokenizer.special_ids_of(["<|im_end|>"])
    assert Utf8Detokenizer(tokenizer).push(special) == ""
    assert Utf8Detokenizer(tokenizer, frozenset([special])).push(special) == "<|im_end|>"


HEAD = AnswerHead(request_id="r", model='a "model"', created_unix_s=7, logprobs=None, prompt_logprobs=None)


@given(text=st.text(min_size=1))
def test_a_chunk_of_a_completion_from_its_template(text: str) -> None:
    shape = TextShape(HEAD)
    shape.opening(2, EchoedPrompt())
    for sample in (0, 1):
        (chunk,) = shape.chunks(sample, text, ())
        assert json.loads(chunk) == json.loads(shape._chunk(sample, text, (), None))


@given(text=st.text(min_size=1))
def test_a_chunk_of_a_chat_from_its_template(text: str) -> None:
    shape = ChatShape(HEAD, PlainParser)
    shape.opening(2, EchoedPrompt())
    for sample in (0, 1):
        (chunk,) = shape.chunks(sample, text, ())
        assert json.loads(chunk) == json.loads(shape._chunk(sample, Delta(content=text), None, None))


def test_a_text_with_the_mark_of_templates_is_written_as_it_is() -> None:
    template = ChunkTemplate(json.dumps({"text": ChunkTemplate.MARK}, ensure_ascii=False))
    assert json.loads(template.with_text(f"a{ChunkTemplate.MARK}b")) == {"text": f"a{ChunkTemplate.MARK}b"}


@given(values=st.lists(st.tuples(st.floats(0, 100), st.integers(1, 5)), max_size=30))
def test_a_bucket_counter_says_what_a_histogram_does(values: list[tuple[float, int]]) -> None:
    buckets = (0.005, 0.01, 1.0, 2.5)
    plain, fast = CollectorRegistry(), CollectorRegistry()
    histogram = Histogram("baton_x_seconds", "X.", buckets=buckets, registry=plain)
    counter = BucketCounter("baton_x_seconds", "X.", buckets)
    fast.register(counter)
    for value, times in values:
        counter.observe(value, times)
        for _ in range(times):
            histogram.observe(value)
    assert _figures(fast) == pytest.approx(_figures(plain))


def test_a_plain_counter_says_what_a_counter_does() -> None:
    plain, fast = CollectorRegistry(), CollectorRegistry()
    Counter("baton_x", "X.", registry=plain).inc(3)
    counter = PlainCounter("baton_x", "X.")
    fast.register(counter)
    counter.value += 3
    assert _figures(fast) == _figures(plain) == {"baton_x_total": 3}


def _figures(registry: CollectorRegistry) -> dict[str, float]:
    lines = generate_latest(registry).decode().splitlines()
    samples = (line.rsplit(" ", 1) for line in lines if not line.startswith("#") and "_created" not in line)
    return {name: float(value) for name, value in samples}


async def test_a_wake_up_that_came_before_the_wait_is_not_lost() -> None:
    wake_up = WakeUp()
    wake_up.due()
    wake_up.due()
    await wake_up.wait()
    waiting = asyncio.create_task(wake_up.wait())
    await asyncio.sleep(0)
    assert not waiting.done()
    wake_up.due()
    await waiting


async def test_a_wait_that_is_cancelled_leaves_the_wake_up_usable() -> None:
    wake_up = WakeUp()
    waiting = asyncio.create_task(wake_up.wait())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait({waiting})
    wake_up.due()
    await wake_up.wait()
