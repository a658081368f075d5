"""The adapters against the real libraries: same losses as an unsharded model, ragged parameters inside."""

import os
import runpy
import sys
import types
from pathlib import Path
from unittest import mock

import pytest
import torch

from integration_cases import assert_ragged, fsdp_on_cpu, llama, mean, own_rows, reference_losses
from rank_pool import spmd


def _rows(name, parameter):
    from ragged_fsdp import Rows

    return Rows(2) if parameter.ndim == 2 else None


def _loop(model, rank, make_optimizer=lambda named: torch.optim.AdamW(named, lr=1e-2)):
    """Three steps in a plain loop; the mean loss of each."""
    optimizer = make_optimizer(model.named_parameters())
    losses = []
    for step in range(3):
        ids = own_rows(step, rank.rank)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean(loss))
    return losses


@spmd(2)
def test_transformers_in_a_plain_loop(rank):
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from transformers import AutoModelForCausalLM

    from ragged_fsdp import fully_shard, register_fsdp_forward_method

    model = llama()
    for layer in model.model.layers:
        fully_shard(layer, orig_param_policy=_rows)
    fully_shard(model, orig_param_policy=_rows)
    assert_ragged(model)
    assert _loop(model, rank) == pytest.approx(reference_losses(4), abs=1e-4)
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    register_fsdp_forward_method(model, "generate")
    written = model.generate(own_rows(0, 0), max_new_tokens=3, do_sample=False)
    if rank.rank == 0:
        model.save_pretrained(rank.shared_dir / "saved", state_dict=full)
        loaded = AutoModelForCausalLM.from_pretrained(rank.shared_dir / "saved")
        assert torch.equal(loaded.generate(own_rows(0, 0), max_new_tokens=3, do_sample=False), written)


@spmd(2)
def test_substitution_reaches_names_and_ends(rank):
    """Modules that imported the function before or inside the block call ours, and torch's afterwards."""
    import torch.distributed.fsdp as torch_fsdp

    from ragged_fsdp.integrations.substitute import ragged_fully_shard

    stock = torch_fsdp.fully_shard
    before, inside = types.ModuleType("imported_before"), types.ModuleType("imported_inside")
    before.shard = stock
    sys.modules.update(imported_before=before, imported_inside=inside)
    try:
        with ragged_fully_shard(_rows, reduction="all_to_all"):
            inside.fully_shard = torch_fsdp.fully_shard
            model = llama()
            for layer in model.model.layers:
                before.shard(layer, offload_policy=None)  # as Accelerate calls it
            inside.fully_shard(model)
        assert before.shard is inside.fully_shard is torch_fsdp.fully_shard is stock
    finally:
        del sys.modules["imported_before"], sys.modules["imported_inside"]
    assert_ragged(model)
    assert _loop(model, rank) == pytest.approx(reference_losses(4), abs=1e-4)
    with pytest.raises(TypeError, match="'mesh' is not one of"), ragged_fully_shard(mesh=None):
        pass
    with pytest.raises(RuntimeError, match="from inside"), ragged_fully_shard():
        raise RuntimeError("from inside")
    assert torch_fsdp.fully_shard is stock


def _accelerator():
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=True,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False,
        state_dict_type="SHARDED_STATE_DICT",
    )
    return Accelerator(cpu=True, fsdp_plugin=plugin)


@spmd(2)
def test_accelerate_exchanges_the_parameters_of_our_optimizers(rank):
    """Accelerate makes the optimizer first and shards then: the steps are those of one made afterwards."""
    from ragged_fsdp import fully_shard, optim
    from ragged_fsdp.integrations.substitute import ragged_fully_shard

    makers = {
        "AdamW8bit": lambda p: optim.AdamW8bit(p, lr=1e-2, min_8bit_numel=512),
        "Shampoo": lambda p: optim.Shampoo(p, lr=1e-2, block_shape=(16, 16), start_step=2, min_numel=512),
        "FusedAdamW": lambda p: optim.FusedAdamW(p, lr=1e-2),
        "Muon": lambda p: optim.Muon(p, lr=1e-2),
    }
    policy = optim.block_policy(min_numel=512)
    for name, make in makers.items():
        model = llama()
        for layer in model.model.layers:
            fully_shard(layer, orig_param_policy=policy)
        fully_shard(model, orig_param_policy=policy)
        expected = _loop(model, rank, make)
        with fsdp_on_cpu() as count_as_accelerator:
            count_as_accelerator()
            accelerator, model = _accelerator(), llama()
            optimizer = make(model.named_parameters())
            with ragged_fully_shard(policy):
                model, optimizer = accelerator.prepare(model, optimizer)
            losses = _loop(model, rank, lambda _, made=optimizer: made)
        assert losses == pytest.approx(expected, abs=1e-4), name
        assert losses[-1] != pytest.approx(reference_losses(4)[0], abs=1e-3)


