"""``python -m ragged_fsdp.run`` on an Accelerate script for FSDP2: resumed, equal to an unsharded loop."""

import runpy
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from integration_cases import fsdp_on_cpu, keep_code_order, train_unsharded
from rank_pool import spmd

SCRIPT = Path(__file__).parents[2] / "examples" / "accelerate_lora.py"
STEPS = 3


@pytest.mark.timeout(400)
@pytest.mark.parametrize("four_bits", [False, True], ids=["lora", "qlora"])
@spmd(2, timeout=380)
def test_an_accelerate_script_runs_as_it_is(rank, four_bits):
    for package in ("peft", *(["bitsandbytes"] if four_bits else [])):
        pytest.importorskip(package)
    from accelerate import Accelerator
    from peft import get_peft_model_state_dict
    from safetensors.torch import load_file

    from ragged_fsdp import run

    printed = []
    patch = pytest.MonkeyPatch()
    patch.setattr(sys, "argv", sys.argv)
    patch.setattr(sys, "path", list(sys.path))  # as of a script of its own; ranks find tests by it
    patch.setattr(Accelerator, "print", lambda self, text: printed.append(text))
    bits = ["--four-bits"] if four_bits else []
    try:
        for steps in (2, STEPS):  # the second goes on from the first
            with fsdp_on_cpu() as count_as_accelerator:
                count_as_accelerator()
                run.main([str(SCRIPT), "--steps", str(steps), "--out", str(rank.shared_dir), *bits])
    finally:
        patch.undo()
    losses = [float(text.split()[-1]) for text in printed]
    example = runpy.run_path(str(SCRIPT))
    model = example["adapted"](rank.shared_dir / "base", torch.device("cpu"), four_bits)
    expected = train_unsharded(keep_code_order(model), 12, STEPS, max_norm=1.0)
    close = 2e-2 if four_bits else 5e-5  # the NF4 base computes in bf16
    assert losses == pytest.approx(expected, abs=close)
    trained, saved = (
        get_peft_model_state_dict(model),
        load_file(rank.shared_dir / "adapter" / "adapter_model.safetensors"),
    )
    assert saved.keys() == trained.keys()
    close_weights = max(
        close, 2e-4
    )  # Adam divides by small gradients: a step is 1e-2, rounding up to 7e-5 of it
    for name, value in saved.items():
        torch.testing.assert_close(value, trained[name], atol=close_weights, rtol=0, msg=name)
    dist.barrier()
