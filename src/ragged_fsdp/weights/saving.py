"""``save``: a sharded model as a folder that is ready to serve, or its adapter as PEFT writes it.

The weights come as a stream to one rank, which writes them as they come: memory holds two groups, whatever
the size of the model. Nothing is under the folder's name until everything is there.
"""

from __future__ import annotations

import copy
import fcntl
import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ragged_fsdp.agreement import together
from ragged_fsdp.checkpoint.place import is_url
from ragged_fsdp.checkpoint.safetensors_writer import TensorToWrite, write_safetensors
from ragged_fsdp.fsdp.runtime.module import reshard_all
from ragged_fsdp.packing import is_packed
from ragged_fsdp.weights.adapters import Adapters
from ragged_fsdp.weights.names import Naming
from ragged_fsdp.weights.sources import sent_dtype, whole_of
from ragged_fsdp.weights.streaming import Stream, stream
from ragged_fsdp.weights.targets import Target, holders_of, targets_of

__all__ = ["copy_serving", "new_folder", "save"]

T = TypeVar("T")
_SERVING = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
"""What a server reads beside the weights."""


def save(
    model: nn.Module,
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    names: Naming | Mapping[str, str] | None = None,
    adapter: str | None = None,
    source: str | Path | None = None,
    max_file_bytes: int = 5 * 2**30,
    overwrite: bool = False,
) -> None:
    """Write the weights of ``model`` as safetensors to the new folder ``folder``, ready to serve.

    All ranks call it; rank 0 writes. Names, casts and LoRA adapters, which are merged, are those of
    :func:`stream`. A model of transformers gets its ``config.json``, and what its source has for a server:
    tokenizer, generation settings, ``use_cache``.

    Args:
        adapter: write this adapter of a PEFT model alone, as PEFT does, instead of the weights.
        source: the Hugging Face folder the model comes from; default is where ``from_pretrained`` found it.
        max_file_bytes: of a file; more are several, with an index.
        overwrite: replace a folder that is there. Else that is refused, unless it is empty.

    Raises:
        ValueError: on every rank, if the model cannot be streamed or the folder cannot be taken.
    """
    chosen = _on_all(lambda: _checked(model, folder, dtype, names, adapter, source, max_file_bytes))
    if len(set(chosen)) > 1:
        raise ValueError(f"save: the ranks do not save the same: adapter= is {chosen} on ranks 0, 1, ...")
    folder, first = Path(folder), not dist.is_initialized() or dist.get_rank() == 0
    if adapter is not None:
        _save_adapter(model, folder, adapter, dtype, first, overwrite)
        return
    streams: list[Stream] = []

    def contents() -> str:
        streams.append(stream(model, dtype=dtype, names=names, to=_receiver(model)))
        records = [(record.name, record.shape, record.dtype) for record in streams[0].metadata()]
        return hashlib.sha256(repr(records).encode()).hexdigest()

    _refuse_parts(_on_all(contents))  # the stream compares ranks that share a group alone
    made = streams[0]
    several = len(set(_on_all(lambda: made.to))) > 1
    with ExitStack() as stack:

        def begin() -> Path | None:
            if not first:
                return None
            writing = stack.enter_context(new_folder(folder, overwrite=overwrite))
            _describe(Adapters(model).base, writing, dtype, source, {r.name for r in made.metadata()})
            return writing

        writing: Any = _on_all(begin)[0]

        def pass_on() -> dict[str, int]:
            sums: dict[str, int] = {}
            with iter(made) as buckets:  # what fails on rank 0 ends the pass on all
                values = _summed(made, buckets, sums if several else None)
                if first:
                    planned = [TensorToWrite(r.name, r.shape, r.dtype) for r in made.metadata()]
                    write_safetensors(writing, planned, values, max_file_bytes=max_file_bytes)
                else:
                    for _ in values:
                        pass
            return sums

        # after the last gather a pass tells nobody: the others would wait for rank 0 below
        _refuse_others(_on_all(pass_on))
        _on_all(stack.pop_all().close)


