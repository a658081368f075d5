"""Whole runs of the trainer on its own processes: the same curve however it is spread, stopped or broken."""

import fcntl
import json
import os
import random
import signal
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner

from ragged_fsdp.checkpoint.dcp import Saver, newest_good, shared_damage
from ragged_fsdp.checkpoint.store import CheckpointStore, open_store
from ragged_fsdp.cli.main import main
from ragged_fsdp.trainer import run_folder
from ragged_fsdp.trainer.config_file import ConfigError
from ragged_fsdp.trainer.launch import RankFailure
from ragged_fsdp.trainer.metrics import losses_by_step, read_metrics
from ragged_fsdp.trainer.run_folder import Places, RunLock
from rank_pool import DEVICE, spmd
from train_cases import settings, tensors, train, train_on_pool


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """An uninterrupted run on one process, unsharded."""
    path = tmp_path_factory.mktemp("reference")
    outcome = train(path, sharding="none", processes=1)
    assert outcome["status"] == "finished" and outcome["eval_loss"] < 5.0
    return path


def _assert_same_curve(path: Path, reference: Path, tolerance: float = 2e-4) -> None:
    got, expected = losses_by_step(path), losses_by_step(reference)
    assert got.keys() == expected.keys()
    assert all(abs(got[step] - expected[step]) < tolerance for step in got), (got, expected)


@pytest.mark.parametrize(
    "changes",
    [
        {"processes": 1},
        {"processes": 3, "accumulate": 2, "reshard_after_forward": False},
        {"processes": 4, "replicas": 2, "granularity": {"*.experts.*": "rows:8", "lm_head.weight": "whole"}},
        {"processes": 2, "sharding": "fsdp2", "activation_checkpointing": 1},
        {"processes": 3, "sharding": "ddp"},
    ],
    ids=["ragged1", "ragged3-accumulate", "hsdp4-granularity", "fsdp2-checkpointing", "ddp3"],
)
def test_the_curve_does_not_depend_on_the_sharding(tmp_path, reference, changes):
    train(tmp_path, **changes)
    _assert_same_curve(tmp_path, reference)


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "adam8bit", "shampoo"])
def test_resuming_is_bit_for_bit(tmp_path, optimizer):
    """One of the two runs keeps its optimizer's state on the host."""
    on_host = optimizer in ("muon", "shampoo")
    processes = 4 if DEVICE == "cuda" else 2
    common = {
        "processes": processes,
        "optimizer": optimizer,
        "model_set": {"hidden": "64", "expert_hidden": "64"},
        "gather_codes": {"*.experts.*": "int8:64x16"} if optimizer == "adam8bit" else {},
    }
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    train(straight, checkpoint_every=5, keep_last=0, offload_optimizer=on_host, **common)
    checkpoint = str(straight / "checkpoints/step-00000005")
    again = train(resumed, resume=checkpoint, offload_optimizer=not on_host, **common)
    assert again["status"] == "finished" and list(losses_by_step(resumed)) == [6, 7, 8]
    assert losses_by_step(resumed).items() <= losses_by_step(straight).items()
    first, second = (tensors(run / "checkpoints/step-00000008") for run in (straight, resumed))
    assert first.keys() == second.keys() and any(name.startswith("optim.state") for name in first)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_resumed_run_has_the_settings_that_it_was_told(tmp_path):
    """The checkpoint's decay and betas once won over the flags, while a line said that they had changed."""
    train(tmp_path, processes=1, steps=4, stop_at=2)
    train(tmp_path, processes=1, steps=4, weight_decay=0.7, beta1=0.3, batch=6)
    assert "weight_decay is 0.7, was 0.1 when the checkpoint was written" in _notes(tmp_path)
    stored = torch.distributed.checkpoint.filesystem.FileSystemReader(tmp_path / "checkpoints/step-00000004")
    groups: dict = {f"optim.param_groups.0.{name}": None for name in ("weight_decay", "betas")}
    torch.distributed.checkpoint.load(groups, storage_reader=stored)
    assert list(groups.values()) == [0.7, (0.3, 0.95)]
    tokens = [row["tokens"] for row in read_metrics(tmp_path) if row["kind"] == "train"]
    assert tokens == [12 * 32, 24 * 32, 30 * 32, 36 * 32]


