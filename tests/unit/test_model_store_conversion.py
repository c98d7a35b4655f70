"""A GGUF file becomes a Hugging Face folder, once."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Starcoder2Config,
    Starcoder2ForCausalLM,
)

from model_store import resolve
from model_store.conversion_cache import CONVERTER_VERSION, ConversionCache
from model_store.errors import ConversionFailed, CorruptFile, UnknownModel
from model_store.folder import check_folder
from model_store.gguf_file import conversion_name

HEADS, KV_HEADS = 4, 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}{{ '<|im_start|>' + m['content'] + '<|im_end|>' }}{% endfor %}"
CONVERTED = f"converted-v{CONVERTER_VERSION}"
GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def byte_alphabet() -> list[str]:
    """The 256 letters in which byte-level BPE writes bytes."""
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


TOKENS = [*SPECIAL, *byte_alphabet(), "ĠĠ"]


@pytest.fixture(scope="module")
def original() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).bfloat16().float().eval()


@pytest.fixture(scope="module")
def gguf_file(original: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The original in float32, with SmolLM2's kind of tokenizer."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    _add_shape(writer, original)
    writer.add_layer_norm_rms_eps(original.config.rms_norm_eps)
    for name, tensor in original.state_dict().items():
        if name != "lm_head.weight":
            writer.add_tensor(*_as_llama_cpp_has_it(name, tensor.numpy()))
    _write(writer)
    return path


@pytest.fixture(scope="module")
def converted(gguf_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ConversionCache(tmp_path_factory.mktemp("cache")).get("tiny", gguf_file)


def _add_shape(writer: gguf.GGUFWriter, model: LlamaForCausalLM | Starcoder2ForCausalLM) -> None:
    config = model.config
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(config.hidden_size // HEADS)
    writer.add_vocab_size(len(TOKENS))
    _add_tokenizer(writer)


def _write(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    control = [gguf.TokenType.CONTROL] * len(SPECIAL)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([*control, *[gguf.TokenType.NORMAL] * (len(TOKENS) - len(SPECIAL))])
    writer.add_token_merges(["Ġ Ġ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)


def _as_llama_cpp_has_it(name: str, weight: np.ndarray) -> tuple[str, np.ndarray]:
    """Its names, and the rows of q and k in its order: the two halves of each head interleaved."""
    if name == "model.embed_tokens.weight":
        return "token_embd.weight", weight
    if name == "model.norm.weight":
        return "output_norm.weight", weight
    _, _, layer, module = name.removesuffix(".weight").split(".", 3)
    heads = {"self_attn.q_proj": HEADS, "self_attn.k_proj": KV_HEADS}.get(module)
    if heads is not None:
        by_half = weight.reshape(heads, 2, weight.shape[0] // heads // 2, weight.shape[1])
        weight = np.ascontiguousarray(by_half.swapaxes(1, 2).reshape(weight.shape))
    return f"blk.{layer}.{GGUF_NAMES[module]}.weight", weight


def test_the_folder_has_all_that_a_model_needs(converted: Path) -> None:
    check_folder(converted)
    assert {path.name for path in converted.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_the_weights_are_the_files_weights_in_bfloat16(converted: Path, original: LlamaForCausalLM) -> None:
    model = AutoModelForCausalLM.from_pretrained(converted)
    assert model.dtype == torch.bfloat16
    for name, weight in original.state_dict().items():
        assert torch.equal(model.state_dict()[name].float(), weight), name


def test_the_logits_are_the_originals(converted: Path, original: LlamaForCausalLM) -> None:
    tokens = torch.arange(20).unsqueeze(0)
    model = AutoModelForCausalLM.from_pretrained(converted, dtype=torch.float32)
    with torch.inference_mode():
        torch.testing.assert_close(model(tokens).logits, original(tokens).logits)


def test_special_tokens_stay_whole_and_no_other_is_added(converted: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted)
    first, *_, last = tokenizer.encode("<|im_start|>user<|im_end|>")
    assert (first, last) == (1, 2)
    assert tokenizer.decode([1, TOKENS.index("a"), 2], skip_special_tokens=True) == "a"
    assert (tokenizer.eos_token, tokenizer.model_max_length) == ("<|im_end|>", 128)


def test_a_digit_is_split_from_the_spaces_before_it(converted: Path) -> None:
    """GPT-2's split alone would leave the last space to the digit: Ġ, Ġ, 1."""
    tokenizer = AutoTokenizer.from_pretrained(converted)
    assert tokenizer.tokenize("  12") == ["ĠĠ", "1", "2"]


def test_the_chat_template_is_in_the_tokenizers_configuration(converted: Path) -> None:
    config = json.loads((converted / "tokenizer_config.json").read_text())
    assert config["chat_template"] == TEMPLATE


