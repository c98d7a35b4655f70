"""What each API key uses of this router, held to its limits."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from router.api_keys import ApiKey, KeyLimits
from router.errors import ErrorCode, RequestError


@dataclass(slots=True)
class _Use:
    """Of one key.

    Attributes:
        tokens: that may still be used, refilled at the limit's rate up to one minute's worth. Below zero
            after a request that used more than there were: its length is not known when it is let in.
    """

    running: int
    tokens: float
    refilled_s: float


class Spending:
    """One request's: it holds a place of its key while it runs, and is charged what it uses."""

    def __init__(self, use: _Use) -> None:
        self._use = use

    def __enter__(self) -> Self:
        self._use.running += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._use.running -= 1

    def charge(self, tokens: int) -> None:
        """Tokens of the prompt or of the answer, as they become known."""
        self._use.tokens -= tokens


class KeyQuota:
    """Lets a request in while its key has a place and a token left.

    Args:
        clock: seconds, only growing.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # By the key's digest: it outlives a file that is read again.
        self._uses: dict[bytes, _Use] = {}

    def request(self, key: ApiKey) -> Spending:
        """To be entered at once.

        Raises:
            RequestError: RESOURCE_EXHAUSTED, with when to try again.
        """
        use = self._refilled(key)
        _check(key, use)
        return Spending(use)

    def _refilled(self, key: ApiKey) -> _Use:
        now_s, per_minute = self._clock(), key.limits.tokens_per_minute
        use = self._uses.setdefault(key.sha256, _Use(running=0, tokens=per_minute or 0, refilled_s=now_s))
        if per_minute is None:
            use.tokens = 0
        else:
            use.tokens = min(per_minute, use.tokens + (now_s - use.refilled_s) * per_minute / 60)
        use.refilled_s = now_s
        return use


def _check(key: ApiKey, use: _Use) -> None:
    limits: KeyLimits = key.limits
    if limits.max_concurrent_requests is not None and use.running >= limits.max_concurrent_requests:
        raise _exhausted(f"this key may run {limits.max_concurrent_requests} requests at once", 1.0)
    if limits.tokens_per_minute is not None and use.tokens <= 0:
        wait_s = (1 - use.tokens) * 60 / limits.tokens_per_minute
        raise _exhausted(f"this key may use {limits.tokens_per_minute} tokens a minute", math.ceil(wait_s))


def _exhausted(message: str, retry_after_s: float) -> RequestError:
    return RequestError(ErrorCode.RESOURCE_EXHAUSTED, message, retry_after_s=retry_after_s)
