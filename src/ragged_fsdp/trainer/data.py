"""Where tokens come from: every source becomes one flat, memory-mapped array.

Text is tokenised once into a file in ``$RAGGED_FSDP_CACHE`` (by default ``~/.cache/ragged_fsdp``), named by
a digest of its sources and of the tokenizer's content, and written under a temporary name, so that processes
that race for it all end with the same complete file.
"""

import glob
import hashlib
import importlib.util
import json
import os
import sysconfig
import uuid
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ragged_fsdp.trainer.config import DataConfig
from ragged_fsdp.trainer.config_file import ConfigError
from ragged_fsdp.trainer.tokenizers import (
    ByteTokenizer,
    DocumentMarks,
    Tokenizer,
    document_marks,
    open_tokenizer,
)

__all__ = ["Tokens", "open_tokens"]

_STDLIB = "stdlib"
_SAMPLED_PLACES, _SAMPLED_TOKENS = 64, 4096
_SUMMED_BLOCKS, _SUMMED_BYTES = 64, 1 << 20


@dataclass(frozen=True)
class Tokens:
    """The two parts of the data, and how to read them."""

    train: np.ndarray
    evaluation: np.ndarray
    tokenizer: Tokenizer
    description: str
    tokenizer_description: str
    """Which tokenizer, and what stands between documents."""

    @cached_property
    def digest(self) -> str:
        """A hash of the number of tokens and of samples, the same wherever and however they are stored."""
        content = hashlib.sha256(f"{len(self.train)} {len(self.evaluation)}".encode())
        for sample in self.samples():
            content.update(sample.tobytes())
        return content.hexdigest()[:24]

    def samples(self) -> Iterator[np.ndarray]:
        """Tokens from places spread over both parts, which are all of them unless they are many."""
        for part in (self.train, self.evaluation):
            last = max(0, len(part) - _SAMPLED_TOKENS)
            for start in np.linspace(0, last, _SAMPLED_PLACES, dtype=np.int64):
                yield part[start : start + _SAMPLED_TOKENS].astype(np.int64)


def open_tokens(config: DataConfig, model: str = "") -> Tokens:
    """Find, tokenise if needed, and map the data; refuses what does not exist.

    ``model`` is the setting of that name: a folder may bring a tokenizer along.
    """
    tokenizer = open_tokenizer(config.tokenizer, model)
    marks = document_marks(config.document_marks, tokenizer)
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
        flat, between = _token_file(token_files[0], config.token_dtype), "tokens are taken as they are stored"
    elif datasets:
        flat, between = _dataset(datasets[0], config, tokenizer, marks)
    else:
        files = _text_files(sources)
        stats = [(name, path.stat().st_size, path.stat().st_mtime_ns) for name, path in files]
        documents = (_encoded(path, tokenizer) for _, path in files)
        flat, between = _cached(str(stats), documents, tokenizer, marks), str(marks)
    return _split(flat, config, tokenizer, f"tokenizer {tokenizer.description}; {between}")


def _split(flat: np.ndarray, config: DataConfig, tokenizer: Tokenizer, how: str) -> Tokens:
    """The first tokens train, the last evaluate; each part needs at least one sequence."""
    cut = len(flat) - round(len(flat) * config.eval_fraction)
    need = config.seq_len + 1
    if cut < need:
        raise ConfigError(f"data: {cut} training tokens are less than one sequence of {need}; lower seq_len")
    if config.eval_fraction and len(flat) - cut < need:
        raise ConfigError(
            f"eval_fraction = {config.eval_fraction}: leaves {len(flat) - cut} tokens, less than a sequence "
            f"of {need}"
        )
    description = f"{', '.join(config.data)}: {cut:,} training and {len(flat) - cut:,} evaluation tokens"
    return Tokens(flat[:cut], flat[cut:], tokenizer, description, how)


def _token_file(path: Path, dtype: str) -> np.ndarray:
    if not path.exists():
        raise ConfigError(f"data: {path} does not exist")
    if path.suffix == ".npy":
        try:
            tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, OSError, EOFError, SyntaxError, MemoryError) as error:
            raise ConfigError(f"data: {path} is no array of tokens: {error}") from error
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
    try:
        return np.memmap(path, dtype=dtype, mode="r")
    except OSError as error:
        raise ConfigError(f"data: {path} cannot be read: {error.strerror}") from error


def _text_files(sources: list[str]) -> list[tuple[str, Path]]:
    """(name, path) of every file, in an order that mixes folders but never changes."""
    found: dict[str, Path] = {}
    for source in sources:
        if source == _STDLIB:
            found.update(_stdlib_files())
            continue
        if (Path(source) / "dataset_dict.json").exists():
            parts = ", ".join(str(path.parent) for path in sorted(Path(source).glob("*/dataset_info.json")))
            raise ConfigError(f"data: {source} holds several datasets; name one: {parts}")
        found_by_pattern = sorted(p for p in glob.glob(source, recursive=True) if os.path.isfile(p))
        matches = [source] if os.path.isfile(source) else found_by_pattern
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


