"""200 damaged or hostile files, each opened as a user would: it must be refused by name, and run nothing.

    python -m benchmarks.faults.hostile          # writes benchmarks/faults/hostile.json

A case is a copy of something whole in which one thing is changed: a bit, the length, a path, a type, or a
pickle that would leave a mark. *Signed* cases have a manifest whose checksums fit the change: they were
made by someone, not by a disk. The errors that count are those a user is shown (``ValueError``, of which
``ConfigError`` is one), with the path of the file or folder in them.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import pickle
import random
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata

from ragged_fsdp.checkpoint import reading
from ragged_fsdp.checkpoint.contents import CheckpointReader
from ragged_fsdp.checkpoint.store import CheckpointStore, checksum, damage
from ragged_fsdp.models.source import find_model
from ragged_fsdp.trainer.config_file import from_values, load_toml
from ragged_fsdp.trainer.data import open_tokens
from ragged_fsdp.weights import load as load_weights

HERE = Path(__file__).parent
_DATA, _INDEX, _MANIFEST = "__0_0.distcp", ".metadata", "manifest.json"


class Mark:
    """Unpickled by anything that runs pickles, it writes a file."""

    def __init__(self, path: Path, how: Callable[..., Any] = os.mkdir) -> None:
        self._path, self._how = path, how

    def __reduce__(self) -> tuple[Any, ...]:
        if self._how is eval:
            return eval, (f"__import__('os').mkdir({str(self._path)!r})",)
        return self._how, (str(self._path),)


@dataclass(frozen=True)
class Case:
    """How a whole thing is changed, and how it is then opened; both get the folder it is in."""

    name: str
    whole: str
    change: Callable[[Path, random.Random, Path], None]
    open: Callable[[Path], Any]


def make_whole(folder: Path) -> None:
    """What the cases are copies of."""
    torch.manual_seed(0)
    store = CheckpointStore(folder / "checkpoint")
    path = store.begin(1)
    state = {
        "model": {"a": torch.randn(64, 8), "b": torch.randn(5)},
        "optim": {"lr": 0.5, "betas": (0.9, 0.95)},
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(state, storage_writer=dcp.FileSystemWriter(path), no_dist=True)
    files = {name: checksum(path / name) for name in (_DATA, _INDEX)}
    store.commit(1, files, {"step": 1, "samples": 12, "eval_loss": None})
    weights = folder / "weights"
    weights.mkdir()
    save_file({"weight": torch.randn(4, 8), "bias": torch.randn(4)}, weights / "one.safetensors")
    index = {"metadata": {}, "weight_map": {"weight": "one.safetensors", "bias": "one.safetensors"}}
    (weights / "model.safetensors.index.json").write_text(json.dumps(index))
    tokens = folder / "tokens"
    tokens.mkdir()
    np.save(tokens / "tokens.npy", np.arange(4000, dtype=np.uint16))
    (tokens / "text.txt").write_text("some text " * 500)
    (folder / "config").mkdir()
    (folder / "config/run.toml").write_text(
        '[run]\nsteps = 8\n[optimizer]\nlr = 0.5\n[model]\nmodel = "nano"\n'
    )
    model = folder / "model"
    model.mkdir()
    config = {"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
    (model / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForCausalLM"]}))


def open_checkpoint(folder: Path) -> dict[str, Any]:
    """Everything of the checkpoint, read as a resume reads it."""
    path = CheckpointStore(folder).path(1)
    if problems := damage(path):
        raise ValueError(problems[0])
    reader = CheckpointReader(path)
    state: dict[str, Any] = {t.name: torch.empty(t.shape, dtype=t.dtype) for t in reader.tensors()}
    state |= dict.fromkeys(reader.values())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        reading.load(state, reading.CheckedReader(path), alone=True)
    return state


def open_weights(folder: Path) -> None:
    """A model with the folder's weights."""
    load_weights(nn.Linear(8, 4), folder)


def open_tokens_file(folder: Path) -> None:
    """The tokens of the array."""
    open_tokens(from_values({"data": [str(folder / "tokens.npy")], "seq_len": 16}).data)


def open_cache(folder: Path) -> None:
    """The tokens of the text, from the cache."""
    with _cache_in(folder):
        open_tokens(from_values({"data": [str(folder / "text.txt")], "seq_len": 16}).data)


def open_config(folder: Path) -> None:
    """The settings of a run."""
    from_values(load_toml(folder / "run.toml"))


def open_model(folder: Path) -> None:
    """The model of a Hugging Face folder."""
    find_model(str(folder), {}).build()


