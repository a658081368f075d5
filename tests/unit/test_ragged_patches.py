"""What is changed in torch: complete, once, and refused clearly where it would not fit."""

import inspect
import subprocess
import sys

import torch
from torch.distributed.tensor import DTensor

from ragged_fsdp.dtensor import patches


def test_every_touched_name_is_replaced_by_ours():
    for touched in patches.TOUCHED:
        found = touched.found
        if touched.name == "op_to_schema_info":
            assert found[torch.ops.aten._fused_sgd_.default].needs_pytree
            continue
        if isinstance(found, dict):
            ours = sum(h.__module__.startswith("ragged_fsdp") for h in found.values())
            assert ours >= 4
            continue
        function = found.__func__ if isinstance(found, staticmethod) else found
        assert function.__module__.startswith("ragged_fsdp"), touched.name
        assert touched.reason and set(touched.parameters) <= set(inspect.signature(function).parameters)


def test_installing_again_changes_nothing():
    before = DTensor.__create_chunk_list__
    patches.install()
    assert DTensor.__create_chunk_list__ is before


def test_an_unknown_torch_is_refused_in_one_line():
    program = (
        "import torch.distributed.tensor._redistribute as r\n"
        "del r.Redistribute.backward\n"
        "del r.redistribute_local_tensor\n"
        "r.redistribute_local_tensor = lambda a, b: None\n"
        "import ragged_fsdp.dtensor\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert result.returncode
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: ragged_fsdp supports torch 2.11 to 2.15; in torch")
    assert torch.__version__ in last and "redistribute_local_tensor" in last


def test_modules_that_imported_early_see_the_replacement():
    program = (
        "from torch.distributed.tensor import distribute_tensor as early\n"
        "import ragged_fsdp.dtensor, torch.distributed.tensor as t, __main__\n"
        "assert __main__.early is t.distribute_tensor is ragged_fsdp.dtensor.distribute_tensor\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
