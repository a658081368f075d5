"""Checkpoints in object stores: complete when their manifest is there, never renamed, one run each."""

import io
import os

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from fsspec.implementations.local import LocalFileSystem
from fsspec.registry import known_implementations

from ragged_fsdp.checkpoint import dcp as checkpoint_dcp
from ragged_fsdp.checkpoint.contents import CheckpointReader
from ragged_fsdp.checkpoint.object_files import ObjectWriter
from ragged_fsdp.checkpoint.place import ObjectPath, place
from ragged_fsdp.checkpoint.store import ObjectStore, damage, open_store, read_manifest
from ragged_fsdp.trainer.config_check import check
from ragged_fsdp.trainer.config_file import ConfigError, from_values


class Objects(LocalFileSystem):
    """Files with an object store's manners: no folders of their own, no rename, whole or not there."""

    protocol = "objects"
    cachable = False

    def rename(self, *args, **kwargs):
        raise NotImplementedError("an object store cannot rename")

    def mv(self, source, target, **kwargs):
        self.cp_file(source, target)
        self.rm_file(source)

    def ls(self, path, detail=False, **kwargs):
        found = super().ls(path, detail=True, **kwargs)
        kept = [entry for entry in found if entry["type"] == "file" or self.find(entry["name"])]
        return kept if detail else [entry["name"] for entry in kept]

    def open(self, path, mode="rb", **kwargs):
        if mode == "rb":
            return super().open(path, mode, **kwargs)
        return _Upload(self._strip_protocol(path))


class _Upload(io.BytesIO):
    def __init__(self, path):
        super().__init__()
        self._path = path

    def close(self):
        if not self.closed:
            os.makedirs(os.path.dirname(self._path), exist_ok=True)
            with open(self._path, "wb") as file:
                file.write(self.getvalue())
        super().close()


fsspec.register_implementation("objects", Objects, clobber=True)


@pytest.fixture(params=["memory", "objects", "file"])
def url(request, tmp_path):
    if request.param == "memory":
        yield f"memory://{tmp_path}"
        fsspec.filesystem("memory").store.clear()
    else:
        yield f"{request.param}://{tmp_path}"


def _save(store, step, eval_loss=None, value=1.0):
    path = store.begin(step)
    writer = ObjectWriter(path)
    dcp.save({"model": {"a": torch.full((3,), value)}, "note": step}, storage_writer=writer, no_dist=True)
    store.commit(step, writer.fs.sums, {"step": step, "eval_loss": eval_loss})


def _value(path):
    reader = CheckpointReader(path)
    return reader.load(next(t for t in reader.tensors() if t.name == "model.a")).tolist()


def test_a_checkpoint_is_there_when_its_manifest_is(url):
    store = open_store(url)
    assert isinstance(store, ObjectStore) and store.steps() == [] and store.remove_leftovers() == []
    store.attempt = "-1a"
    writer = ObjectWriter(store.begin(5))
    dcp.save({"model": {"a": torch.ones(3)}}, storage_writer=writer, no_dist=True)
    assert store.steps() == []
    assert [path.name for path in store.remove_leftovers()] == ["step-00000005-1a"]
    _save(store, 5, value=2.0)
    assert store.steps() == [5] and damage(store.path(5)) == [] and _value(store.path(5)) == [2.0] * 3
    assert read_manifest(store.path(5))["info"]["step"] == 5
    assert open_store(url).steps() == [5] and str(store.path(5)).startswith(url)
    assert b"fsspec" not in (store.path(5) / ".metadata").open().read()  # the index says where, not how


def test_what_is_called_as_its_folder_is_listed(url):
    folder = place(url) / "weights"
    (folder / "weights").write_text("a")
    (folder / "other").write_text("b")
    assert sorted(path.name for path in folder.iterdir()) == ["other", "weights"]


def test_the_last_and_the_best_are_kept_and_a_step_again_replaces_the_first(url):
    store = open_store(url, keep_last=2)
    store.attempt = "-1a"
    for step, loss in [(1, 3.0), (2, 1.0), (3, 2.0), (4, None), (5, 1.5)]:
        _save(store, step, loss)
    assert store.steps() == [2, 4, 5] and store.best_step() == 2
    store.attempt = "-1b"
    _save(store, 5, value=7.0)
    names = sorted(path.name for path in store.root.iterdir())
    assert names == ["best.json", "step-00000002-1a", "step-00000004-1a", "step-00000005-1b"]
    assert _value(store.path(5)) == [7.0] * 3
    # a crash may leave both: the later attempt counts
    store.attempt = "-1c"
    store._drop_one = lambda path: None
    _save(store, 5, value=8.0)
    assert store.steps() == [2, 4, 5] and _value(store.path(5)) == [8.0] * 3