def test_frozen_parameters_stay_as_they_are(tmp_path):
    """On one process, with spread experts, and resumed on others; a run that freezes more goes on."""
    frozen = {"freeze": ["*embed*", "*.experts.*"]}
    plain, spread = tmp_path / "plain", tmp_path / "spread"
    train(plain, sharding="none", processes=1, **frozen)
    train(spread, processes=4, ep=2, stop_at=4, keep_last=0, **frozen)
    train(spread, processes=3, keep_last=0, **frozen)
    _assert_same_curve(spread, plain)
    before, after = (tensors(spread / f"checkpoints/step-0000000{step}") for step in (4, 8))
    stays = {name for name in before if name.startswith("model.") and torch.equal(before[name], after[name])}
    assert {name for name in before if "embed" in name or ".experts." in name} == stays
    start = next(row for row in read_metrics(spread) if row["kind"] == "start")
    assert start["parameters"] - start["trained_parameters"] == sum(before[name].numel() for name in stays)
    with pytest.raises(
        ConfigError, match=r"no optimizer state of layers\.0\..*experts.* and 3 more; keep them"
    ):
        train(spread, processes=1, steps=9, freeze=["*embed*"])
    train(spread, processes=2, steps=9, freeze=[*frozen["freeze"], "lm_head*"])
    assert "freeze is" in _notes(spread)


@pytest.mark.parametrize(("before", "after"), [("ragged", "fsdp2"), ("fsdp2", "ragged")])
def test_checkpoints_move_between_world_sizes_and_to_and_from_fsdp2(tmp_path, reference, before, after):
    train(tmp_path, sharding=before, processes=2, stop_at=3)
    train(tmp_path, sharding=after, processes=3)
    _assert_same_curve(tmp_path, reference)
    starts = [row for row in read_metrics(tmp_path) if row["kind"] == "start"]
    assert [(row["step"], row["world_size"]) for row in starts] == [(0, 2), (3, 3)]


@spmd(2)
def test_a_checkpoint_that_cannot_be_written_says_why_and_where(rank):
    root = rank.shared_dir / "checkpoints"
    root.touch()  # a file where the folder should be
    for background in (True, False):
        saver = Saver(CheckpointStore(root), background=background, timeout_s=30)
        with pytest.raises(
            RuntimeError, match=rf"step 1 could not be written to {root}, where .* MiB are free: .*Error"
        ):
            saver.save(1, {"a": torch.ones(2)}, {})
            saver.wait()
    saver = Saver(CheckpointStore(rank.shared_dir / "others"), background=False, timeout_s=30)
    with pytest.raises(RuntimeError, match=r"MiB are free: rank 1 failed: TypeError: cannot pickle"):
        saver.save(1, {f"of {rank.rank}": threading.Lock() if rank.rank == 1 else 1}, {})


class _FailsToCopy(dict):
    def items(self):
        raise MemoryError("no memory for a copy")


def _fails(*_):
    raise PermissionError("no access")


