"""What is changed in torch: complete, once, and refused clearly where it would not fit."""

import inspect
import subprocess
import sys

import torch

from ragged_fsdp.torch_internals import REPLACED, STOCK


def test_every_replaced_name_is_ours_now():
    for record in REPLACED:
        for name in record.names:
            found = record.found(name)
            found = getattr(found, "__func__", found)
            if record.parameters:
                assert not STOCK[name].__module__.startswith("ragged_fsdp"), name
                assert found.__module__.startswith("ragged_fsdp"), name
                assert set(record.parameters) <= set(inspect.signature(found).parameters), name
    handlers = STOCK["DTensor._op_dispatcher._custom_op_handlers"].values()
    assert sum(handler.__module__.startswith("ragged_fsdp") for handler in handlers) >= 4
    info = STOCK["DTensor._op_dispatcher.sharding_propagator.op_to_schema_info"]
    assert info[torch.ops.aten._fused_sgd_.default].needs_pytree


def test_modules_that_imported_early_see_the_replacement():
    program = (
        "from torch.distributed.tensor import distribute_tensor as early\n"
        "import ragged_fsdp.dtensor, torch.distributed.tensor as t, __main__\n"
        "assert __main__.early is t.distribute_tensor is ragged_fsdp.dtensor.distribute_tensor\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
