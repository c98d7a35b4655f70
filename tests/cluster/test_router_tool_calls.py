"""Tool calls through the HTTP door, with the openai package as its client."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import openai
import pytest
from openai.types.chat import ChatCompletionMessage
from tokenizers import Tokenizer

from protos.inference_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP, FinishReason
from router.worker_directory import StaticDirectory
from tests.cluster.router_bench import both_legs, running_router, started_router
from tests.cluster.scripted_worker import ScriptedWorker, SubmittedLeg
from tests.tool_templates import LLAMA, PLAIN, QWEN, TIME, WEATHER, with_template

TURNS = [{"role": "user", "content": "Rain?"}]
TOOLS = [WEATHER, TIME]


@dataclass(frozen=True)
class Door:
    """A router before two scripted workers, its client, and the tokenizer of its model."""

    client: openai.AsyncOpenAI
    prefill: ScriptedWorker
    decode: ScriptedWorker
    tokenizer: Tokenizer

    async def asked(self, **fields: object) -> openai.types.chat.ChatCompletion:
        return await self.client.chat.completions.create(
            model="tiny", messages=TURNS, **{"tools": TOOLS, **fields}
        )  # pyright: ignore

    async def play(self, text: str, reason: FinishReason = FINISH_REASON_STOP) -> SubmittedLeg:
        """Both workers do a request whose answer is `text`, a token at a time."""
        p, d = await both_legs(self.prefill, self.decode)
        d.say_admitted()
        p.say_prefilled()
        for index, token_id in enumerate(self.tokenizer.encode(text).ids):
            d.say_tokens(index, [token_id])
        d.say_finished(reason)
        return d

    async def answer(
        self, text: str, reason: FinishReason = FINISH_REASON_STOP, **fields: object
    ) -> "Answer":
        """What the client gets of `text`, which must be the same streamed and whole."""
        whole = await self._whole(text, reason, **fields)
        streamed = await self._streamed(text, reason, **fields)
        assert streamed == whole
        return whole

    async def _whole(self, text: str, reason: FinishReason, **fields: object) -> "Answer":
        async with asyncio.TaskGroup() as group:
            played = group.create_task(self.play(text, reason))
            chat = group.create_task(self.asked(**fields))
        choice = chat.result().choices[0]
        return Answer.of(choice.message, choice.finish_reason, played.result())

    async def _streamed(self, text: str, reason: FinishReason, **fields: object) -> "Answer":
        async with asyncio.TaskGroup() as group:
            played = group.create_task(self.play(text, reason))
            stream = await self.client.chat.completions.create(
                model="tiny", messages=TURNS, stream=True, **{"tools": TOOLS, **fields}
            )  # pyright: ignore
            chunks = [chunk async for chunk in stream]
        answer = Answer()
        for chunk in chunks:
            answer.add(chunk.choices[0])
        answer.schema = played.result().submit.sampling.grammar.json_schema
        return answer


@dataclass
class Answer:
    """
    Attributes:
        calls: name and arguments of each.
        schema: what the workers were told that the text must fit.
    """

    content: str = ""
    calls: list[list[str]] = field(default_factory=list)
    finish_reason: str | None = None
    schema: str = ""

    @classmethod
    def of(cls, message: ChatCompletionMessage, finish_reason: str, leg: SubmittedLeg) -> "Answer":
        calls = message.tool_calls or []
        assert all(call.id.startswith("call_") and call.type == "function" for call in calls)
        assert len({call.id for call in calls}) == len(calls)
        assert (message.content is None) is (bool(calls) and not message.content)
        return cls(
            content=message.content or "",
            calls=[[call.function.name, call.function.arguments] for call in calls],
            finish_reason=finish_reason,
            schema=leg.submit.sampling.grammar.json_schema,
        )

    def add(self, choice: openai.types.chat.chat_completion_chunk.Choice) -> None:
        """Holds every chunk to OpenAI's order: a call's first has all but its arguments."""
        assert self.finish_reason is None
        self.content += choice.delta.content or ""
        self.finish_reason = choice.finish_reason
        for call in choice.delta.tool_calls or ():
            assert call.function is not None
            if call.index == len(self.calls):
                assert call.id and call.type == "function" and call.function.arguments == ""
                self.calls.append([call.function.name or "", ""])
            else:
                assert call.index == len(self.calls) - 1
                assert (call.id, call.type, call.function.name) == (None, None, None)
                self.calls[call.index][1] += call.function.arguments or ""


@asynccontextmanager
async def opened(folder: Path, prefill: ScriptedWorker, decode: ScriptedWorker) -> AsyncIterator[Door]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    async with (
        running_router(folder, prefill=[prefill], decode=[decode]) as router,
        openai.AsyncOpenAI(
            base_url=f"http://{router.http_address}/v1", api_key="none", max_retries=0, timeout=20
        ) as client,
    ):
        yield Door(client, prefill, decode, tokenizer)


@pytest.fixture
async def qwen(
    tiny_model: Path, tmp_path: Path, scripted_prefill: ScriptedWorker, scripted_decode: ScriptedWorker
) -> AsyncIterator[Door]:
    folder = with_template(tiny_model, tmp_path / "qwen", QWEN)
    async with opened(folder, scripted_prefill, scripted_decode) as door:
        yield door


@pytest.fixture
async def llama(
    tiny_model: Path, tmp_path: Path, scripted_prefill: ScriptedWorker, scripted_decode: ScriptedWorker
) -> AsyncIterator[Door]:
    folder = with_template(tiny_model, tmp_path / "llama", LLAMA)
    async with opened(folder, scripted_prefill, scripted_decode) as door:
        yield door


def hermes(*calls: tuple[str, str]) -> str:
    return "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
        for name, arguments in calls
    )


def llama3(calls: Sequence[tuple[str, str]], separator: str = "; ") -> str:
    return separator.join(f'{{"name": "{name}", "parameters": {arguments}}}' for name, arguments in calls)


RAIN = ("get_weather", '{"city": "K\u00f6ln", "days": 2}')
NOW = ("get_time", "{}")
BOTH = [list(RAIN), list(NOW)]


async def test_hermes_calls_follow_the_text_before_them(qwen: Door) -> None:
    answer = await qwen.answer("Let me look.\n" + hermes(RAIN, NOW))
    assert answer == Answer("Let me look.", BOTH, "tool_calls")


@pytest.mark.parametrize("text", [llama3([RAIN, NOW]), "<|python_tag|>" + llama3([RAIN, NOW], ";")])
async def test_llama_calls_are_an_answer_without_content(llama: Door, text: str) -> None:
    assert await llama.answer(text) == Answer("", BOTH, "tool_calls")


async def test_a_special_token_after_text_begins_a_llama_call_and_never_shows(llama: Door) -> None:
    answer = await llama.answer("I look. <|python_tag|>" + llama3([RAIN]))
    assert answer == Answer("I look.", [list(RAIN)], "tool_calls")


async def test_a_special_token_stays_hidden_without_tools(llama: Door) -> None:
    answer = await llama.answer("a<|python_tag|>b", tools=None)
    assert answer == Answer("ab", [], "stop")


@pytest.mark.parametrize("text", ["It rains <3.", "<tool_call> is a tag", '<tool_call>{"name": "fly"}'])
async def test_text_that_only_looks_like_a_call_is_content(qwen: Door, text: str) -> None:
    assert await qwen.answer(text) == Answer(text, [], "stop")


async def test_without_parallel_calls_the_first_is_the_only_one(qwen: Door) -> None:
    answer = await qwen.answer(hermes(RAIN, NOW), parallel_tool_calls=False)
    assert answer == Answer("", [list(RAIN)], "tool_calls")


async def test_a_call_that_the_token_limit_cuts_ends_with_length(qwen: Door) -> None:
    text = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "K'
    answer = await qwen.answer(text, FINISH_REASON_LENGTH)
    assert answer == Answer("", [["get_weather", '{"city": "K']], "length")


async def test_with_tool_choice_none_nothing_is_a_call(qwen: Door) -> None:
    text = hermes(NOW)
    assert await qwen.answer(text, tool_choice="none") == Answer(text, [], "stop")


async def test_a_required_hermes_call_is_held_to_a_schema_and_begun_in_the_prompt(qwen: Door) -> None:
    text = '{"name": "get_weather", "arguments": {"city": "K\u00f6ln", "days": 2}}'
    answer = await qwen.answer(text, tool_choice="required")
    assert (answer.calls, answer.finish_reason) == ([list(RAIN)], "tool_calls")
    names = [call["properties"]["name"]["const"] for call in json.loads(answer.schema)["anyOf"]]
    assert names == ["get_weather", "get_time"]


async def test_a_named_llama_call_is_held_to_that_functions_schema(llama: Door) -> None:
    choice = {"type": "function", "function": {"name": "get_weather"}}
    answer = await llama.answer(llama3([RAIN]), tool_choice=choice)
    assert (answer.content, answer.calls, answer.finish_reason) == ("", [list(RAIN)], "tool_calls")
    assert json.loads(answer.schema)["properties"]["name"] == {"const": "get_weather"}


async def test_arguments_leave_before_the_call_ends(qwen: Door) -> None:
    stream_task = asyncio.create_task(
        qwen.client.chat.completions.create(model="tiny", messages=TURNS, tools=TOOLS, stream=True)  # pyright: ignore
    )
    p, d = await both_legs(qwen.prefill, qwen.decode)
    d.say_admitted()
    p.say_prefilled()
    ids = qwen.tokenizer.encode('<tool_call>{"name": "get_weather", "arguments": {"city": "K').ids
    d.say_tokens(0, ids)
    answer = Answer()
    async for chunk in await stream_task:
        answer.add(chunk.choices[0])
        if answer.calls and answer.calls[0][1]:
            break
    assert answer.calls == [["get_weather", '{"city": "K']]


async def test_a_conversation_with_calls_and_results_goes_on(qwen: Door) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(qwen.play(hermes(RAIN)))
        first = group.create_task(qwen.asked())
    message = first.result().choices[0].message
    assert message.tool_calls is not None
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "wet"}
    turns = [*TURNS, message.model_dump(exclude_none=True), result]
    async with asyncio.TaskGroup() as group:
        played = group.create_task(qwen.play("It rains."))
        second = group.create_task(
            qwen.client.chat.completions.create(model="tiny", messages=turns, tools=TOOLS)  # pyright: ignore
        )
    assert second.result().choices[0].message.content == "It rains."
    prompt = qwen.tokenizer.decode(played.result().submit.prompt_token_ids, skip_special_tokens=False)
    assert f"{hermes(RAIN)}<|im_end|>" in prompt
    assert "<tool_response>\nwet\n</tool_response>" in prompt


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "fly"}}}, "tool_choice"),
        ({"messages": [*TURNS, {"role": "tool", "content": "x"}]}, "messages"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
    ],
)
async def test_a_wrong_field_is_named(qwen: Door, fields: dict[str, object], wrong: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await qwen.client.chat.completions.create(
            **{"model": "tiny", "messages": TURNS, "tools": TOOLS, **fields}  # pyright: ignore
        )
    assert caught.value.param == wrong


@pytest.mark.parametrize(
    ("template", "settings"),
    [(PLAIN, {}), (PLAIN, {"tool_call_format": "hermes"}), (QWEN, {"tool_call_format": "none"})],
)
async def test_tools_that_would_vanish_or_calls_that_nobody_reads_are_refused(
    tiny_model: Path, tmp_path: Path, template: str, settings: dict[str, str]
) -> None:
    folder = with_template(tiny_model, tmp_path / "m", template)
    async with started_router(folder, StaticDirectory(prefill=[], decode=[]), **settings) as router:  # pyright: ignore
        base_url = f"http://{router.http_address}/v1"
        async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
            with pytest.raises(openai.BadRequestError) as caught:
                await client.chat.completions.create(model="tiny", messages=TURNS, tools=TOOLS)  # pyright: ignore
    assert caught.value.param == "tools"
