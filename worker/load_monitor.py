"""What a worker knows of its own load: for its routers and for Prometheus."""

from collections import deque
from collections.abc import Iterable
from statistics import median

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from engine.step_result import EngineLoad
from protos import worker_pb2
from worker.engine_thread import EngineReport

# Steps that the medians are taken over.
_WINDOW = 64
# Tokens a second, before a step has measured it.
_FIRST_PREFILL_RATE = 1000.0
_STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class LoadMonitor:
    """Sums up the engine's reports and the hand-offs."""

    def __init__(self, load: EngineLoad, role: str) -> None:
        self.registry = CollectorRegistry()
        self.draining = False
        self._role = role
        self._load = load
        self._step_s: deque[float] = deque(maxlen=_WINDOW)
        # Of each step with prompt tokens: tokens a second, and how many there were.
        self._prefill_rates: deque[tuple[float, int]] = deque(maxlen=_WINDOW)
        self._kv_bytes_sent = 0
        self._kv_bytes_received = 0

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"baton_{name}", text, ["role"], registry=self.registry).labels(role)

        def counter(name: str, text: str) -> Counter:
            return Counter(f"baton_{name}", text, ["role"], registry=self.registry).labels(role)

        self._running = gauge("num_requests_running", "Sequences that take part in steps.")
        self._waiting = gauge("num_requests_waiting", "Sequences that wait for blocks or a grant.")
        self._kv_usage = gauge("kv_cache_usage_perc", "Share of the KV blocks that is held, 0 to 1.")
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens computed here.")
        self._generation_tokens = counter("generation_tokens", "Tokens sampled here.")
        self._preemptions = counter("num_preemptions", "Sequences that gave their blocks up.")
        self._prefix_queries = counter("prefix_cache_queries", "Tokens looked up in the prefix cache.")
        self._prefix_hits = counter("prefix_cache_hits", "Tokens found in the prefix cache.")
        self._sent = Counter(
            "baton_kv_sent_bytes",
            "K and V handed off to other workers.",
            ["role", "transport"],
            registry=self.registry,
        )
        self._received = counter("kv_received_bytes", "K and V handed off to this worker.")
        self._steps = Histogram(
            "baton_step_seconds", "Engine steps.", ["role"], registry=self.registry, buckets=_STEP_BUCKETS
        ).labels(role)

    def on_report(self, report: EngineReport) -> None:
        load, before = report.load, self._load
        self._load = load
        self._preemptions.inc(load.num_preemptions - before.num_preemptions)
        self._prefix_queries.inc(load.prefix_query_tokens - before.prefix_query_tokens)
        self._prefix_hits.inc(load.prefix_hit_tokens - before.prefix_hit_tokens)
        self._running.set(load.num_running)
        self._waiting.set(load.num_waiting)
        self._kv_usage.set(1 - load.free_blocks / load.num_blocks)
        if (step := report.step) is None:
            return
        self._step_s.append(step.duration_s)
        self._steps.observe(step.duration_s)
        self._generation_tokens.inc(len(step.tokens))
        if step.num_prompt_tokens:
            self._prompt_tokens.inc(step.num_prompt_tokens)
            self._prefill_rates.append((step.num_prompt_tokens / step.duration_s, step.num_prompt_tokens))

    def on_kv_sent(self, num_bytes: int, transport: str) -> None:
        self._kv_bytes_sent += num_bytes
        self._sent.labels(self._role, transport).inc(num_bytes)

    def on_kv_received(self, num_bytes: int) -> None:
        self._kv_bytes_received += num_bytes
        self._received.inc(num_bytes)

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens a second."""
        return weighted_median(self._prefill_rates) if self._prefill_rates else _FIRST_PREFILL_RATE

    def report(self, *, legs_before_engine: int, tokens_before_engine: int) -> worker_pb2.LoadReport:
        """Both count what has come to the worker and not to its engine."""
        load = self._load
        return worker_pb2.LoadReport(
            num_running=load.num_running,
            num_waiting=load.num_waiting + legs_before_engine,
            waiting_prompt_tokens=load.waiting_prompt_tokens + tokens_before_engine,
            num_blocks=load.num_blocks,
            free_blocks=load.free_blocks,
            step_s=median(self._step_s) if self._step_s else 0.0,
            prefill_tokens_per_s=weighted_median(self._prefill_rates) if self._prefill_rates else 0.0,
            computed_prompt_tokens=load.computed_prompt_tokens,
            generated_tokens=load.generated_tokens,
            kv_bytes_sent=self._kv_bytes_sent,
            kv_bytes_received=self._kv_bytes_received,
            draining=self.draining,
            num_preemptions=load.num_preemptions,
            prefix_query_tokens=load.prefix_query_tokens,
            prefix_hit_tokens=load.prefix_hit_tokens,
        )


def weighted_median(values: Iterable[tuple[float, int]]) -> float:
    """Half of the weight is at or below it.

    Of rates by tokens: a step with few tokens is slow, and tells little of a long prompt.

    Args:
        values: with their weights; at least one.
    """
    ordered = sorted(values)
    left = sum(weight for _, weight in ordered) / 2
    for value, weight in ordered:
        left -= weight
        if left <= 0:
            return value
    return ordered[-1][0]