@contextmanager
def _cache_in(folder: Path) -> Iterator[None]:
    before = os.environ.get("RAGGED_FSDP_CACHE")
    os.environ["RAGGED_FSDP_CACHE"] = str(folder / "cache")
    try:
        yield
    finally:
        os.environ.pop("RAGGED_FSDP_CACHE")
        if before is not None:
            os.environ["RAGGED_FSDP_CACHE"] = before


def _flip(path: Path, choose: random.Random, begin: int = 0, end: int | None = None) -> None:
    content = bytearray(path.read_bytes())
    content[choose.randrange(begin, end or len(content))] ^= 1 << choose.randrange(8)
    path.write_bytes(content)


def _cut(path: Path, choose: random.Random) -> None:
    os.truncate(path, choose.randrange(path.stat().st_size))


def _sign(path: Path) -> None:
    """Give a changed checkpoint a manifest that fits it."""
    store = CheckpointStore(path.parent)
    files = {name: checksum(path / name) for name in (_DATA, _INDEX)}
    os.rename(path, store.writing_path(1))
    store.commit(1, files, {"step": 1})


def _index(change: Callable[[Metadata, Path], Any]) -> Callable[[Path, random.Random, Path], None]:
    """A signed checkpoint whose index was changed, or is what the change returns."""

    def apply(folder: Path, choose: random.Random, mark: Path) -> None:
        path = CheckpointStore(folder).path(1)
        metadata = pickle.loads((path / _INDEX).read_bytes())
        made = change(metadata, mark)
        (path / _INDEX).write_bytes(made if isinstance(made, bytes) else pickle.dumps(made or metadata))
        _sign(path)

    return apply


def _place(**changes: Any) -> Callable[[Metadata, Path], None]:
    """An index whose first entry is stored elsewhere."""

    def change(metadata: Metadata, mark: Path) -> None:
        vars(next(iter(metadata.storage_data.values()))).update(changes)

    return change


def _payload(kind: str, make: Callable[[Path], bytes]) -> Callable[[Path, random.Random, Path], None]:
    """A signed checkpoint in which the bytes of one tensor or value are others."""

    def apply(folder: Path, choose: random.Random, mark: Path) -> None:
        path = CheckpointStore(folder).path(1)
        metadata = pickle.loads((path / _INDEX).read_bytes())
        name = "model.a" if kind == "tensor" else "optim.lr"
        place = next(p for index, p in metadata.storage_data.items() if index.fqn == name)
        content = make(mark)
        place.offset, place.length = (path / _DATA).stat().st_size, len(content)
        with (path / _DATA).open("ab") as file:
            file.write(content)
        (path / _INDEX).write_bytes(pickle.dumps(metadata))
        _sign(path)

    return apply


def _torch_bytes(value: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


def _manifest(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path, random.Random, Path], None]:
    def apply(folder: Path, choose: random.Random, mark: Path) -> None:
        file = CheckpointStore(folder).path(1) / _MANIFEST
        manifest = json.loads(file.read_text())
        manifest.pop("crc32")
        file.write_text(json.dumps(change(manifest) or manifest))

    return apply


def _header(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path, random.Random, Path], None]:
    """Safetensors with another header."""

    def apply(folder: Path, choose: random.Random, mark: Path) -> None:
        file = folder / "one.safetensors"
        content = file.read_bytes()
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        made = json.dumps(change(header) or header).encode()
        file.write_bytes(len(made).to_bytes(8, "little") + made + content[8 + length :])

    return apply


def _write(name: str, content: Callable[[Path], bytes]) -> Callable[[Path, random.Random, Path], None]:
    return lambda folder, choose, mark: (folder / name).write_bytes(content(mark)) and None


def _on(
    name: str, damage: Callable[..., None], **options: int
) -> Callable[[Path, random.Random, Path], None]:
    return lambda folder, choose, mark: damage(next(folder.glob(name)), choose, **options)


def _in_cache(damage: Callable[..., None]) -> Callable[[Path, random.Random, Path], None]:
    def apply(folder: Path, choose: random.Random, mark: Path) -> None:
        open_cache(folder)  # fills it: its name depends on where the text is
        damage(next((folder / "cache").glob("*.uint8")), choose)

    return apply


