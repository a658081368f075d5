"""Runs that used to go wrong without a word: each says what it does, or refuses."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fsdp_inside
from ragged_fsdp.checkpoint.contents import CheckpointReader
from ragged_fsdp.checkpoint.store import CheckpointStore
from ragged_fsdp.trainer.launch import RankFailure
from ragged_fsdp.trainer.metrics import losses_by_step
from rank_pool import spmd
from train_cases import on_one, said_on_pool, train

ROOT = Path(__file__).parents[2]


@spmd(2)
def test_a_folder_of_damaged_checkpoints_is_not_begun_anew_unless_told(rank):
    run = rank.shared_dir / "run"
    said = said_on_pool(run, stop_at=2, checkpoint_every=1, keep_last=0)
    assert "weights: random, from seed 0" in said and "tokenizer bytes; documents end with token 0" in said
    said = said_on_pool(run, stop_at=1)
    assert "stop_at = 1: the run is at step 2 already, so nothing is trained" in said
    assert "has layers.1." in said_on_pool(run, model_set={"layers": "1"})
    assert "has no layers.2." in said_on_pool(run, model_set={"layers": "3"})
    store = CheckpointStore(run / "checkpoints")

    def damage() -> None:
        for step in store.steps():
            next(store.path(step).glob("*.distcp")).write_bytes(b"")

    on_one(rank, damage)
    losses = losses_by_step(run)
    for mode in ("auto", "must"):
        said = said_on_pool(run, resume=mode)
        assert f"resume = {mode}: {store.root} holds only damaged checkpoints" in said
        assert "--resume restart moves them aside" in said
    assert store.steps() == [1, 2] and losses_by_step(run) == losses
    said = said_on_pool(run, resume="restart", stop_at=1)
    assert f"the checkpoints that were there are in {run / 'checkpoints-1'}" in said
    assert CheckpointStore(run / "checkpoints-1").steps() == [1, 2] and store.steps() == [1]
    assert "resume = restart" not in said_on_pool(run, stop_at=2) and store.steps() == [1, 2]


@spmd(2)
def test_a_run_taken_back_to_an_older_checkpoint_goes_on_from_its_own(rank):
    """The later ones of the course that was left once stayed the newest: what was saved after was deleted."""
    run = rank.shared_dir / "run"
    said_on_pool(run, stop_at=4, checkpoint_every=2, keep_last=0)
    store = CheckpointStore(run / "checkpoints")
    first = store.path(2)
    said = said_on_pool(run, resume=str(first), lr=1e-3, stop_at=3, keep_last=1)
    assert f"checkpoints of later steps than 2 that were there are in {run / 'checkpoints-1'}" in said
    assert store.steps() == [3] and CheckpointStore(run / "checkpoints-1").steps() == [4]
    assert store.best_step() == 3 and CheckpointStore(run / "checkpoints-1").best_step() == 4
    assert f"resumed from {store.path(3)} at step 3" in said_on_pool(run, lr=1e-3, stop_at=4)
    said = said_on_pool(run, resume="never", checkpoint_dir=str(rank.shared_dir / "elsewhere"))
    assert f"resume = never: {run} already holds the metrics of a run" in said


@spmd(2)
def test_ranks_that_begin_to_share_their_data_draw_alike(rank):
    """They once took up the random states of ranks with data of their own: dropout on what tensor-parallel
    ranks hold in common was another on each of them."""
    run = rank.shared_dir / "run"
    heads = {"model_set": {"kv_heads": "2"}}

    def states(step: int) -> list[torch.Tensor]:
        reader = CheckpointReader(run / f"checkpoints/step-{step:08d}")
        return [reader.load(t) for t in reader.tensors("rng.") if t.name.endswith(".torch")]

    said_on_pool(run, stop_at=1, keep_last=0, **heads)
    first, second = states(1)
    assert not first.equal(second)
    assert "tp was 1: random states (dropout) start anew" in said_on_pool(run, stop_at=2, tp=2, **heads)
    first, second = states(2)
    assert first.equal(second)
    assert "random states" not in said_on_pool(run, stop_at=3, tp=2, **heads)


@spmd(2)
def test_a_stop_that_saves_nothing_says_so(rank):
    said = said_on_pool(rank.shared_dir / "run", stop_at=1, save_on_interrupt=False)
    assert "stopped after step 1 of 8; not saved" in said


def test_a_store_that_cannot_be_listed_does_not_hide_why_a_run_failed(tmp_path, monkeypatch):
    def fails(*_: object) -> None:
        raise RankFailure("rank 1 failed: of this")

    monkeypatch.setattr("ragged_fsdp.trainer.start.launch", fails)
    monkeypatch.setattr(CheckpointStore, "steps", lambda _: (_ for _ in ()).throw(OSError("no network")))
    with pytest.raises(RankFailure, match=r"of this\nits checkpoints could not be listed: no network"):
        train(tmp_path)


def _python(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    environment |= {"PYTHONPATH": str(ROOT / "src"), **variables}
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)


_SIGNALS = """
import multiprocessing as mp, os, signal, threading, time
from multiprocessing import forkserver
from ragged_fsdp.trainer.launch import RankFailure, launch

