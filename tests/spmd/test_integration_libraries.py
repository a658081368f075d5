"""The adapters against the real libraries: same losses as an unsharded model, ragged parameters inside."""

import os

import pytest
import torch
from torch import nn

from rank_pool import spmd

LLAMA = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 64,
    "use_cache": False,
    "tie_word_embeddings": False,
}


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    return LlamaForCausalLM(LlamaConfig(**LLAMA))


def _batch(step: int, rows: int) -> torch.Tensor:
    return torch.randint(64, (rows, 16), generator=torch.Generator().manual_seed(step))


def _reference_losses(rows: int) -> list[float]:
    """Three steps of the unsharded model on whole batches."""
    model = _llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(3):
        ids = _batch(step, rows)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _mean(value: torch.Tensor) -> float:
    total = value.detach().clone()
    torch.distributed.all_reduce(total)
    return (total / torch.distributed.get_world_size()).item()


def _assert_ragged(model: nn.Module) -> None:
    from ragged_fsdp.dtensor import is_ragged

    assert all(is_ragged(parameter) for parameter in model.parameters())


@spmd(2)
def test_transformers_in_a_plain_loop(rank):
    from ragged_fsdp import Rows, fully_shard

    model = _llama()
    policy = lambda name, p: Rows(4) if p.ndim == 2 else None  # noqa: E731
    for layer in model.model.layers:
        fully_shard(layer, orig_param_policy=policy)
    fully_shard(model, orig_param_policy=policy)
    _assert_ragged(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(3):
        ids = _batch(step, 4)[rank.rank * 2 : rank.rank * 2 + 2]
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(_mean(loss))
    assert losses == pytest.approx(_reference_losses(4), abs=1e-4)


@spmd(2)
def test_accelerate_prepares_a_ragged_model(rank):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    from ragged_fsdp import Rows
    from ragged_fsdp.integrations.substitute import ragged_fully_shard

    AcceleratorState._reset_state(reset_partial_state=True)
    state = PartialState(cpu=True)
    if state.distributed_type == DistributedType.MULTI_CPU:
        # Accelerate offers FSDP on accelerators only; what follows is its unchanged FSDP2 path.
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=True,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False,
        state_dict_type="SHARDED_STATE_DICT",
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    assert accelerator.is_fsdp2
    model = _llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with ragged_fully_shard(lambda name, p: Rows(2) if p.ndim == 2 else None):
        model, optimizer = accelerator.prepare(model, optimizer)
    _assert_ragged(model)
    assert type(model.model.layers[0]).__name__ == "FSDPLlamaDecoderLayer"
    losses = []
    for step in range(3):
        ids = _batch(step, 4)[rank.rank * 2 : rank.rank * 2 + 2]
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(_mean(loss))
    assert losses == pytest.approx(_reference_losses(4), abs=1e-4)
    folder = rank.shared_dir / "state"
    accelerator.save_state(str(folder))
    with torch.no_grad():
        before = model.lm_head.weight.full_tensor().clone()
        model.lm_head.weight.zero_()
    accelerator.load_state(str(folder))
    assert torch.equal(model.lm_head.weight.full_tensor(), before)
    AcceleratorState._reset_state(reset_partial_state=True)


@spmd(2)
def test_lightning_model_parallel_strategy(rank):
    lightning = pytest.importorskip("lightning")
    from lightning.pytorch.plugins.environments import LightningEnvironment
    from lightning.pytorch.strategies import ModelParallelStrategy

    from ragged_fsdp.integrations.lightning import shard_layers

    class Task(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = _llama()
            self.seen: list[float] = []

        def configure_model(self) -> None:
            shard_layers(self, self.model, self.model.model.layers)

        def training_step(self, batch, index):
            ids = batch[0]
            loss = self.model(input_ids=ids, labels=ids).loss
            self.seen.append(_mean(loss))
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    task = Task()
    rows = torch.cat([_batch(step, 4)[rank.rank * 2 : rank.rank * 2 + 2] for step in range(3)])
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), batch_size=2, shuffle=False)
    os.environ["NODE_RANK"] = "0"
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=rank.world_size,
        strategy=ModelParallelStrategy(data_parallel_size=rank.world_size, tensor_parallel_size=1),
        plugins=[LightningEnvironment()],
        max_epochs=1,
        use_distributed_sampler=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=str(rank.shared_dir),
    )
    trainer.fit(task, loader)
    _assert_ragged(task.model)
    assert task.seen == pytest.approx(_reference_losses(4), abs=1e-4)
    trainer.save_checkpoint(str(rank.shared_dir / "checkpoint"))
    assert list((rank.shared_dir / "checkpoint").glob("*.distcp"))


@spmd(2)
def test_torchtitan_parallelize_function(rank):
    """torchtitan's calling convention; its own trainer needs other releases than those tested here."""
    from types import SimpleNamespace

    from ragged_fsdp.integrations.torchtitan import parallelize

    mesh = rank.mesh(names=("fsdp",))
    dims = SimpleNamespace(tp=1, pp=1, cp=1, ep=1, dp_replicate=1, get_mesh=lambda names: mesh)
    function = parallelize(lambda model: model.model.layers)
    model = function(_llama(), parallel_dims=dims, job_config=None)
    _assert_ragged(model)
    ids = _batch(0, 4)[rank.rank * 2 : rank.rank * 2 + 2]
    assert _mean(model(input_ids=ids, labels=ids).loss) == pytest.approx(_reference_losses(4)[0], abs=1e-4)
    dims.tp = 2
    with pytest.raises(ValueError, match=r"parallel_dims\.tp = 2"):
        function(_llama(), parallel_dims=dims)