@spmd(2)
def test_accelerate_prepares_a_ragged_model(rank):
    from ragged_fsdp.integrations.substitute import ragged_fully_shard

    with fsdp_on_cpu() as count_as_accelerator:
        count_as_accelerator()
        accelerator = _accelerator()
        assert accelerator.is_fsdp2
        model = llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with ragged_fully_shard(_rows):
            model, optimizer = accelerator.prepare(model, optimizer)
        assert_ragged(model)
        assert type(model.model.layers[0]).__name__ == "FSDPLlamaDecoderLayer"
        losses = []
        for step in range(3):
            ids = own_rows(step, rank.rank)
            loss = model(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1e9)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(mean(loss))
        assert losses == pytest.approx(reference_losses(4), abs=1e-4)
        folder = rank.shared_dir / "state"
        accelerator.save_state(str(folder))
        with torch.no_grad():
            before = model.lm_head.weight.full_tensor().clone()
            model.lm_head.weight.zero_()
        accelerator.load_state(str(folder))
        assert torch.equal(model.lm_head.weight.full_tensor(), before)


def _lightning_trainer(rank, steps):
    import lightning
    from lightning.pytorch.plugins.environments import LightningEnvironment
    from lightning.pytorch.strategies import ModelParallelStrategy

    os.environ["NODE_RANK"] = "0"
    return lightning.Trainer(
        accelerator="cpu",
        devices=rank.world_size,
        strategy=ModelParallelStrategy(data_parallel_size=rank.world_size, tensor_parallel_size=1),
        plugins=[LightningEnvironment()],
        max_steps=steps,
        use_distributed_sampler=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=str(rank.shared_dir),
    )


@spmd(2)
def test_lightning_model_parallel_strategy(rank):
    """Trained, saved after two steps and resumed in another trainer: the third loss is that of one run."""
    lightning = pytest.importorskip("lightning")

    from ragged_fsdp.integrations.lightning import shard_layers

    class Task(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = llama()
            self.seen: list[float] = []

        def configure_model(self) -> None:
            shard_layers(self, self.model, self.model.model.layers, orig_param_policy=_rows)

        def training_step(self, batch, index):
            ids = batch[0]
            loss = self.model(input_ids=ids, labels=ids).loss
            self.seen.append(mean(loss))
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    with pytest.raises(ValueError, match="no device mesh"):
        Task().configure_model()

    def loader(*steps):
        rows = torch.utils.data.TensorDataset(torch.cat([own_rows(step, rank.rank) for step in steps]))
        return torch.utils.data.DataLoader(rows, batch_size=2, shuffle=False)

    first, second = Task(), Task()
    trainer = _lightning_trainer(rank, 2)
    trainer.fit(first, loader(0, 1, 2))
    assert_ragged(first.model)
    trainer.save_checkpoint(str(rank.shared_dir / "checkpoint"))
    assert list((rank.shared_dir / "checkpoint").glob("*.distcp"))
    resumed = _lightning_trainer(rank, 3)  # it starts its loader anew
    resumed.fit(second, loader(2, 2, 2), ckpt_path=str(rank.shared_dir / "checkpoint"))
    assert first.seen + second.seen == pytest.approx(reference_losses(4), abs=1e-4)


@spmd(2)
def test_the_whole_scripts_of_the_pages_train(rank):
    """Those of ``examples/``, against the real libraries, a few steps each."""
    from lightning.pytorch.plugins.environments import LightningEnvironment

    examples = Path(__file__).parents[2] / "examples"

    def script(name):
        return runpy.run_path(str(examples / name))

    if not torch.accelerator.is_available():  # Accelerate would train with DDP, without a word
        for name in ("accelerate_ragged.py", "trainer_ragged.py"):
            with mock.patch("sys.argv", [name]), pytest.raises(SystemExit):
                runpy.run_path(str(examples / name), run_name="__main__")
    with fsdp_on_cpu() as count_as_accelerator:
        count_as_accelerator()
        accelerate = script("accelerate_ragged.py")["train"](12)
    with fsdp_on_cpu() as count_as_accelerator:
        trainer = script("trainer_ragged.py")
        settings = trainer["settings"](str(rank.shared_dir / "trainer"), 12)
        count_as_accelerator()
        transformers = trainer["train"](settings)
    os.environ["NODE_RANK"] = "0"
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    lightning = script("lightning_ragged.py")["train"](2, 12, plugins=[LightningEnvironment()], **quiet)
    for losses in (accelerate, transformers, lightning):
        assert len(losses) == 12 and losses[-1] < losses[0] - 0.3, losses


@pytest.mark.timeout(400)  # every rank imports peft
@spmd(2, timeout=380)
def test_the_script_of_the_trainer_trains_adapters(rank):
    """``--lora`` and ``--model``: adapters train on a base from a folder, and the folder gets the adapter."""
    pytest.importorskip("peft")
    from safetensors.torch import load_file

    script = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "trainer_ragged.py"))
    if rank.rank == 0:
        script["base_model"](None).save_pretrained(rank.shared_dir / "base")
    torch.distributed.barrier()
    out = rank.shared_dir / "adapter"
    with fsdp_on_cpu() as count_as_accelerator:
        settings = script["settings"](str(out), 12)
        count_as_accelerator()
        losses = script["train"](settings, str(rank.shared_dir / "base"), 8)
    torch.distributed.barrier()
    assert len(losses) == 12 and losses[-1] < losses[0] - 0.1, losses
    adapter = load_file(out / "adapter_model.safetensors")
    assert any(tensor.any() for name, tensor in adapter.items() if "lora_B" in name)