def cases() -> list[Case]:
    """All of them, in a fixed order."""
    found: list[Case] = []

    def add(whole: str, opener: Callable[[Path], Any], **changes: Any) -> None:
        for name, change in changes.items():
            found.append(Case(f"{whole}: {name.replace('_', ' ')}", whole, change, opener))

    step = "step-00000001"
    for number in range(12):
        for what, file in (("tensors", _DATA), ("index", _INDEX), ("manifest", _MANIFEST)):
            add(
                "checkpoint",
                open_checkpoint,
                **{f"bit of the {what} flipped {number}": _on(f"{step}/{file}", _flip)},
            )
            if number < 8:
                add("checkpoint", open_checkpoint, **{f"{what} cut {number}": _on(f"{step}/{file}", _cut)})
    add("checkpoint", open_checkpoint, **_hostile_indices(), **_hostile_payloads(), **_hostile_manifests())
    for number in range(15):
        add(
            "weights",
            open_weights,
            **{f"bit of the length flipped {number}": _on("one.safetensors", _flip, end=8)},
        )
        flipped = _on("one.safetensors", _flip, begin=8, end=100)
        add("weights", open_weights, **{f"bit of the header flipped {number}": flipped})
    for number in range(10):
        add("weights", open_weights, **{f"cut {number}": _on("one.safetensors", _cut)})
    add("weights", open_weights, **_hostile_weights())
    for number in range(8):
        add("tokens", open_tokens_file, **{f"array cut {number}": _on("tokens.npy", _cut)})
        add("tokens", open_cache, **{f"bit of the cache flipped {number}": _in_cache(_flip)})
        add("tokens", open_cache, **{f"cache cut {number}": _in_cache(_cut)})
    add("tokens", open_tokens_file, **_hostile_tokens())
    add("config", open_config, **_hostile_configs())
    add("model", open_model, **_hostile_models())
    return found


def _hostile_indices() -> dict[str, Any]:
    def with_(attribute: str, value: Any) -> Callable[[Metadata, Path], None]:
        return lambda metadata, mark: setattr(metadata, attribute, value)

    def first(metadata: Metadata) -> Any:
        return metadata.state_dict_metadata["model.a"]

    def piece(metadata: Metadata) -> Any:
        return first(metadata).chunks[0]

    return {
        "index is a pickle that makes a folder": _index(lambda m, mark: pickle.dumps(Mark(mark))),
        "index is a pickle that evaluates": _index(lambda m, mark: pickle.dumps(Mark(mark, eval))),
        "old pickle that makes a folder": _index(lambda m, mark: pickle.dumps(Mark(mark), protocol=0)),
        "pickle inside planner data": _index(lambda m, mark: setattr(m, "planner_data", Mark(mark))),
        "pickle inside a name": _index(lambda m, mark: m.state_dict_metadata.update({"x": Mark(mark)})),
        "pickle inside a dtype": _index(lambda m, mark: setattr(first(m).properties, "dtype", Mark(mark))),
        "pickle inside a place": _index(lambda m, mark: _place(length=Mark(mark))(m, mark)),
        "torch.load inside": _index(lambda m, mark: setattr(m, "planner_data", Mark(mark, torch.load))),
        "a way through torch": _index(
            lambda m, mark: b"\x80\x04\x8c\x05torch\x8c\tos.system\x93\x8c\x04true\x85R."
        ),
        "a method of a record": _index(
            lambda m, mark: b"\x80\x04\x8c\x05torch\x8c\x0dSize.__repr__\x93\x29R."
        ),
        "a list": _index(lambda m, mark: [1, 2]),
        "nothing": _index(lambda m, mark: pickle.dumps(None)),
        "a path up": _index(_place(relative_path="../../evil")),
        "an absolute path": _index(_place(relative_path="/etc/passwd")),
        "a path of another system": _index(_place(relative_path="..\\evil")),
        "an empty path": _index(_place(relative_path="")),
        "the folder itself": _index(_place(relative_path="..")),
        "a path with a zero byte": _index(_place(relative_path="a\0b")),
        "a path that is bytes": _index(_place(relative_path=b"__0_0.distcp")),
        "a file that is not there": _index(_place(relative_path="other")),
        "a place before the file": _index(_place(offset=-1)),
        "a place behind the file": _index(_place(offset=1 << 40)),
        "a length that is no number": _index(_place(length="8")),
        "an extension": _index(_place(transform_descriptors=["evil.Transform"])),
        "no places": _index(with_("storage_data", None)),
        "places lost": _index(with_("storage_data", {})),
        "entries in a list": _index(with_("state_dict_metadata", [])),
        "a negative shape": _index(lambda m, mark: setattr(first(m), "size", (-1, 8))),
        "a piece outside": _index(lambda m, mark: setattr(piece(m), "offsets", torch.Size([60, 0]))),
        "a piece of other dims": _index(lambda m, mark: setattr(piece(m), "sizes", torch.Size([64]))),
        "pieces that are no list": _index(lambda m, mark: setattr(first(m), "chunks", None)),
        "a link out": _link_out,
    }


