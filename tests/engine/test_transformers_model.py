from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import EngineConfig
from engine.llama_config import llama_config
from engine.loading import load_engine
from engine.model_config import CorruptCheckpoint, ModelError, UnsupportedModel, read_model_config
from engine.request import KVSource, RunUntil
from tests.engine.engines import Run, prompt_of, request, tiny_engine
from tests.engine.model_steps import ModelSteps, ReferenceModel, Rows, model_of, random_tokens
from tests.engine.test_engine import Wire, hand_off
from tests.reference import NearTies, Reference
from tests.tiny_decoders import FAMILIES, MAX_POSITIONS, WINDOW, make_tiny_decoder
from tests.tiny_models import make_tiny_model

# Logits are about 10 in size.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-3}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory):
    """The folder of a tiny model of a family; read only."""
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = make_tiny_decoder(tmp_path_factory.mktemp(family), family)
        return made[family]

    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_of_sequences_in_any_phase_has_the_references_logits(folder_of, family: str):
    folder, lengths = folder_of(family), (16, 17, 120, 90, 40)
    assert llama_config(read_model_config(folder)) is None
    steps, reference = ModelSteps(model_of(folder), random_tokens(*lengths)), ReferenceModel(folder)
    for sequence, computed, chunk in ((0, 15, 15), (1, 16, 16), (2, 119, 50), (3, 33, 33)):
        steps.prefill(sequence, computed, chunk)
    rows = (Rows(0, 15, 16), Rows(1, 16, 17), Rows(2, 119, 120), Rows(3, 33, 90), Rows(4, 0, 40))
    expected = [reference.logits(steps.sequences[r.sequence])[r.start : r.end] for r in rows]
    torch.testing.assert_close(steps.step(*rows), torch.cat(expected), **TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_the_references(folder_of, family: str):
    """Prompts of several lengths side by side, in chunks of 16, shorter and longer than the window."""
    folder = folder_of(family)
    run, reference, ties = Run(tiny_engine(folder, step_tokens=16)), Reference(folder), NearTies(1)
    prompts = {f"p{n}": prompt_of(n, seed=n) for n in (1, WINDOW - 6, 3 * WINDOW)}
    for name, prompt in prompts.items():
        run.engine.submit(request(name, prompt, max_tokens=10))
    texts = run.to_end()
    for name, prompt in prompts.items():
        ties.check(texts[name], reference.greedy(prompt, 10))


@pytest.mark.parametrize("family", ["gemma2", "gpt2", "deepseek_v3", "mimo_v2_flash"])
def test_a_handed_off_sequence_goes_on_as_if_it_had_never_moved(folder_of, family: str):
    folder, prompt, wire = folder_of(family), prompt_of(50), Wire()
    prefill = Run(tiny_engine(folder, wire, step_tokens=16))
    decode = Run(tiny_engine(folder, step_tokens=16))
    prefill.engine.submit(request("a", prompt, 12, run_until=RunUntil.FIRST_TOKEN))
    decode.engine.submit(request("a", prompt, 12, kv_source=KVSource.HANDOFF))
    prefill.to_end()
    hand_off(wire, prefill, decode, "a")
    NearTies(0).check(decode.to_end()["a"], Reference(folder).greedy(prompt, 12))
    assert decode.engine.load().computed_prompt_tokens == 0


def test_windows_decide_the_text(folder_of, tmp_path: Path):
    """Else the tests above would not show that they are kept."""
    wide = make_tiny_decoder(tmp_path, "mixtral", num_local_experts=4, sliding_window=None)
    tokens = random_tokens(3 * WINDOW)
    narrow, whole = (ModelSteps(model_of(f), tokens).prefill(0, 60, 60) for f in (folder_of("mixtral"), wide))
    torch.testing.assert_close(narrow[:WINDOW], whole[:WINDOW], **TOLERANCE)
    assert not torch.allclose(narrow[WINDOW:], whole[WINDOW:], atol=0.1)


LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "factor": 2.0,
    "original_max_position_embeddings": 128,
}


@pytest.mark.parametrize(
    "fields",
    [
        {"hidden_act": "gelu"},
        {"rope_scaling": LONGROPE},
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ],
    ids=["gelu", "longrope", "dynamic", "partial"],
)
def test_a_llama_that_the_lean_decoder_does_not_compute_runs_all_the_same(
    tmp_path: Path, fields: dict[str, object]
):
    folder = make_tiny_model(tmp_path, **fields)
    steps = ModelSteps(model_of(folder), random_tokens(128))
    expected = ReferenceModel(folder).logits(steps.sequences[0])
    torch.testing.assert_close(steps.prefill(0, 128, 50), expected, **TOLERANCE)