def signal_all_once_there_is_a_server(before):
    while forkserver._forkserver._forkserver_pid in (before, None):
        time.sleep(0.01)
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM):
        os.killpg(0, number)

if __name__ == "__main__":
    context = mp.get_context("forkserver")
    context.set_forkserver_preload = lambda _: forkserver.set_forkserver_preload(["dies_of_import"])
    try:
        launch("train_cases:until_told", None, 2)
    except RankFailure as failure:
        print(failure)
    del context.set_forkserver_preload
    os.setpgid(0, 0)
    dead = forkserver._forkserver._forkserver_pid
    threading.Thread(target=signal_all_once_there_is_a_server, args=(dead,)).start()
    print(launch("train_cases:until_told", None, 2))
"""


def test_a_signal_to_all_processes_stops_a_run_and_a_dead_server_is_named(tmp_path):
    """``timeout`` signals the group: the fork server died of it, and every rank with it, nothing saved. The
    warning of SLURM ended the launcher, and a SIGTERM that was repeated all ranks.

    The server dies by itself, each time it is started: one that is killed from outside before the first rank
    is asked for is started again by Python, and all is well.
    """
    script = tmp_path / "signals.py"
    script.write_text(_SIGNALS)
    (tmp_path / "dies_of_import.py").write_text("import os; os.kill(os.getpid(), 9)")
    done = _python(str(script), PYTHONPATH=f"{ROOT / 'src'}:{ROOT / 'tests'}:{tmp_path}")
    first, last = done.stdout.strip().splitlines()
    assert first.startswith("the process that starts the ranks died before rank 0; "), done.stderr
    assert "out-of-memory killer" in first and last == "stop", done.stderr


def test_without_torchrun_the_error_is_one_line_of_ours():
    done = _python(
        "-c", "import torch; from ragged_fsdp import fully_shard; fully_shard(torch.nn.Linear(2, 2))"
    )
    lines = done.stderr.strip().splitlines()
    assert lines[-1].startswith("ValueError: fully_shard: there is no process group")
    assert "torchrun --nproc-per-node N script.py" in lines[-1] and not any(
        "/torch/" in line for line in lines
    )


@spmd(2)
def test_an_error_of_a_call_is_not_also_logged(rank):
    """Python prints what is raised; a log line beside it would say it twice on every rank."""
    from ragged_fsdp import fully_shard

    seen = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())
    logging.getLogger("ragged_fsdp").addHandler(handler)
    try:
        with pytest.raises(ValueError, match="scalar"):
            fully_shard(_with_scalar(), mesh=rank.mesh())
        assert seen == []
        with pytest.MonkeyPatch.context() as patch:
            fsdp_inside.wait_long_for_others(patch)
            with pytest.raises(ValueError, match="scalar"):
                fully_shard(_with_scalar(), mesh=rank.mesh())
        assert len(seen) == 1 and "waiting to tell the others: ValueError" in seen[0]
    finally:
        logging.getLogger("ragged_fsdp").removeHandler(handler)


def _with_scalar():
    module = torch.nn.Linear(2, 2)
    module.scalar = torch.nn.Parameter(torch.tensor(1.0))
    return module
