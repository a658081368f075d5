"""torchtitan's own trainer on ragged parameters: two configs for its command line.

    cd examples
    torchrun --nproc-per-node 8 -m torchtitan.train --module torchtitan_ragged --config debugmodel
    torchrun --nproc-per-node 8 -m torchtitan.train --module torchtitan_ragged --config llama3_8b

The first needs no download: it writes a tokenizer of bytes, and Python's standard library as its data. The
second wants Llama's tokenizer where torchtitan looks for it (``--hf-assets-path``). All flags of torchtitan
work; its trainer needs GPUs.
"""

import json
import sysconfig
import tempfile
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from torchtitan.models.llama3 import config_registry
from torchtitan.trainer import Trainer

from ragged_fsdp import Rows
from ragged_fsdp.integrations.torchtitan import ragged_parallelize


def keep_rows(name: str, parameter: nn.Parameter) -> Rows | None:
    """32 rows of a matrix stay on one rank."""
    return Rows(32) if parameter.ndim == 2 else None


def ragged(config: Trainer.Config) -> Trainer.Config:
    """A config of torchtitan whose model is sharded by ragged_fsdp."""
    spec = config.model_spec
    assert spec is not None
    spec.parallelize_fn = ragged_parallelize(spec.parallelize_fn, keep_rows, reduction="auto")
    config.parallelism.spmd_backend = (
        "partial_dtensor"  # "spmd_types" wants a fully_shard newer than torch 2.13's
    )
    config.training.disable_cuda_graphs = True
    return config


def llama3_8b() -> Trainer.Config:
    """torchtitan's Llama 3 8B and its settings."""
    return ragged(config_registry.llama3_8b())


def debugmodel() -> Trainer.Config:
    """torchtitan's debug Llama on bytes; data and tokenizer are written into a temporary folder."""
    config = config_registry.llama3_debugmodel()
    config.training.seq_len, config.training.local_batch_size = 256, 4
    config.validator.enable = False
    config.hf_assets_path, config.dataloader.dataset_path = _bytes_of_the_standard_library()
    return ragged(config)


def _bytes_of_the_standard_library() -> tuple[str, str]:
    """Folders of a tokenizer and of documents."""
    folder = Path(tempfile.mkdtemp(prefix="torchtitan-"))
    alphabet = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab={**alphabet, "<begin>": 256, "<end>": 257}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    (folder / "assets").mkdir()
    tokenizer.save(str(folder / "assets/tokenizer.json"))
    marks = {"bos_token": "<begin>", "eos_token": "<end>"}
    (folder / "assets/tokenizer_config.json").write_text(json.dumps(marks))
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    lines = [json.dumps({"text": path.read_text(errors="replace")}) for path in sources]
    (folder / "documents").mkdir()
    (folder / "documents/train.jsonl").write_text("\n".join(lines) + "\n")
    return str(folder / "assets"), str(folder / "documents")
