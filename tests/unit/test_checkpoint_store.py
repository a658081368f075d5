"""The folder of checkpoints: complete or not there, best and last kept, damage named."""

import json
import shutil

import pytest

from ragged_fsdp.checkpoint.store import CheckpointStore, checksum, damage, read_manifest


def _save(store, step, eval_loss=None, text="data"):
    path = store.begin(step)
    (path / "__0_0.distcp").write_text(f"{text} {step}")
    store.commit(
        step, {"__0_0.distcp": checksum(path / "__0_0.distcp")}, {"step": step, "eval_loss": eval_loss}
    )


def test_a_checkpoint_has_its_name_only_when_complete(tmp_path):
    store = CheckpointStore(tmp_path)
    path = store.begin(5)
    (path / "__0_0.distcp").write_text("half")
    assert store.steps() == []
    assert [p.name for p in store.remove_leftovers()] == [".writing-step-00000005"]
    _save(store, 5)
    assert store.steps() == [5] and damage(store.path(5)) == []
    assert read_manifest(store.path(5))["info"]["step"] == 5


def test_the_last_and_the_best_are_kept(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=2, keep_best=True)
    for step, loss in [(1, 3.0), (2, 1.0), (3, 2.0), (4, None), (5, 1.5)]:
        _save(store, step, loss)
    assert store.steps() == [2, 4, 5] and store.best_step() == 2
    _save(store, 6, float("nan"))  # no number is lower than that one, nor higher
    assert store.steps() == [2, 5, 6] and store.best_step() == 2
    _save(store, 1)  # of a run that has passed over the others, which are damaged
    assert store.steps() == [1, 2, 5, 6]
    without = CheckpointStore(tmp_path / "other", keep_last=1, keep_best=False)
    for step in (1, 2):
        _save(without, step, 1.0)
    assert without.steps() == [2]
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_a_step_that_is_saved_again_has_its_new_loss(tmp_path):
    """The loss of the checkpoint that it replaced once stayed in best.json: no later one could be better."""
    store = CheckpointStore(tmp_path, keep_last=1)
    for step, loss in [(1, 1.0), (1, 3.0), (2, 2.0)]:
        _save(store, step, loss)
    assert store.best_step() == 2 and store.steps() == [2]
    _save(store, 2)  # which was not evaluated
    assert store.best_step() is None


@pytest.mark.parametrize(
    "text",
    [b"\xff\xfe", b"[" * 100_000, b'{"step": 1, "eval_loss": 1' + b"0" * 400 + b"}", b"[1]", b"\0" * 30],
)
def test_a_damaged_note_of_the_best_does_not_end_the_saves(tmp_path, text):
    store = CheckpointStore(tmp_path, keep_last=1)
    (tmp_path / "best.json").write_bytes(text)
    assert store.best_step() is None
    for step, loss in [(1, 1.0), (2, 2.0)]:
        _save(store, step, loss)
    assert store.best_step() == 1 and store.steps() == [1, 2]


def test_saving_a_step_again_replaces_it(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path)
    _save(store, 1, text="old")
    there = []
    monkeypatch.setattr(shutil, "rmtree", lambda path, **_: there.append(path.exists() and store.steps()))
    _save(store, 1, text="new")
    assert there == [False, False, [1]]  # the old one is deleted, which takes long, when the new one is there
    assert (store.path(1) / "__0_0.distcp").read_text() == "new 1" and damage(store.path(1)) == []


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda p: (p / "__0_0.distcp").unlink(), "is missing"),
        (lambda p: (p / "__0_0.distcp").write_text("data"), "bytes instead of"),
        (lambda p: (p / "__0_0.distcp").write_text("dato 7"), "checksum"),
        (lambda p: (p / "manifest.json").unlink(), "not a complete checkpoint"),
        (lambda p: (p / "manifest.json").write_text("{"), "is damaged"),
        (lambda p: (p / "manifest.json").write_text(json.dumps({"files": []})), "is damaged"),
    ],
)
def test_damage_is_named(tmp_path, break_it, message):
    store = CheckpointStore(tmp_path)
    _save(store, 7)
    break_it(store.path(7))
    problems = damage(store.path(7))
    assert len(problems) == 1 and message in problems[0] and str(store.path(7)) in problems[0]
