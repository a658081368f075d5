"""TRL's ``SFTTrainer`` with LoRA: losses and the adapter it writes are those of DDP, which is unsharded."""

import runpy
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from integration_cases import fsdp_on_cpu
from rank_pool import spmd

SCRIPT = Path(__file__).parents[2] / "examples" / "trl_sft.py"
STEPS = 3


def _fine_tune(folder: Path, *, ragged: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    from safetensors.torch import load_file

    from ragged_fsdp.integrations.substitute import ragged_fully_shard

    example = runpy.run_path(str(SCRIPT))
    changes = {"use_cpu": True, "bf16": False, "disable_tqdm": True}
    with ExitStack() as stack:
        if ragged:
            count_as_accelerator = stack.enter_context(fsdp_on_cpu())
            sharded = stack.enter_context(ragged_fully_shard())
            arguments = example["settings"](str(folder), STEPS, **changes)
            count_as_accelerator()
        else:
            arguments = example["settings"](str(folder), STEPS, fsdp=False, fsdp_config=None, **changes)
        losses = example["train"](arguments)
        assert not ragged or sharded.count("FSDPLlamaDecoderLayer") == 2
    dist.barrier()
    return losses, load_file(folder / "adapter_model.safetensors")


@pytest.mark.timeout(400)  # every rank imports TRL
@spmd(2, timeout=380)
def test_the_example_of_trl_equals_ddp(rank):
    for package in ("trl", "peft"):
        pytest.importorskip(package)
    (expected, unsharded), (losses, adapter) = (
        _fine_tune(rank.shared_dir / how, ragged=how == "ours") for how in ("ddp", "ours")
    )
    assert len(losses) == STEPS and losses == pytest.approx(expected, abs=2e-5)
    assert adapter.keys() == unsharded.keys()
    for name, value in adapter.items():
        assert torch.allclose(value, unsharded[name], atol=2e-5), name
