"""Where a request's time goes, from what the workers and the router measure."""

from protos import worker_pb2
from router.completion import StageTimes


class StageClock:
    """The stages of one attempt, whose request (or the failure before it) came at `arrival_s`.

    The workers measure their own stages. A request that the router ends at a stop string gets no
    report from the worker that decoded: then the router's own clock says how long that took.
    All moments are `time.monotonic`'s.
    """

    __slots__ = (
        "_admitted_s",
        "_decoded",
        "_door_s",
        "_failed_s",
        "_prefilled",
        "_submitted_s",
        "first_token_s",
        "last_token_s",
    )

    def __init__(self, arrival_s: float, submitted_s: float) -> None:
        self._door_s = submitted_s - arrival_s
        self._submitted_s = submitted_s
        self._admitted_s: float | None = None
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self._prefilled: worker_pb2.Prefilled | worker_pb2.Finished | None = None
        self._decoded: worker_pb2.Finished | None = None
        self._failed_s: float | None = None

    def token(self, now_s: float) -> None:
        if self.first_token_s is None:
            self.first_token_s = now_s
        self.last_token_s = now_s

    def admitted(self, now_s: float) -> None:
        self._admitted_s = now_s

    def prefilled(self, event: worker_pb2.Prefilled | worker_pb2.Finished) -> None:
        """What the worker that prefilled says; of several samples the first."""
        if self._prefilled is None:
            self._prefilled = event

    def decoded(self, event: worker_pb2.Finished) -> None:
        """What the worker that decoded says; of several samples the one that took longest."""
        if self._decoded is None or event.decode_s > self._decoded.decode_s:
            self._decoded = event

    def failed(self, now_s: float) -> None:
        """Until then the stage went on that it was in."""
        self._failed_s = now_s

    def times(self) -> StageTimes:
        """As far as they are known."""
        first_s = _first_known(self.first_token_s, self._failed_s, self._submitted_s)
        last_s = _first_known(self._failed_s, self.last_token_s, first_s)
        admitted_s = first_s if self._admitted_s is None else max(first_s, self._admitted_s)
        prefilled, decoded = self._prefilled, self._decoded
        transfer_s = admitted_s - first_s
        if prefilled is not None:
            transfer_s = prefilled.transfer_s if isinstance(prefilled, worker_pb2.Prefilled) else 0.0
        return StageTimes(
            door_s=self._door_s,
            queue_s=prefilled.queue_s if prefilled is not None else 0.0,
            prefill_s=prefilled.prefill_s if prefilled is not None else first_s - self._submitted_s,
            transfer_s=transfer_s,
            decode_wait_s=decoded.decode_wait_s if decoded is not None else 0.0,
            decode_s=decoded.decode_s if decoded is not None else max(0.0, last_s - admitted_s),
        )


def _first_known(*moments_s: float | None) -> float:
    return next(moment_s for moment_s in moments_s if moment_s is not None)
