"""What a worker says of its rates."""

import pytest

from worker.load_monitor import weighted_median


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([(7.0, 3)], 7.0),
        ([(1.0, 1), (2.0, 1), (3.0, 1)], 2.0),
        ([(5000.0, 512), *((100.0, 4) for _ in range(60))], 5000.0),
        ([(5000.0, 512), (20.0, 512), (5100.0, 512)], 5000.0),
        ([(1.0, 1), (2.0, 1)], 1.0),
    ],
)
def test_a_rate_counts_by_its_tokens(values: list[tuple[float, int]], expected: float) -> None:
    assert weighted_median(values) == expected
