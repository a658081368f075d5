"""Who hears what a run measures: a file of JSON lines; if asked TensorBoard, Weights & Biases, callbacks.

All of them are a :class:`Logger`, made on rank 0 alone. What kinds of lines there are is in
:mod:`ragged_fsdp.trainer.metrics`.
"""

import importlib
import importlib.util
import uuid
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from ragged_fsdp.trainer.config import LogConfig, TrainConfig
from ragged_fsdp.trainer.config_file import ConfigError
from ragged_fsdp.trainer.metrics import JsonLines

__all__ = ["Logger", "Loggers", "check_loggers", "open_loggers"]


class Logger(Protocol):
    """One that hears of each line. An exception of his ends the run: nothing is lost in silence."""

    def write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """A line: ``start``, ``train``, ``eval``, ``checkpoint``, ``note`` or ``end``, and what it holds."""

    def close(self) -> None:
        """The run is over."""


class TensorBoard:
    """Numbers as scalars named ``kind/name``."""

    def __init__(self, run_dir: Path, resumed_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._events: Any = SummaryWriter(str(run_dir / "tensorboard"), purge_step=resumed_step + 1)

    def write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        for name, value in _flat(values):
            self._events.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        self._events.close()


class WeightsAndBiases:
    """Numbers as metrics named ``kind/name``; a resumed run goes on in the same one of theirs."""

    def __init__(self, run_dir: Path, config: TrainConfig) -> None:
        import wandb

        identity = run_dir / "wandb-id"
        if not identity.exists():
            identity.write_text(uuid.uuid4().hex[:16])
        self._run: Any = wandb.init(
            id=identity.read_text(),
            resume="allow",
            name=run_dir.name,
            dir=str(run_dir),
            config=asdict(config),
        )
        # Their own counter only goes up: after a resume from an older checkpoint it would drop the lines.
        self._run.define_metric("*", step_metric="step")

    def write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        numbers = {f"{kind}/{name}": value for name, value in _flat(values)}
        if numbers:
            self._run.log({"step": step, **numbers})

    def close(self) -> None:
        self._run.finish()


class Loggers:
    """All loggers of a run as one."""

    def __init__(self, loggers: list[Logger]) -> None:
        self._loggers = loggers

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Pass a line on to each, in the order in which they were given."""
        for logger in self._loggers:
            logger.write(kind, step, values)

    def close(self) -> None:
        """Close each of them."""
        for logger in self._loggers:
            logger.close()


def open_loggers(config: TrainConfig, run_dir: Path, resumed_step: int) -> Loggers:
    """The loggers that the settings name; the file of JSON lines is the first."""
    loggers: list[Logger] = [JsonLines(run_dir, resumed_step)]
    if config.log.tensorboard:
        loggers.append(TensorBoard(run_dir, resumed_step))
    if config.log.wandb:
        loggers.append(WeightsAndBiases(run_dir, config))
    loggers += [_factory(text)(config) for text in config.log.callback]
    return Loggers(loggers)


def check_loggers(config: LogConfig) -> None:
    """Refuse what is not installed or cannot be imported."""
    for package in ("tensorboard", "wandb"):  # the settings are named like them
        if getattr(config, package) and importlib.util.find_spec(package) is None:
            raise ConfigError(f"{package} = true needs the package {package}, which is not installed")
    for text in config.callback:
        _factory(text)


def _factory(text: str) -> Callable[[TrainConfig], Logger]:
    """What ``package.module:name`` or ``file.py:name`` names."""
    module, colon, name = text.rpartition(":")
    if not colon or not module or not name:
        raise ConfigError(f"callback = {text!r}: expected MODULE:NAME or FILE.py:NAME")
    try:
        loaded = _from_file(Path(module)) if module.endswith(".py") else importlib.import_module(module)
    except (ImportError, OSError) as error:
        raise ConfigError(f"callback = {text!r}: {error}") from error
    if not callable(getattr(loaded, name, None)):
        raise ConfigError(f"callback = {text!r}: {module} has no class or function {name!r}")
    return getattr(loaded, name)


def _from_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _flat(values: dict[str, Any], prefix: str = "") -> list[tuple[str, float]]:
    found: list[tuple[str, float]] = []
    for name, value in values.items():
        if isinstance(value, dict):
            found += _flat(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found.append((prefix + name, value))
    return found
