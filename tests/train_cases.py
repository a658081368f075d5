"""Small training runs for tests: a few steps of a tiny model on a few kilobytes of text."""

import contextlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ragged_fsdp.trainer.config_file import ConfigError, from_values
from ragged_fsdp.trainer.start import start
from rank_pool import DEVICE

__all__ = ["on_one", "said_on_pool", "save_words", "settings", "tensors", "train", "train_on_pool"]


def settings(run_dir: Path, **changes: Any) -> dict[str, Any]:
    """Settings of a run in ``run_dir`` that takes a second or two."""
    return {
        "run_dir": str(run_dir),
        "data": [str(Path(__file__))],
        "model": "nano",
        "seq_len": 32,
        "batch": 12,
        "steps": 8,
        "warmup": 2,
        "lr": 1e-2,
        "eval_every": 4,
        "eval_sequences": 3,
        "eval_fraction": 0.1,
        "checkpoint_every": 0,
        "tensorboard": False,
        "log_every": 1000,
        "processes": 2,
        "device": DEVICE,
        "precision": "fp32",
        "timeout": 60.0,
        **changes,
    }


def train(run_dir: Path, **changes: Any) -> dict[str, Any]:
    """Train on processes of its own; returns the outcome."""
    return start(from_values(settings(run_dir, **changes)))


def until_told(_: None, pipe: Any) -> str:
    """What a rank of the launcher may do: wait for the request to stop."""
    return pipe.recv()


def train_on_pool(run_dir: Path, **changes: Any) -> dict[str, Any]:
    """Train on the ranks of a test's pool, all of which call this."""
    import torch
    import torch.distributed as dist

    from ragged_fsdp.trainer.job import TrainingJob
    from ragged_fsdp.trainer.stop import StopRequest

    config = from_values(settings(run_dir, **changes))
    device = torch.device(DEVICE, torch.cuda.current_device()) if DEVICE == "cuda" else torch.device("cpu")
    outcome = TrainingJob(config, device, StopRequest(0.0)).run()
    dist.barrier()  # what rank 0 wrote is there for all
    return outcome


def tensors(checkpoint: Path) -> dict[str, Any]:
    """Model and optimizer in a checkpoint, whole."""
    from ragged_fsdp.checkpoint.contents import CheckpointReader

    reader = CheckpointReader(checkpoint)
    return {t.name: reader.load(t) for t in reader.tensors() if not t.name.startswith("rng")}


def save_words(
    folder: Path, words: list[str], *, eos: str | None = None, bos: str | None = None, adds_bos: bool = False
) -> None:
    """A tokenizer of whole words in ``folder``; ids are 1, 2, ... in the order of ``words``, 0 is unknown."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    ids = {word: number for number, word in enumerate(["[UNK]", *words])}
    inner = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if adds_bos:
        assert bos is not None
        inner.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, ids[bos])]
        )
    PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="[UNK]", eos_token=eos, bos_token=bos
    ).save_pretrained(folder)


def said_on_pool(run_dir: Path, **changes: Any) -> str:
    """What a run on all ranks says, or the refusal; nothing of it stays alive, its lock included."""
    import torch.distributed as dist

    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        try:
            train_on_pool(run_dir, **changes)
        except ConfigError as error:
            print(error)
    said = [text.getvalue()]
    dist.broadcast_object_list(said, src=0)
    return said[0]


def on_one(rank: Any, action: Callable[[], object]) -> None:
    """Rank 0 acts, the others wait for it."""
    import torch.distributed as dist

    if rank.rank == 0:
        action()
    dist.barrier()