def _link_out(folder: Path, choose: random.Random, mark: Path) -> None:
    path = CheckpointStore(folder).path(1)
    outside = folder / "outside"
    shutil.move(path / _DATA, outside)
    (path / _DATA).symlink_to(outside)


def _hostile_payloads() -> dict[str, Any]:
    return {
        "tensor is a pickle that makes a folder": _payload("tensor", lambda mark: _torch_bytes(Mark(mark))),
        "tensor is an old pickle": _payload(
            "tensor", lambda mark: _torch_bytes(Mark(mark), _use_new_zipfile_serialization=False)
        ),
        "tensor is a bare pickle": _payload("tensor", lambda mark: pickle.dumps(Mark(mark))),
        "tensor is another": _payload("tensor", lambda mark: _torch_bytes(torch.zeros(3))),
        "tensor is a text": _payload("tensor", lambda mark: _torch_bytes("text")),
        "tensor is noise": _payload("tensor", lambda mark: bytes(range(256))),
        "value is a pickle that makes a folder": _payload("value", lambda mark: _torch_bytes(Mark(mark))),
        "value is a pickle that evaluates": _payload("value", lambda mark: _torch_bytes(Mark(mark, eval))),
        "value is an old pickle": _payload(
            "value", lambda mark: _torch_bytes(Mark(mark), _use_new_zipfile_serialization=False)
        ),
        "value is a bare pickle": _payload("value", lambda mark: pickle.dumps(Mark(mark))),
        "value is noise": _payload("value", lambda mark: bytes(range(256))),
    }


def _hostile_manifests() -> dict[str, Any]:
    def files(**changed: Any) -> Callable[[dict[str, Any]], None]:
        return lambda manifest: manifest["files"].update(changed)

    fine = {"bytes": 1, "crc32": 1}
    return {
        "manifest names a path up": _manifest(files(**{"../../evil": fine})),
        "manifest names an absolute path": _manifest(files(**{"/etc/passwd": fine})),
        "manifest names a file that is not there": _manifest(files(other=fine)),
        "manifest has sizes as texts": _manifest(files(other={"bytes": "1", "crc32": 1})),
        "manifest has unknown sums": _manifest(files(other={"md5": 1})),
        "manifest has files in a list": _manifest(lambda manifest: {**manifest, "files": [1]}),
        "manifest has no files": _manifest(lambda manifest: {"info": {}}),
        "manifest has info of a number": _manifest(lambda manifest: {**manifest, "info": 3}),
        "manifest is a list": _manifest(lambda manifest: [manifest]),
        "manifest is a pickle": lambda folder, choose, mark: (
            CheckpointStore(folder).path(1) / _MANIFEST
        ).write_bytes(pickle.dumps(Mark(mark))),
        "manifest is very deep": lambda folder, choose, mark: (
            CheckpointStore(folder).path(1) / _MANIFEST
        ).write_text("[" * 100_000),
    }


def _hostile_weights() -> dict[str, Any]:
    index = "model.safetensors.index.json"

    def named(file: Any) -> Callable[[Path], bytes]:
        return lambda mark: json.dumps({"weight_map": {"weight": file, "bias": file}}).encode()

    def tensor(**changes: Any) -> Callable[[Path, random.Random, Path], None]:
        return _header(lambda header: header["weight"].update(changes))

    return {
        "index with a path up": _write(index, named("../weights/one.safetensors")),
        "index with an absolute path": _write(index, named("/etc/passwd")),
        "index with a number": _write(index, named(3)),
        "index with a file that is not there": _write(index, named("two.safetensors")),
        "index is a list": _write(index, lambda mark: b"[]"),
        "index is a pickle": _write(index, lambda mark: pickle.dumps(Mark(mark))),
        "file is a pickle": _write("one.safetensors", lambda mark: pickle.dumps(Mark(mark))),
        "file is a pickle of torch": _write("one.safetensors", lambda mark: _torch_bytes(Mark(mark))),
        "file is empty": _on("one.safetensors", _empty),
        "negative shape": tensor(shape=[-4, -8]),
        "shape of texts": tensor(shape=["4", "8"]),
        "shape of booleans": tensor(shape=[True, 32]),
        "shape too large": tensor(shape=[1 << 60, 1 << 60]),
        "unknown type": tensor(dtype="F128"),
        "place before the data": tensor(data_offsets=[-128, 0]),
        "place behind the data": tensor(data_offsets=[1 << 40, (1 << 40) + 128]),
        "place that ends first": tensor(data_offsets=[128, 0]),
        "a tensor that is a list": _header(lambda header: {"weight": [1]}),
        "header is a list": _header(lambda header: [1]),
    }


