"""Parameters of sampling through a router, a prefill and a decode worker, over gRPC."""

import json
import re
from pathlib import Path

import grpc
import jsonschema
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from protos import inference_pb2
from tests.cluster.local_cluster import LocalCluster, local_cluster, token_request
from tests.engine.engines import prompt_of
from tests.reference import NEAR_TIE, Reference

PROMPT = prompt_of(100)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{1,9}$"},
        "age": {"type": "integer", "maximum": 99},
    },
    "required": ["name", "age"],
}


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> Reference:
    return Reference(tiny_model)


async def responses(
    cluster: LocalCluster, request: inference_pb2.GenerateRequest
) -> list[inference_pb2.GenerateResponse]:
    return [response async for response in cluster.client.Generate(request, timeout=60)]


def check(told: list[inference_pb2.TokenLogprobs], tokens: list[int], logits: torch.Tensor, top: int) -> None:
    assert len(told) == len(tokens) == len(logits)
    for each, token, row in zip(told, tokens, logits.log_softmax(-1), strict=True):
        assert each.logprob == pytest.approx(row[token].item(), abs=1e-4)
        assert list(each.top_logprobs) == pytest.approx(row.topk(top).values.tolist(), abs=1e-4)
        assert len(each.top_token_ids) == top


async def test_logprobs_of_prompt_and_text_are_the_references(tiny_model, reference):
    """Conformance 9, position 0 included."""
    async with local_cluster(tiny_model) as cluster:
        asked = token_request(
            PROMPT, 8, temperature=1.0, seed=5, ignore_eos=True, logprobs=3, prompt_logprobs=2, top_k=9
        )
        answer = await responses(cluster, asked)
    tokens = [token for response in answer for token in response.token_ids]
    told = [each for response in answer for each in response.logprobs]
    logits = reference.logits((*PROMPT, *tokens))
    check(told, tokens, logits[99:-1], 3)
    of_prompt = [each for response in answer for each in response.prompt_logprobs]
    assert of_prompt[0] == inference_pb2.TokenLogprobs()
    check(of_prompt[1:], list(PROMPT[1:]), logits[:99], 2)
    assert [bool(response.prompt_logprobs) for response in answer][1:] == [False] * (len(answer) - 1)
    assert answer[-1].served_by.prefill_worker != answer[-1].served_by.decode_worker
    assert answer[-1].served_by.kv_bytes > 0


async def test_penalties_shape_the_text_on_both_workers(tiny_model, reference):
    async with local_cluster(tiny_model) as cluster:
        asked = token_request(
            PROMPT, 20, ignore_eos=True, repetition_penalty=1.3, frequency_penalty=0.4, logit_bias={7: -50.0}
        )
        tokens = (await cluster.generate(asked)).token_ids
    logits = reference.logits((*PROMPT, *tokens))[99:-1]
    for place, token in enumerate(tokens):
        ids = torch.LongTensor([[*PROMPT, *tokens[:place]]])
        row = RepetitionPenaltyLogitsProcessor(1.3)(ids, logits[place : place + 1].clone())[0]
        for before in tokens[:place]:
            row[before] -= 0.4
        row[7] -= 50
        assert row.max() - row[token] < NEAR_TIE
    assert len(tokens) == 20


async def test_texts_are_in_the_grammar_whoever_draws_the_first_token(tiny_model):
    async with local_cluster(tiny_model) as cluster:
        for seed in range(4):
            schema = inference_pb2.Grammar(json_schema=json.dumps(SCHEMA))
            asked = token_request(PROMPT, 600, temperature=1.0, seed=seed, grammar=schema)
            answer = await cluster.generate(asked)
            assert answer.last.finish_reason == inference_pb2.FINISH_REASON_STOP
            jsonschema.validate(json.loads(answer.text), SCHEMA)
            regex = inference_pb2.Grammar(regex="[ab]{4}")
            answer = await cluster.generate(
                token_request(PROMPT, 9, temperature=1.0, seed=seed, grammar=regex)
            )
            assert re.fullmatch("[ab]{4}", answer.text)
        await cluster.wait_clean()


@pytest.mark.parametrize(
    "grammar",
    [
        inference_pb2.Grammar(regex="("),
        inference_pb2.Grammar(json_schema='{"not": {}}'),
        inference_pb2.Grammar(json_schema='{"type": "nope"}'),
    ],
)
@pytest.mark.parametrize("prompt", [PROMPT, prompt_of(3)], ids=["handed off", "on one worker"])
async def test_what_is_no_grammar_is_the_clients_error_and_names_the_field(tiny_model, grammar, prompt):
    async with local_cluster(tiny_model) as cluster:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await cluster.generate(token_request(prompt, 9, grammar=grammar))
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "response_format" in (raised.value.details() or "")
        await cluster.wait_clean()
