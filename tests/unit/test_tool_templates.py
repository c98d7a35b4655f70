"""Conversations with tools, against transformers reading the same folder."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

import pytest
from transformers import AutoTokenizer

from router.errors import RequestError
from router.openai_schema import read_chat
from router.tokenizer import Tokenizer
from router.tool_style import HERMES, LLAMA3, ToolStyle, choose_tool_style, plan_calls
from tests import tool_templates
from tests.tool_templates import PLAIN, TIME, WEATHER, with_template

Template: TypeAlias = str | list[dict[str, str]]

CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "id": "call_1",
            "type": "function",
            "function": {"name": "get_weather", "arguments": '{"city": "K\u00f6ln", "days": 2}'},
        }
    ],
}
TURNS = [
    {
        "role": "user",
        "content": [{"type": "text", "text": "Rain "}, {"type": "text", "text": "in K\u00f6ln?"}],
    },
    CALL,
    {"role": "tool", "tool_call_id": "call_1", "content": '{"rain": true}'},
    {"role": "user", "content": "And now?"},
]
# The same in transformers' words.
REFERENCE_TURNS = [
    {"role": "user", "content": "Rain in K\u00f6ln?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "get_weather", "arguments": {"city": "K\u00f6ln", "days": 2}},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": '{"rain": true}'},
    {"role": "user", "content": "And now?"},
]
NO_PARAMETERS = {"type": "object", "properties": {}}
REFERENCE_TOOLS = [
    WEATHER,
    {"type": "function", "function": {**TIME["function"], "parameters": NO_PARAMETERS}},  # pyright: ignore
]


def style_of(folder: Path) -> ToolStyle | None:
    tokenizer = Tokenizer.load(folder)
    return choose_tool_style("auto", tokenizer.tool_template, tokenizer.has_token)


async def encoded(folder: Path, **fields: object) -> list[int]:
    body = read_chat(json.dumps({"messages": TURNS, **fields}).encode())
    plan = plan_calls(body.tool_use(), style_of(folder))
    tokenizer = Tokenizer.load(folder)
    return list(await tokenizer.encode_chat(body.chat_messages(), plan.tools, plan.answer_start))


def reference(folder: Path, tools: list[Mapping[str, object]] | None, answer_start: str = "") -> list[int]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template(
        REFERENCE_TURNS, tools=tools, add_generation_prompt=True, tokenize=False
    )
    return tokenizer(text + answer_start, add_special_tokens=False)["input_ids"]


@pytest.fixture(params=["QWEN", "HERMES", "LLAMA"])
def folder(request: pytest.FixtureRequest, tiny_model: Path, tmp_path: Path) -> Path:
    return with_template(tiny_model, tmp_path / "m", getattr(tool_templates, request.param))


async def test_tools_calls_and_results_are_rendered_as_transformers_does(folder: Path) -> None:
    tools = [{**WEATHER, "strict": True}, TIME]
    assert await encoded(folder, tools=tools) == reference(folder, REFERENCE_TOOLS)


async def test_with_tool_choice_none_the_model_is_not_told_of_tools(folder: Path) -> None:
    assert await encoded(folder, tools=[WEATHER], tool_choice="none") == reference(folder, None)


async def test_a_tool_use_template_in_a_file_of_its_own_is_taken(tiny_model: Path, tmp_path: Path) -> None:
    folder = with_template(tiny_model, tmp_path / "m", "unused")
    (folder / "chat_template.jinja").write_text(PLAIN)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text(tool_templates.HERMES_TOOL_USE)
    assert await encoded(folder, tools=[WEATHER]) == reference(folder, [WEATHER])
    assert await encoded(folder) == reference(folder, None)


async def test_a_required_call_is_begun_with_the_prompt_where_markup_opens_it(
    tiny_model: Path, tmp_path: Path
) -> None:
    qwen = with_template(tiny_model, tmp_path / "qwen", tool_templates.QWEN)
    llama = with_template(tiny_model, tmp_path / "llama", tool_templates.LLAMA)
    fields = {"tools": [WEATHER], "tool_choice": "required"}
    assert await encoded(qwen, **fields) == reference(qwen, [WEATHER], "<tool_call>\n")
    assert await encoded(llama, **fields) == reference(llama, [WEATHER])


@pytest.mark.parametrize("template", [PLAIN, PLAIN + "{# <tool_call> #}"])
async def test_a_template_without_a_place_for_tools_refuses_them(
    tiny_model: Path, tmp_path: Path, template: str
) -> None:
    folder = with_template(tiny_model, tmp_path / "m", template)
    with pytest.raises(RequestError) as caught:
        await encoded(folder, tools=[WEATHER])
    assert caught.value.field == "tools"


async def test_what_the_template_raises_about_calls_is_the_clients_error(
    tiny_model: Path, tmp_path: Path
) -> None:
    folder = with_template(tiny_model, tmp_path / "m", tool_templates.LLAMA)
    twice = {**CALL, "tool_calls": CALL["tool_calls"] * 2}  # pyright: ignore
    with pytest.raises(RequestError, match="single tool-calls") as caught:
        await encoded(folder, messages=[TURNS[0], twice], tools=[WEATHER])
    assert caught.value.field == "messages"


@pytest.mark.parametrize(
    ("template", "style"),
    [
        (tool_templates.QWEN, HERMES),
        (tool_templates.HERMES, HERMES),
        (tool_templates.LLAMA, LLAMA3),
        (tool_templates.QWEN + "<function=", None),
        (tool_templates.QWEN + "<arg_key>", None),
        (PLAIN, None),
    ],
)
def test_the_template_for_tools_tells_the_style(
    tiny_model: Path, tmp_path: Path, template: Template, style: ToolStyle | None
) -> None:
    assert style_of(with_template(tiny_model, tmp_path / "m", template)) is style


def test_the_configured_style_goes_before_the_templates() -> None:
    def has_token(_: str) -> bool:
        return True

    assert choose_tool_style("llama3", tool_templates.QWEN, has_token) is LLAMA3
    assert choose_tool_style("hermes", "", has_token) is HERMES
    assert choose_tool_style("none", tool_templates.QWEN, has_token) is None
