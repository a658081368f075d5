"""Combinations of settings that cannot work, found before any process is started."""

import math
import os
from pathlib import Path

import torch
from torch import nn

from ragged_fsdp.checkpoint.place import is_url, place
from ragged_fsdp.experts import expert_count, expert_modules
from ragged_fsdp.experts.layers import expert_parameters
from ragged_fsdp.fp8 import fp8_training
from ragged_fsdp.fp8 import gather_policy as fp8_codes
from ragged_fsdp.models.names import nearest
from ragged_fsdp.models.source import ModelSource, find_model
from ragged_fsdp.models.splits import refusal
from ragged_fsdp.policy import Tiles
from ragged_fsdp.trainer.batches import check_tokens
from ragged_fsdp.trainer.config import RESUME_MODES, ShardingConfig, TrainConfig
from ragged_fsdp.trainer.config_file import ConfigError
from ragged_fsdp.trainer.data import Tokens
from ragged_fsdp.trainer.loggers import check_loggers
from ragged_fsdp.trainer.rules import check_rules, freeze, match_rules, stores_tiles
from ragged_fsdp.trainer.tokenizers import has_tokenizer
from ragged_fsdp.weights.names import plain_name

__all__ = ["check", "check_device", "check_vocabulary", "likely_mistakes"]


