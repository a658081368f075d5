"""The reference page has every public name, and every public name says what it is."""

import inspect
import re
from importlib import import_module

import pytest
import torch  # noqa: F401  public names need it

from docs_blocks import ROOT

PAGE = (ROOT / "docs" / "api.md").read_text()
DOCUMENTED = set(re.findall(r"^\.\. auto\w+:: ragged_fsdp\.(?:\w+\.)*(\w+)", PAGE, re.MULTILINE))
MODULES = [
    "ragged_fsdp",
    "ragged_fsdp.fp8",
    "ragged_fsdp.optim",
    "ragged_fsdp.planner",
    "ragged_fsdp.weights",
    "ragged_fsdp.replicas",
    "ragged_fsdp.dtensor",
    "ragged_fsdp.integrations.substitute",
    "ragged_fsdp.integrations.lightning",
    "ragged_fsdp.integrations.torchtitan",
]


def _public(module_name):
    module = import_module(module_name)
    values = ((name, getattr(module, name)) for name in module.__all__)
    return [(name, value) for name, value in values if inspect.isclass(value) or inspect.isfunction(value)]


@pytest.mark.parametrize("module_name", MODULES)
def test_public_names_are_in_the_reference(module_name):
    for name, value in _public(module_name):
        standing_in = value.__name__ == f"_{name}"  # for a class that this torch does not have yet
        if value.__module__.startswith("torch.") or standing_in:
            assert f"`{name}`" in PAGE, f"docs/api.md does not say that {name} is torch's"
            continue
        assert name in DOCUMENTED, f"docs/api.md lacks {module_name}.{name}"
        assert inspect.getdoc(value), f"{module_name}.{name} has no docstring"
        members = vars(value).items() if inspect.isclass(value) else ()
        for method, member in members:
            if not method.startswith("_") and (callable(member) or isinstance(member, property)):
                assert inspect.getdoc(member), f"{module_name}.{name}.{method} has no docstring"