def test_many_processes_at_once_convert_it_once(gguf_file: Path, tmp_path: Path) -> None:
    processes = [_start_asking(gguf_file, tmp_path) for _ in range(3)]
    results = [process.communicate(timeout=240) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert {Path(folder.strip()) for folder, _ in results} == {tmp_path / CONVERTED / "tiny"}
    assert sum("reading tiny.gguf" in steps for _, steps in results) == 1


def test_after_a_process_was_killed_while_converting_the_next_one_gets_a_whole_folder(
    gguf_file: Path, tmp_path: Path
) -> None:
    with _start_asking(gguf_file, tmp_path) as killed:
        assert killed.stderr is not None
        assert "reading tiny.gguf" in killed.stderr.readline()
        killed.kill()
    check_folder(ConversionCache(tmp_path).get("tiny", gguf_file))
    assert not (tmp_path / CONVERTED / ".tiny.partial").exists()


def _start_asking(gguf_file: Path, cache: Path) -> subprocess.Popen[str]:
    script = (
        "import sys; from pathlib import Path; from model_store.conversion_cache import ConversionCache\n"
        "print(ConversionCache(Path(sys.argv[1])).get('tiny', Path(sys.argv[2])))\n"
    )
    command = [sys.executable, "-c", script, str(cache), str(gguf_file)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_file_that_is_no_gguf_fails_and_leaves_no_folder(tmp_path: Path) -> None:
    file = tmp_path / "text.gguf"
    file.write_text("not a model")
    with pytest.raises(ConversionFailed, match=r"text\.gguf"):
        ConversionCache(tmp_path).get("text", file)
    assert [path for path in tmp_path.rglob("*") if path.is_dir() and path.name != CONVERTED] == []


def test_a_cache_that_cannot_be_written_is_a_clear_error(gguf_file: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConversionFailed, match=r"\$BATON_CACHE"):
        ConversionCache(tmp_path / "file").get("tiny", gguf_file)


def test_the_embedded_model_speaks_chatml_with_its_default_system_prompt() -> None:
    """Needs the package of the `smollm2` extra; `make setup` has it converted."""
    tokenizer = AutoTokenizer.from_pretrained(resolve("smollm2-135m"))
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.eos_token == "<|im_end|>"


def test_the_default_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BATON_CACHE", str(tmp_path))
    (tmp_path / CONVERTED / "tiny").mkdir(parents=True)
    assert ConversionCache.default().get("tiny", Path(os.devnull)) == tmp_path / CONVERTED / "tiny"


def test_a_files_path_resolves_to_its_conversion_and_the_same_content_is_converted_once(
    gguf_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))
    folder = resolve(str(gguf_file))
    assert "reading tiny.gguf" in capfd.readouterr().err
    copy = shutil.copy(gguf_file, tmp_path)
    assert resolve(str(copy)) == folder
    assert "reading" not in capfd.readouterr().err


def test_another_content_under_the_same_name_has_another_conversion(gguf_file: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copy(gguf_file, tmp_path))
    assert conversion_name(copy) == conversion_name(gguf_file)
    content = bytearray(copy.read_bytes())
    content[-1] ^= 1
    copy.write_bytes(content)
    assert conversion_name(copy) != conversion_name(gguf_file)


@pytest.mark.parametrize(
    ("name", "content", "error", "said"),
    [
        ("none.gguf", None, UnknownModel, "no file .*none"),
        ("m-00001-of-00002.gguf", b"GGUF", UnknownModel, "one part of several"),
        ("text.gguf", b"not a model", CorruptFile, "not a GGUF"),
        ("cut.gguf", b"GGUF", ConversionFailed, "cut.gguf could not be converted"),
    ],
)
def test_a_file_that_cannot_be_converted_is_one_clear_error(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    name: str,
    content: bytes | None,
    error: type[Exception],
    said: str,
) -> None:
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(error, match=said):
        resolve(str(tmp_path / name))


def test_a_file_of_another_architecture_keeps_its_weights(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = Starcoder2Config(
        vocab_size=len(TOKENS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=128,
        sliding_window=None,
    )
    original = Starcoder2ForCausalLM(config).bfloat16().float()
    file = tmp_path / "coder.gguf"
    writer = gguf.GGUFWriter(file, "starcoder2")
    _add_shape(writer, original)
    writer.add_layer_norm_eps(config.norm_epsilon)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.STARCODER2, 2)
    for name, tensor in original.state_dict().items():
        if name != "lm_head.weight":
            writer.add_tensor(names.get_name(name, (".weight", ".bias")), tensor.numpy())
    _write(writer)
    model = AutoModelForCausalLM.from_pretrained(ConversionCache(tmp_path).get("coder", file))
    assert isinstance(model, Starcoder2ForCausalLM)
    for name, weight in original.state_dict().items():
        assert torch.equal(model.state_dict()[name].float(), weight), name
