"""Streams whose tokens go past the task that waits for them."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from random import Random
from typing import TypeVar

import httpx
import pytest

from protos import worker_pb2
from protos.inference_pb2 import FINISH_REASON_LENGTH
from router.completion import End, Piece
from router.errors import ErrorCode, RequestError
from router.generation_request import RequestDraft, TokenPrompt
from router.piece_sink import PieceSink
from router.sampling_options import SamplingDraft
from router.text_stream import TextStream
from router.tokenizer import Tokenizer
from tests.cluster.router_bench import PROMPT, both_legs, generating, token_request
from tests.cluster.router_fixtures import Cluster
from tests.cluster.scripted_worker import SubmittedLeg

Word = worker_pb2.SequenceTokens | worker_pb2.Admitted | worker_pb2.Prefilled | worker_pb2.Finished
W = TypeVar("W")
# What the two legs of a request say.
Say = Callable[[SubmittedLeg, SubmittedLeg], Awaitable[None]]

BODY = {"model": "tiny", "prompt": list(PROMPT), "max_tokens": 5, "stream": True}


def draft(max_tokens: int) -> RequestDraft:
    return RequestDraft(
        request_id="r",
        model="tiny",
        prompt=TokenPrompt(PROMPT),
        sampling=SamplingDraft(max_tokens=max_tokens),
        stop=(),
        cache_salt="",
        arrival_s=time.monotonic(),
        arrival_unix_s=time.time(),
    )


async def outputs(scripted: Cluster, max_tokens: int, sink: PieceSink, heard: list[Piece]) -> End:
    """Adds the pieces that are yielded to `heard`."""
    async with aclosing(scripted.router._service.generate(draft(max_tokens), sink)) as running:
        async for output in running:
            if isinstance(output, End):
                return output
            assert isinstance(output, Piece)
            heard.append(output)
    raise AssertionError("no end")


async def test_what_a_sink_takes_and_what_it_leaves_is_every_token_once_and_in_order(
    scripted: Cluster,
) -> None:
    heard: list[Piece] = []
    taken: list[int] = []

    class Sink:
        async def prepare(self) -> None:
            assert not heard

        def take(self, piece: Piece) -> bool:
            if piece.first_index % 3 == 1:
                return False
            heard.append(piece)
            taken.append(piece.first_index)
            return True

    reading = asyncio.create_task(outputs(scripted, 40, Sink(), heard))
    _, d = await both_legs(scripted.prefill, scripted.decode)
    d.say_admitted()
    for index in range(40):
        d.say_tokens(index, [100 + index])
    d.say_finished(FINISH_REASON_LENGTH)
    end = await reading
    assert [token for piece in heard for token in piece.token_ids] == [*range(100, 140)]
    assert end.usage.completion_tokens == 40
    assert taken


async def test_a_sink_that_fails_ends_its_own_request_only(scripted: Cluster) -> None:
    class Broken:
        async def prepare(self) -> None:
            pass

        def take(self, piece: Piece) -> bool:
            raise LookupError("a defect")

    reading = asyncio.create_task(outputs(scripted, 5, Broken(), []))
    p, d = await both_legs(scripted.prefill, scripted.decode)
    async with generating(scripted.router, token_request(max_tokens=1, ignore_eos=True)) as other:
        beside = await scripted.prefill.next_leg()
        d.say_admitted()
        d.say_tokens(0, [100])
        with pytest.raises(RequestError) as failed:
            await reading
        assert failed.value.code is ErrorCode.INTERNAL
        await p.cancel_arrives()
        await d.cancel_arrives()
        beside.say_tokens(0, [7])
        beside.say_finished(FINISH_REASON_LENGTH)
        assert (await other).token_ids == [7]


async def streamed(scripted: Cluster, ask: Callable[[], Awaitable[httpx.Response]]) -> str:
    """The body of a stream of five tokens, without what differs between two requests."""
    asking = asyncio.ensure_future(ask())
    p, d = await both_legs(scripted.prefill, scripted.decode)
    p.say_tokens(0, [70])
    d.say_admitted()
    p.say_prefilled()
    for index in range(1, 5):
        d.say_tokens(index, [70 + index])
    d.say_finished(FINISH_REASON_LENGTH)
    answered = await asking
    assert answered.status_code == 200
    return answered.text


async def test_a_server_without_a_writer_streams_the_same(scripted: Cluster) -> None:
    headers = {"x-request-id": "same"}
    application = httpx.ASGITransport(app=scripted.router._http.config.app)
    async with (
        httpx.AsyncClient(base_url=f"http://{scripted.router.http_address}", headers=headers) as ours,
        httpx.AsyncClient(base_url="http://door", headers=headers, transport=application) as other,
    ):
        bodies = [
            await streamed(scripted, lambda client=client: client.post("/v1/completions", json=BODY))
            for client in (ours, other)
        ]
    texts = [[line for line in body.splitlines() if '"text":""' not in line] for body in bodies]
    assert texts_of("".join(texts[0])) == texts_of("".join(texts[1]))
    assert bodies[0].endswith("data: [DONE]\n\n")


def texts_of(body: str) -> str:
    """The events of tokens may be cut otherwise: their texts, one after the other."""
    return "".join(part.split('"', 1)[0] for part in body.split('"text":"')[1:])


async def raw_answer(scripted: Cluster, fields: dict[str, object], say: Say) -> str:
    """All bytes of a streamed completion, and whatever follows them until the connection is quiet."""
    host, port = scripted.router.http_address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps({**BODY, **fields}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: door\r\ncontent-length: {len(body)}\r\n"
    writer.write(head.encode() + b"content-type: application/json\r\n\r\n" + body)
    await say(*await both_legs(scripted.prefill, scripted.decode))
    answer = await reader.readuntil(b"\r\n0\r\n\r\n")
    # The next answer of the connection tells what came between.
    writer.write(b"GET /health HTTP/1.1\r\nhost: door\r\nconnection: close\r\n\r\n")
    assert (await reader.read()).startswith(b"HTTP/1.1 200 OK")
    writer.close()
    return answer.decode()


async def test_text_before_a_stop_string_in_its_token_leaves_before_the_end(scripted: Cluster) -> None:
    text_of = scripted.router._tokenizer.prompt_text
    before = text_of([70, 71, 72])
    longer = [(token, text) for token in range(260, 380) if len(text := text_of([token])) > 2]
    token, text = next(
        each for each in longer if len(each[1]) > 2 and each[1][-1] not in before + each[1][:-1]
    )

    async def say(p: SubmittedLeg, d: SubmittedLeg) -> None:
        d.say_admitted()
        for index in range(3):
            d.say_tokens(index, [70 + index])
            await asyncio.sleep(0.02)  # the stream waits for its next token
        d.say_tokens(3, [token])

    answer = await raw_answer(scripted, {"stop": [text[-1]]}, say)
    assert texts_of(answer) == before + text[:-1]


async def test_a_gap_that_is_filled_last_leaves_before_the_end(scripted: Cluster) -> None:
    """The decode worker is ahead of the prefill worker, whose first token of the second sample is the last
    of all.
    """

    async def say(p: SubmittedLeg, d: SubmittedLeg) -> None:
        d.say_admitted()
        d.say_tokens(0, [70, 71])
        await asyncio.sleep(0.02)
        d.say_tokens(2, [72])
        d.say_finished(FINISH_REASON_LENGTH)
        d.say_tokens(1, [74, 75], sample=1)
        d.say_finished(FINISH_REASON_LENGTH, sample=1)
        await asyncio.sleep(0.02)
        tokens = worker_pb2.SequenceTokens(attempt=p.submit.attempt, sample=1, index=0, token_ids=[73])
        prefilled = worker_pb2.Prefilled(attempt=p.submit.attempt)
        p.session.say(worker_pb2.StepEvent(tokens=[tokens], prefilled=[prefilled]))

    answer = await raw_answer(scripted, {"max_tokens": 3, "n": 2}, say)
    for index, tokens in enumerate(([70, 71, 72], [73, 74, 75])):
        events = [line for line in answer.splitlines() if f'"index":{index}' in line]
        assert texts_of("".join(events)) == scripted.router._tokenizer.prompt_text(tokens)


@dataclass(slots=True)
class Course:
    """What a sample's tokens are, and what a client is to get of it."""

    tokens: list[int]
    text: str
    finish: str

    @classmethod
    def random(cls, chance: Random, length: int, tokenizer: Tokenizer, stop: list[str]) -> "Course":
        tokens = [chance.randint(20, 380) for _ in range(length)]
        stream, text = TextStream(tokenizer, stop), ""
        for token in tokens:
            written = stream.push([token])
            text += written.text
            if written.stopped:
                return cls(tokens, text, "stop")
        rest = stream.finish()
        return cls(tokens, text + rest.text, "stop" if rest.stopped else "length")


