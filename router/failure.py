"""Why an attempt failed."""

import re
from dataclasses import dataclass, replace

from protos import worker_pb2
from router.errors import ErrorCode, RequestError, unavailable

# How a worker's refusal begins when one field is at fault.
_NAMES_FIELD = re.compile(r"([a-z_]{1,64}): ")
_INTERNAL = frozenset({worker_pb2.DROP_CAUSE_INTERNAL, worker_pb2.DROP_CAUSE_INCOMPATIBLE})


@dataclass(frozen=True, slots=True)
class Failure:
    """
    Attributes:
        cause: in a word: a label of the metrics.
        error: what the client is told if no further attempt is made.
        session: with the worker at fault.
        is_final: every worker would say the same.
        is_leaving: the worker at fault takes nothing new any more.
    """

    cause: str
    error: RequestError
    session: str
    is_final: bool = False
    is_leaving: bool = False

    def because_of(self, session: str) -> "Failure":
        """The same, and another worker is at fault."""
        return replace(self, session=session)


def worker_lost(worker_id: str, session: str, reason: str) -> Failure:
    """The session ended with the attempt in it."""
    return Failure("worker_lost", unavailable(f"worker {worker_id} died: {reason}"), session)


def worker_dropped(worker_id: str, session: str, event: worker_pb2.Dropped) -> Failure:
    """The worker said that the attempt is over there."""
    cause = worker_pb2.DropCause.Name(event.cause).removeprefix("DROP_CAUSE_").lower()
    message = f"worker {worker_id} dropped the request ({cause}): {event.detail}"
    if event.cause == worker_pb2.DROP_CAUSE_INVALID:
        named = _NAMES_FIELD.match(event.detail)
        error = RequestError(ErrorCode.INVALID_ARGUMENT, event.detail or message, field=named and named[1])
        return Failure(cause, error, session, is_final=True)
    error = RequestError(ErrorCode.INTERNAL, message) if event.cause in _INTERNAL else unavailable(message)
    return Failure(cause, error, session, is_leaving=event.cause == worker_pb2.DROP_CAUSE_DRAINING)


def unfinished(session: str, message: str) -> Failure:
    """The worker owed something, and it never came."""
    return Failure("unfinished", RequestError(ErrorCode.INTERNAL, message), session)
