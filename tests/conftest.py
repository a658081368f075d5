"""Shared by all tiers: the pools of ranks end with the run, and hear the warnings that pytest hears.

``RAGGED_FSDP_TEST_RANKS=1,3`` keeps the tests that run on so many ranks; 0 stands for those on none.
"""

import os

import hypothesis
import pytest

from rank_pool import WARNING_FILTERS, shutdown_pools

hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_configure(config: pytest.Config) -> None:
    os.environ[WARNING_FILTERS] = "\n".join(config.getini("filterwarnings"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    sizes = os.environ.get("RAGGED_FSDP_TEST_RANKS")
    if not sizes:
        return
    wanted = {int(size) for size in sizes.split(",")}

    def is_wanted(item: pytest.Item) -> bool:
        return (item.callspec.params.get("world_size", 0) if hasattr(item, "callspec") else 0) in wanted

    config.hook.pytest_deselected(items=[item for item in items if not is_wanted(item)])
    items[:] = filter(is_wanted, items)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.path.parent.name == "unit":  # the tests of one process come last: idle ranks would slow them down
        shutdown_pools()


def pytest_sessionfinish() -> None:
    shutdown_pools()
