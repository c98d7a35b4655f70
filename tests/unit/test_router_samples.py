"""One attempt at several samples: their tokens, ends and log probabilities, in the order they are told."""

from collections.abc import Callable, Sequence

import pytest

from protos import worker_pb2
from protos.inference_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP, TokenLogprobs
from router.attempt import Attempt, AttemptEvent
from router.completion import FinishReason, Token
from router.completion import TokenLogprobs as Scores
from router.errors import ErrorCode
from router.observations import Observations
from router.sample_course import SampleFinished, Tokens, scored_tokens
from router.sampling_options import Limits, SamplingDraft, check_sampling
from router.submission import AttemptId
from router.worker_session import LegEvent, WorkerSession
from security.channel_security import Plaintext

Hear = Callable[[LegEvent], None]


def attempt_at(leg: str, first_indices: dict[int, int] | None = None, **sampling) -> tuple[Attempt, Hear]:
    """An attempt with one leg whose session never runs, and the ear it listens with."""
    options = check_sampling(SamplingDraft(**{"max_tokens": 4, **sampling}), 1, Limits(None, None))
    indices = first_indices or dict.fromkeys(range(options.n), 0)
    attempt = Attempt(AttemptId(1, 0, b""), indices, options, arrival_s=0.0, on_change=list)
    session = WorkerSession("127.0.0.1:1", "tiny", 1.0, Plaintext(), Observations())
    submit = worker_pb2.Submit(attempt=worker_pb2.Attempt(number=1))
    getattr(submit, leg).SetInParent()
    attempt.submit([(session, "w0", submit)])
    return attempt, session._listeners[1]


def said(sample: int, index: int, token_ids: Sequence[int]) -> worker_pb2.SequenceTokens:
    return worker_pb2.SequenceTokens(sample=sample, index=index, token_ids=token_ids)


def finished(sample: int) -> worker_pb2.Finished:
    return worker_pb2.Finished(sample=sample, finish_reason=FINISH_REASON_LENGTH)


def all_events(attempt: Attempt) -> list[AttemptEvent]:
    events = []
    while (event := attempt.take()) is not None:
        events.append(event)
    return events


async def test_samples_have_tokens_and_ends_of_their_own() -> None:
    attempt, hear = attempt_at("local", n=2)
    hear.hear_tokens(said(1, 0, [20]))
    hear.hear_tokens(said(0, 0, [10]))
    hear.hear_tokens(said(1, 1, [21]))
    hear(finished(1))
    hear(finished(0))
    assert all_events(attempt) == [
        Tokens(1, 0, [20, 21]),
        Tokens(0, 0, [10]),
        SampleFinished(1, FinishReason.LENGTH),
        SampleFinished(0, FinishReason.LENGTH),
    ]


async def test_no_sample_is_starved_by_one_that_always_has_tokens() -> None:
    attempt, hear = attempt_at("local", n=2)
    samples = []
    for index in range(4):
        hear.hear_tokens(said(0, index, [1]))
        hear.hear_tokens(said(1, index, [2]))
        event = attempt.take()
        assert isinstance(event, Tokens)
        samples.append(event.sample)
    assert samples == [0, 1, 0, 1]


async def test_the_end_of_one_sample_does_not_wait_for_the_others() -> None:
    attempt, hear = attempt_at("local", n=2)
    hear.hear_tokens(said(0, 0, [10]))
    hear(finished(0))
    assert attempt.take() == Tokens(0, 0, [10])
    assert attempt.take() == SampleFinished(0, FinishReason.LENGTH)
    hear.hear_tokens(said(1, 0, [20]))
    assert attempt.take() == Tokens(1, 0, [20])


async def test_an_abandoned_sample_is_not_heard_any_more() -> None:
    attempt, hear = attempt_at("local", n=2)
    attempt.abandon(0)
    hear.hear_tokens(said(0, 0, [10]))
    hear(finished(0))
    hear.hear_tokens(said(1, 0, [20]))
    hear(finished(1))
    assert all_events(attempt) == [
        Tokens(1, 0, [20]),
        SampleFinished(1, FinishReason.LENGTH),
    ]


async def test_the_last_abandoned_sample_ends_the_attempt() -> None:
    attempt, hear = attempt_at("decode", n=2)
    hear(finished(1))
    attempt.abandon(0)
    assert all_events(attempt) == [SampleFinished(1, FinishReason.LENGTH)]


