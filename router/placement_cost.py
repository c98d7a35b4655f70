"""What a placement costs: one number, in seconds, from estimates that live steps keep right.

cost = wait + prefill + transfer + decode + disturbance

wait         prompt tokens that are before it on the worker that prefills / its prefill rate
prefill      tokens of it that this worker has not cached / its prefill rate
transfer     bytes of the tokens that the decode worker has not cached / the link's rate
decode       until the decode worker has blocks for it, and the time of its first tokens, by how full
             the worker then is: what attention reads grows with the tokens that run
disturbance  what the streams of a decode worker lose while it prefills beside them
"""

from typing import NamedTuple

from router.cluster_view import WorkerSnapshot

# Until a worker's steps have been measured.
START_PREFILL_TOKENS_PER_S = 1000.0
START_STEP_S = 0.02
# How many tokens of the answer count. Its length is not known, and load does not last.
HORIZON_TOKENS = 16
# What a second of each of its streams counts, where a decode worker makes them wait for a prompt.
DISTURBANCE = 0.25


class Need(NamedTuple):
    """What a request needs of its workers.

    Attributes:
        num_tokens: of the prompt, and generated already.
        max_new_tokens: at most to come, of each sample.
    """

    num_tokens: int
    max_new_tokens: int


class Cost(NamedTuple):
    """Seconds, each an estimate."""

    wait_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    decode_s: float = 0.0
    disturbance_s: float = 0.0

    @property
    def total_s(self) -> float:
        return sum(self)


def pair_cost(
    need: Need,
    prefill: WorkerSnapshot,
    decode: WorkerSnapshot,
    *,
    cached_prefill: int,
    cached_decode: int,
    bytes_per_s: float,
) -> Cost:
    """
    Args:
        cached_prefill, cached_decode: tokens of the request that the workers have.
        bytes_per_s: of the link between them.
    """
    rate = prefill_rate(prefill)
    return Cost(
        wait_s=wait_s(prefill),
        prefill_s=uncached(need, cached_prefill) / rate,
        transfer_s=(need.num_tokens - cached_decode) * prefill.token_bytes / bytes_per_s,
        decode_s=decode_s(need, decode),
    )


def alone_cost(need: Need, worker: WorkerSnapshot, cached: int) -> Cost:
    """Of prefill and decode on one worker."""
    prefill_s = uncached(need, cached) / prefill_rate(worker)
    if need.max_new_tokens == 1:
        return Cost(wait_s=wait_s(worker), prefill_s=prefill_s)
    return Cost(
        wait_s=wait_s(worker),
        prefill_s=prefill_s,
        decode_s=decode_s(need, worker),
        disturbance_s=DISTURBANCE * worker.num_running * prefill_s,
    )


def uncached(need: Need, cached: int) -> int:
    """Tokens to compute: at least the last, whose logits are wanted."""
    return max(1, need.num_tokens - cached)


def prefill_rate(worker: WorkerSnapshot) -> float:
    """Prompt tokens a second."""
    return worker.prefill_tokens_per_s or START_PREFILL_TOKENS_PER_S


def wait_s(worker: WorkerSnapshot) -> float:
    """Until the prompts that it has are computed."""
    return worker.waiting_prompt_tokens / prefill_rate(worker)


def blocks_needed(need: Need, worker: WorkerSnapshot) -> int:
    """For the tokens that are there and the next."""
    return need.num_tokens // worker.block_size + 1


def has_room(need: Need, worker: WorkerSnapshot) -> bool:
    """Its free blocks are enough, with one left for each stream to grow into."""
    return blocks_needed(need, worker) + worker.num_running <= worker.free_blocks


def decode_s(need: Need, worker: WorkerSnapshot) -> float:
    step_s = worker.step_s or START_STEP_S
    blocks = blocks_needed(need, worker)
    # Whoever waits there already is taken to want as much.
    short_of = (1 + worker.num_waiting) * blocks - worker.free_blocks
    # As many tokens become free as are written, when streams come and go.
    wait = max(0, short_of) * worker.block_size * step_s / max(1, worker.num_running)
    fill = min(1.0, (worker.num_blocks - worker.free_blocks + blocks) / max(1, worker.num_blocks))
    return wait + min(need.max_new_tokens, HORIZON_TOKENS) * step_s * fill