def check(config: TrainConfig, world_size: int, rank: int = 0) -> ModelSource:
    """Raise :class:`ConfigError` naming the setting, what it is and what would work; returns the model."""
    _check_run(config)
    _check_mesh(config.sharding, world_size)
    _check_batch(config, world_size // config.sharding.tp)
    check_device(config.sharding)
    try:
        source = find_model(
            config.model.model, config.model.model_set, random_weights=config.model.weights == "random"
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    tp, ep = config.sharding.tp, config.sharding.ep
    if problem := refusal("tp", tp, source.tp if ep == 1 else source.tp_beside_ep):
        raise ConfigError(problem)
    _check_experts(config.sharding, source)
    _check_rules(config.sharding, source)
    if config.model.freeze:
        freeze(source.build(), config.model.freeze)
    if rank == 0:  # the others log nothing: their nodes may lack the packages and the files
        check_loggers(config.log)
    if source.positions is not None and not source.rotary and config.data.seq_len > source.positions:
        raise ConfigError(
            f"seq_len = {config.data.seq_len}: {source.name} has {source.positions} positions, no more"
        )
    return source


def check_vocabulary(source: ModelSource, tokens: Tokens) -> None:
    """Raise :class:`ConfigError` for a tokenizer with more tokens than the model has, and for data with such.

    Of large data samples are looked at; of the rest a step finds out when it reads it.
    """
    if tokens.tokenizer.vocab_size > source.vocab_size:
        raise ConfigError(
            f"tokenizer: its {tokens.tokenizer.vocab_size} tokens do not fit the model's vocabulary of "
            f"{source.vocab_size}"
        )
    for sample in tokens.samples():
        check_tokens(sample, source.vocab_size)


def likely_mistakes(config: TrainConfig, source: ModelSource) -> list[str]:
    """Lines for settings that work but rarely as meant."""
    said = []
    steps, warmup = config.run.steps, config.optimizer.warmup
    if 2 * warmup > steps:
        said.append(
            f"warmup = {warmup} of {steps} steps: the learning rate peaks late or never; set --warmup"
        )
    if source.positions is not None and config.data.seq_len > source.positions:
        said.append(
            f"seq_len = {config.data.seq_len} is longer than the {source.positions} positions that "
            f"{source.name} was made for"
        )
    if config.data.tokenizer == "bytes" and has_tokenizer(Path(config.model.model)):
        said.append(f"tokenizer = bytes, although {config.model.model} has one; --tokenizer auto uses it")
    agent_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if agent_store and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        said.append(
            "torchrun's agents keep one store over all restarts, in which ranks find addresses of ranks that "
            "are gone; export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before torchrun"
        )
    return said


def _check_experts(config: ShardingConfig, source: ModelSource) -> None:
    """Whether there are experts to spread, and what only some ways of sharding can do with them."""
    defaults = {"dispatch": "all_to_all", "expert_capacity": 0.0, "rebalance": 0, "ep_across_nodes": False}
    for name, default in defaults.items():
        if config.ep == 1 and getattr(config, name) != default:
            raise ConfigError(
                f"{name} = {getattr(config, name)} is for expert parallelism; set ep, or leave it"
            )
    if config.ep == 1:
        return
    if config.dispatch == "all_gather" and config.expert_capacity:
        raise ConfigError(
            f"expert_capacity = {config.expert_capacity} needs dispatch = all_to_all or two_level"
        )
    if config.rebalance and config.sharding != "ragged":
        raise ConfigError(f"rebalance = {config.rebalance} needs sharding = ragged, not {config.sharding}")
    model = source.build()
    counts = {expert_count(module) for module in expert_modules(model).values()}
    if not counts:
        raise ConfigError(f"ep = {config.ep}: the model {source.name!r} has no experts that can be spread")
    common = math.gcd(*counts)
    if config.sharding == "fsdp2" and common % config.ep:
        fits = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
        raise ConfigError(
            f"ep = {config.ep} does not divide the model's {common} experts, as sharding = fsdp2 needs; use "
            f"ragged, or for this model one of {fits}"
        )
    if config.granularity and (config.rebalance or common % config.ep):
        stored = match_rules(model, "granularity", config.granularity)
        for name, module in expert_modules(model).items():
            for own, parameter in expert_parameters(module).items():
                if isinstance(stored.get(parameter), Tiles):
                    what = f"rebalance = {config.rebalance}" if config.rebalance else f"ep = {config.ep}"
                    raise ConfigError(
                        f"granularity: {name}.{own} in tiles needs as many experts on every process, which "
                        f"{what} of {common} experts does not keep; use rows for it, or leave one of them"
                    )


def _check_rules(config: ShardingConfig, source: ModelSource) -> None:
    """What only our ``fully_shard`` knows: rules by parameter name, other reductions, nodes."""
    for setting, everywhere in (
        ("reduction", ("auto", "reduce_scatter")),
        ("ranks_per_node", (0,)),
        ("internode_dtype", ("auto",)),
    ):
        value = getattr(config, setting)
        if value not in everywhere and config.sharding != "ragged":
            raise ConfigError(f"{setting} = {value} needs sharding = ragged, not {config.sharding}")
    if config.precision == "bf16-reduce" and config.sharding not in ("ragged", "fsdp2"):
        raise ConfigError(f"precision = bf16-reduce needs sharding = ragged or fsdp2, not {config.sharding}")
    if config.internode_dtype != "auto" and config.reduction not in ("auto", "two_level"):
        raise ConfigError(
            f"internode_dtype = {config.internode_dtype} needs reduction = two_level or auto, not "
            f"{config.reduction}"
        )
    if config.fp8 and (config.sharding == "fsdp2" or config.precision == "fp64"):
        against = "sharding = fsdp2" if config.sharding == "fsdp2" else "precision = fp64"
        raise ConfigError(f"fp8 does not go with {against}; leave one of them")
    for setting in ("granularity", "gather_codes"):
        rules = getattr(config, setting)
        if rules and config.sharding != "ragged":
            raise ConfigError(f"{setting} needs sharding = ragged, not {config.sharding}")
        if rules:
            check_rules(source.build(), setting, rules, config.granularity)
    if config.fp8:
        model = source.build()
        try:
            fp8_training(model, tiles=stores_tiles(config.granularity))
        except ValueError as error:
            raise ConfigError(f"fp8: {error}") from error
        _check_fp8_tiles(model, config)


def _check_fp8_tiles(model: nn.Module, config: ShardingConfig) -> None:
    """With a rule of tiles, matrices that it leaves out must be covered by tiles of 128 x 128."""
    stored = match_rules(model, "granularity", config.granularity)
    for name, parameter in model.named_parameters():
        codes = fp8_codes(name, parameter)
        if codes is None or isinstance(stored.get(parameter), Tiles):
            continue
        try:
            codes.check(parameter.shape)
        except ValueError as error:
            raise ConfigError(
                f"fp8: {plain_name(name)}: {error} Or store it in tiles: "
                f"--granularity '{plain_name(name)}=tiles:128x128'."
            ) from error


def _check_run(config: TrainConfig) -> None:
    resume = config.run.resume
    if resume not in RESUME_MODES and not is_url(resume) and not os.path.isdir(resume):
        hint = nearest(resume, RESUME_MODES)
        raise ConfigError(f"resume = {resume!r}: no such folder, and not a mode; {hint}")
    _check_places(config)
    first, steps = config.log.profile_from, config.run.steps
    if config.log.profile and first > steps:
        raise ConfigError(f"profile_from = {first} is after the last of {steps} steps; use at most {steps}")
    if config.eval.eval_sequences and not config.data.eval_fraction:
        raise ConfigError(
            "eval_sequences needs eval_fraction > 0; set eval_sequences = 0 to train without evaluation"
        )


def _check_places(config: TrainConfig) -> None:
    """Whether the run's folder and that of its checkpoints can be used, and URLs be opened."""
    run_dir, checkpoints = config.run.run_dir, config.checkpoint.checkpoint_dir
    if is_url(run_dir):
        raise ConfigError(f"run_dir = {run_dir!r}: expected a folder; checkpoint_dir can be a URL")
    _check_folder("run_dir", Path(run_dir))
    if checkpoints and not is_url(checkpoints):
        _check_folder("checkpoint_dir", Path(checkpoints))
    if is_url(checkpoints) and config.run.resume == "restart":
        raise ConfigError(
            f"resume = restart: checkpoints at {checkpoints} cannot be renamed; use another checkpoint_dir"
        )
    for name, given in (("checkpoint_dir", checkpoints), ("resume", config.run.resume)):
        try:
            place(given)
        except ValueError as error:
            raise ConfigError(f"{name}: {error}") from error


def _check_folder(setting: str, folder: Path) -> None:
    """Whether a folder is there, or can be made."""
    # of os.path: a method of Path raises for a name that is too long, or behind a folder that is closed to us
    there = next(path for path in (folder, *folder.absolute().parents) if os.path.exists(path))
    if not there.is_dir():
        raise ConfigError(f"{setting} = {str(folder)!r}: {there} is not a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"{setting} = {str(folder)!r}: {there} cannot be written to")


def _check_mesh(config: ShardingConfig, world_size: int) -> None:
    if config.sharding == "none" and world_size > 1:
        raise ConfigError(f"sharding = none is for one process, not {world_size}; use ddp, fsdp2 or ragged")
    for name, size in (("replicas", config.replicas), ("tp", config.tp), ("ep", config.ep)):
        if size > 1 and config.sharding not in ("ragged", "fsdp2"):
            raise ConfigError(f"{name} = {size} needs sharding = ragged or fsdp2, not {config.sharding}")
    if config.ep > 1 and config.ep % config.tp:
        raise ConfigError(
            f"tp = {config.tp} with ep = {config.ep}: processes that share their tokens must be in one "
            f"group of ep, so ep must be a multiple of tp"
        )
    if world_size % config.replicas:
        raise ConfigError(f"replicas = {config.replicas} does not divide the {world_size} processes")
    per_replica = world_size // config.replicas
    for name, size in (("tp", config.tp), ("ep", config.ep)):
        if per_replica % size:
            each = f" of each of {config.replicas} replicas" if config.replicas > 1 else ""
            fits = ", ".join(str(n) for n in range(1, per_replica + 1) if per_replica % n == 0)
            raise ConfigError(
                f"{name} = {size} does not divide the {per_replica} processes{each}; it can be {fits}"
            )


def _check_batch(config: TrainConfig, data_ranks: int) -> None:
    batch, pieces = config.data.batch, config.data.accumulate
    if config.sharding.expert_capacity and batch % (pieces * data_ranks):
        raise ConfigError(
            f"expert_capacity = {config.sharding.expert_capacity} needs as many sequences on all processes; "
            f"batch = {batch} is no multiple of {pieces} micro-batches on {data_ranks}"
        )
    if batch // pieces < data_ranks:
        what = "processes" if config.sharding.tp == 1 else f"groups of {config.sharding.tp} processes"
        raise ConfigError(
            f"batch = {batch} in {pieces} micro-batches is less than one sequence for each of {data_ranks} "
            f"{what}; use at least {data_ranks * pieces}"
        )


def check_device(config: ShardingConfig) -> None:
    """Raise :class:`ConfigError` for a GPU that is not there."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device = cuda, but torch sees no GPU here")
