"""Text to token ids: bytes, or a Hugging Face tokenizer in a local folder; and marks around documents."""

import hashlib
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ragged_fsdp.trainer.config_file import ConfigError

__all__ = ["ByteTokenizer", "DocumentMarks", "Tokenizer", "document_marks", "has_tokenizer", "open_tokenizer"]

_ONE_OF = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
)
_FILES = ("tokenizer*", "vocab*", "merges*", "special_tokens*", "added_tokens*", "*.model", "*.tiktoken")


class Tokenizer(Protocol):
    """Text to token ids and back."""

    vocab_size: int
    description: str
    """In words, for the user."""
    digest: str
    """A hash of all that decides the ids: equal hashes mean equal ids, wherever the tokenizer lies."""
    begin: int | None
    """The token that begins a document, if there is one."""
    end: int | None
    """The token that ends a document, if there is one."""
    begins_by_itself: bool
    """Whether the model expects ``begin``: the tokenizer puts it there when asked for special tokens."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...


class ByteTokenizer:
    """UTF-8 bytes are the tokens; a zero byte ends a document."""

    vocab_size = 256
    description = "bytes"
    digest = "bytes"
    begin: int | None = None
    end: int | None = 0
    begins_by_itself = False

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        # a model may have more tokens than there are bytes, and say one that stands for none
        unknown = "\ufffd".encode()
        return b"".join(bytes([i]) if i < 256 else unknown for i in ids).decode(errors="replace")


class FolderTokenizer:
    """A Hugging Face tokenizer saved in a local folder."""

    def __init__(self, folder: str) -> None:
        from transformers import AutoTokenizer

        if not Path(folder).is_dir():
            raise ConfigError(
                f"tokenizer = {folder!r}: no such folder; use 'auto', 'bytes' or a tokenizer's folder"
            )
        try:
            self._inner: Any = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # the library raises errors of several kinds
            raise ConfigError(f"tokenizer = {folder!r}: transformers cannot read it: {error}") from error
        self.vocab_size = len(self._inner)
        self.description = f"{folder} ({self.vocab_size:,} tokens)"
        self.begin, self.end = self._inner.bos_token_id, self._inner.eos_token_id
        with_special = self._inner.encode("a")
        self.begins_by_itself = self.begin is not None and with_special[:1] == [self.begin]
        self.digest = _digest(self._inner, Path(folder))

    def encode(self, text: str) -> list[int]:
        return self._inner.encode(text, add_special_tokens=False)

    def decode(self, ids: list[int]) -> str:
        return str(self._inner.decode(ids))


def _digest(tokenizer: Any, folder: Path) -> str:
    """A hash of the tokenizer's content: its path stays the same where it is trained again in place."""
    content = hashlib.sha256(f"{tokenizer.bos_token_id} {tokenizer.eos_token_id}".encode())
    if tokenizer.is_fast:
        content.update(tokenizer.backend_tokenizer.to_str().encode())
    else:
        for file in sorted({file for pattern in _FILES for file in folder.glob(pattern) if file.is_file()}):
            content.update(file.name.encode() + file.read_bytes())
    return content.hexdigest()[:24]


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder holds a Hugging Face tokenizer."""
    return any((folder / name).is_file() for name in _ONE_OF)


def open_tokenizer(setting: str, model: str) -> Tokenizer:
    """The tokenizer that a setting means; ``auto`` is that of the model's folder, or bytes if it has none."""
    if setting == "bytes":
        return ByteTokenizer()
    if setting == "auto":
        return FolderTokenizer(model) if has_tokenizer(Path(model)) else ByteTokenizer()
    return FolderTokenizer(setting)


class DocumentMarks:
    """Ids put before and after each document, unless it has them already."""

    def __init__(self, begin: int | None, end: int | None) -> None:
        self.begin, self.end = begin, end

    def add(self, ids: np.ndarray) -> np.ndarray:
        """``ids`` of one document with its marks."""
        before = [self.begin] if self.begin is not None and ids[:1].tolist() != [self.begin] else []
        after = [self.end] if self.end is not None and ids[-1:].tolist() != [self.end] else []
        return np.concatenate([np.asarray(part, dtype=ids.dtype) for part in (before, ids, after)])

    def __str__(self) -> str:
        marks = [("begin", self.begin), ("end", self.end)]
        said = [f"{verb} with token {token}" for verb, token in marks if token is not None]
        return f"documents {' and '.join(said)}" if said else "documents are joined with nothing between them"


def document_marks(setting: str, tokenizer: Tokenizer) -> DocumentMarks:
    """The marks that a setting means for a tokenizer; refuses one that the tokenizer has no token for."""
    wanted = {
        "auto": (tokenizer.begins_by_itself, tokenizer.end is not None),
        "eos": (False, True),
        "bos": (True, False),
        "both": (True, True),
        "none": (False, False),
    }[setting]
    for wants, token, name in zip(wanted, (tokenizer.begin, tokenizer.end), ("bos", "eos"), strict=True):
        if wants and token is None:
            raise ConfigError(f"document_marks = {setting}: {tokenizer.description} has no {name} token")
    return DocumentMarks(tokenizer.begin if wanted[0] else None, tokenizer.end if wanted[1] else None)