@pytest.mark.parametrize("what", ["copy", "checksum", "commit", "damage", "steps"])
@spmd(2)
def test_a_rank_that_fails_alone_keeps_no_other_waiting(rank, what):
    """One exchange carries the failure, whatever it is: the time-out of an hour is never waited for."""
    store = CheckpointStore(rank.shared_dir / "checkpoints")
    saver = Saver(store, background=True, timeout_s=3600)
    failing = rank.rank == (1 if what in ("copy", "checksum", "damage") else 0)
    state = {"a": torch.ones(2), "b": _FailsToCopy() if failing and what == "copy" else {}}
    with pytest.MonkeyPatch.context() as patch:
        if failing and what in ("checksum", "damage"):
            patch.setattr(f"ragged_fsdp.checkpoint.dcp.{what}", _fails)
        elif failing and what in ("commit", "steps"):
            patch.setattr(CheckpointStore, what, _fails)
        with pytest.raises((RuntimeError, PermissionError), match=r"no access|no memory") as raised:
            if what == "damage":
                shared_damage(rank.shared_dir, None)
            elif what == "steps":
                newest_good(store, None, print)
            else:
                saver.save(1, state, {})
                saver.wait()
    assert failing or f"rank {1 - rank.rank} failed: " in str(raised.value)
    assert not store.steps()
    saver.save(2, {"a": torch.ones(2)}, {})
    saver.wait()
    assert store.steps() == [2]


@spmd(2)
def test_ranks_that_were_started_otherwise_refuse_together(rank, monkeypatch):
    """Nodes are started by a command each. Every rank says what differs, none waits, and nothing is left."""
    monkeypatch.setattr("ragged_fsdp.trainer.run_folder._SEEN_WITHIN_S", 0.5)
    first, run, own = rank.rank == 0, rank.shared_dir / "run", rank.shared_dir / f"run{rank.rank}"
    text = rank.shared_dir / f"text{rank.rank}"
    text.write_text(f"{rank.rank}" * 1000)
    train_on_pool(rank.shared_dir / "before", steps=2, checkpoint_every=1)
    stored = [str(rank.shared_dir / f"before/checkpoints/step-0000000{step}") for step in (1, 2)]
    other_tokens = (
        r"rank 0 has '901 training and 100 evaluation tokens \(digest \w+\), tokenizer bytes', rank 1"
    )
    for folder, message, on_0, on_1 in (
        (run, r"started alike: rank 0 has 'lr = 0.01', rank 1 has 'lr = 0.1'", {}, {"lr": 0.1}),
        (run, r"rank 0 has 'replicas = 1', rank 1 has 'replicas = 2'", {}, {"replicas": 2}),
        (run, r"rank 0 has 'resume = 'auto'', rank 1 has", {}, {"resume": "never"}),
        (
            run,
            r"'checkpoint_dir = 'a folder'', .* = 'file://",
            *({"checkpoint_dir": f"{u}{own}"} for u in ("", "file://")),
        ),
        (run, f"do not open the data the same: {other_tokens}", {"data": [str(text)]}, {"data": [str(text)]}),
        (run, r"data: .*missing' matches no file", {}, {"data": ["missing"]}),
        (run, r"resume = 'missing': no such folder", {"resume": stored[0]}, {"resume": "missing"}),
        (run, r"do not build the model the same: rank 0 has", {"model": "nano"}, {"model": "demo"}),
        (run, r"read the checkpoint the same: rank 0 has 'manifest", *({"resume": s} for s in stored)),
        (
            run,
            r"resume: \S+ is not a checkpoint folder",
            {"resume": stored[0]},
            {"resume": str(rank.shared_dir)},
        ),
        (own, r"run_dir = .*run1' is on .* another folder than the one that process", {}, {}),
        (run, r"checkpoint_dir = .*run1' is on .* another", *[{"checkpoint_dir": str(own)}] * 2),
    ):
        with pytest.raises(ConfigError, match=message):
            train_on_pool(folder, **(on_0 if first else on_1))
        dist.barrier()
        assert not run.exists() and not own.exists(), message


