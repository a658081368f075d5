"""The trainer under Ray Train, on a real Ray cluster of several raylets of this machine."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")

import ray
from ray.cluster_utils import Cluster
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from ragged_fsdp.trainer.metrics import losses_by_step
from ragged_fsdp.trainer.ray import ray_train_loop
from train_cases import settings, tensors, train

pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A head without CPUs and two nodes with one each."""
    nodes: dict[str, Any] = {"object_store_memory": 80 * 2**20}
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **nodes})
    made.add_node(num_cpus=1, **nodes)
    made.add_node(num_cpus=1, **nodes)
    ray.init(address=made.address, log_to_driver=False)
    yield made
    ray.shutdown()
    made.shutdown()


def _fit(run_dir: Path, storage: Path, workers: int | tuple[int, int], **changes: Any) -> Any:
    """Train under Ray; each worker leaves its process number."""

    def loop(given: dict[str, Any]) -> None:
        rank = ray.train.get_context().get_world_rank()
        (storage / f"pid-{rank}").write_text(str(os.getpid()))
        ray_train_loop(given)

    storage.mkdir()
    trainer = TorchTrainer(
        loop,
        train_loop_config=settings(run_dir, **changes),
        scaling_config=ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(
            name="run",
            storage_path=str(storage),
            failure_config=FailureConfig(max_failures=2),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    )
    return trainer.fit()


def _once_saved(store: Path, step: int, then: Callable[[], None]) -> threading.Thread:
    """Call ``then`` when Ray has the checkpoint of a step."""

    def wait() -> None:
        while not (store / "run" / f"step-{step:08d}" / "manifest.json").exists():
            time.sleep(0.01)
        then()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def test_a_killed_worker_costs_what_was_not_saved_and_no_bit(cluster: Cluster, tmp_path: Path) -> None:
    quiet, run_dir, storage = tmp_path / "quiet", tmp_path / "run", tmp_path / "ray"
    changes = {"steps": 12, "checkpoint_every": 2}

    def kill() -> None:
        os.kill(int((storage / "pid-1").read_text()), signal.SIGKILL)

    killing = _once_saved(storage, 4, kill)
    result = _fit(run_dir, storage, workers=2, **changes)
    killing.join(1)
    assert not killing.is_alive()
    assert result.error is None and result.metrics["step"] == 12
    assert Path(result.checkpoint.path).name == "step-00000012"
    train(quiet, **changes)
    assert losses_by_step(run_dir) == losses_by_step(quiet)
    ours, theirs = tensors(Path(result.checkpoint.path)), tensors(quiet / "checkpoints" / "step-00000012")
    assert ours.keys() == theirs.keys() and all(ours[name].equal(theirs[name]) for name in ours)


def test_a_node_that_dies_leaves_the_rest_to_go_on(cluster: Cluster, tmp_path: Path) -> None:
    run_dir, storage = tmp_path / "run", tmp_path / "ray"
    node = next(node for node in cluster.worker_nodes)
    losing = _once_saved(storage, 4, lambda: cluster.remove_node(node, allow_graceful=False))
    result = _fit(run_dir, storage, workers=(1, 2), steps=12, checkpoint_every=2)
    losing.join(1)
    assert not losing.is_alive()
    assert result.error is None and result.metrics["step"] == 12
    losses = losses_by_step(run_dir)
    assert sorted(losses) == list(range(1, 13)) and losses[12] < losses[1]
