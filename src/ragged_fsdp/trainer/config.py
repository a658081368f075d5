# ruff: noqa: RUF009  (``_option`` is ``dataclasses.field`` with our metadata)
"""The settings of a training run: one frozen dataclass per section of the TOML file.

Every field is a key of its section and, with dashes, a flag of ``ragged-fsdp train``; names are unique
across sections, so a flag needs no section. The help text of a flag is the field's ``help``.
"""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

__all__ = [
    "RESUME_MODES",
    "CheckpointConfig",
    "DataConfig",
    "EvalConfig",
    "LogConfig",
    "ModelConfig",
    "OptimizerConfig",
    "RunConfig",
    "ShardingConfig",
    "TrainConfig",
]


RESUME_MODES = ("auto", "never", "must", "restart")
"""What ``resume`` may be besides the place of a checkpoint."""


def _option(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    at_least: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    per_node: bool = False,
) -> Any:
    """A field with a default. ``per_node``: ranks of a run need not have the same value, such as a path."""
    metadata = {
        "help": help,
        "choices": choices,
        "at_least": at_least,
        "at_most": at_most,
        "below": below,
        "per_node": per_node,
    }
    if isinstance(default, list | dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class RunConfig:
    """Where the run lives and how long it goes on."""

    run_dir: str = _option("runs/default", "folder of the run: settings, metrics, checkpoints", per_node=True)
    steps: int = _option(200, "optimizer steps in all; the learning-rate schedule ends here", at_least=1)
    stop_at: int = _option(0, "stop after this step, as if interrupted (0: after the last)", at_least=0)
    minutes: float = _option(
        0.0, "stop after this many minutes, saving (0: no limit)", at_least=0, per_node=True
    )
    seed: int = _option(
        0, "seed of the initial weights, the data order and dropout", at_least=0, at_most=2**40
    )
    resume: str = _option(
        "auto",
        "auto: from the newest good checkpoint if any; never: refuse a used folder; must: refuse an unused "
        "one; restart: move the folder's checkpoints aside and begin at step 0; or the path or the URL of a "
        "checkpoint",
        per_node=True,
    )
    resume_changed: bool = _option(
        False, "resume although the tokenizer, the order of the data or a dtype is not the checkpoint's"
    )


@dataclass(frozen=True)
class ModelConfig:
    """Which model, and from which weights."""

    model: str = _option(
        "demo",
        "a built-in size (nano, demo, small, medium, large), a published model's shapes (llama-3-8b), a "
        "Hugging Face config class (LlamaConfig), or a local Hugging Face folder",
        per_node=True,
    )
    model_set: dict[str, str] = _option({}, "change a field of the model's config: --model-set layers=2")
    weights: str = _option(
        "auto",
        "auto: those of a local Hugging Face folder if it has any, else random; random: always random",
        choices=("auto", "random"),
    )
    freeze: list[str] = _option(
        [],
        "parameters that are not trained, by a pattern of their names: --freeze '*embed*'; may be given "
        "several times",
    )


@dataclass(frozen=True)
class DataConfig:
    """What is read, and how much of it makes a step."""

    data: list[str] = _option(
        ["stdlib"],
        "'stdlib' (the Python standard library's sources), files or globs of text, one .bin or .npy file of "
        "tokens, or a local Hugging Face dataset folder; may be given several times",
        per_node=True,
    )
    tokenizer: str = _option(
        "auto",
        "auto: that of the model's folder if it has one, else bytes; 'bytes'; or a local folder with a "
        "Hugging Face tokenizer",
        per_node=True,
    )
    document_marks: str = _option(
        "auto",
        "tokens put around each document of text: eos after it, bos before it, both, none; auto: the "
        "tokenizer's eos if it has one, its bos if it begins texts with it (bytes: a zero byte after each)",
        choices=("auto", "eos", "bos", "both", "none"),
    )
    token_dtype: str = _option(
        "uint16", "element type of a .bin token file", choices=("uint8", "uint16", "uint32", "int32", "int64")
    )
    text_column: str = _option("text", "column of a Hugging Face dataset; 'input_ids' is taken as tokens")
    seq_len: int = _option(256, "tokens per sequence", at_least=1)
    batch: int = _option(24, "sequences per optimizer step, over all processes", at_least=1)
    accumulate: int = _option(1, "micro-batches that a step is cut into", at_least=1)
    eval_fraction: float = _option(0.05, "share of the data kept for evaluation", at_least=0, below=1)


@dataclass(frozen=True)
class OptimizerConfig:
    """How parameters are updated, and the learning rate over time."""

    optimizer: str = _option("adamw", "optimizer", choices=("adamw", "adam8bit", "muon", "shampoo"))
    lr: float = _option(3e-3, "peak learning rate", at_least=0)
    weight_decay: float = _option(0.1, "decoupled weight decay of matrices", at_least=0)
    beta1: float = _option(0.9, "decay of the first moment (momentum)", at_least=0, below=1)
    beta2: float = _option(0.95, "decay of the second moment", at_least=0, below=1)
    eps: float = _option(1e-8, "added to the denominator", at_least=0)
    muon_lr: float = _option(0.02, "peak learning rate of the matrices under muon", at_least=0)
    muon_dtype: str = _option(
        "auto",
        "precision in which muon orthogonalizes; auto: bf16 on GPUs, that of the weights on CPUs, where bf16 "
        "is not faster",
        choices=("auto", "bf16", "fp32"),
    )
    offload_optimizer: bool = _option(
        False, "keep optimizer state in the host's memory; it visits the device for each update"
    )
    clip: float = _option(1.0, "largest gradient norm (0: no clipping)", at_least=0)
    schedule: str = _option(
        "cosine", "shape of the learning rate after warmup", choices=("cosine", "linear", "wsd", "constant")
    )
    warmup: int = _option(20, "steps of linear warmup", at_least=0)
    decay: float = _option(0.2, "last share of the steps in which wsd decays", at_least=0, at_most=1)
    min_lr: float = _option(0.1, "last learning rate as a share of the peak", at_least=0, at_most=1)


@dataclass(frozen=True)
class ShardingConfig:
    """How the model lies on processes, and in which precision it computes."""

    sharding: str = _option(
        "ragged",
        "ragged (ours), fsdp2 (torch's fully_shard), ddp (replicas), none (one process)",
        choices=("ragged", "fsdp2", "ddp", "none"),
    )
    processes: int = _option(
        0,
        "local processes (0: one per GPU, or one per CPU core up to 4); torchrun and SLURM bring their own",
        at_least=0,
        per_node=True,
    )
    device: str = _option("auto", "auto: cuda if there is one", choices=("auto", "cpu", "cuda"))
    tp: int = _option(
        1,
        "tensor parallel: processes that split each layer's heads, experts or MLP and share their data",
        at_least=1,
    )
    ep: int = _option(
        1,
        "expert parallel: processes that split each layer's experts and send each other tokens; any number "
        "of experts, and a multiple of tp",
        at_least=1,
    )
    ep_across_nodes: bool = _option(
        False,
        "under ep, let the processes of a group lie as far apart as a replica allows, and not be neighbours: "
        "on different nodes, tokens travel between them, and the experts' weights inside",
    )
    dispatch: str = _option(
        "all_to_all",
        "how tokens reach experts under ep: all_to_all sends each to its experts, two_level once to every "
        "other node and on from there, all_gather to every process of a small group",
        choices=("all_to_all", "two_level", "all_gather"),
    )
    expert_capacity: float = _option(
        0.0,
        "under ep, rows that a process may send each other one, as a multiple of an even share: shapes are "
        "then fixed and nothing waits for the device; what does not fit is dropped and counted (0: no limit)",
        at_least=0,
    )
    rebalance: int = _option(
        0,
        "under ep, every this many steps experts move between processes so that each gets as many rows "
        "(0: never)",
        at_least=0,
    )
    replicas: int = _option(1, "hsdp: groups of processes that each hold the whole model", at_least=1)
    granularity: dict[str, str] = _option(
        {}, "what stays together on one rank, by parameter name: --granularity '*.experts.*=rows:32'"
    )
    gather_codes: dict[str, str] = _option(
        {},
        "weights gathered and computed with as 8-bit codes and a scale per tile, by parameter name: "
        "--gather-codes '*.experts.*=int8:32x32' (or float8_e4m3fn)",
    )
    fp8: bool = _option(
        False,
        "products of linear layers and experts in FP8, forward and both gradients, with a scale per 128 "
        "elements of activations and gradients and per 128 x 128 of weights; weights travel as codes, also "
        "those in tiles (--granularity '*_proj*=tiles:128x128'); not with fsdp2",
    )
    reduction: str = _option(
        "auto",
        "reduce_scatter: gradients are added on the wire; all_to_all: they travel as they were computed (in "
        "bf16 half the bytes) and are added in fp32 on arrival; two_level: so inside each node, then the "
        "nodes' sums between them; auto: what fits the network, reduce_scatter with fsdp2",
        choices=("auto", "reduce_scatter", "all_to_all", "two_level"),
    )
    ranks_per_node: int = _option(
        0,
        "processes that share a fast link, neighbours in rank, for two_level and auto (0: "
        "RAGGED_FSDP_RANKS_PER_NODE, else they find out)",
        at_least=0,
    )
    internode_dtype: str = _option(
        "auto",
        "dtype of the sums that two_level sends between nodes; auto: that of the gradients",
        choices=("auto", "bf16", "fp32"),
    )
    reshard_after_forward: bool = _option(True, "free the gathered parameters between forward and backward")
    precision: str = _option(
        "auto",
        "auto: bf16 on GPUs, fp32 on CPUs; bf16: bf16 compute, fp32 weights and reductions; "
        "bf16-reduce: gradients are reduced in bf16 too; fp64: double precision throughout, to tell rounding "
        "from other differences between runs",
        choices=("auto", "fp32", "bf16", "bf16-reduce", "fp64"),
    )
    activation_checkpointing: int = _option(
        0, "recompute every n-th layer in backward (0: none, 1: all)", at_least=0
    )
    compile: bool = _option(False, "torch.compile each layer")
    timeout: float = _option(
        600.0, "seconds after which an unfinished collective is an error", at_least=1, at_most=1e6
    )


@dataclass(frozen=True)
class EvalConfig:
    """What is measured and shown besides the training loss."""

    eval_every: int = _option(25, "steps between evaluations (0: only at the end)", at_least=0)
    eval_sequences: int = _option(48, "sequences of an evaluation (0: no evaluation)", at_least=0)
    sample_tokens: int = _option(0, "tokens to generate at the end (0: none)", at_least=0)
    sample_prompt: str = _option("def ", "text that the sample continues")
    temperature: float = _option(0.7, "temperature of the sample (0: greedy)", at_least=0)


@dataclass(frozen=True)
class CheckpointConfig:
    """When the state is saved, and what is kept."""

    checkpoint_every: int = _option(100, "steps between checkpoints (0: only at the end)", at_least=0)
    checkpoint_dir: str = _option(
        "",
        "where checkpoints go: a folder, or a URL that fsspec knows (s3://bucket/run, gs://bucket/run); "
        "default: 'checkpoints' in run_dir",
        per_node=True,
    )
    keep_last: int = _option(2, "newest checkpoints to keep (0: all)", at_least=0)
    keep_best: bool = _option(True, "also keep the one with the lowest evaluation loss")
    async_checkpoint: bool = _option(True, "write in the background while training goes on")
    save_at_end: bool = _option(True, "save after the last step")
    save_on_interrupt: bool = _option(True, "save when stopped by Ctrl-C, SIGTERM or the time limit")


@dataclass(frozen=True)
class LogConfig:
    """What is written down while training."""

    log_every: int = _option(10, "steps between log lines when not on a terminal", at_least=1)
    tensorboard: bool = _option(True, "write TensorBoard events besides metrics.jsonl")
    wandb: bool = _option(
        False, "log to Weights & Biases too, as its environment variables say (WANDB_PROJECT, WANDB_MODE)"
    )
    callback: list[str] = _option(
        [],
        "MODULE:NAME or FILE.py:NAME, called with the settings on rank 0: its result's write(kind, step, "
        "values) hears of every line of metrics.jsonl, its close() of the end; may be given several times",
    )
    profile: int = _option(0, "write a Chrome trace of this many steps", at_least=0)
    profile_from: int = _option(5, "first step of the trace, counted from where the run starts", at_least=1)
    peak_tflops: float = _option(0.0, "peak of the device for MFU (0: known GPUs only)", at_least=0)


@dataclass(frozen=True)
class TrainConfig:
    """All settings of a run."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)

    @property
    def checkpoint_place(self) -> str:
        """The folder or the URL of the run's checkpoints."""
        return self.checkpoint.checkpoint_dir or str(Path(self.run.run_dir) / "checkpoints")

    @classmethod
    def sections(cls) -> dict[str, type]:
        """Name and class of every section."""
        return {f.name: f.default_factory for f in fields(cls)}  # type: ignore[misc]
