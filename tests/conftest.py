"""What every test shares."""

import os

# Before torch starts its threads: the suite shares the machine's cores with the workers that it starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

import worker  # noqa: F401  gRPC set up as in workers, before it is imported
from tests.tiny_models import make_tiny_model

# No test measures time.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny random Llama; read only."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny-llama")
