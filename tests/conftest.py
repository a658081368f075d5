"""Shared by all tiers: the pools of ranks end with the run, and hypothesis is deterministic."""

import os

import hypothesis

from rank_pool import shutdown_pools

hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_sessionfinish() -> None:
    shutdown_pools()
