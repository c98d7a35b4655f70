"""Whatever text the grammar of a required call lets through, the style's parser reads one call out of it."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.grammar import CompiledGrammar, GrammarCompiler, GrammarForm, GrammarMatcher, GrammarText
from router.openai_schema import read_chat
from router.tokenizer import Tokenizer
from router.tool_parsers.events import Arguments, CallStart
from router.tool_style import HERMES, LLAMA3, CallPlan, ToolStyle, plan_calls
from tests.tiny_models import VOCAB_SIZE

MAX_TOKENS = 2000
EOS = 1

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "set_light",
            "parameters": {
                "type": "object",
                "properties": {"on": {"type": "boolean"}, "color": {"enum": ["red", "blue"]}},
                "required": ["on"],
            },
        },
    },
    {"type": "function", "function": {"name": "get_time"}},
]


def plan_of(style: ToolStyle) -> CallPlan:
    body = {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS, "tool_choice": "required"}
    return plan_calls(read_chat(json.dumps(body).encode()).tool_use(), style)


@pytest.fixture(scope="module", params=[HERMES, LLAMA3], ids=["hermes", "llama3"])
def planned(request: pytest.FixtureRequest, tiny_model: Path) -> tuple[CallPlan, CompiledGrammar]:
    plan = plan_of(request.param)
    compiler = GrammarCompiler(tiny_model, VOCAB_SIZE, frozenset({EOS}))
    return plan, compiler.compile(GrammarText(GrammarForm.JSON_SCHEMA, plan.json_schema))


def sampled(grammar: CompiledGrammar, seed: int) -> list[int]:
    """Tokens drawn at random from those that the grammar allows, up to the end it demands."""
    rng, matcher, tokens = np.random.default_rng(seed), GrammarMatcher(grammar), []
    for _ in range(MAX_TOKENS):
        words = matcher.allowed(frozenset()).view(np.uint8)
        token = int(rng.choice(np.flatnonzero(np.unpackbits(words, bitorder="little"))))
        if token == EOS:
            break
        tokens.append(token)
        matcher.advance(token)
    return tokens


@settings(max_examples=50)
@given(seed=st.integers(0, 2**32 - 1))
def test_a_required_call_is_one_call_with_fitting_arguments(
    planned: tuple[CallPlan, CompiledGrammar], tiny_model: Path, seed: int
) -> None:
    plan, grammar = planned
    text = Tokenizer.load(tiny_model).decode(sampled(grammar, seed))
    parser = plan.new_parser()
    start, *rest = [*parser.push(text), *parser.finish()]
    assert isinstance(start, CallStart)
    assert all(isinstance(event, Arguments) for event in rest)
    arguments = json.loads("".join(event.text for event in rest))
    if start.name == "get_time":
        assert arguments == {}
    else:
        assert arguments.keys() <= {"on", "color"} and isinstance(arguments["on"], bool)
        assert arguments.get("color", "red") in ("red", "blue")
