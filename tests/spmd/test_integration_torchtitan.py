"""torchtitan's own parallelize function on its own Llama, sharding with ours: losses of the unsharded model.

Optional: torchtitan wants an older ``datasets`` than the other tests, and triton. Where it is installed
(``pip install torchtitan triton``) this runs on CPU ranks, with its meshes and its activation checkpointing.
"""

from unittest import mock

import pytest
import torch

from integration_cases import assert_ragged, mean
from rank_pool import spmd

try:
    import torchtitan.models.llama3  # noqa: F401
except ImportError as error:
    pytest.skip(f"torchtitan: {error}", allow_module_level=True)

MESHES = {
    "fsdp": {"data_parallel_shard_degree": 4},
    "hsdp": {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 2},
    "tp": {"data_parallel_shard_degree": 2, "tensor_parallel_degree": 2},
}


def _spec(parallelism):
    """torchtitan's debug Llama with attention that runs on CPU, and the configuration of a run."""
    from torchtitan.config import ParallelismConfig, TrainingConfig
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import model_registry
    from torchtitan.trainer import Trainer

    spec = model_registry("debugmodel")
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config = Trainer.Config(
        model_spec=spec,
        training=TrainingConfig(local_batch_size=2, seq_len=16, mixed_precision_param="float32"),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor", **parallelism),
    )
    spec.model.update_from_config(config=config)
    return spec, config


def _parallel(rank, parallelism, reference):
    """What torchtitan's trainer does to a model, on CPU; then the reference's weights."""
    from torchtitan.config import CompileConfig
    from torchtitan.distributed import ParallelDims, parallel_dims
    from torchtitan.distributed.activation_checkpoint import FullAC

    from ragged_fsdp import Rows, distribute_tensor
    from ragged_fsdp.integrations.torchtitan import ragged_parallelize

    spec, config = _spec(parallelism)
    policy = lambda name, p: Rows(8) if p.ndim == 2 else None  # noqa: E731
    spec.parallelize_fn = ragged_parallelize(spec.parallelize_fn, policy, reduction="all_to_all")
    with mock.patch.object(parallel_dims, "device_type", "cpu"):
        dims = ParallelDims.from_config(config.parallelism, rank.world_size)
        dims.build_mesh()
    with torch.device("meta"):
        model = spec.model.build()
    model = spec.parallelize_fn(
        model,
        parallel_dims=dims,
        training=config.training,
        parallelism=config.parallelism,
        compile_config=CompileConfig(enable=False),
        ac_config=FullAC.Config(),
        dump_folder=str(rank.shared_dir),
    )
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights()
        for name, parameter in model.named_parameters():
            weight = reference.get_parameter(name.replace("_checkpoint_wrapped_module.", ""))
            parameter.copy_(distribute_tensor(weight, parameter.device_mesh, parameter.placements))
    return model, dims.get_mesh("batch")


def _batch(step, part, parts):
    ids = torch.randint(2000, (4, 16), generator=torch.Generator().manual_seed(step))
    return ids.chunk(parts)[part]


def _losses(model, part=0, parts=1):
    """Three clipped steps on this rank's part of the batch; torchtitan sums gradients over ranks."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(3):
        ids = _batch(step, part, parts)
        logits = model(ids)
        logits = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
        (loss / parts).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean(loss))
    return losses


@pytest.mark.parametrize("mesh", MESHES)
@spmd(4)
def test_torchtitan_shards_with_ours(rank, mesh):
    reference = _spec(MESHES[mesh])[0].model.build()
    torch.manual_seed(3)
    with torch.no_grad():
        reference.init_weights()
    model, batch = _parallel(rank, MESHES[mesh], reference)
    losses = _losses(model, batch.get_local_rank(), batch.size())
    assert_ragged(model)
    assert losses == pytest.approx(_losses(reference), abs=1e-4)
