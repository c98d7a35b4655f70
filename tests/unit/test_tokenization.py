"""/tokenize and /detokenize, against transformers reading the same folder."""

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import tokenizers
from tokenizers import processors
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from router.tokenizer import INLINE_CHARS, INLINE_TOKENS
from tests.tool_templates import QWEN, WEATHER, with_template
from tests.unit.lonely_door import lonely_door

TURNS = [{"role": "user", "content": "What is\nit?"}, {"role": "assistant", "content": "The fox."}]


@pytest.fixture(scope="module")
def folder(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer adds BOS, and whose template knows tools."""
    folder = with_template(tiny_model, tmp_path_factory.mktemp("tokenized") / "m", QWEN)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", pair="$A $B", special_tokens=[("<|im_start|>", 0)]
    )
    backend.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
async def door(folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with lonely_door(folder) as client:
        yield client


@pytest.fixture(scope="module")
def reference(folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("text", ["The fox", "", "\u00e9 <b>&", "<|im_end|>", "ab" * INLINE_CHARS])
@pytest.mark.parametrize("special", [{}, {"add_special_tokens": True}, {"add_special_tokens": False}])
async def test_a_prompt_has_the_tokens_that_transformers_gives_it(
    door: httpx.AsyncClient, reference: PreTrainedTokenizerBase, text: str, special: dict[str, bool]
) -> None:
    answer = (await door.post("/tokenize", json={"model": "tiny", "prompt": text, **special})).json()
    expected = reference(text, **special)["input_ids"]
    assert answer == {
        "count": len(expected),
        "max_model_len": 4096,
        "tokens": expected,
        "token_strs": None,
    }


@pytest.mark.parametrize("opened", [{}, {"add_generation_prompt": True}, {"add_generation_prompt": False}])
@pytest.mark.parametrize("tools", [{}, {"tools": []}, {"tools": [WEATHER]}])
async def test_a_chat_has_the_tokens_that_its_template_gives_it(
    door: httpx.AsyncClient, reference: PreTrainedTokenizerBase, opened: dict[str, bool], tools: dict
) -> None:
    answer = (await door.post("/tokenize", json={"messages": TURNS, **opened, **tools})).json()
    expected = reference.apply_chat_template(
        TURNS,
        tools=tools.get("tools") or None,
        add_generation_prompt=opened.get("add_generation_prompt", True),
        return_dict=False,
    )
    assert (answer["count"], answer["tokens"]) == (len(expected), expected)


@pytest.mark.parametrize("text", ["The fox\u00e9", "ab" * INLINE_CHARS])
async def test_the_vocabularys_entries_are_told_if_asked_for(
    door: httpx.AsyncClient, reference: PreTrainedTokenizerBase, text: str
) -> None:
    answer = (await door.post("/tokenize", json={"prompt": text, "return_token_strs": True})).json()
    assert answer["token_strs"] == reference.convert_ids_to_tokens(answer["tokens"])
    assert answer["token_strs"][0] == "<|im_start|>"


@pytest.mark.parametrize("text", ["The fox\u00e9 <|im_end|>", "", "ab" * (2 * INLINE_TOKENS)])
async def test_what_was_tokenized_comes_back(door: httpx.AsyncClient, text: str) -> None:
    tokens = (await door.post("/tokenize", json={"prompt": text})).json()["tokens"]
    answer = await door.post("/detokenize", json={"model": "tiny", "tokens": tokens})
    assert answer.json() == {"prompt": f"<|im_start|>{text}"}


async def test_no_tokens_are_no_text(door: httpx.AsyncClient) -> None:
    assert (await door.post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("tokenize", {}, "prompt"),
        ("tokenize", {"prompt": "a", "messages": TURNS}, "prompt"),
        ("tokenize", {"prompt": ["a"]}, "prompt"),
        ("tokenize", {"prompt": [1, 2]}, "prompt"),
        ("tokenize", {"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
        ("tokenize", {"prompt": "a", "return_token_strs": "yes"}, "return_token_strs"),
        ("tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ("tokenize", {"prompt": "a", "tools": []}, "tools"),
        ("tokenize", {"messages": []}, "messages"),
        ("tokenize", {"messages": [{"role": "tool", "content": "a"}]}, "messages"),
        ("tokenize", {"messages": TURNS, "tools": [{"type": "function"}]}, "tools"),
        ("tokenize", {"messages": TURNS, "add_special_tokens": True}, "add_special_tokens"),
        ("tokenize", {"messages": TURNS, "continue_final_message": True}, "continue_final_message"),
        ("tokenize", {"messages": TURNS, "chat_template": "{{ 1 }}"}, "chat_template"),
        ("detokenize", {}, "tokens"),
        ("detokenize", {"tokens": "a"}, "tokens"),
        ("detokenize", {"tokens": [1.0]}, "tokens"),
        ("detokenize", {"tokens": [-1]}, "tokens"),
        ("detokenize", {"tokens": [385]}, "tokens"),
        ("detokenize", {"tokens": [10**30]}, "tokens"),
    ],
)
async def test_a_wrong_field_is_named(door: httpx.AsyncClient, path: str, body: dict, field: str) -> None:
    answer = await door.post(f"/{path}", json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == field


@pytest.mark.parametrize(("path", "fields"), [("tokenize", {"prompt": "a"}), ("detokenize", {"tokens": [1]})])
async def test_another_model_is_not_found(door: httpx.AsyncClient, path: str, fields: dict) -> None:
    answer = await door.post(f"/{path}", json={"model": "other", **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (404, "model")
