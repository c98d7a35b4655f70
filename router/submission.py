"""What an attempt asks of its workers, in the words of worker.proto."""

from dataclasses import dataclass

from protos import inference_pb2, worker_pb2
from router.cluster_view import WorkerSnapshot
from router.generation_request import GenerationRequest, Grammar, GrammarForm
from router.placement import Alone, Pair, Placement


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


def submits(
    identity: AttemptId,
    request: GenerationRequest,
    seed: int,
    generated: tuple[int, ...],
    placement: Placement,
) -> list[tuple[WorkerSnapshot, worker_pb2.Submit]]:
    """Each leg's worker and message: the decode leg first, so that it waits for the hand-off.

    Args:
        generated: tokens of earlier attempts.
    """
    match placement:
        case Alone(worker):
            submit = _submit(identity, request, seed, generated)
            submit.local.SetInParent()
            return [(worker, submit)]
        case Pair(prefill, decode):
            receive = _submit(identity, request, seed, generated)
            receive.decode.prefill_worker_id = prefill.worker_id
            send = _submit(identity, request, seed, generated)
            send.prefill.CopyFrom(
                worker_pb2.PrefillLeg(
                    decode_worker_id=decode.worker_id,
                    decode_address=decode.address,
                    decode_epoch=decode.epoch,
                    decode_session=decode.session,
                )
            )
            return [(decode, receive), (prefill, send)]


def _submit(
    identity: AttemptId, request: GenerationRequest, seed: int, generated: tuple[int, ...]
) -> worker_pb2.Submit:
    options = request.sampling
    return worker_pb2.Submit(
        attempt=worker_pb2.Attempt(number=identity.number, attempt=identity.attempt),
        request_id=request.request_id,
        secret=identity.secret,
        arrival_unix_s=request.arrival_unix_s,
        prompt_token_ids=request.prompt,
        generated_token_ids=generated,
        sampling=inference_pb2.SamplingParams(
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            min_p=options.min_p,
            seed=seed,
            max_tokens=options.max_tokens,
            min_tokens=options.min_tokens,
            stop_token_ids=options.stop_token_ids,
            ignore_eos=options.ignore_eos,
            grammar=None if options.grammar is None else _grammar(options.grammar),
        ),
    )


def _grammar(grammar: Grammar) -> inference_pb2.Grammar:
    match grammar.form:
        case GrammarForm.JSON_OBJECT:
            return inference_pb2.Grammar(json_object=inference_pb2.JsonObject())
        case GrammarForm.JSON_SCHEMA:
            return inference_pb2.Grammar(json_schema=grammar.text)
        case GrammarForm.REGEX:
            return inference_pb2.Grammar(regex=grammar.text)
