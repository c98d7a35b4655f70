"""Parsers of tool calls: what a model wrote, cut into any pieces."""

import json
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.tool_parsers.events import Arguments, CallStart, Text, ToolEvent, ToolParser
from router.tool_parsers.hermes import HermesParser
from router.tool_parsers.llama3 import Llama3Parser

FUNCTIONS = frozenset({"look_up", "add"})
PARSERS = (HermesParser, Llama3Parser)


def merged(events: Sequence[ToolEvent]) -> list[ToolEvent]:
    """Neighbours that say one thing are one."""
    whole: list[ToolEvent] = []
    for event in events:
        match whole[-1:], event:
            case [Text(before)], Text(text):
                whole[-1] = Text(before + text)
            case [Arguments(at, before)], Arguments(index, text) if at == index:
                whole[-1] = Arguments(index, before + text)
            case _:
                whole.append(event)
    return whole


def parsed(parser: ToolParser, pieces: Sequence[str]) -> list[ToolEvent]:
    events = [event for piece in pieces for event in parser.push(piece)]
    return merged(events + parser.finish())


def said(make: Callable[[frozenset[str]], ToolParser], text: str) -> list[ToolEvent]:
    return parsed(make(FUNCTIONS), [text])


def call(index: int, name: str, arguments: str) -> list[ToolEvent]:
    return [CallStart(index, name), Arguments(index, arguments)]


SOUP = [
    "<tool_call>", "</tool_call>", "<tool", "_call>", "</", "<|python_tag|>", "<|python", "_tag|>", "<", ";",
    "{", "}", "[", "]", ",", ":", '"', "\\", "\\u00e9", "\\ud800", " ", "\n", "\u00a0", "a", "\u00e9",
    "-1", "1e", "nul", "true",
    '"name"', '"arguments"', '"parameters"', '"look_up"', '"type"', '{"name": "add", "arguments": {',
    '{"name": "look_up", "parameters": {"q": "', '{"name": "add"}', '{"arguments": "{}", "name": "add"}',
]  # fmt: skip
soups = st.lists(st.sampled_from(SOUP), max_size=25).map("".join)


@st.composite
def cut_soups(draw: st.DrawFn) -> tuple[str, list[str]]:
    text = draw(soups)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    bounds = [0, *cuts, len(text)]
    return text, [text[start:end] for start, end in pairwise(bounds)]


@pytest.mark.parametrize("make", PARSERS)
@given(cut=cut_soups())
def test_any_cut_gives_the_same_events(
    make: Callable[[frozenset[str]], ToolParser], cut: tuple[str, list[str]]
) -> None:
    text, pieces = cut
    assert parsed(make(FUNCTIONS), pieces) == said(make, text) == parsed(make(FUNCTIONS), list(text))


@pytest.mark.parametrize("make", PARSERS)
@given(text=soups)
def test_a_text_without_a_call_comes_out_as_it_is(
    make: Callable[[frozenset[str]], ToolParser], text: str
) -> None:
    events = said(make, text)
    if not any(isinstance(event, CallStart) for event in events):
        assert events == ([Text(text)] if text else [])


@pytest.mark.parametrize("make", PARSERS)
@given(text=soups)
def test_calls_are_of_declared_functions_and_counted_from_zero(
    make: Callable[[frozenset[str]], ToolParser], text: str
) -> None:
    starts = [event for event in said(make, text) if isinstance(event, CallStart)]
    assert [start.index for start in starts] == list(range(len(starts)))
    assert {start.name for start in starts} <= FUNCTIONS


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    scalars | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
argument_objects = st.dictionaries(st.text(max_size=6), json_values, max_size=4)
layouts = st.sampled_from([{}, {"indent": 2}, {"separators": (",", ":")}])
words = st.text(alphabet="ab {}\"';.\n<>", max_size=12).map(str.strip)


