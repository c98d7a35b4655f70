"""Which prompt is computed first."""


def response_ratio(waited_s: float, service_s: float) -> float:
    """How long a prompt will have taken if it is served now, over how long it would take alone.

    The highest is served first (HRRN; Brinch Hansen, 1971): a short prompt overtakes a long one that
    came at the same time, and a long one is not starved, because its ratio grows while it waits.

    Args:
        waited_s: since it came.
        service_s: of the work that remains.
    """
    return (waited_s + service_s) / max(service_s, 1e-9)