def _encoded(path: Path, tokenizer: Tokenizer) -> np.ndarray:
    raw = path.read_bytes()
    if isinstance(tokenizer, ByteTokenizer):
        return np.frombuffer(raw, dtype=np.uint8)
    return np.asarray(tokenizer.encode(raw.decode(errors="replace")), dtype=np.int64)


def _dataset(
    folder: Path, config: DataConfig, tokenizer: Tokenizer, marks: DocumentMarks
) -> tuple[np.ndarray, str]:
    """The tokens of a Hugging Face dataset, and what stands between its documents."""
    if importlib.util.find_spec("datasets") is None:
        raise ConfigError(f"data: {folder} needs the package datasets, which is not installed")
    from datasets import load_from_disk

    # a dataset may be stored with a format, under which rows are arrays, or lack a column
    dataset, column = load_from_disk(str(folder)).with_format(None), config.text_column
    if column not in dataset.column_names:
        raise ConfigError(f"text_column = {column!r}: {folder} has {', '.join(dataset.column_names)}")
    is_text = getattr(dataset.features[column], "dtype", "") in ("string", "large_string")
    if not is_text and isinstance(tokenizer, ByteTokenizer) and config.document_marks == "auto":
        marks = DocumentMarks(None, None)  # ids of a tokenizer that is not here: zero may be any token of it
    nothing: Any = "" if is_text else []
    values = (row[column] or nothing for row in dataset)  # a row may have none
    documents = (np.asarray(tokenizer.encode(v) if is_text else v, dtype=np.int64) for v in values)
    files = [p for p in sorted(folder.rglob("*")) if p.is_file()]
    stats = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in files]
    flat = _cached(f"{column}{folder.resolve()}{stats}", documents, tokenizer, marks, wide=not is_text)
    return flat, str(marks)


def _cached(
    sources: str,
    documents: Iterable[np.ndarray],
    tokenizer: Tokenizer,
    marks: DocumentMarks,
    *,
    wide: bool = False,
) -> np.ndarray:
    """The documents as one mapped array; they are only read if the cache has no file for them.

    ``wide`` is for ids that need not be the tokenizer's.
    """
    dtype = np.dtype(np.uint8 if tokenizer.vocab_size <= 256 and not wide else np.uint32)
    key = f"{tokenizer.digest}{marks.begin} {marks.end}{sources}"
    path = _cache_folder() / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.{dtype.name}"
    sums = path.with_name(f"{path.name}.json")
    if not (path.exists() and sums.exists()):
        try:
            _write_tokens(path, sums, (marks.add(document).astype(dtype) for document in documents))
        except OSError as error:
            raise ConfigError(
                f"data: {error}; tokens are kept in RAGGED_FSDP_CACHE = {path.parent}"
            ) from error
    if path.stat().st_size == 0:
        raise ConfigError("data: the sources hold no text")
    try:
        whole = json.loads(sums.read_text()) == _sums(path)
    except ValueError:
        whole = False
    if not whole:
        raise ConfigError(
            f"data: the cached tokens in {path} have changed since they were written; delete them"
        )
    return np.memmap(path, dtype=dtype, mode="r")


def _cache_folder() -> Path:
    """Where tokenised text is kept."""
    try:
        return Path(os.environ.get("RAGGED_FSDP_CACHE") or Path.home() / ".cache" / "ragged_fsdp")
    except RuntimeError as error:  # a user without a home
        raise ConfigError(f"data: no folder for tokens: {error} Set RAGGED_FSDP_CACHE") from error


def _write_tokens(path: Path, sums: Path, documents: Iterable[np.ndarray]) -> None:
    """The tokens and their checksums, each under its name once it is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    own = uuid.uuid4().hex  # processes of several containers may have one id
    temporary, written = path.with_suffix(f".tmp-{own}"), sums.with_suffix(f".tmp-{own}-json")
    try:
        with temporary.open("wb") as out:
            for document in documents:
                out.write(document.tobytes())
        written.write_text(json.dumps(_sums(temporary)))
        os.replace(temporary, path)
        os.replace(written, sums)
    finally:
        temporary.unlink(missing_ok=True)
        written.unlink(missing_ok=True)


def _sums(path: Path) -> dict[str, int]:
    """Size of a file and CRC-32 of blocks spread over it, which are all of it unless it is large."""
    size, crc = path.stat().st_size, 0
    with path.open("rb") as file:
        for index in range(_SUMMED_BLOCKS):
            file.seek(index * size // _SUMMED_BLOCKS)
            crc = zlib.crc32(file.read(min(_SUMMED_BYTES, -(-size // _SUMMED_BLOCKS))), crc)
    return {"bytes": size, "crc32": crc}