@st.composite
def written_calls(draw: st.DrawFn, member: str) -> tuple[str, str, str]:
    """Text, name and arguments of one call."""
    name = draw(st.sampled_from(sorted(FUNCTIONS)))
    layout, ascii_only = draw(layouts), draw(st.booleans())
    arguments = json.dumps(draw(argument_objects), ensure_ascii=ascii_only, **layout)
    head = draw(st.sampled_from(["", '"type": "function", ']))
    return f'{{{head}"name": "{name}", "{member}": {arguments}}}', name, arguments


@given(
    parts=st.lists(st.tuples(words, written_calls("arguments"), st.booleans()), max_size=4),
    last=words.filter(lambda text: text != "<"),  # the beginning of a closing tag
    space=st.sampled_from(["", "\n", " \n "]),
)
def test_hermes_calls_and_the_text_around_them_come_out_whole(
    parts: list[tuple[str, tuple[str, str, str], bool]], last: str, space: str
) -> None:
    text, expected = "", []
    for index, (before, (written, name, arguments), closed) in enumerate(parts):
        text += f"{before}{space}<tool_call>{space}{written}{space}{'</tool_call>' if closed else ''}{space}"
        expected += [Text(before)] if before else []
        expected += call(index, name, arguments)
    expected += [Text(last)] if last else []
    assert said(HermesParser, text + last) == merged(expected)


@given(
    calls=st.lists(written_calls("parameters"), min_size=1, max_size=4),
    between=st.sampled_from([";", "; ", "\n", "<|python_tag|>", " ;\n<|python_tag|>"]),
    start=st.sampled_from(["", "\n", "<|python_tag|>", "Let me see. <|python_tag|>"]),
)
def test_llama_calls_come_out_whole(calls: list[tuple[str, str, str]], between: str, start: str) -> None:
    text = start + between.join(written for written, _, _ in calls)
    expected: list[ToolEvent] = [Text("Let me see.")] if start.startswith("Let") else []
    for index, (_, name, arguments) in enumerate(calls):
        expected += call(index, name, arguments)
    assert said(Llama3Parser, text) == expected


@given(text=st.text(alphabet="<tol_ca/>x \n", max_size=30))
def test_nothing_but_a_possible_tag_and_the_space_before_it_is_held_back(text: str) -> None:
    parser = HermesParser(FUNCTIONS)
    written = "".join(event.text for event in parser.push(text) if isinstance(event, Text))
    assert "<tool_call>".startswith(text[len(written) :].lstrip())


def test_the_name_and_each_piece_of_the_arguments_leave_at_once() -> None:
    parser = HermesParser(FUNCTIONS)
    assert parser.push('<tool_call>\n{"name": "add", "arguments": ') == []
    assert parser.push('{"a": ') == [CallStart(0, "add"), Arguments(0, '{"a": ')]
    assert parser.push("12") == [Arguments(0, "12")]
    assert parser.push(', "b": "x') == [Arguments(0, ', "b": "x')]
    assert parser.push('"}}\n</tool_call>') == [Arguments(0, '"}')]
    assert parser.finish() == []


@pytest.mark.parametrize(
    "written",
    [
        '{"arguments": {"a": 1}, "name": "add"}',
        '{"name": "add", "arguments": "{\\"a\\": 1}"}',
        '{"arguments": "{\\"a\\": 1}", "name": "add"}',
        '{"name": "add", "id": 7, "arguments": {"a": 1}, "arguments": {"b": 2}, "why": [{}]}',
        '{"n\\u0061me": "\\u0061dd", "parameters": {"a": 1}}',
    ],
)
@pytest.mark.parametrize("make", PARSERS)
def test_members_may_come_in_any_order_and_arguments_in_a_string(
    make: Callable[[frozenset[str]], ToolParser], written: str
) -> None:
    opening = "<tool_call>" if make is HermesParser else ""
    assert said(make, opening + written) == call(0, "add", '{"a": 1}')


