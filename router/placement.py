"""Which workers a request goes to: a pure decision over a snapshot of them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from router.cluster_view import Role, WorkerSnapshot


@dataclass(frozen=True, slots=True)
class Pair:
    """Prefill on one worker, hand off, decode on the other."""

    prefill: WorkerSnapshot
    decode: WorkerSnapshot


@dataclass(frozen=True, slots=True)
class Alone:
    """Prefill and decode on the one worker."""

    worker: WorkerSnapshot


Placement = Pair | Alone


def place(
    workers: Sequence[WorkerSnapshot],
    *,
    num_prompt_tokens: int,
    max_tokens: int,
    local_prefill_tokens: int,
) -> Placement | None:
    """By load, among the workers that take new requests. None: there is none.

    A prompt of at most `local_prefill_tokens` is prefilled where it decodes; a single token is
    decoded where the prompt is prefilled; so is everything when one of the roles is missing.
    """
    open_ = [worker for worker in workers if not worker.draining]
    prefill = [worker for worker in open_ if worker.role is Role.PREFILL]
    decode = [worker for worker in open_ if worker.role is Role.DECODE]
    if max_tokens == 1 and prefill:
        return Alone(_least_waiting(prefill))
    if num_prompt_tokens > local_prefill_tokens and (pair := _best_pair(prefill, decode)):
        return pair
    if decode:
        return Alone(_most_room(decode))
    return Alone(_least_waiting(prefill)) if prefill else None


def _best_pair(prefill: Sequence[WorkerSnapshot], decode: Sequence[WorkerSnapshot]) -> Pair | None:
    """The least busy prefill worker that has a partner, and its best partner."""
    partners = {worker.pairing for worker in decode}
    able = [worker for worker in prefill if worker.pairing in partners]
    if not able:
        return None
    chosen = _least_waiting(able)
    return Pair(chosen, _most_room(worker for worker in decode if worker.pairing == chosen.pairing))


def _least_waiting(workers: Iterable[WorkerSnapshot]) -> WorkerSnapshot:
    """Fewest prompt tokens to compute first, then fewest sequences."""
    return min(workers, key=lambda w: (w.waiting_prompt_tokens, w.num_waiting + w.num_running, w.worker_id))


def _most_room(workers: Iterable[WorkerSnapshot]) -> WorkerSnapshot:
    """Most free blocks, then fewest sequences."""
    return min(workers, key=lambda w: (-w.free_blocks, w.num_waiting + w.num_running, w.worker_id))
