"""What Prometheus reads of a router: vLLM's names after `baton_`."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from router.bucket_counter import BucketCounter
from router.completion import End, StageTimes
from router.placement import PLACEMENT_KINDS
from router.plain_counter import PlainCounter

# Buckets as OpenTelemetry's gen_ai conventions have them, in seconds.
_FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
)  # fmt: skip
_INTER_TOKEN_S = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_REQUEST_S = (
    0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92, 163.84,
)  # fmt: skip

CANCELLED = "CANCELLED"


class RouterMetrics:
    """One router's, in a registry of its own."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self.first_token = Histogram(
            "baton_time_to_first_token_seconds",
            "A request's arrival at the router to its first token there.",
            buckets=_FIRST_TOKEN_S,
            registry=registry,
        )
        self.inter_token = BucketCounter(
            "baton_inter_token_latency_seconds",
            "Between two tokens of a sequence, as they arrive at the router.",
            _INTER_TOKEN_S,
        )
        registry.register(self.inter_token)
        self._request = Histogram(
            "baton_e2e_request_latency_seconds",
            "A request's arrival at the router to its end, of those that ended well.",
            buckets=_REQUEST_S,
            registry=registry,
        )
        stages = Histogram(
            "baton_request_stage_seconds",
            "Where the time of a request that ended well went.",
            ("stage",),
            buckets=_REQUEST_S,
            registry=registry,
        )
        self._stages = {stage: stages.labels(stage) for stage, _ in _stages(StageTimes())}
        self.running = Gauge("baton_num_requests_running", "Requests without an end yet.", registry=registry)
        self._success = Counter(
            "baton_request_success", "Requests that ended well.", ("finished_reason",), registry=registry
        )
        self._errors = Counter(
            "baton_request_errors",
            f"Requests that got an error, by code; {CANCELLED}: the client hung up.",
            ("code",),
            registry=registry,
        )
        self._prompt_tokens = Counter(
            "baton_prompt_tokens", "Prompt tokens of requests that ended well.", registry=registry
        )
        self.generation_tokens = PlainCounter("baton_generation_tokens", "Tokens delivered to clients.")
        registry.register(self.generation_tokens)
        self._kv_bytes = Counter(
            "baton_handoff_kv_bytes", "KV handed over for requests that ended well.", registry=registry
        )
        self._retries = Counter(
            "baton_request_retries",
            "Attempts that failed, and were followed by another.",
            ("cause",),
            registry=registry,
        )
        placements = Counter(
            "baton_placements",
            "Attempts by where they went: a pair, or one worker alone.",
            ("kind",),
            registry=registry,
        )
        self._placements = {kind: placements.labels(kind) for kind in PLACEMENT_KINDS}
        self._refusals = Counter(
            "baton_admission_refusals", "Requests that were refused at once.", ("reason",), registry=registry
        )
        self.queued = Gauge(
            "baton_num_requests_waiting", "Requests that wait in the router.", registry=registry
        )
        self.expected_ttft = Gauge(
            "baton_expected_time_to_first_token_seconds",
            "What a short prompt would wait now.",
            registry=registry,
        )
        self.workers = Gauge(
            "baton_workers_ready", "Workers that take new requests.", ("role",), registry=registry
        )

    def ended(self, end: End, latency_s: float) -> None:
        """A request had its end."""
        self._request.observe(latency_s)
        self._success.labels(end.last.finish_reason.value).inc()
        self._prompt_tokens.inc(end.usage.prompt_tokens)
        self._kv_bytes.inc(end.served_by.kv_bytes)
        for stage, seconds in _stages(end.stage_times):
            self._stages[stage].observe(seconds)

    def failed(self, code: str) -> None:
        self._errors.labels(code).inc()

    def retried(self, cause: str) -> None:
        """An attempt failed for `cause`, and another one follows."""
        self._retries.labels(cause).inc()

    def placed(self, kind: str) -> None:
        """An attempt was placed."""
        self._placements[kind].inc()

    def refused(self, reason: str) -> None:
        """Admission refused a request."""
        self._refusals.labels(reason).inc()

    def exposition(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self._registry)


def _stages(times: StageTimes) -> list[tuple[str, float]]:
    return [
        ("door", times.door_s),
        ("queue", times.queue_s),
        ("prefill", times.prefill_s),
        ("transfer", times.transfer_s),
        ("decode_wait", times.decode_wait_s),
        ("decode", times.decode_s),
    ]
