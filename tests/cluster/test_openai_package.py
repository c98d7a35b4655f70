"""What the openai package itself makes of our answers: its parsed answers, its stream events, its lists."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Literal

import openai
import pytest
from pydantic import BaseModel, ConfigDict

from tests.cluster.local_cluster import LocalCluster, local_cluster
from tests.tool_templates import QWEN

TURNS = [{"role": "user", "content": "What is it?"}]


class Answer(BaseModel):
    """What an answer must be."""

    ok: bool
    word: Literal["north", "wind"]


class Weather(BaseModel):
    """A function's arguments."""

    model_config = ConfigDict(extra="forbid")

    place: Literal["here", "there"]
    days: Literal[1, 2]


@pytest.fixture(scope="module")
def folder(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a template that knows tools."""
    folder = tmp_path_factory.mktemp("models") / "tools"
    shutil.copytree(tiny_model, folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": QWEN}))
    return folder


@pytest.fixture
async def cluster(folder: Path) -> AsyncIterator[LocalCluster]:
    async with local_cluster(folder, step_tokens=64) as running:
        yield running
        await running.wait_clean()


@pytest.fixture
async def client(cluster: LocalCluster) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"http://{cluster.router.http_address}/v1", api_key="none", max_retries=0, timeout=120
    ) as client:
        yield client


async def test_an_answer_is_parsed_into_a_model_of_pydantic(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.parse(
        model="tiny", messages=TURNS, response_format=Answer, n=2, seed=1, max_tokens=200
    )  # pyright: ignore
    assert [type(choice.message.parsed) for choice in answer.choices] == [Answer, Answer]


async def test_a_stream_of_events_ends_in_the_answer_that_is_not_streamed(client: openai.AsyncOpenAI) -> None:
    asked = {
        "model": "tiny",
        "messages": TURNS,
        "n": 2,
        "seed": 4,
        "max_completion_tokens": 50,
        "logprobs": True,
        "top_logprobs": 2,
        # The package raises for what a limit cuts.
        "extra_body": {"structured_outputs": {"regex": "[0-9]{3}-(the|a) wind"}},
    }
    whole = await client.chat.completions.create(**asked)
    async with client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
        kinds = {event.type async for event in stream}
        streamed = await stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done", "logprobs.content.delta"} <= kinds
    assert streamed.usage is not None and whole.usage is not None
    assert streamed.usage.total_tokens == whole.usage.total_tokens
    for ours, theirs in zip(streamed.choices, whole.choices, strict=True):
        assert (ours.index, ours.finish_reason) == (theirs.index, theirs.finish_reason)
        assert ours.message.content == theirs.message.content
        assert ours.logprobs is not None and theirs.logprobs is not None
        assert [entry.token for entry in ours.logprobs.content or []] == [
            entry.token for entry in theirs.logprobs.content or []
        ]


async def test_a_streamed_answer_is_parsed_at_its_end(client: openai.AsyncOpenAI) -> None:
    async with client.chat.completions.stream(
        model="tiny", messages=TURNS, response_format=Answer, seed=1, max_tokens=200
    ) as stream:  # pyright: ignore
        final = await stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Answer)
    assert final.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "Weather"}}])
async def test_arguments_of_a_call_are_parsed_whole_and_streamed(
    client: openai.AsyncOpenAI, choice: str | dict
) -> None:
    asked = {
        "model": "tiny",
        "messages": TURNS,
        "tools": [openai.pydantic_function_tool(Weather)],
        "tool_choice": choice,
        "seed": 2,
        "max_tokens": 200,
    }
    whole = await client.chat.completions.parse(**asked)
    async with client.chat.completions.stream(**asked) as stream:
        kinds = {event.type async for event in stream}
        streamed = await stream.get_final_completion()
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    for answer in (whole, streamed):
        (call,) = answer.choices[0].message.tool_calls or []
        assert isinstance(call.function.parsed_arguments, Weather)
    assert whole.choices[0].finish_reason == streamed.choices[0].finish_reason


async def test_an_answer_that_its_limit_cuts_is_not_parsed(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        await client.chat.completions.parse(
            model="tiny", messages=TURNS, response_format=Answer, seed=1, max_tokens=2
        )  # pyright: ignore


async def test_models_are_listed_and_retrieved(client: openai.AsyncOpenAI) -> None:
    (listed,) = [model async for model in client.models.list()]
    assert await client.models.retrieve("tiny") == listed
    with pytest.raises(openai.NotFoundError) as caught:
        await client.models.retrieve("some/other")
    assert caught.value.param == "model"


async def test_the_blocking_client_streams_too(cluster: LocalCluster) -> None:
    def read() -> str:
        with openai.OpenAI(base_url=f"http://{cluster.router.http_address}/v1", api_key="none") as client:
            stream = client.chat.completions.create(
                model="tiny", messages=TURNS, stream=True, max_tokens=8, extra_body={"ignore_eos": True}
            )  # pyright: ignore
            return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    assert await asyncio.to_thread(read)
