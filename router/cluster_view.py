"""The workers as one router sees them at one moment."""

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class Role(Enum):
    """A preference: every worker can do both."""

    PREFILL = "prefill"
    DECODE = "decode"


class LinkState(Enum):
    """Where the router stands with an address that the directory lists."""

    CONNECTING = "connecting"
    CONNECTED = "connected"
    # It answers, but serves another model or speaks another protocol.
    REFUSED = "refused"
    LOST = "lost"


class WorkerSnapshot(NamedTuple):
    """A worker with a live session.

    Attributes:
        session: the router's session with it.
        fingerprint: of the model: workers with equal ones write the same text.
        wire_dtype: of K and V that it hands off.
        accepted_dtypes: of K and V that it takes.
        capacity_tokens: the longest sequence that it can hold, prompt and generated tokens together.
        token_bytes: of one token's K and V.
        free_blocks, num_running, num_waiting, waiting_prompt_tokens: of its last load report, with what
            this router has sent since.
        step_s, prefill_tokens_per_s: medians over its recent steps; 0 before the first.
    """

    address: str
    worker_id: str
    epoch: int
    session: str
    role: Role
    fingerprint: str
    wire_dtype: str
    accepted_dtypes: frozenset[str]
    block_size: int
    capacity_tokens: int
    token_bytes: int
    num_blocks: int
    free_blocks: int
    num_running: int
    num_waiting: int
    waiting_prompt_tokens: int
    step_s: float
    prefill_tokens_per_s: float
    draining: bool

    def can_take(self, sender: "WorkerSnapshot") -> bool:
        """A sequence that the other hands off."""
        return sender.fingerprint == self.fingerprint and sender.wire_dtype in self.accepted_dtypes


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """One line of /workers: what an operator wants to know of an address. None: no session tells it.

    Attributes:
        reason: why there is no session.
        in_flight: legs of this router's requests that run there.
        silent_s: since its last word.
        tls: its connections are encrypted; `kv_trusted_network`: all the same not all of its KV.
        step_s, prefill_tokens_per_s: medians over its recent steps.
        computed_prompt_tokens, generated_tokens, kv_bytes_sent, kv_bytes_received: of its whole life.
    """

    address: str
    state: str
    reason: str
    role: str | None
    worker_id: str | None = None
    epoch: int | None = None
    session: str | None = None
    model: str | None = None
    fingerprint: str | None = None
    dtype: str | None = None
    block_size: int | None = None
    num_layers: int | None = None
    max_model_len: int | None = None
    tls: bool | None = None
    kv_trusted_network: bool | None = None
    in_flight: int = 0
    silent_s: float | None = None
    draining: bool | None = None
    num_running: int | None = None
    num_waiting: int | None = None
    waiting_prompt_tokens: int | None = None
    num_blocks: int | None = None
    free_blocks: int | None = None
    step_s: float | None = None
    prefill_tokens_per_s: float | None = None
    computed_prompt_tokens: int | None = None
    generated_tokens: int | None = None
    kv_bytes_sent: int | None = None
    kv_bytes_received: int | None = None