def test_an_8_bit_cache_holds_layers_of_different_shapes(folder_of):
    folder, prompt, texts = folder_of("mimo_v2_flash"), prompt_of(50), []
    for kv_dtype in ("auto", "int8"):
        run = Run(tiny_engine(folder, step_tokens=16, kv_dtype=kv_dtype))
        run.engine.submit(request("a", prompt, 4))
        texts.append(run.to_end()["a"])
    assert texts[0] == texts[1]


def test_bfloat16_stays_as_close_to_float32_as_the_reference_does(folder_of):
    folder = folder_of("olmo2")
    steps = ModelSteps(model_of(folder, torch.bfloat16), random_tokens(60))
    exact = ReferenceModel(folder).logits(steps.sequences[0])
    allowed = (ReferenceModel(folder, torch.bfloat16).logits(steps.sequences[0]) - exact).square().mean()
    assert (steps.prefill(0, 60, 25) - exact).square().mean() < 2 * allowed


@pytest.mark.parametrize("sampled", [[], [0], [4], [1, 3]])
def test_logits_are_those_of_the_sampled_rows(folder_of, sampled: list[int]):
    steps = ModelSteps(model_of(folder_of("gemma2")), random_tokens(5))
    logits = steps.step(Rows(0, 0, 5), sampled=sampled)
    expected = ReferenceModel(folder_of("gemma2")).logits(steps.sequences[0])[sampled]
    torch.testing.assert_close(logits, expected, **TOLERANCE)


def test_two_models_of_one_process_keep_to_themselves(folder_of):
    one, other = (ModelSteps(model_of(folder_of("gpt2")), random_tokens(30, seed=s)) for s in (1, 2))
    one.prefill(0, 20, 20)
    other.prefill(0, 29, 29)
    expected = ReferenceModel(folder_of("gpt2")).logits(one.sequences[0])[20:]
    torch.testing.assert_close(one.step(Rows(0, 20, 30)), expected, **TOLERANCE)


@pytest.mark.parametrize(
    ("family", "shape", "reason"),
    [
        ("falcon", {"num_ln_in_parallel_attn": None}, "0 of its 3 layers attend through"),
        ("mamba", {}, "0 of its 3 layers"),
        ("bamba", {"attn_layer_indices": [1]}, "depends on other tokens than attention sees"),
        ("falcon_h1", {}, "depends on other tokens than attention sees"),
        ("llama4_text", {"attention_chunk_size": 32}, "a mask that is not a sliding window"),
        ("bert", {}, "a mask that is not a sliding window"),
        ("diffllama", {}, "is an earlier one again"),
        ("doge", {}, "DogeForCausalLM is not supported"),
    ],
)
def test_what_pages_cannot_serve_is_refused_with_the_reason(
    tmp_path: Path, family: str, shape: dict[str, object], reason: str
):
    folder = make_tiny_decoder(tmp_path, family, **shape)
    with pytest.raises(UnsupportedModel, match=f"{folder}.*{reason}"):
        tiny_engine(folder, device="cpu")


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_positions_end_where_the_models_table_ends(folder_of, family: str):
    with pytest.raises(ModelError, match=f"limit of {MAX_POSITIONS}"):
        tiny_engine(folder_of(family), max_model_len=MAX_POSITIONS + 1)
    run = Run(tiny_engine(folder_of(family), max_model_len=MAX_POSITIONS))
    run.engine.submit(request("a", prompt_of(MAX_POSITIONS - 2), 2))
    reference = Reference(folder_of(family)).greedy(prompt_of(MAX_POSITIONS - 2), 2)
    NearTies(0).check(run.to_end()["a"], reference)


@pytest.mark.parametrize("change", ["missing", "unexpected", "mismatched"])
def test_tensors_that_do_not_fit_the_configuration_are_corrupt(tmp_path: Path, change: str):
    folder = make_tiny_decoder(tmp_path, "olmo")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    taken = tensors.pop("model.layers.1.mlp.up_proj.weight")
    if change == "unexpected":
        tensors |= {"model.layers.1.mlp.up_proj.weight": taken, "model.layers.1.extra.weight": taken.clone()}
    elif change == "mismatched":
        tensors["model.layers.1.mlp.up_proj.weight"] = taken[:7]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(CorruptCheckpoint, match=f"{folder}.*(layers.1|{change})"):
        tiny_engine(folder)


def test_a_damaged_file_is_corrupt(tmp_path: Path):
    folder = make_tiny_decoder(tmp_path, "olmo")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(CorruptCheckpoint, match=r"model\.safetensors"):
        load_engine(EngineConfig(model_path=folder))
