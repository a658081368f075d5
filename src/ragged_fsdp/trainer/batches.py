"""Which sequence is read when: a function of the seed and of the number of samples read so far.

Nothing here depends on the number of processes. The data is cut into windows of ``seq_len`` tokens; an
epoch visits each once, in an order that a keyed permutation gives without storing it; sample ``n`` of
the run is window ``permutation(n mod windows)`` of epoch ``n // windows``. A step takes the next
``batch`` samples, cuts them into micro-batches, and each of those over the data-parallel ranks::

    samples of a step   0 1 2 3 4 5 6 7 8 9        batch 10, 2 micro-batches, 3 ranks
    micro-batch 0       [0 1 | 2 3 | 4]            ranks 0, 1, 2
    micro-batch 1       [5 6 | 7 8 | 9]

Resuming needs the number of samples alone.
"""

import hashlib

import numpy as np
import torch
from torch import Tensor

from ragged_fsdp.trainer.config_file import ConfigError

__all__ = ["Batches", "check_tokens", "permuted", "share"]

_ROUNDS = 4


def share(count: int, parts: int, index: int) -> range:
    """The indices of part ``index`` when ``count`` things are cut into contiguous, near-equal parts."""
    small, larger = divmod(count, parts)
    start = index * small + min(index, larger)
    return range(start, start + small + (index < larger))


def permuted(index: int, count: int, key: bytes) -> int:
    """Where a permutation of ``range(count)``, chosen by ``key``, sends ``index``.

    A Feistel network on the smallest even number of bits that holds ``count``; results outside the
    range are sent through again (cycle walking), fewer than four times on average.
    """
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    value = index
    while True:
        left, right = value >> half, value & mask
        for turn in range(_ROUNDS):
            digest = hashlib.blake2b(right.to_bytes(8, "little"), key=key, salt=bytes([turn]), digest_size=8)
            left, right = right, left ^ (int.from_bytes(digest.digest(), "little") & mask)
        value = left << half | right
        if value < count:
            return value


def check_tokens(ids: np.ndarray, vocab_size: int) -> None:
    """Raise ``ConfigError`` for a token that the model does not have."""
    if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
        wrong = ids.min() if ids.min() < 0 else ids.max()
        raise ConfigError(
            f"data: token {wrong} is not in the model's vocabulary of {vocab_size}; see token_dtype"
        )


class Batches:
    """Sequences of ``seq_len`` inputs and their next tokens, by sample number."""

    def __init__(self, tokens: np.ndarray, seq_len: int, seed: int, vocab_size: int | None = None) -> None:
        self._tokens = tokens
        self._vocab_size = vocab_size
        self._seq_len = seq_len
        self._seed = seed
        self.windows = (len(tokens) - 1) // seq_len

    def sequences(self, samples: range) -> Tensor:
        """(len(samples), seq_len + 1) token ids: inputs and targets overlap in all but one."""
        rows = [self._window(sample) for sample in samples]
        if not rows:
            return torch.empty(0, self._seq_len + 1, dtype=torch.int64)
        ids = np.stack(rows).astype(np.int64)
        if self._vocab_size is not None:
            check_tokens(ids, self._vocab_size)
        return torch.from_numpy(ids)

    def _window(self, sample: int) -> np.ndarray:
        epoch, index = divmod(sample, self.windows)
        start = permuted(index, self.windows, f"{self._seed}/{epoch}".encode()) * self._seq_len
        return self._tokens[start : start + self._seq_len + 1]