def _checked(
    model: Any, folder: Any, dtype: Any, names: Any, adapter: str | None, source: Any, max_file_bytes: Any
) -> str | None:
    """The adapter to save; raises if an argument cannot be used."""
    if is_url(os.fspath(folder)):
        raise ValueError(f"save: weights are written to a folder; {folder} is a URL")
    if type(max_file_bytes) is not int or max_file_bytes < 1:
        raise ValueError(f"save: max_file_bytes must be a positive number, got {max_file_bytes!r}")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"save: dtype must be a floating-point dtype or None, got {dtype!r}")
    if adapter is None:
        return None
    if names is not None or source is not None:
        raise ValueError("save: adapter= writes PEFT's files; names= and source= are for whole models")
    if adapter not in getattr(model, "peft_config", {}):
        known = sorted(getattr(model, "peft_config", {}))
        raise ValueError(f"save: the model has no adapter {adapter!r}; it has {known}")
    return adapter


def _summed(
    made: Stream, buckets: Iterable[Any], sums: dict[str, int] | None
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a pass on the host, and in ``sums``, unless that is None, the CRC-32 of each parameter.

    Buffers are not compared: copies of a model count what each of them has seen.
    """
    compared = made.parameter_names()
    for bucket in buckets:
        for name, value in bucket.tensors():
            held = value.cpu()
            if sums is not None and name in compared:
                sums[name] = _sum(held)
            yield name, held


def _sum(value: Tensor) -> int:
    return zlib.crc32(value.contiguous().view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def _refuse_parts(held: list[str]) -> None:
    """Raise where what a rank holds is described in another way than what rank 0 holds."""
    if other := next((rank for rank, text in enumerate(held) if text != held[0]), None):
        raise ValueError(
            f"save: rank {other} does not have the tensors that rank 0 has, as in a pipeline; the folder "
            "would hold a part of the model"
        )


def _refuse_others(sums: list[dict[str, int]]) -> None:
    """Raise where a rank got other values than rank 0: stages with the same names, or copies that differ."""
    for rank, own in enumerate(sums):  # ranks that get nothing have no sums
        if other := next((name for name in own if own[name] != sums[0][name]), None):
            raise ValueError(
                f"save: rank {rank} has other values of {other!r} than rank 0, as equal stages of a pipeline "
                "have, or copies that were trained apart; the folder would hold a part of the model"
            )


def _receiver(model: nn.Module) -> int:
    """Rank 0, or of a copy on other ranks the first of them: what it gets is compared, and not written."""
    reshard_all(model)
    own = dist.get_rank() if dist.is_initialized() else 0
    holders = holders_of(targets_of(model)) or [own]
    return 0 if 0 in holders else holders[0]


def _on_all(action: Callable[[], T]) -> list[T]:
    """What it returns on every rank; raises on all if it fails on one."""
    return together(action, None) if dist.is_initialized() else [action()]


def _describe(
    base: Any, folder: Path, dtype: torch.dtype | None, source: str | Path | None, sent: set[str]
) -> None:
    """Write the config of a model of transformers, and copy what a server needs."""
    if not hasattr(getattr(base, "config", None), "to_json_string"):
        if source is not None:
            copy_serving(Path(source), folder)
        return
    config = copy.deepcopy(base.config)
    library = next(cls for cls in type(base).__mro__ if cls.__module__.startswith("transformers."))
    config.architectures = config.architectures or [library.__name__]
    given = json.loads(config.to_json_string())
    if any(is_packed(parameter) for parameter in base.parameters()):
        given.pop("quantization_config", None)  # what is written are values: a reader would look for codes
    if dtype is not None:
        given["dtype"] = str(dtype).removeprefix("torch.")
    if given.get("tie_word_embeddings") and sent & set(getattr(base, "_tied_weights_keys", None) or ()):
        given["tie_word_embeddings"] = False  # an adapter has trained a copy of one: both are there
    origin = Path(source if source is not None else base.name_or_path or "/nowhere")
    if (origin / "config.json").is_file():
        stored = json.loads((origin / "config.json").read_text())
        given.pop("use_cache", None)  # training switches it off
        given.update({"use_cache": stored["use_cache"]} if "use_cache" in stored else {})
    elif source is not None:
        raise ValueError(f"save: source={str(source)!r} has no config.json")
    if getattr(base, "generation_config", None) is not None:
        base.generation_config.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(given, indent=2, sort_keys=True) + "\n")
    copy_serving(origin, folder)


def copy_serving(origin: Path, folder: Path) -> None:
    """Copy the tokenizer and generation settings that ``origin`` has."""
    for name in _SERVING:
        if (origin / name).is_file():
            shutil.copyfile(origin / name, folder / name)


@contextmanager
def new_folder(out: Path, *, overwrite: bool) -> Iterator[Path]:
    """An empty folder to write to, which becomes ``out`` at the end; nothing is left of one that fails.

    Two that write to one ``out`` at a time would mix their files: the second is refused.
    """
    out = out.resolve()  # of a link the folder it leads to is replaced; "." has no name
    writing, replaced = out.with_name(f".writing-{out.name}"), out.with_name(f".replaced-{out.name}")
    with _locked(writing):
        try:
            if out.exists() and not out.is_dir():
                raise ValueError(f"{out} is no folder; give another")
            if Path.cwd().is_relative_to(out):  # an empty name means it too
                raise ValueError(f"{out} is, or holds, the working directory; give another folder")
            if out.exists() and not overwrite and any(out.iterdir()):
                raise ValueError(
                    f"{out} exists and is not empty; give another folder, or overwrite=True (--overwrite)"
                )
            yield writing
            if out.exists():
                shutil.rmtree(replaced, ignore_errors=True)
                os.rename(out, replaced)
            os.rename(writing, out)
            shutil.rmtree(replaced, ignore_errors=True)
        except BaseException:
            shutil.rmtree(writing, ignore_errors=True)
            raise


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a folder that is emptied of what a crash left; the system lets go of it when the process ends."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            handle = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:  # another has given it its name, or up, in between
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if folder.exists() and os.path.samestat(os.fstat(handle), folder.stat()):
                for left in folder.iterdir():
                    shutil.rmtree(left) if left.is_dir() else left.unlink()
                yield
                return
        except BlockingIOError as error:
            raise ValueError(f"{folder} is being written by another process") from error
        finally:
            os.close(handle)


def _save_adapter(
    model: Any, folder: Path, adapter: str, dtype: torch.dtype | None, first: bool, overwrite: bool
) -> None:
    """The adapter's own tensors, gathered one by one, in the files PEFT reads."""
    held: list[Target] = []

    def contents() -> str:
        adapters = Adapters(model, merging=False)
        held.extend(t for t in targets_of(model) if adapters.in_adapter(t.name, adapter) is not None)
        if without := [target.name for target in held if target.tensor.is_meta]:
            raise ValueError(f"save: {without[0]!r} is on the meta device and has no weights")
        return repr([(target.name, target.tensor.shape, target.tensor.dtype) for target in held])

    _refuse_parts(_on_all(contents))
    several = len(set(_on_all(lambda: _receiver(model)))) > 1
    whole: dict[str, Tensor] = {}
    sums: dict[str, int] = {}
    for target in held:
        value = whole_of(target.tensor)  # every rank takes part
        if first:
            whole[target.name] = value.cpu().to(sent_dtype(value.dtype, dtype))
        if several and isinstance(target.tensor, nn.Parameter):
            sums[target.name] = _sum(value.cpu())
    _refuse_others(_on_all(lambda: sums))

    def write() -> None:
        if not first:
            return
        from peft import get_peft_model_state_dict
        from safetensors.torch import save_file

        found = get_peft_model_state_dict(model, whole, adapter, save_embedding_layers=False)
        config = copy.copy(model.peft_config[adapter])
        config.inference_mode = True
        with new_folder(folder, overwrite=overwrite) as writing:
            config.save_pretrained(writing)
            tensors = {name: value.contiguous() for name, value in found.items()}
            save_file(tensors, writing / "adapter_model.safetensors", metadata={"format": "pt"})

    _on_all(write)
