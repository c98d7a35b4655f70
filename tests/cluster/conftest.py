"""Fixtures of the cluster tests."""

from tests.cluster.router_fixtures import scripted, scripted_decode, scripted_prefill

__all__ = ["scripted", "scripted_decode", "scripted_prefill"]