def _empty(path: Path, choose: random.Random) -> None:
    path.write_bytes(b"")


def _python(mark: Path) -> bytes:
    return f"__import__('os').mkdir('{mark}')".encode()


def _hostile_tokens() -> dict[str, Any]:
    def array(value: Any) -> Callable[[Path], bytes]:
        def make(mark: Path) -> bytes:
            file = io.BytesIO()
            np.save(file, value(mark) if callable(value) else value, allow_pickle=True)
            return file.getvalue()

        return make

    return {
        "array of objects": _write("tokens.npy", array(lambda mark: np.array([Mark(mark)], dtype=object))),
        "array is a pickle": _write("tokens.npy", lambda mark: pickle.dumps(Mark(mark))),
        "array of floats": _write("tokens.npy", array(np.zeros(4000))),
        "array of two dims": _write("tokens.npy", array(np.zeros((40, 100), dtype=np.int64))),
        "array is noise": _write("tokens.npy", lambda mark: bytes(range(256))),
        "header that evaluates": _write(
            "tokens.npy", lambda mark: b"\x93NUMPY\x01\x00v\x00" + _python(mark).ljust(118)
        ),
    }


def _hostile_configs() -> dict[str, Any]:
    texts = {
        "bytes that are no text": b"\xff\xfe[run]",
        "half a table": b"[run\nsteps = 8",
        "an unknown section": b"[ruin]\nsteps = 8",
        "an unknown key": b"[run]\nstep = 8",
        "a key of another section": b"[run]\nlr = 0.5",
        "a section that is a number": b"run = 3",
        "a number as a text": b'[run]\nsteps = "8"',
        "a truth as a number": b"[run]\nsteps = true",
        "not a number": b"[optimizer]\nlr = nan",
        "below zero": b"[run]\nsteps = -8",
        "an unknown choice": b'[optimizer]\noptimizer = "sgd"',
        "a table as a text": b'[sharding]\ngranularity = "rows"',
        "a list of numbers": b"[data]\ndata = [1, 2]",
        "the same key twice": b"[run]\nsteps = 8\nsteps = 9",
        "very deep": b"[run]\nsteps = " + b"[" * 20_000,
    }
    made = {name: _write("run.toml", lambda mark, text=text: text) for name, text in texts.items()}
    return {**made, "a pickle": _write("run.toml", lambda mark: pickle.dumps(Mark(mark)))}


def _hostile_models() -> dict[str, Any]:
    def remote_code(folder: Path, choose: random.Random, mark: Path) -> None:
        (folder / "evil.py").write_text(f"import os\nos.mkdir({str(mark)!r})\n")
        config = {
            "model_type": "evil",
            "auto_map": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"},
        }
        (folder / "config.json").write_text(json.dumps(config))

    return {
        "code of its own": remote_code,
        "config is a pickle": _write("config.json", lambda mark: pickle.dumps(Mark(mark))),
        "config cut": _on("config.json", _cut),
        "config of an unknown model": _write("config.json", lambda mark: b'{"model_type": "nothing"}'),
        "config is a list": _write("config.json", lambda mark: b"[1]"),
    }


def try_case(case: Case, folder: Path, wholes: Path, seed: int) -> str:
    """``refused``, or what happened instead."""
    place = folder / "case" / case.whole
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(wholes / case.whole, place)
    mark = folder / "mark"
    case.change(place, random.Random(seed), mark)
    try:
        case.open(place)
        said = None
    except ValueError as error:
        said = str(error)
    except BaseException as error:
        return f"ended with {type(error).__name__}: {error}"
    if mark.exists():
        return "ran what was in it"
    if said is None:
        return "was taken"
    names = (str(place), *(key for key in ("steps", "lr", "optimizer", "granularity", "data") if key in said))
    return "refused" if any(name in said for name in names) else f"refused without a name: {said}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE / "hostile.json")
    options = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory() as name:
        wholes = Path(name) / "whole"
        wholes.mkdir()
        make_whole(wholes)
        for seed, case in enumerate(cases()):
            results[case.name] = try_case(case, Path(name) / "try", wholes, seed)
            if results[case.name] != "refused":
                print(case.name, "->", results[case.name], flush=True)
    refused = sum(result == "refused" for result in results.values())
    summary = {"cases": len(results), "refused": refused, "torch": torch.__version__, "results": results}
    options.out.write_text(json.dumps(summary, indent=1) + "\n")
    print(f"{refused} of {len(results)} refused by name, with nothing run")
    if refused < len(results):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
