"""torchtitan shards with ours: its parallelize function against the unsharded model, its trainer on FSDP2.

Optional: torchtitan wants an older ``datasets`` than the other tests, and triton. ``make test-torchtitan``
makes an environment with it and runs this on CPU ranks, with its meshes and activation checkpointing.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
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


def _trained(config, folder, *flags, ranks=2):
    """The losses that torchtitan's trainer logs, by step."""
    root = Path(__file__).parents[2]
    paths = [str(root / name) for name in ("src", "examples", "tests")]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += [str(root / "tests/torchtitan_on_cpu.py"), "--module", "torchtitan_on_cpu", "--config", config]
    command += ["--dump-folder", str(folder), "--compile.no-enable", "--checkpoint.enable", *flags]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    said = re.sub(r"\x1b\[[0-9;]*m", "", result.stdout + result.stderr)
    assert result.returncode == 0, said[-4000:]
    return {int(step): float(loss) for step, loss in re.findall(r"step: +(\d+) +loss: +([\d.]+)", said)}


@pytest.mark.skipif(
    not hasattr(torch.distributed, "set_timeout"), reason="torchtitan 0.3.0 calls it; torch has it since 2.14"
)
@pytest.mark.timeout(1800)
def test_the_example_trains_as_with_fsdp2_and_resumes(tmp_path):
    """Both begin with torchtitan's seed checkpoint: a ragged tensor draws other numbers than rows do."""
    _trained("stock", tmp_path / "seed", "--checkpoint.create-seed-checkpoint", ranks=1)
    steps = ["--checkpoint.interval", "2", "--training.steps", "4"]
    losses = {}
    for config in ("ragged", "stock"):
        shutil.copytree(tmp_path / "seed", tmp_path / config)
        losses[config] = _trained(config, tmp_path / config, *steps)
    ragged = losses["ragged"]
    assert sorted(ragged) == [1, 2, 3, 4] and ragged[4] < ragged[1]
    assert losses["stock"] == pytest.approx(ragged, abs=1e-3)
    shutil.rmtree(tmp_path / "ragged/checkpoint/step-4")
    resumed = _trained("ragged", tmp_path / "ragged", *steps)
    assert resumed == pytest.approx({step: ragged[step] for step in (3, 4)}, abs=1e-3)
