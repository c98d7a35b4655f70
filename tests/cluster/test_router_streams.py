"""Streams whose tokens go past the task that waits for them."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing

import httpx
import pytest

from protos import worker_pb2
from protos.inference_pb2 import FINISH_REASON_LENGTH
from router.completion import End, Piece
from router.errors import ErrorCode, RequestError
from router.generation_request import RequestDraft, TokenPrompt
from router.piece_sink import PieceSink
from router.sampling_options import SamplingDraft
from tests.cluster.router_bench import PROMPT, both_legs, generating, token_request
from tests.cluster.router_fixtures import Cluster
from tests.cluster.scripted_worker import SubmittedLeg

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

    def sink(piece: Piece) -> bool:
        if piece.first_index % 3 == 1:
            return False
        heard.append(piece)
        taken.append(piece.first_index)
        return True

    reading = asyncio.create_task(outputs(scripted, 40, sink, heard))
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
    def broken(piece: Piece) -> bool:
        raise LookupError("a defect")

    reading = asyncio.create_task(outputs(scripted, 5, broken, []))
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


Say = Callable[[SubmittedLeg, SubmittedLeg], Awaitable[None]]


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
