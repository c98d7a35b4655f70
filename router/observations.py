"""What the sessions with workers teach about the cluster."""

from dataclasses import dataclass, field

from router.link_rates import LinkRates
from router.prefix_index import PrefixIndex


@dataclass(frozen=True, slots=True)
class Observations:
    """Fed by every session, read by placement."""

    prefixes: PrefixIndex = field(default_factory=PrefixIndex)
    links: LinkRates = field(default_factory=LinkRates)
