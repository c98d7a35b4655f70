"""What an attempt asks of its workers, in the words of worker.proto."""

from dataclasses import dataclass

from protos import inference_pb2, worker_pb2
from router.cluster_view import WorkerSnapshot
from router.generation_request import GenerationRequest
from router.grammar import Grammar, JsonObject, JsonSchema, Regex
from router.placement import Alone, Pair, Placement
from router.sampling_options import SamplingOptions


@dataclass(frozen=True, slots=True)
class AttemptId:
    """
    Attributes:
        number: of the attempt, in every session it is submitted to.
        attempt: counts the attempts at the request, from 0.
        secret: authenticates the attempt's hand-off.
    """

    number: int
    attempt: int
    secret: bytes


@dataclass(frozen=True, slots=True)
class Share:
    """What of a request an attempt is to bring.

    Attributes:
        samples: their numbers, one after the other.
        generated: the tokens that are there; only a single sample has any.
        options: the request's, but for what earlier attempts have brought.
    """

    samples: range
    generated: tuple[int, ...]
    options: SamplingOptions


def submits(
    identity: AttemptId, request: GenerationRequest, share: Share, seed: int, placement: Placement
) -> list[tuple[WorkerSnapshot, worker_pb2.Submit]]:
    """Each leg's worker and message: the decode leg first, so that it waits for the hand-off."""
    match placement:
        case Alone(worker):
            submit = _submit(identity, request, share, seed)
            submit.expected_cached_tokens = placement.cached_tokens
            submit.local.SetInParent()
            return [(worker, submit)]
        case Pair(prefill, decode):
            receive = _submit(identity, request, share, seed)
            send = worker_pb2.Submit()
            send.CopyFrom(receive)
            receive.decode.prefill_worker_id = prefill.worker_id
            send.expected_cached_tokens = placement.cached_tokens
            send.prefill.CopyFrom(
                worker_pb2.PrefillLeg(
                    decode_worker_id=decode.worker_id,
                    decode_address=decode.address,
                    decode_epoch=decode.epoch,
                    decode_session=decode.session,
                )
            )
            return [(decode, receive), (prefill, send)]


def _submit(identity: AttemptId, request: GenerationRequest, share: Share, seed: int) -> worker_pb2.Submit:
    return worker_pb2.Submit(
        attempt=worker_pb2.Attempt(number=identity.number, attempt=identity.attempt),
        request_id=request.request_id,
        secret=identity.secret,
        arrival_unix_s=request.arrival_unix_s,
        prompt_token_ids=request.prompt,
        generated_token_ids=share.generated,
        sampling=_sampling(share.options, seed),
        sample=share.samples.start,
        cache_salt=request.cache_salt,
    )


def _sampling(options: SamplingOptions, seed: int) -> inference_pb2.SamplingParams:
    return inference_pb2.SamplingParams(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        seed=seed,
        max_tokens=options.max_tokens,
        min_tokens=options.min_tokens,
        stop_token_ids=options.stop_token_ids,
        ignore_eos=options.ignore_eos,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        repetition_penalty=options.repetition_penalty,
        logit_bias=options.logit_bias,
        n=options.n,
        logprobs=options.logprobs,
        prompt_logprobs=options.prompt_logprobs,
        grammar=_grammar(options.grammar),
    )


def _grammar(grammar: Grammar | None) -> inference_pb2.Grammar | None:
    match grammar:
        case None:
            return None
        case JsonObject():
            return inference_pb2.Grammar(json_object=inference_pb2.JsonObject())
        case JsonSchema(text):
            return inference_pb2.Grammar(json_schema=text)
        case Regex(pattern):
            return inference_pb2.Grammar(regex=pattern)