def words_of_decode(chance: Random, attempt: worker_pb2.Attempt, courses: list[Course]) -> list[Word]:
    """Each sample's in order, from its first or its second token on, the samples' mixed."""
    samples: list[list[Word]] = []
    for sample, course in enumerate(courses):
        words, index = [], chance.choice((0, 1))
        while index < len(course.tokens):
            ids = course.tokens[index : index + chance.randint(1, 3)]
            words.append(
                worker_pb2.SequenceTokens(attempt=attempt, sample=sample, index=index, token_ids=ids)
            )
            index += len(ids)
        end = worker_pb2.Finished(attempt=attempt, sample=sample, finish_reason=FINISH_REASON_LENGTH)
        samples.append([*words, end])
    mixed: list[Word] = [worker_pb2.Admitted(attempt=attempt)]
    while left := [words for words in samples if words]:
        mixed.append(chance.choice(left).pop(0))
    return mixed


def words_of_prefill(attempt: worker_pb2.Attempt, courses: list[Course]) -> list[Word]:
    first = [
        worker_pb2.SequenceTokens(attempt=attempt, sample=sample, index=0, token_ids=course.tokens[:1])
        for sample, course in enumerate(courses)
    ]
    return [*first, worker_pb2.Prefilled(attempt=attempt)]