async def test_what_is_said_of_an_unknown_sample_is_ignored() -> None:
    attempt, hear = attempt_at("local")
    hear.hear_tokens(said(3, 0, [10]))
    hear(finished(3))
    hear.hear_tokens(said(0, 0, [11]))
    hear(finished(0))
    assert all_events(attempt) == [Tokens(0, 0, [11]), SampleFinished(0, FinishReason.LENGTH)]


async def test_a_sample_can_go_on_by_itself_from_its_tokens() -> None:
    attempt, hear = attempt_at("local", first_indices={2: 2})
    hear.hear_tokens(said(2, 1, [1, 2, 3]))
    hear(finished(2))
    assert all_events(attempt) == [
        Tokens(2, 2, [2, 3]),
        SampleFinished(2, FinishReason.LENGTH),
    ]


def scored(logprob: float, top: Sequence[tuple[int, float]] = ()) -> TokenLogprobs:
    return TokenLogprobs(
        logprob=logprob, top_token_ids=[id_ for id_, _ in top], top_logprobs=[each for _, each in top]
    )


async def test_a_token_without_its_log_probability_waits_for_who_knows_it() -> None:
    attempt, hear = attempt_at("local", logprobs=1)
    hear.hear_tokens(said(0, 0, [10]))
    hear.hear_tokens(worker_pb2.SequenceTokens(index=1, token_ids=[11], logprobs=[scored(-2, [(9, -1)])]))
    hear.hear_tokens(
        worker_pb2.SequenceTokens(index=0, token_ids=[10], logprobs=[scored(-0.5, [(10, -0.5)])])
    )
    assert attempt.take() == Tokens(0, 0, [10, 11], [Scores(-0.5, ((10, -0.5),)), Scores(-2, ((9, -1),))])


async def test_a_log_probability_that_never_comes_is_an_error() -> None:
    attempt, hear = attempt_at("local", logprobs=1)
    hear.hear_tokens(said(0, 0, [10]))
    hear(finished(0))
    assert attempt.take() is None
    assert attempt.failure is not None and attempt.failure.error.code is ErrorCode.INTERNAL


async def test_the_prompts_log_probabilities_come_before_any_token() -> None:
    attempt, hear = attempt_at("local", prompt_logprobs=0)
    hear.hear_tokens(said(0, 0, [10]))
    prompt = worker_pb2.PromptLogprobs(tokens=[TokenLogprobs(), scored(-1)])
    hear(prompt)
    hear(finished(0))
    assert all_events(attempt) == [
        prompt,
        Tokens(0, 0, [10]),
        SampleFinished(0, FinishReason.LENGTH),
    ]


async def test_prompt_log_probabilities_that_never_come_are_an_error() -> None:
    attempt, hear = attempt_at("local", prompt_logprobs=0)
    hear.hear_tokens(said(0, 0, [10]))
    hear(finished(0))
    assert attempt.take() is None
    assert attempt.failure is not None and "prompt" in attempt.failure.error.message


def test_the_first_token_of_a_prompt_has_no_log_probability() -> None:
    tokens = scored_tokens([5, 6], [TokenLogprobs(), scored(-1, [(7, -0.5)])])
    assert tokens == (Token(5), Token(6, Scores(-1, ((7, -0.5),))))


@pytest.mark.parametrize(
    ("detail", "field"),
    [
        ("response_format: json_schema: $ref loops", "response_format"),
        ("the model cannot do that: no", None),
        ("Prompt: too long", None),
        ("", None),
    ],
)
async def test_a_refusal_names_the_field_that_its_detail_begins_with(detail: str, field: str | None) -> None:
    attempt, hear = attempt_at("local")
    hear(worker_pb2.Dropped(cause=worker_pb2.DROP_CAUSE_INVALID, detail=detail))
    assert attempt.failure is not None and attempt.failure.is_final
    assert attempt.failure.error.code is ErrorCode.INVALID_ARGUMENT
    assert attempt.failure.error.field == field


async def test_cached_tokens_are_those_of_the_worker_that_prefilled() -> None:
    attempt, hear = attempt_at("prefill")
    hear(worker_pb2.Prefilled(cached_tokens=32))
    assert attempt.cached_tokens == 32
    decoding, hear = attempt_at("decode")
    hear(worker_pb2.Finished(finish_reason=FINISH_REASON_STOP, cached_tokens=48))
    assert decoding.cached_tokens is None
