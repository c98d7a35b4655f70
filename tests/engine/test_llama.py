from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.engine.model_steps import (
    BLOCK_SIZE,
    ModelSteps,
    ReferenceModel,
    Rows,
    model_of,
    random_tokens,
)
from tests.tiny_models import FAMILIES, make_tiny_model

# Logits are about 10 in size.
TOLERANCE = {"rtol": 1e-5, "atol": 3e-4}
PROMPT = 150


class Pair:
    """Our model and transformers' of the same folder."""

    def __init__(self, folder: Path) -> None:
        self.model = model_of(folder)
        self.reference = ReferenceModel(folder)

    def steps(self, *lengths: int, block_size: int = BLOCK_SIZE) -> ModelSteps:
        return ModelSteps(self.model, random_tokens(*lengths), block_size)

    def expected(self, steps: ModelSteps, sequence: int = 0) -> Tensor:
        return self.reference.logits(steps.sequences[sequence])


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(make_tiny_model(tmp_path_factory.mktemp(request.param), request.param))


@pytest.fixture(scope="module")
def llama(tiny_model: Path) -> Pair:
    return Pair(tiny_model)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 64, 65, PROMPT, 513])
def test_full_prefill_has_the_references_logits(pair: Pair, length: int):
    steps = pair.steps(length)
    torch.testing.assert_close(steps.prefill(0, length, length), pair.expected(steps), **TOLERANCE)


@pytest.mark.parametrize("chunk", [*range(1, BLOCK_SIZE + 3), 31, 32, 33, 63, 64, 65, 100, 149])
def test_chunked_prefill_has_the_references_logits(pair: Pair, chunk: int):
    steps = pair.steps(PROMPT)
    torch.testing.assert_close(steps.prefill(0, PROMPT, chunk), pair.expected(steps), **TOLERANCE)


def test_decode_steps_have_the_references_logits(pair: Pair):
    steps = pair.steps(60)
    steps.prefill(0, 30, 30)
    decoded = torch.cat([steps.step(Rows(0, i, i + 1)) for i in range(30, 60)])
    torch.testing.assert_close(decoded, pair.expected(steps)[30:], **TOLERANCE)


def test_sequences_of_any_length_and_phase_share_a_step(pair: Pair):
    steps = pair.steps(16, 17, 120, 90, 40)
    steps.prefill(0, 15, 15)
    steps.prefill(1, 16, 16)
    steps.prefill(2, 119, 50)
    steps.prefill(3, 33, 33)
    rows = (Rows(0, 15, 16), Rows(1, 16, 17), Rows(2, 119, 120), Rows(3, 33, 90), Rows(4, 0, 40))
    expected = torch.cat([pair.expected(steps, r.sequence)[r.start : r.end] for r in rows])
    torch.testing.assert_close(steps.step(*rows), expected, **TOLERANCE)


def test_short_and_long_contexts_decode_together(llama: Pair):
    lengths = (3, 700, 20, 690, 17, 1000, 350)
    steps = llama.steps(*lengths)
    for sequence, length in enumerate(lengths):
        steps.prefill(sequence, length - 1, 512)
    logits = steps.step(*(Rows(s, length - 1, length) for s, length in enumerate(lengths)))
    expected = torch.stack([llama.expected(steps, s)[-1] for s in range(len(lengths))])
    torch.testing.assert_close(logits, expected, **TOLERANCE)


@pytest.mark.parametrize("block_size", [1, 3, 64])
def test_block_size_does_not_change_the_logits(llama: Pair, block_size: int):
    steps = llama.steps(80, block_size=block_size)
    logits = torch.cat([steps.prefill(0, 79, 33), steps.step(Rows(0, 79, 80))])
    torch.testing.assert_close(logits, llama.expected(steps), **TOLERANCE)


@pytest.mark.parametrize("sampled", [[], [0], [4], [1, 3]])
def test_logits_are_those_of_the_sampled_rows(llama: Pair, sampled: list[int]):
    steps = llama.steps(5)
    logits = steps.step(Rows(0, 0, 5), sampled=sampled)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, llama.expected(steps)[sampled], **TOLERANCE)


@pytest.mark.parametrize(
    "rope_scaling",
    [
        {"rope_type": "linear", "factor": 2.0},
        {"type": "linear", "factor": 4.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    ],
    ids=["linear", "linear, old spelling", "llama3", "yarn"],
)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_rope_scaling_is_the_references(tmp_path: Path, family: str, rope_scaling: dict[str, object]):
    pair = Pair(make_tiny_model(tmp_path, family, rope_scaling=rope_scaling))
    steps = pair.steps(300)
    torch.testing.assert_close(steps.prefill(0, 300, 100), pair.expected(steps), **TOLERANCE)


@pytest.mark.parametrize(
    ("family", "shape"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"num_key_value_heads": 4}),
        ("llama", {"num_key_value_heads": 1}),
        ("llama", {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 24}),
        ("qwen3", {"attention_bias": True}),
        ("mistral", {"head_dim": 32, "sliding_window": 4096}),
        ("mistral", {"sliding_window": 21}),
        ("mistral", {"sliding_window": 1}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 30, "max_window_layers": 1}),
    ],
)
def test_shapes_biases_and_windows_are_the_references(tmp_path: Path, family: str, shape: dict[str, object]):
    pair = Pair(make_tiny_model(tmp_path, family, **shape))
    steps = pair.steps(50)
    logits = torch.cat([steps.prefill(0, 49, 20), steps.step(Rows(0, 49, 50))])
    torch.testing.assert_close(logits, pair.expected(steps), **TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_stays_as_close_to_float32_as_the_reference_does(tmp_path: Path, family: str):
    folder = make_tiny_model(tmp_path, family)
    steps = ModelSteps(model_of(folder, torch.bfloat16), random_tokens(100))
    logits = torch.cat([steps.prefill(0, 99, 40), steps.step(Rows(0, 99, 100))])
    exact = ReferenceModel(folder).logits(steps.sequences[0])
    allowed = (ReferenceModel(folder, torch.bfloat16).logits(steps.sequences[0]) - exact).square().mean()
    assert logits.dtype == torch.float32
    assert (logits - exact).square().mean() < 2 * allowed


def test_the_hook_sees_each_layers_kv_as_the_cache_holds_it(llama: Pair):
    steps = llama.steps(40, 30)
    steps.prefill(0, 39, 39)
    rows = (Rows(0, 39, 40), Rows(1, 0, 30))
    slots = torch.cat([steps.slots(r) for r in rows])
    seen: list[list[Tensor]] = []

    def hook(layer: int) -> None:
        assert layer == len(seen)
        seen.append([steps.cache.gather(layer, index, slots) for index in range(2)])
        if layer < 2:
            assert not steps.cache.gather(layer + 1, 0, slots).any()

    steps.step(*rows, hook=hook)
    assert len(seen) == 3
    for layer, tensors in enumerate(seen):
        for index, tensor in enumerate(tensors):
            assert tensor.any()
            assert torch.equal(tensor, steps.cache.gather(layer, index, slots))


def test_the_hook_runs_before_its_layers_attention(llama: Pair):
    steps = llama.steps(40)
    steps.prefill(0, 39, 39)
    undisturbed = steps.step(Rows(0, 39, 40))

    def hook(layer: int) -> None:
        steps.cache.pages(layer, 1).zero_()

    assert not torch.allclose(steps.step(Rows(0, 39, 40), hook=hook), undisturbed)