def step_of(words: Sequence[Word]) -> worker_pb2.StepEvent:
    def of(kind: type[W]) -> list[W]:
        return [word for word in words if isinstance(word, kind)]

    return worker_pb2.StepEvent(
        tokens=of(worker_pb2.SequenceTokens),
        admitted=of(worker_pb2.Admitted),
        prefilled=of(worker_pb2.Prefilled),
        finished=of(worker_pb2.Finished),
    )


@pytest.mark.parametrize("seed", range(30))
async def test_in_whatever_order_two_workers_speak_the_stream_is_right(scripted: Cluster, seed: int) -> None:
    chance = Random(seed)
    stop = chance.choice(([], [], ["e"], [" t"], ["a", "in"]))
    length = chance.randint(2, 12)
    tokenizer = scripted.router._tokenizer
    courses = [Course.random(chance, length, tokenizer, stop) for _ in range(chance.choice((1, 1, 2, 3)))]

    async def say(p: SubmittedLeg, d: SubmittedLeg) -> None:
        left = {
            p: words_of_prefill(p.submit.attempt, courses),
            d: words_of_decode(chance, d.submit.attempt, courses),
        }
        while speaking := [leg for leg, words in left.items() if words]:
            leg = chance.choice(speaking)
            count = chance.randint(1, 3)
            said, left[leg] = left[leg][:count], left[leg][count:]
            leg.session.say(step_of(said))
            for _ in range(chance.choice((0, 0, 1, 5, 30))):
                await asyncio.sleep(0)

    fields = {"max_tokens": length, "n": len(courses), "stop": stop}
    events = (await raw_answer(scripted, fields, say)).split("data: ")[1:]
    assert events.pop().startswith("[DONE]")
    texts, ends = [""] * len(courses), [""] * len(courses)
    for event in events:
        (choice,) = json.loads(event.split("\n")[0])["choices"]
        assert not ends[choice["index"]], "text after the end"
        texts[choice["index"]] += choice["text"]
        ends[choice["index"]] = choice["finish_reason"] or ""
    assert texts == [course.text for course in courses]
    assert ends == [course.finish for course in courses]