@spmd(2)
def test_ranks_need_not_have_the_same_paths_nor_log_the_same(rank, monkeypatch):
    """Nor see one folder where nothing is saved; and a folder is waited for until a node sees it."""
    first, known = rank.rank == 0, run_folder._words_in
    link = rank.shared_dir / f"node{rank.rank}"
    link.symlink_to(rank.shared_dir)
    unseen = [None] * (0 if first else 2)
    monkeypatch.setattr(run_folder, "_words_in", lambda folder: unseen.pop() if unseen else known(folder))
    text = link / "text"
    if first:
        text.write_text("text " * 1000)
    dist.barrier()
    hooks = [] if first else ["not_on_this_node.py:Hook"]
    common = {"steps": 2, "data": [str(text)], "log_every": 1 if first else 7, "callback": hooks}
    train_on_pool(link / "run", checkpoint_every=1, checkpoint_dir=str(link / "checkpoints"), **common)
    assert not unseen
    saves_nothing = {"checkpoint_every": 0, "save_at_end": False, "save_on_interrupt": False}
    stored = str(link / "checkpoints/step-00000001")
    train_on_pool(rank.shared_dir / f"run{rank.rank}", resume=stored, **saves_nothing, **common)
    assert list(losses_by_step(rank.shared_dir / "run0")) == [2]


@spmd(2)
def test_ranks_to_which_an_object_store_shows_different_lists_take_the_same_checkpoint(rank):
    store = open_store(f"file://{rank.shared_dir}/checkpoints")
    saver = Saver(store, background=False, timeout_s=30)
    for step in (1, 2):
        saver.save(step, {"a": torch.ones(2)}, {})
    expected = str(store.path(2))
    with pytest.MonkeyPatch.context() as patch:
        if rank.rank == 1:
            patch.setattr(type(store), "_complete_ones", _fails)
        assert str(newest_good(store, None, print)) == expected


@spmd(2)
def test_a_save_goes_to_where_the_saver_was_made_whatever_the_working_directory_is_then(rank):
    (rank.shared_dir / "elsewhere").mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(rank.shared_dir)
        saver = Saver(CheckpointStore(Path("relative")), background=True, timeout_s=30)
        if rank.rank == 0:  # as a callback may do
            patch.chdir(rank.shared_dir / "elsewhere")
        saver.save(1, {"a": torch.ones(2)}, {})
        saver.wait()
    assert CheckpointStore(rank.shared_dir / "relative").steps() == [1]
    assert not list((rank.shared_dir / "elsewhere").iterdir())


class _SlowToGo:
    def __del__(self) -> None:
        time.sleep(0.5)


@spmd(1)
def test_a_save_that_was_waited_for_has_left_no_thread(rank):
    """A process that ended while the thread freed its copies did so with SIGABRT, not with its status."""
    saver = Saver(CheckpointStore(rank.shared_dir), background=True, timeout_s=30)
    saver.save(1, {"a": torch.ones(2), "b": _SlowToGo()}, {})
    saver.wait()
    assert not [thread for thread in threading.enumerate() if thread.name == "checkpoint"]


def _notes(path: Path) -> str:
    return "\n".join(row["text"] for row in read_metrics(path) if row["kind"] == "note")


def test_a_damaged_checkpoint_is_named_and_passed_over(tmp_path, reference):
    train(tmp_path, checkpoint_every=2, keep_last=0, stop_at=6)
    store = CheckpointStore(tmp_path / "checkpoints")
    assert store.steps() == [2, 4, 6]
    victim = next(store.path(6).glob("*.distcp"))
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    (store.path(4) / ".metadata").unlink()
    with pytest.raises(ConfigError, match="has changed since it was written"):
        train(tmp_path / "other", resume=str(store.path(6)))
    train(tmp_path)
    said = _notes(tmp_path)
    assert f"{victim} has changed since it was written" in said and ".metadata is missing" in said
    assert "step-00000002 at step 2" in said and "random states" not in said
    _assert_same_curve(tmp_path, reference)


def _forked() -> list[psutil.Process]:
    """Live processes that a fork server of this process made: ranks of a run, and of pools of other tests."""
    own = psutil.Process()
    return [p for p in own.children(recursive=True) if p not in own.children() and p.is_running()]


