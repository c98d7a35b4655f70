"""Converts a GGUF file into a Hugging Face folder: `python -m model_store.gguf_conversion FILE FOLDER`.

Writes config.json, generation_config.json, model.safetensors (bfloat16), tokenizer.json and
tokenizer_config.json with the chat template. One line on stdout for each step. A change of what comes
out goes with a new CONVERTER_VERSION (model_store.conversion_cache).
"""

import sys
from pathlib import Path

import torch
from gguf import GGUFReader
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def convert(gguf: Path, folder: Path) -> None:
    """Writes the folder's files. `folder` exists and is empty.

    Raises:
        OSError, ValueError: the file is not a GGUF, or of a kind that transformers does not read.
    """
    _say(f"reading {gguf.name}")
    max_length = _convert_model(gguf, folder)
    _say("converting the tokenizer")
    _convert_tokenizer(gguf, folder, max_length)


def _convert_model(gguf: Path, folder: Path) -> int | None:
    """Returns the longest sequence the model was made for, in tokens, if it says."""
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    _say("writing the weights")
    model.save_pretrained(folder)
    return getattr(model.config, "max_position_embeddings", None)


def _convert_tokenizer(gguf: Path, folder: Path, max_length: int | None) -> None:
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if max_length is not None:
        tokenizer.model_max_length = max_length
    if _pre_tokenizer_name(gguf) == "smollm":
        _split_single_digits(tokenizer.backend_tokenizer)
    tokenizer.save_pretrained(folder, save_jinja_files=False)


def _pre_tokenizer_name(gguf: Path) -> str | None:
    field = GGUFReader(gguf).get_field("tokenizer.ggml.pre")
    return None if field is None else field.contents()


def _split_single_digits(tokenizer: Tokenizer) -> None:
    """What llama.cpp calls `smollm`: each digit a token of its own, then GPT-2's split.

    transformers 5.24 leaves out the first half, and then cuts spaces before a digit differently.
    """
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


def _say(step: str) -> None:
    print(step, flush=True)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
