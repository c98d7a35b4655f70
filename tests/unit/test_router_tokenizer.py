"""Encoding and chat templates, against transformers reading the same folder."""

import json
import shutil
from pathlib import Path

import pytest
import tokenizers
from tokenizers import processors
from transformers import AutoTokenizer

from router.chat_template import ChatMessage, ChatTemplate
from router.errors import ErrorCode, RequestError
from router.tokenizer import INLINE_CHARS, Tokenizer

TURNS = [ChatMessage("system", "Be brief."), ChatMessage("user", "  What\nis \u00e9? <b>&</b> ")]


def with_config(model: Path, folder: Path, **changes: object) -> Path:
    """A copy of a model's tokenizer files with some fields of tokenizer_config.json changed."""
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(model / name, folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


def reference_chat(folder: Path) -> list[int]:
    turns = [{"role": turn.role, "content": turn.content} for turn in TURNS]
    reference = AutoTokenizer.from_pretrained(folder)
    return reference.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)


@pytest.mark.parametrize("text", ["The fox", "", " a", "<|im_start|>user", "x" * (2 * INLINE_CHARS)])
async def test_text_is_encoded_as_transformers_does(tiny_model: Path, text: str) -> None:
    reference = AutoTokenizer.from_pretrained(tiny_model)
    assert list(await Tokenizer.load(tiny_model).encode_text(text)) == reference(text)["input_ids"]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"add_bos_token": False},
        {"bos_token": {"__type": "AddedToken", "content": "<|im_start|>", "special": True}},
    ],
)
@pytest.mark.parametrize("single", ["<|im_start|> $A", "$A <|im_end|>"])
async def test_bos_and_eos_are_added_as_transformers_does(
    tiny_model: Path, tmp_path: Path, changes: dict[str, object], single: str
) -> None:
    folder = with_config(tiny_model, tmp_path / "m", **changes)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing(
        single=single, pair="$A $B", special_tokens=[("<|im_start|>", 0), ("<|im_end|>", 1)]
    )
    backend.save(str(folder / "tokenizer.json"))
    reference = AutoTokenizer.from_pretrained(folder)
    assert list(await Tokenizer.load(folder).encode_text("The fox")) == reference("The fox")["input_ids"]
    assert list(await Tokenizer.load(folder).encode_chat(TURNS)) == reference_chat(folder)


@pytest.mark.parametrize(
    "template",
    [
        "{{ bos_token }}{% for m in messages %}\n  {% if loop.first %}\n{{ m.content | trim }}\n"
        "  {% endif %}\n{% endfor %}{{ eos_token }}",
        "{{ messages | tojson(indent=1) }}",
        "{% for m in messages %}{% if m.role == 'user' %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
        "{% generation %}{{ messages[1].content }}{% endgeneration %}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
        "{{ strftime_now('%Y') }}{% if tools is not none %}tools{% endif %}",
    ],
)
async def test_templates_render_as_transformers_does(tiny_model: Path, tmp_path: Path, template: str) -> None:
    folder = with_config(tiny_model, tmp_path / "m", chat_template=template)
    assert list(await Tokenizer.load(folder).encode_chat(TURNS)) == reference_chat(folder)


async def test_a_template_file_goes_before_the_configured_one(tiny_model: Path, tmp_path: Path) -> None:
    folder = with_config(tiny_model, tmp_path / "m")
    (folder / "chat_template.jinja").write_text("only this")
    assert list(await Tokenizer.load(folder).encode_chat(TURNS)) == reference_chat(folder)


async def test_of_several_templates_the_default_is_taken(tiny_model: Path, tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    folder = with_config(tiny_model, tmp_path / "m", chat_template=named)
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.decode(await tokenizer.encode_chat(TURNS)) == "plain"


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[7].content.upper() }}",
        "{{ 1 // 0 }}",
        "{{ messages[0].content + 1 }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
    ],
)
def test_a_template_that_raises_is_the_clients_error(template: str) -> None:
    with pytest.raises(RequestError) as caught:
        ChatTemplate(template, {}).render(TURNS)
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT
    assert caught.value.field == "messages"


async def test_a_model_without_a_template_refuses_chats(tiny_model: Path, tmp_path: Path) -> None:
    folder = with_config(tiny_model, tmp_path / "m", chat_template=None)
    with pytest.raises(RequestError, match="no chat template"):
        await Tokenizer.load(folder).encode_chat(TURNS)


@pytest.mark.parametrize("damage", ["tokenizer.json", "tokenizer_config.json"])
def test_a_damaged_file_is_named(tiny_model: Path, tmp_path: Path, damage: str) -> None:
    folder = with_config(tiny_model, tmp_path / "m")
    (folder / damage).write_text("{")
    with pytest.raises(ValueError, match=damage):
        Tokenizer.load(folder)


def test_a_template_that_does_not_compile_is_found_at_the_start(tiny_model: Path, tmp_path: Path) -> None:
    folder = with_config(tiny_model, tmp_path / "m", chat_template="{% for %}")
    with pytest.raises(ValueError, match="does not compile"):
        Tokenizer.load(folder)