def _when(condition, action) -> threading.Thread:
    """Act, in a thread, as soon as a condition holds."""

    def work() -> None:
        deadline = time.monotonic() + 100
        while time.monotonic() < deadline:
            if condition():
                action()
                return
            time.sleep(0.002)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def _steps_done(path: Path) -> int:
    return max(losses_by_step(path), default=0)


@pytest.mark.parametrize("moment", ["step", "save"])
def test_a_killed_rank_ends_the_others_and_nothing_is_lost(tmp_path, reference, moment):
    seed, others, killed_at = random.Random(moment), _forked(), []

    def ranks() -> list[psutil.Process]:
        return [p for p in _forked() if p not in others]

    def due() -> bool:
        if moment == "step":
            return _steps_done(tmp_path) >= 2
        return any((tmp_path / "checkpoints").glob(".writing-*")) and _steps_done(tmp_path) >= 2

    def kill() -> None:
        seed.choice(ranks()).kill()
        killed_at.append(time.monotonic())

    thread = _when(due, kill)
    with pytest.raises(RankFailure, match=r"rank \d died without a traceback:\nkilled by SIGKILL") as caught:
        # evaluations make the steps long enough for the kill to come before the run is over
        train(tmp_path, processes=3, checkpoint_every=1, keep_last=0, eval_every=1, eval_sequences=48)
    thread.join()
    assert time.monotonic() - killed_at[0] < 40 and not ranks()  # not the 60 s of a collective's timeout
    assert "out-of-memory killer" in str(caught.value)
    left = CheckpointStore(tmp_path / "checkpoints").steps()
    where = f"is of step {left[-1]}; the same command goes on" if left else "there is no checkpoint yet"
    assert where in str(caught.value)
    train(tmp_path, processes=3, checkpoint_every=1)
    _assert_same_curve(tmp_path, reference)
    assert not list((tmp_path / "checkpoints").glob(".*-step-*"))


def test_a_run_saves_resumes_and_keeps_in_an_object_store(tmp_path, reference):
    """``tests/unit/test_checkpoint_objects.py`` has stores of worse manners."""
    url, run = f"file://{tmp_path}/bucket/one", tmp_path / "run"
    common = {"checkpoint_every": 2, "checkpoint_dir": url}
    train(run, stop_at=4, **common)
    assert open_store(url).steps() == [2, 4] and not (run / "checkpoints").exists()
    with pytest.raises(ConfigError, match=f"belongs to the run in {run}"):
        train(tmp_path / "other", **common)
    train(run, processes=3, **common)
    _assert_same_curve(run, reference)
    assert open_store(url).steps() == [6, 8] and "step-00000004" in _notes(run)
    shown = CliRunner().invoke(main, ["inspect", url, "--verify", "--json"])
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.output)["info"]["step"] == 8 and json.loads(shown.output)["problems"] == []
    exported = CliRunner().invoke(main, ["export", url, str(tmp_path / "out")])
    assert exported.exit_code == 0 and (tmp_path / "out/model.safetensors").is_file(), exported.output


def test_an_error_on_one_rank_is_shown_first(tmp_path):
    with pytest.raises(RankFailure) as caught:
        train(tmp_path, lr=1e30, clip=0.0, processes=2, warmup=0)
    assert str(caught.value).startswith("rank ") and "FloatingPointError: step" in str(caught.value)


def test_an_interrupt_saves_and_the_run_goes_on_later(tmp_path, reference):
    """However often a scheduler repeats its signal, and a terminal and `timeout` both pass on a Ctrl-C."""

    before = signal.getsignal(signal.SIGINT)

    def interrupt() -> None:
        for number in (signal.SIGINT, signal.SIGINT, signal.SIGTERM, signal.SIGTERM):
            if signal.getsignal(signal.SIGINT) is not before:  # the run may have ended at the first
                os.kill(os.getpid(), number)
            time.sleep(0.02)

    thread = _when(lambda: _steps_done(tmp_path) >= 2, interrupt)
    outcome = train(tmp_path, steps=8)
    thread.join()
    if outcome["status"] != "finished":  # the signal may come after the last step
        assert outcome["status"] == "interrupted"
        assert CheckpointStore(tmp_path / "checkpoints").steps() == [outcome["step"]]
    train(tmp_path)
    _assert_same_curve(tmp_path, reference)


