"""Where a checkpoint is: a folder, or a prefix of an object store that fsspec knows (``s3://bucket/run``).

``ObjectPath`` has as much of ``pathlib.Path`` as readers and writers of checkpoints need, so that both are
used alike. What an object store cannot do, such as to rename, is not there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["AnyPath", "ObjectPath", "is_url", "place"]

_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
"""The extra of this package that brings what a protocol needs."""


class _Size(NamedTuple):
    st_size: int


@dataclass(frozen=True)
class ObjectPath:
    """An object, or a prefix of objects, under its URL."""

    fs: Any
    """The ``AbstractFileSystem`` of fsspec."""
    url: str

    def __truediv__(self, name: str) -> ObjectPath:
        return ObjectPath(self.fs, f"{self.url}/{name}")

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        """What is behind the last slash."""
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> ObjectPath:
        """What is before the last slash."""
        return ObjectPath(self.fs, self.url.rpartition("/")[0])

    def resolve(self) -> ObjectPath:
        """Itself: there are no links."""
        return self

    def absolute(self) -> ObjectPath:
        """Itself: a URL does not depend on the working directory."""
        return self

    def exists(self) -> bool:
        """Whether there is an object, or any below it."""
        self.fs.invalidate_cache()  # others write too: what was listed before may be wrong
        return bool(self.fs.exists(self.url))

    def is_file(self) -> bool:
        """Whether it is an object."""
        self.fs.invalidate_cache()
        return bool(self.fs.isfile(self.url))

    def is_dir(self) -> bool:
        """Whether there are objects below it."""
        return bool(self.fs.isdir(self.url))

    def iterdir(self) -> Iterator[ObjectPath]:
        """What is directly below it, in no order."""
        self.fs.invalidate_cache()
        try:
            found = self.fs.ls(self.url, detail=False)
        except FileNotFoundError:
            return
        own = self.fs._strip_protocol(self.url).rstrip("/")
        keys = {key.rstrip("/") for key in found} - {own, ""}  # a store may list the folder itself
        yield from (self / key.rpartition("/")[2] for key in keys)

    def stat(self) -> _Size:
        """What is asked of the object's metadata: its size."""
        return _Size(int(self.fs.info(self.url)["size"]))

    def open(self, mode: str = "rb") -> Any:
        """The object as a file; a new one appears when it is closed."""
        return self.fs.open(self.url, mode)

    def read_text(self) -> str:
        """The object's content as text."""
        with self.open() as file:
            return str(file.read().decode())

    def write_text(self, text: str) -> None:
        """Replace it, whole."""
        with self.open("wb") as file:
            file.write(text.encode())

    def remove(self) -> None:
        """Delete it and all below it."""
        if self.exists():
            self.fs.rm(self.url, recursive=True)


AnyPath = Path | ObjectPath


def is_url(text: str) -> bool:
    """Whether it names a place in an object store."""
    return "://" in text


def place(text: str) -> AnyPath:
    """The place with this name; ``ValueError`` says what is missing to open a URL."""
    if not is_url(text):
        return Path(text)
    if odd := sorted(set(text) & set("*?[")):  # fsspec would delete all that match
        raise ValueError(f"{text} cannot be opened: {odd[0]!r} stands for other names; use one without it")
    from fsspec.core import url_to_fs  # comes with torch

    protocol = text.partition("://")[0]
    options = {"auto_mkdir": True} if protocol in ("file", "local") else {}  # objects need no folders
    try:
        fs, _ = url_to_fs(text, **options)
    except (ImportError, ValueError) as error:
        extra = _EXTRAS.get(protocol)
        hint = f"; pip install '.[{extra}]' in a checkout" if extra and isinstance(error, ImportError) else ""
        raise ValueError(f"{text} cannot be opened: {error}{hint}") from error
    return ObjectPath(fs, text.rstrip("/"))
