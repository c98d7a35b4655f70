"""An attempt that nobody reads: what it holds for a slow client."""

from collections.abc import Callable

from protos import worker_pb2
from protos.inference_pb2 import FINISH_REASON_LENGTH
from router.attempt import Attempt
from router.completion import FinishReason
from router.observations import Observations
from router.sample_course import SampleFinished, Tokens
from router.sampling_options import Limits, SamplingDraft, check_sampling
from router.submission import AttemptId
from router.worker_session import LegEvent, WorkerSession
from security.channel_security import Plaintext


def local_attempt(max_tokens: int) -> tuple[Attempt, Callable[[LegEvent], None]]:
    """An attempt on one worker whose session is never run, and the ear it listens with."""
    options = check_sampling(SamplingDraft(max_tokens=max_tokens), 1, Limits(None, None))
    attempt = Attempt(AttemptId(1, 0, b"secret"), {0: 0}, options, arrival_s=0.0, on_change=list)
    session = WorkerSession("127.0.0.1:1", "tiny", 1.0, Plaintext(), Observations())
    submit = worker_pb2.Submit(attempt=worker_pb2.Attempt(number=1))
    submit.local.SetInParent()
    attempt.submit([(session, "d0", submit)])
    return attempt, session._listeners[1]


async def test_tokens_that_nobody_read_come_in_one_piece() -> None:
    attempt, hear = local_attempt(max_tokens=100)
    for index in range(100):
        hear.hear_tokens(worker_pb2.SequenceTokens(index=index, token_ids=[index]))
    assert attempt.take() == Tokens(0, 0, [*range(100)])


async def test_what_is_held_for_a_slow_client_is_bounded_by_max_tokens() -> None:
    attempt, hear = local_attempt(max_tokens=10)
    for index in range(1000):
        hear.hear_tokens(worker_pb2.SequenceTokens(index=index, token_ids=[1, 2, 3]))
    tokens = attempt.take()
    assert isinstance(tokens, Tokens) and len(tokens.token_ids) == 10


async def test_tokens_that_were_said_come_before_the_end() -> None:
    attempt, hear = local_attempt(max_tokens=2)
    hear.hear_tokens(worker_pb2.SequenceTokens(index=0, token_ids=[5]))
    hear(worker_pb2.Finished(finish_reason=FINISH_REASON_LENGTH))
    assert attempt.take() == Tokens(0, 0, [5])
    assert attempt.take() == SampleFinished(0, FinishReason.LENGTH)
    assert attempt.take() is None
    assert attempt.is_decided and attempt.failure is None
