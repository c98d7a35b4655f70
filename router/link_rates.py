"""How fast KV goes from worker to worker, as far as a request feels it."""

from collections import OrderedDict
from dataclasses import dataclass

# Until the first hand-off has been measured: of plain TCP between two machines, about.
START_BYTES_PER_S = 500e6
# The start value weighs as much as a hand-off of this size.
_START_BYTES = 16e6
# What an older hand-off weighs after each newer one.
_DECAY = 0.9
# The least recently used are forgotten beyond.
_MAX_PAIRS = 4096


@dataclass(slots=True)
class _Link:
    """Sums over hand-offs, older ones weighing less: a large one says more than a small one."""

    num_bytes: float
    seconds: float

    def add(self, num_bytes: float, seconds: float) -> None:
        self.num_bytes = self.num_bytes * _DECAY + num_bytes
        self.seconds = self.seconds * _DECAY + seconds

    @property
    def bytes_per_s(self) -> float:
        return self.num_bytes / self.seconds


class LinkRates:
    """Bytes handed over per second of exposed transfer: what is sent while the prompt is computed is free.

    So a rate is not the wire's but the one that the cost of a placement needs: bytes / rate = the seconds
    that a hand-off adds to the time to the first decoded token.
    """

    def __init__(self) -> None:
        self._pairs: OrderedDict[tuple[str, str], _Link] = OrderedDict()
        # Over all pairs: what a pair without a hand-off of its own is taken for.
        self._any = _Link(_START_BYTES, _START_BYTES / START_BYTES_PER_S)

    def measured(self, prefill_worker: str, decode_worker: str, num_bytes: int, transfer_s: float) -> None:
        """A hand-off of `num_bytes` was accepted `transfer_s` after the first token."""
        if num_bytes <= 0 or transfer_s <= 0:
            return
        pair = (prefill_worker, decode_worker)
        link = self._pairs.get(pair)
        if link is None:
            link = self._pairs[pair] = _Link(_START_BYTES, _START_BYTES / self._any.bytes_per_s)
            if len(self._pairs) > _MAX_PAIRS:
                self._pairs.popitem(last=False)
        self._pairs.move_to_end(pair)
        link.add(num_bytes, transfer_s)
        self._any.add(num_bytes, transfer_s)

    def bytes_per_s(self, prefill_worker: str, decode_worker: str) -> float:
        link = self._pairs.get((prefill_worker, decode_worker), self._any)
        return link.bytes_per_s
