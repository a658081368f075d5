"""What a checkpoint of a run holds, and how a run takes it up again.

Tensors go through ``torch.distributed.checkpoint`` under the names of an unsharded model (``model.*``,
``optim.*``), so that any number of ranks, and FSDP2, can read them; each rank's random state is under
``rng.<rank>``. The counters are plain values in the manifest.
"""

import random
from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from ragged_fsdp.checkpoint import dcp
from ragged_fsdp.checkpoint.place import AnyPath
from ragged_fsdp.trainer.config_file import ConfigError
from ragged_fsdp.trainer.ranks import Ranks

__all__ = ["Counters", "restore", "state_to_save"]


@dataclass
class Counters:
    """How far the run has come."""

    step: int = 0
    samples: int = 0
    tokens: int = 0
    train_loss: float | None = None
    eval_loss: float | None = None
    """The last evaluation's loss."""
    eval_step: int | None = None

    @classmethod
    def from_info(cls, info: dict[str, Any]) -> "Counters":
        """The counters that a checkpoint's manifest holds."""
        return cls(**{name: info[name] for name in cls.__dataclass_fields__ if name in info})

    def to_info(self) -> dict[str, Any]:
        """Values for a manifest; the evaluation counts only if it was of this very step."""
        info = asdict(self)
        if self.eval_step != self.step:
            info["eval_loss"] = None
        return info


def state_to_save(model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks) -> dict[str, Any]:
    """The state tree of this rank; tensors are the live ones."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {
        "model": model_state,
        "optim": optimizer_state,
        "rng": {str(ranks.rank): _random_state(ranks.device)},
    }


def restore(
    path: AnyPath, info: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks
) -> list[str]:
    """Take up the state in ``path``, of whose manifest ``info`` is; returns what could not be taken up
    exactly, in words.

    Of the optimizer that is its moments: decay, betas and the like stay those that it was built with. A
    checkpoint of another tool may hold the model alone: the optimizer then starts anew.
    """
    names = dcp.stored_names(path)
    notes = []
    state = state_to_save(model, optimizer, ranks)
    groups = state["optim"].pop("param_groups")  # or those in the checkpoint would win over this run's
    if not any(name.startswith("optim.") for name in names):
        notes.append("the checkpoint has no optimizer state; the optimizer starts anew")
        del state["optim"]
    else:
        _check_trained(path, names, state["optim"]["state"])
    stored_ranks = {name.split(".")[1] for name in names if name.startswith("rng.")}
    same_ranks = stored_ranks == {str(rank) for rank in range(ranks.world_size)}
    same_form = f"rng.{ranks.rank}.python.words" in names  # else written before random states were tensors
    # Ranks that share their data draw alike: with states of ranks that did not, what they hold in common
    # would drift apart.
    tp = info.get("config", {}).get("sharding", {}).get("tp", 1)
    same_sharing = tp == ranks.world_size // ranks.data_parts
    takes_random = same_ranks and same_form and same_sharing
    if not takes_random:
        why = "a checkpoint of an older version" if same_sharing else f"tp was {tp}"
        why = why if same_ranks else "another number of processes"
        notes.append(f"{why}: random states (dropout) start anew, data order goes on")
        del state["rng"]
    try:
        dcp.load(state, path, ranks.control)
    except ValueError as error:
        raise ConfigError(f"resume: {error}") from error
    optimizer_state = {**state["optim"], "param_groups": groups} if "optim" in state else {}
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=optimizer_state)
    if takes_random:
        _set_random_state(state["rng"][str(ranks.rank)], ranks.device)
    return notes


def _check_trained(path: AnyPath, names: Collection[str], states: dict[str, Any]) -> None:
    """Raise ``ConfigError`` for parameters that were frozen when the checkpoint was written."""
    stored = {name.removeprefix("optim.state.").rpartition(".")[0] for name in names}
    new = [name for name in states if states[name] and name not in stored]
    if new:
        more = f" and {len(new) - 1} more" if len(new) > 1 else ""
        raise ConfigError(
            f"resume: {path} has no optimizer state of {new[0]}{more}; keep them frozen (--freeze), or begin "
            "another run; a Hugging Face model can begin from the folder that 'ragged-fsdp export' writes"
        )


def _random_state(device: torch.device) -> dict[str, Any]:
    """Every generator that a model may draw from, as tensors and numbers: nothing that needs a pickle."""
    numpy: Any = np.random.get_state(legacy=False)
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": {
            "key": torch.from_numpy(numpy["state"]["key"].astype(np.int64)),
            "position": int(numpy["state"]["pos"]),
            "has_gauss": int(numpy["has_gauss"]),
            "gauss": float(numpy["gauss"]),
        },
        "python": {"version": version, "words": torch.tensor(words), "gauss": gauss},
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def _set_random_state(state: dict[str, Any], device: torch.device) -> None:
    torch.set_rng_state(state["torch"])
    numpy, python = state["numpy"], state["python"]
    key = numpy["key"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", key, numpy["position"], numpy["has_gauss"], numpy["gauss"]))
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    if device.type == "cuda":
        cuda: Tensor = state["cuda"]
        torch.cuda.set_rng_state(cuda.cpu(), device)
