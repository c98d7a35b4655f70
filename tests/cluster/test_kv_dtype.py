"""Through the whole cluster, quantized KV is the same text as without a hand-off, and fewer bytes."""

from pathlib import Path

import pytest

from tests.cluster.local_cluster import LocalCluster, local_cluster, together, token_request
from tests.engine.engines import Run, prompt_of, request, tiny_engine

BLOCK_SIZE, STEP_TOKENS = 16, 64
LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 130, 500)
LAYERS, HEADS, HEAD_DIM = 3, 2, 16


@pytest.fixture(params=["int8", "fp8"])
def kv_dtype(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
async def cluster(tiny_model: Path, kv_dtype: str):
    async with local_cluster(
        tiny_model, kv_dtype=kv_dtype, step_tokens=STEP_TOKENS, block_size=BLOCK_SIZE
    ) as running:
        yield running
        await running.wait_clean()


def texts_of_one_worker(model: Path, kv_dtype: str) -> list[tuple[int, ...]]:
    options = {"kv_dtype": kv_dtype, "step_tokens": STEP_TOKENS, "block_size": BLOCK_SIZE}
    run = Run(tiny_engine(model, **options))
    for length in LENGTHS:
        run.engine.submit(request(f"p{length}", prompt_of(length, seed=length), 24))
        run.to_end()
    return [tuple(run.tokens[f"p{length}"]) for length in LENGTHS]


async def test_a_hand_off_gives_exactly_the_text_of_one_worker_alone(
    cluster: LocalCluster, tiny_model: Path, kv_dtype: str
):
    alone = texts_of_one_worker(tiny_model, kv_dtype)
    requests = [token_request(prompt_of(length, seed=length), 24) for length in LENGTHS]
    assert [(await cluster.generate(each)).token_ids for each in requests] == alone


async def test_quantized_texts_differ_from_exact_ones(cluster: LocalCluster, tiny_model: Path, kv_dtype: str):
    """The option reaches both engines; fp8 or int8, somewhere in 240 tokens it shows."""
    requests = [token_request(prompt_of(length, seed=length), 24) for length in LENGTHS]
    answers = await together(cluster, requests)
    assert [answer.token_ids for answer in answers] != texts_of_one_worker(tiny_model, "auto")


async def test_a_hand_off_carries_one_byte_a_value_and_two_a_head(cluster: LocalCluster):
    answer = await cluster.generate(token_request(prompt_of(130), 5, ignore_eos=True))
    assert answer.last.served_by.kv_bytes == 130 * LAYERS * 2 * HEADS * (HEAD_DIM + 2)


async def test_the_router_knows_the_workers_kv_dtype(cluster: LocalCluster, kv_dtype: str):
    assert {worker.dtype for worker in cluster.router.fleet.statuses()} == {kv_dtype}