def test_an_interrupt_before_the_ranks_are_there_is_not_lost(tmp_path):
    before = signal.getsignal(signal.SIGINT)
    thread = _when(
        lambda: signal.getsignal(signal.SIGINT) is not before, lambda: os.kill(os.getpid(), signal.SIGINT)
    )
    outcome = train(tmp_path)
    thread.join()
    assert outcome["status"] == "interrupted"
    assert CheckpointStore(tmp_path / "checkpoints").steps() == [outcome["step"]][: outcome["step"]]


def test_refusals_come_from_the_ranks_as_such(tmp_path):
    train(tmp_path, stop_at=1)
    with pytest.raises(ConfigError, match="resume = never"):
        train(tmp_path, resume="never")
    with pytest.raises(
        ConfigError,
        match=r"has .* of shape \(256, 32\), this run's model has \(256, 64\) \(hidden is 64, was 32\)",
    ):
        train(tmp_path, model_set={"hidden": "64"})
    with pytest.raises(ConfigError, match="trained with optimizer = adamw, this run has muon"):
        train(tmp_path, optimizer="muon")
    with RunLock(tmp_path).file, pytest.raises(ConfigError, match=f"in use by process {os.getpid()}"):
        train(tmp_path)
    np.arange(4000, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    with pytest.raises(ConfigError, match="is not in the model's vocabulary of 256"):
        train(tmp_path / "tokens", data=[str(tmp_path / "tokens.bin")])
    assert not (tmp_path / "tokens").exists()


def _everything(folder: Path) -> dict[Path, bytes | None]:
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def test_a_refused_start_leaves_nothing_and_touches_nothing(tmp_path):
    """What only the ranks can find once left a new folder with a lock, or checkpoints that were moved."""
    run, own = tmp_path / "run", tmp_path / "mine" / "run"
    train(run, stop_at=2, checkpoint_every=1, keep_last=0, freeze=["lm_head*"])
    objects, foreign = tmp_path / "objects", tmp_path / "foreign"
    for folder in (own, objects, foreign):
        folder.mkdir(parents=True)
    (foreign / ".metadata").write_bytes(b"none")
    before = _everything(tmp_path)
    new, cut = tmp_path / "new", {"layers.*": "elements:1"}
    first = str(run / "checkpoints/step-00000001")
    for folder, message, changes in (
        (new / "run", "holds no complete checkpoint", {"resume": "must"}),
        (own, "holds no complete checkpoint", {"resume": "must", "checkpoint_dir": str(new / "checkpoints")}),
        (own, "holds no complete checkpoint", {"resume": "must", "checkpoint_dir": f"file://{objects}"}),
        (new / "run", "damaged or no index", {"resume": str(foreign)}),
        (new / ("long" * 100), "cannot be used: File name too long", {}),
        (run, "no optimizer state of lm_head", {"resume": first}),
        (run, "optimizer = shampoo: ", {"resume": "restart", "optimizer": "shampoo", "granularity": cut}),
    ):
        with pytest.raises(ConfigError, match=message):
            train(folder, **changes)
        (run / ".lock").write_bytes(before[run / ".lock"] or b"")  # it names who had it last
        assert _everything(tmp_path) == before, message


def test_a_lock_on_a_file_that_was_removed_is_taken_again(tmp_path, monkeypatch):
    """A refused run removes the file that another has opened meanwhile, whose lock would keep nobody out."""
    refused = RunLock(tmp_path / "run")
    flock = fcntl.flock

    def removed_before(file, operation):
        monkeypatch.setattr(fcntl, "flock", flock)
        refused.undo()
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", removed_before)
    taken = RunLock(tmp_path / "run")
    with pytest.raises(ConfigError, match="in use by process"):
        RunLock(tmp_path / "run")
    (tmp_path / "run/mine").touch()
    taken.undo()
    assert _everything(tmp_path) == {tmp_path / "run": None, tmp_path / "run/mine": b""}


def test_a_lock_that_cannot_be_written_is_refused_and_leaves_nothing(tmp_path, monkeypatch):
    """A full disk once ended the first rank with a traceback, and the others when they had waited for it."""

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(ConfigError, match=r"run_dir = .*run' cannot be used: No space left on device"):
            RunLock(tmp_path / "new" / "run")
        assert _everything(tmp_path) == {}
        (tmp_path / ".lock").touch()
        with pytest.raises(ConfigError, match="No space left on device") as caught:
            RunLock(tmp_path)
    RunLock(tmp_path).release()  # the error, which is still there, holds nothing
    assert caught.value is not None


def test_a_store_that_cannot_be_reached_any_more_keeps_no_folder_and_hides_no_error(tmp_path):
    """It took the place of why the start failed, and the run's folder stayed locked."""

    class Store:
        def disclaim(self):
            raise OSError("no network")

    Places([RunLock(tmp_path / "run")], Store()).undo()
    assert _everything(tmp_path) == {}


@spmd(2)
def test_a_start_that_fails_leaves_nothing(rank):
    with pytest.MonkeyPatch.context() as patch, pytest.raises(PermissionError, match="no access"):
        patch.setattr("ragged_fsdp.trainer.job.materialize", lambda *_, **__: _fails())
        train_on_pool(rank.shared_dir / "new" / "run")
    dist.barrier()
    assert not (rank.shared_dir / "new").exists()


def test_checkpoints_may_lie_in_the_run_s_own_folder(tmp_path):
    """The lock was once taken twice, and the run refused by its own process."""
    train(tmp_path, steps=2, checkpoint_dir=str(tmp_path))
    assert CheckpointStore(tmp_path).steps() == [2]


def test_metrics_trace_sample_and_time_limit(tmp_path):
    outcome = train(
        tmp_path,
        steps=3,
        profile=1,
        profile_from=2,
        tensorboard=True,
        sample_tokens=5,
        peak_tflops=1.0,
        precision="bf16",
    )
    assert outcome["sample"].startswith("def ")
    rows = [row for row in read_metrics(tmp_path) if row["kind"] == "train"]
    assert {"loss", "grad_norm", "lr", "tokens_per_s", "mfu", "memory", "phases_s"} <= rows[-1].keys()
    assert 0 < rows[-1]["memory"]["held"] <= rows[-1]["memory"]["allocated"]
    assert sum(rows[-1]["phases_s"].values()) <= rows[-1]["step_s"] and 0 < rows[-1]["mfu"] < 1
    start = next(row for row in read_metrics(tmp_path) if row["kind"] == "start")
    assert 0 <= start["padding"] < 1 and start["shard_bytes"] > 0
    trace = json.loads((tmp_path / "trace/steps-2-2.json").read_text())
    assert any("all_gather" in event.get("name", "") for event in trace["traceEvents"])
    assert list((tmp_path / "tensorboard").iterdir())
    late = train(tmp_path, steps=10_000, minutes=1e-9, lr=2e-3, profile=1, precision="fp32")
    assert late["status"] == "time" and late["step"] == 3
    assert "lr is 0.002, was 0.01 when the checkpoint was written" in _notes(tmp_path)
    assert "precision is fp32, was bf16 when the checkpoint was written" in _notes(tmp_path)
    assert settings(tmp_path)["model"] in (tmp_path / "config.toml").read_text()
