"""Where a request is tried again, and how often: pure decisions."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from router.cluster_view import WorkerSnapshot
from router.completion import StageTimes
from router.errors import RequestError
from router.failure import Failure


@dataclass(frozen=True, slots=True)
class RetryLimits:
    """
    Attributes:
        max_attempts: in a row that bring no token.
        rejoin_limit_s: how long to wait for a listed worker when none is left.
    """

    max_attempts: int
    rejoin_limit_s: float


@dataclass(frozen=True, slots=True)
class History:
    """What failed attempts leave to the next.

    Attributes:
        failed: sessions with workers that failed one: the next is made elsewhere, if there is anywhere else.
        leaving: sessions with workers that take nothing new.
        mover: of these the one that has just given the request back, and may hand its KV on.
        num_fruitless: attempts in a row that brought no token. Those that did are not counted: a long
            stream may outlive any number of workers.
        spent: the time that went into them.
    """

    failed: frozenset[str] = frozenset()
    leaving: frozenset[str] = frozenset()
    mover: str | None = None
    num_fruitless: int = 0
    spent: StageTimes = field(default_factory=StageTimes)

    def after(self, failure: Failure, *, num_tokens: int, spent: StageTimes) -> "History":
        """
        Args:
            num_tokens: that the attempt brought.
            spent: on the attempt.
        """
        is_news = failure.is_leaving and failure.session not in self.leaving
        return replace(
            self,
            mover=failure.session if is_news else None,
            failed=self.failed | {failure.session},
            leaving=self.leaving | ({failure.session} if failure.is_leaving else frozenset()),
            num_fruitless=0 if num_tokens else self.num_fruitless + 1,
            spent=self.spent + spent,
        )


def choices(
    workers: Sequence[WorkerSnapshot], history: History, fingerprint: str | None
) -> list[list[WorkerSnapshot]]:
    """The workers to place the next attempt among, the better choice first.

    Args:
        fingerprint: of the model that wrote the tokens so far: another one must not go on with them.
            None: there are none.
    """
    able = [
        worker
        for worker in workers
        if worker.session not in history.leaving and fingerprint in (None, worker.fingerprint)
    ]
    unblamed = [worker for worker in able if worker.session not in history.failed]
    return [unblamed, able] if len(unblamed) < len(able) else [able]


def last_word(failure: Failure, num_attempts: int, why: str) -> RequestError:
    """The error that names the last cause, when no further attempt is made."""
    error = failure.error
    message = f"{error.message} (attempt {num_attempts}; {why})"
    return RequestError(error.code, message, field=error.field, retry_after_s=error.retry_after_s)
