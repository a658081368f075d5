"""Where tokens come from: every source becomes one flat, memory-mapped array.

Text is tokenised once into a file in ``$RAGGED_FSDP_CACHE`` (by default ``~/.cache/ragged_fsdp``), named by
a digest of its sources and written under a temporary name, so that processes that race for it all end with
the same complete file.
"""

import glob
import hashlib
import os
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from ragged_fsdp.trainer.config import DataConfig
from ragged_fsdp.trainer.config_file import ConfigError

__all__ = ["ByteTokenizer", "Tokenizer", "Tokens", "open_tokens"]

_STDLIB = "stdlib"
_SEPARATOR = 0  # a zero byte ends a document


class Tokenizer(Protocol):
    """Text to token ids and back."""

    vocab_size: int

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...


class ByteTokenizer:
    """UTF-8 bytes are the tokens."""

    vocab_size = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")


class FolderTokenizer:
    """A Hugging Face tokenizer saved in a local folder."""

    def __init__(self, folder: str) -> None:
        from transformers import AutoTokenizer

        if not Path(folder).is_dir():
            raise ConfigError(f"tokenizer = {folder!r}: no such folder; use 'bytes' or a tokenizer's folder")
        self._inner = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self.vocab_size = len(self._inner)

    def encode(self, text: str) -> list[int]:
        return self._inner.encode(text, add_special_tokens=False)

    def decode(self, ids: list[int]) -> str:
        return str(self._inner.decode(ids))


@dataclass(frozen=True)
class Tokens:
    """The two parts of the data, and how to read them."""

    train: np.ndarray
    evaluation: np.ndarray
    tokenizer: Tokenizer
    description: str


def open_tokens(config: DataConfig) -> Tokens:
    """Find, tokenise if needed, and map the data; refuses what does not exist."""
    tokenizer: Tokenizer = (
        ByteTokenizer() if config.tokenizer == "bytes" else FolderTokenizer(config.tokenizer)
    )
    sources = config.data
    if not sources:
        raise ConfigError("data: at least one source is needed, such as 'stdlib' or a glob of text files")
    token_files = [Path(s) for s in sources if s.endswith((".bin", ".npy"))]
    datasets = [Path(s) for s in sources if (Path(s) / "dataset_info.json").exists()]
    if (alone := [*token_files, *datasets]) and len(sources) > 1:
        raise ConfigError(
            f"data: {alone[0]} holds tokens or a dataset, so it must be the only source of {len(sources)}"
        )
    if token_files:
        flat = _token_file(token_files[0], config.token_dtype)
    elif datasets:
        key, documents = _dataset_key(datasets[0], config), _dataset_documents(datasets[0], config, tokenizer)
        flat = _cached(key, documents, tokenizer)
    else:
        files = _text_files(sources)
        flat = _cached(_files_key(files, config.tokenizer), _encoded(files, tokenizer), tokenizer)
    return _split(flat, config, tokenizer)


def _split(flat: np.ndarray, config: DataConfig, tokenizer: Tokenizer) -> Tokens:
    """The first tokens train, the last evaluate; each part needs at least one sequence."""
    if not 0 <= config.eval_fraction < 1:
        raise ConfigError(f"eval_fraction = {config.eval_fraction}: expected a share from 0 to below 1")
    cut = len(flat) - round(len(flat) * config.eval_fraction)
    need = config.seq_len + 1
    if cut < need:
        raise ConfigError(f"data: {cut} training tokens are less than one sequence of {need}; lower seq_len")
    if 0 < len(flat) - cut < need:
        raise ConfigError(
            f"eval_fraction = {config.eval_fraction}: leaves {len(flat) - cut} tokens, less than a sequence "
            f"of {need}"
        )
    description = f"{', '.join(config.data)}: {cut:,} training and {len(flat) - cut:,} evaluation tokens"
    return Tokens(flat[:cut], flat[cut:], tokenizer, description)


def _token_file(path: Path, dtype: str) -> np.ndarray:
    if not path.exists():
        raise ConfigError(f"data: {path} does not exist")
    if path.suffix == ".npy":
        tokens = np.load(path, mmap_mode="r")
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise ConfigError(
                f"data: {path} holds {tokens.dtype} of shape {tokens.shape}; expected flat integers"
            )
        return tokens
    item = np.dtype(dtype).itemsize
    if path.stat().st_size == 0 or path.stat().st_size % item:
        raise ConfigError(
            f"data: {path} has {path.stat().st_size} bytes, not a whole number of {dtype} tokens"
        )
    return np.memmap(path, dtype=dtype, mode="r")


def _text_files(sources: list[str]) -> list[tuple[str, Path]]:
    """(name, path) of every file, in an order that mixes folders but never changes."""
    found: dict[str, Path] = {}
    for source in sources:
        if source == _STDLIB:
            found.update(_stdlib_files())
            continue
        matches = sorted(p for p in glob.glob(source, recursive=True) if os.path.isfile(p))
        if not matches:
            raise ConfigError(f"data: {source!r} matches no file")
        found.update((match, Path(match)) for match in matches)
    return sorted(found.items(), key=lambda item: hashlib.sha256(item[0].encode()).digest())


def _stdlib_files() -> Iterator[tuple[str, Path]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__", "lib-dynload"}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if not skipped.intersection(name.parts):
            yield name.as_posix(), path


def _encoded(files: list[tuple[str, Path]], tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    for _, path in files:
        raw = path.read_bytes()
        if isinstance(tokenizer, ByteTokenizer):
            yield np.frombuffer(raw + bytes([_SEPARATOR]), dtype=np.uint8)
        else:
            yield np.asarray(tokenizer.encode(raw.decode(errors="replace")))


def _dataset_documents(folder: Path, config: DataConfig, tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    from datasets import load_from_disk

    dataset = load_from_disk(str(folder))
    if config.text_column not in dataset.column_names:
        raise ConfigError(
            f"text_column = {config.text_column!r}: {folder} has {', '.join(dataset.column_names)}"
        )
    for row in dataset:
        value = row[config.text_column]
        yield np.asarray(tokenizer.encode(value) if isinstance(value, str) else value)


def _files_key(files: list[tuple[str, Path]], tokenizer: str) -> str:
    stats = [(name, path.stat().st_size, path.stat().st_mtime_ns) for name, path in files]
    return f"{tokenizer}{stats}"


def _dataset_key(folder: Path, config: DataConfig) -> str:
    stats = [
        (p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in sorted(folder.rglob("*")) if p.is_file()
    ]
    return f"{config.tokenizer}{config.text_column}{folder.resolve()}{stats}"


def _cached(key: str, documents: Iterable[np.ndarray], tokenizer: Tokenizer) -> np.ndarray:
    """The documents as one mapped array; they are only read if the cache has no file for the key."""
    dtype = np.dtype(np.uint8 if tokenizer.vocab_size <= 256 else np.uint32)
    default = Path.home() / ".cache" / "ragged_fsdp"
    folder = Path(os.environ.get("RAGGED_FSDP_CACHE", default))
    path = folder / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.{dtype.name}"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".tmp-{os.getpid()}")
        with temporary.open("wb") as out:
            for document in documents:
                out.write(document.astype(dtype).tobytes())
        os.replace(temporary, path)
    if path.stat().st_size == 0:
        raise ConfigError("data: the sources hold no text")
    return np.memmap(path, dtype=dtype, mode="r")
