"""A Prometheus counter for what is counted with every token."""

from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector


class PlainCounter(Collector):
    """As prometheus_client.Counter without labels, for one thread: add to `value`."""

    def __init__(self, name: str, documentation: str) -> None:
        self._name = name
        self._documentation = documentation
        self.value = 0

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(self._name, self._documentation, self.value)
