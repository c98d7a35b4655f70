"""How fast a backlog goes."""

# What the workers' own word weighs at first, in seconds of measuring; and when old measurements weigh half.
_PRIOR_S = 1.0
_HALF_LIFE_S = 10.0


class ServiceRate:
    """Prompt tokens a second that come out of a backlog, measured while there is one.

    The workers' rates say what they could compute; when something else holds them up (no free blocks for
    decoding, say), this falls below. All moments are on one clock.
    """

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._since_s: float | None = None

    def follow(self, now_s: float, tokens_per_s: float, *, num_waiting: int) -> None:
        """Measures while something waits. `tokens_per_s` is what the workers say: where it starts from."""
        if num_waiting == 0:
            self._since_s = None
        elif self._since_s is None:
            self._tokens, self._seconds, self._since_s = tokens_per_s * _PRIOR_S, _PRIOR_S, now_s

    def served(self, now_s: float, tokens: int) -> None:
        """Prompt tokens were computed."""
        if self._since_s is None:
            return
        passed_s = now_s - self._since_s
        weight = 0.5 ** (passed_s / _HALF_LIFE_S)
        self._tokens = self._tokens * weight + tokens
        self._seconds = self._seconds * weight + passed_s
        self._since_s = now_s

    def tokens_per_s(self, now_s: float, otherwise: float) -> float:
        """It falls while nothing comes. `otherwise` without a backlog."""
        if self._since_s is None:
            return otherwise
        return max(self._tokens, 1.0) / (self._seconds + now_s - self._since_s)
