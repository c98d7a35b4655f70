"""A Submit as an engine request."""

from collections.abc import Set
from dataclasses import replace

from engine.request import EngineRequest, FinishReason, KVSource, RunUntil, SamplingParams
from engine.sequence import Sequence
from protos import inference_pb2
from worker.leg import Assignment


def engine_request(
    assignment: Assignment,
    *,
    kv_source: KVSource = KVSource.COMPUTE,
    run_until: RunUntil = RunUntil.END,
) -> EngineRequest:
    """All but the grammar, which takes time: `RequestGrammars.complete`."""
    submit = assignment.submit
    return EngineRequest(
        sequence_id=assignment.sequence_id,
        prompt=tuple(submit.prompt_token_ids),
        generated=tuple(submit.generated_token_ids),
        sampling=_sampling_params(submit.sampling),
        arrival_s=submit.arrival_unix_s,
        sample=submit.sample,
        kv_source=kv_source,
        run_until=run_until,
        cache_salt=submit.cache_salt,
    )


def end_so_far(assignment: Assignment, eos_token_ids: Set[int]) -> FinishReason | None:
    """Why the last token of the earlier attempts ended the sequence. None: it goes on."""
    request = engine_request(assignment)
    if not request.generated:
        return None
    if assignment.submit.sampling.HasField("grammar"):
        # A grammar's text always ends with the model's own end.
        request = replace(request, sampling=replace(request.sampling, ignore_eos=False))
    before = replace(request, generated=request.generated[:-1])
    return Sequence.of(before, 0.0).end_with(request.generated[-1], frozenset(eos_token_ids))


def _sampling_params(sampling: inference_pb2.SamplingParams) -> SamplingParams:
    return SamplingParams(
        temperature=sampling.temperature if sampling.HasField("temperature") else 1.0,
        top_k=sampling.top_k,
        top_p=sampling.top_p if sampling.HasField("top_p") else 1.0,
        min_p=sampling.min_p,
        seed=sampling.seed,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        stop_token_ids=frozenset(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty if sampling.HasField("repetition_penalty") else 1.0,
        logit_bias=tuple(sorted(sampling.logit_bias.items())),
        logprobs=sampling.logprobs if sampling.HasField("logprobs") else None,
        prompt_logprobs=sampling.prompt_logprobs if sampling.HasField("prompt_logprobs") else None,
        n=sampling.n if sampling.HasField("n") else 1,
    )
