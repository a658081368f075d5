"""The LoRA example, begun on one rank and ended on two, equals a plain loop: losses, adapter, merge."""

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

from integration_cases import train_unsharded
from ragged_fsdp.trainer.launch import launch

SCRIPT = Path(__file__).parents[2] / "examples" / "lora.py"
STEPS = 4


def _plain(peft):
    """Losses of the unsharded model on whole batches, and the model."""
    example = runpy.run_path(str(SCRIPT))
    model = example["base_model"](None)
    torch.manual_seed(1)
    targets = ["q_proj", "v_proj", "up_proj", "down_proj"]
    model = peft.get_peft_model(model, peft.LoraConfig(r=8, lora_alpha=16, target_modules=targets))
    return train_unsharded(model, 12, STEPS, max_norm=1.0), model


@pytest.mark.timeout(400)  # peft and transformers are imported by every rank
def test_the_lora_example_equals_a_plain_loop(tmp_path, monkeypatch):
    peft = pytest.importorskip("peft")
    from safetensors.torch import load_file

    run, adapter, merged = (str(tmp_path / name) for name in ("run", "adapter", "merged"))
    options = ["--checkpoint", run, "--adapter", adapter]
    printed = ""
    for processes, steps in ((1, 2), (2, STEPS)):
        command = [str(SCRIPT), "--steps", str(steps), *options]
        printed += launch("test_fsdp_example:run_on_rank", command, processes=processes)
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", printed)]
    expected, model = _plain(peft)
    assert losses == pytest.approx(expected, abs=2e-5)
    trained = peft.get_peft_model_state_dict(model)
    saved = load_file(f"{adapter}/adapter_model.safetensors")
    assert saved.keys() == trained.keys()
    for name, value in saved.items():
        assert torch.allclose(value, trained[name], atol=2e-5), name
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--merge", adapter, merged])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    whole = model.merge_and_unload().state_dict()
    for name, value in load_file(f"{merged}/model.safetensors").items():
        assert torch.allclose(value, whole[name], atol=2e-5), name