@pytest.mark.parametrize("make", PARSERS)
def test_a_call_without_arguments_has_none(make: Callable[[frozenset[str]], ToolParser]) -> None:
    opening = "<tool_call>" if make is HermesParser else ""
    assert said(make, opening + '{"name": "add"}') == call(0, "add", "{}")


@pytest.mark.parametrize(
    "written",
    [
        '{"name": "unknown", "arguments": {}}',
        '{"name": "add", "arguments": [1]}',
        '{"name": "add", "arguments": "no object"}',
        '{"name": "add", "arguments": null}',
        '{"name": ["add"], "arguments": {}}',
        '{"name": "\\ud800", "arguments": {}}',
        '{"arguments": {}}',
        '{"city": "Paris"}',
        "{}",
        '{"name": "add"',
        '{"name": "add", "arguments": ',
        "{'name': 'add', 'arguments': {}}",
        "[" * 5000,
        '{"id": ' + "[" * 5000,
    ],
)
@pytest.mark.parametrize("make", PARSERS)
def test_what_only_looks_like_a_call_is_text(
    make: Callable[[frozenset[str]], ToolParser], written: str
) -> None:
    opening = " <tool_call>\n" if make is HermesParser else " <|python_tag|>\n"
    assert said(make, opening + written + " end") == [Text(opening + written + " end")]


def test_a_call_inside_what_only_looked_like_one_is_found() -> None:
    text = '<tool_call>{"x <tool_call>{"name": "add", "arguments": {}}</tool_call>'
    assert said(HermesParser, text) == [Text('<tool_call>{"x'), *call(0, "add", "{}")]


def test_a_call_that_the_token_limit_cuts_keeps_the_arguments_it_has() -> None:
    assert said(HermesParser, '<tool_call>{"name": "add", "arguments": {"a": "<') == call(
        0, "add", '{"a": "<'
    )


@pytest.mark.parametrize("end", ["</tool_call>", "}</tool_call>", "}</tool_c", "}", "} \n </tool_call>\n"])
def test_the_closing_markup_never_shows_however_much_of_it_there_is(end: str) -> None:
    text = '<tool_call>{"name": "add", "arguments": {"a": 1}' + end
    assert said(HermesParser, text) == call(0, "add", '{"a": 1}')


def test_a_closing_tag_that_closes_nothing_is_text() -> None:
    assert said(HermesParser, "a </tool_call> b") == [Text("a </tool_call> b")]


def test_arguments_that_turn_out_to_be_no_json_are_passed_on_up_to_the_closing_tag() -> None:
    text = '<tool_call>{"name": "add", "arguments": {"a": None}}</tool_call> Done.'
    assert said(HermesParser, text) == [*call(0, "add", '{"a": None}}'), Text("Done.")]


def test_a_raw_line_break_in_a_string_is_escaped() -> None:
    text = '{"name": "add", "parameters": {"a": "x\ny"}}'
    (_, arguments) = said(Llama3Parser, text)
    assert isinstance(arguments, Arguments) and json.loads(arguments.text) == {"a": "x\ny"}


def test_markup_inside_a_string_of_the_arguments_is_the_arguments() -> None:
    arguments = '{"a": "</tool_call><tool_call>;<|python_tag|>"}'
    text = f'{{"name": "add", "arguments": {arguments}}}'
    assert said(HermesParser, f"<tool_call>{text}</tool_call>") == call(0, "add", arguments)
    assert said(Llama3Parser, text) == call(0, "add", arguments)


def test_llama_json_in_the_middle_of_a_text_is_text() -> None:
    text = 'Write {"name": "add", "parameters": {}} to add.'
    assert said(Llama3Parser, text) == [Text(text)]


def test_text_after_a_llama_call_is_text() -> None:
    text = '{"name": "add", "parameters": {}}; and so on'
    assert said(Llama3Parser, text) == [*call(0, "add", "{}"), Text("; and so on")]


def test_a_separator_after_the_last_llama_call_is_markup() -> None:
    assert said(Llama3Parser, '{"name": "add", "parameters": {}} ;\n') == call(0, "add", "{}")