def test_a_checkpoint_that_was_copied_from_a_folder_counts_until_it_is_written_again(url):
    store = open_store(url)
    _save(store, 5, value=2.0)  # without an attempt, as in a folder
    assert store.path(5).name == "step-00000005" and open_store(url).steps() == [5]
    store.attempt = "-1a"
    _save(store, 5, value=3.0)
    assert store.steps() == [5] and _value(store.path(5)) == [3.0] * 3
    assert [path.name for path in store.root.iterdir()] == ["step-00000005-1a"]


def test_damage_and_objects_that_vanish_are_named(url):
    store = open_store(url)
    store.attempt = "-1a"
    writer = ObjectWriter(store.begin(7))
    dcp.save({"model": {"a": torch.ones(3)}}, storage_writer=writer, no_dist=True)
    (store.final_path(7) / "__0_0.distcp").remove()
    with pytest.raises(OSError, match=r"__0_0.distcp is not there"):
        store.commit(7, writer.fs.sums, {"step": 7})
    assert store.steps() == []
    _save(store, 7)
    data = store.path(7) / "__0_0.distcp"
    with data.open() as file:
        content = bytearray(file.read())
    content[len(content) // 2] ^= 1
    with data.open("wb") as file:
        file.write(content)
    (problem,) = damage(store.path(7))
    assert problem == f"{data} has changed since it was written (checksum)"
    (store.path(7) / ".metadata").remove()
    assert f"{store.path(7) / '.metadata'} is missing" in damage(store.path(7))


def test_one_run_has_a_place(url):
    store = open_store(url)
    store.claim("/runs/one")
    store.claim("/runs/one")
    with pytest.raises(ValueError, match="belongs to the run in /runs/one; use another, or remove"):
        open_store(url).claim("/runs/two")
    (store.root / "owner.json").write_text("{")
    with pytest.raises(ValueError, match=r"owner\.json is damaged"):
        store.claim("/runs/one")
    store.attempt = "-1a"
    assert store.move_aside() is None
    _save(store, 1)
    with pytest.raises(ValueError, match="cannot rename"):
        store.move_aside()


def test_a_refused_run_takes_back_its_own_claim_alone(url):
    """Another node may have started the same run meanwhile, which claims the place under the same name."""
    refused, restarted = open_store(url), open_store(url)
    assert refused.claim("/runs/one")
    assert not restarted.claim("/runs/one")
    refused.disclaim()
    assert (restarted.root / "owner.json").is_file()
    restarted.disclaim()
    refused.disclaim()
    assert not (restarted.root / "owner.json").exists()


def test_places_that_cannot_be_opened_say_what_is_missing(tmp_path, monkeypatch):
    assert place("runs/one") == type(tmp_path)("runs/one")
    assert isinstance(place("memory://one/"), ObjectPath) and str(place("memory://one/")) == "memory://one"
    with pytest.raises(ValueError, match=r"memory://run\[1\] cannot be opened: '\[' stands for other names"):
        place("memory://run[1]")  # what is deleted there would be that of run1
    with pytest.raises(ValueError, match="nothing://x cannot be opened: Protocol not known"):
        place("nothing://x")
    known = {"class": "not_installed.Files", "err": "Install s3fs to access S3"}
    monkeypatch.setitem(known_implementations, "s3", known)
    missing = r"s3://b/x cannot be opened: Install s3fs to access S3; pip install '.\[s3\]' in a checkout"
    with pytest.raises(ValueError, match=missing):
        place("s3://b/x")
    small = {"model": "nano", "run_dir": str(tmp_path / "run")}
    for settings, message in [
        ({"checkpoint_dir": "s3://b/x"}, f"checkpoint_dir: {missing}"),
        ({"resume": "s3://b/x"}, f"resume: {missing}"),
        ({"run_dir": "memory://x"}, "run_dir = 'memory://x': expected a folder; checkpoint_dir can be a URL"),
        ({"checkpoint_dir": "memory://x", "resume": "restart"}, "cannot be renamed; use another"),
        ({"checkpoint_dir": __file__}, "checkpoint_dir = .* is not a folder"),
    ]:
        with pytest.raises(ConfigError, match=message):
            check(from_values({**small, **settings}, {}), 1)


def test_a_later_attempt_is_told_by_what_is_in_the_store_and_not_by_a_clock(url, monkeypatch):
    """The first start was on a host whose clock is ahead of that of the second."""
    monkeypatch.setattr(checkpoint_dcp.dist, "get_rank", lambda: 0)
    store = open_store(url)
    store._drop_one = lambda path: None  # a crash between the manifest and the deletion
    for now, value in [(2_000_000_000, 1.0), (1_000_000_000, 2.0), (1_500_000_000, 3.0)]:
        monkeypatch.setattr(checkpoint_dcp.time, "time", lambda now=now: now)
        store.attempt = checkpoint_dcp._new_attempt(store)
        _save(store, 5, value=value)
        assert _value(store.path(5)) == [value] * 3
