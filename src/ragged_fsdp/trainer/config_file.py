"""Settings from a TOML file and from flags, and back to a file.

Refuses what it does not know, with the nearest valid name: a misspelt key that is passed over is a run
with other settings than its owner believes.
"""

import json
import math
import os
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import tomli_w

from ragged_fsdp.models.names import nearest
from ragged_fsdp.trainer.config import TrainConfig

__all__ = ["ConfigError", "from_values", "load_toml", "save_toml", "section_of"]


class ConfigError(ValueError):
    """A setting that cannot be used; the message names it and what would be right."""


def section_of() -> dict[str, str]:
    """Key to the name of its section; keys are unique across sections."""
    return {f.name: section for section, cls in TrainConfig.sections().items() for f in fields(cls)}


def load_toml(path: str | Path) -> dict[str, Any]:
    """Keys and values of a settings file, flat, checked against the known names."""
    try:
        parsed = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the settings file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    sections = TrainConfig.sections()
    values: dict[str, Any] = {}
    for section, table in parsed.items():
        if section not in sections:
            raise ConfigError(f"{path}: unknown section [{section}]; {nearest(section, sections)}")
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: {section} must be a table, got {table!r}")
        keys = [f.name for f in fields(sections[section])]
        for key, value in table.items():
            if key not in keys:
                elsewhere = section_of().get(key)
                hint = f"it belongs to [{elsewhere}]" if elsewhere else nearest(key, keys)
                raise ConfigError(f"{path}: unknown key {key!r} in [{section}]; {hint}")
            values[key] = value
    return values


def from_values(*layers: Mapping[str, Any]) -> TrainConfig:
    """Settings from the defaults and then each layer in turn; later layers win."""
    home = section_of()
    merged: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            if key not in home:
                raise ConfigError(f"unknown setting {key!r}; {nearest(key, home)}")
            merged[key] = value
    parts = {}
    for section, cls in TrainConfig.sections().items():
        hints = get_type_hints(cls)
        own = {f.name: f for f in fields(cls) if f.name in merged}
        parts[section] = cls(**{k: _checked(f, hints[k], merged[k]) for k, f in own.items()})
    return TrainConfig(**parts)


def save_toml(config: TrainConfig, path: Path) -> None:
    """Write all settings, so that the file alone repeats the run. On a full disk what was there stays."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(tomli_w.dumps(asdict(config)), encoding="utf-8")
    os.replace(temporary, path)


def _checked(field: Any, hint: Any, value: Any) -> Any:
    """``value`` as the type of the field, or a refusal that names it."""
    value = _converted(field.name, hint, value)
    choices, at_least, at_most, below = (
        field.metadata[key] for key in ("choices", "at_least", "at_most", "below")
    )
    if choices and value not in choices:
        raise ConfigError(f"{field.name} = {value!r}: {nearest(str(value), choices)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{field.name} = {value}: expected a finite number")
    if at_least is not None and not value >= at_least:
        raise ConfigError(f"{field.name} = {value}: expected at least {at_least}")
    if at_most is not None and not value <= at_most:
        raise ConfigError(f"{field.name} = {value}: expected at most {at_most}")
    if below is not None and not value < below:
        raise ConfigError(f"{field.name} = {value}: expected less than {below}")
    return value


def _converted(name: str, hint: Any, value: Any) -> Any:
    if get_origin(hint) is list:
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list | tuple) or not all(isinstance(i, str) for i in items):
            raise ConfigError(f"{name}: expected a list of strings, got {value!r}")
        return list(items)
    if get_origin(hint) is dict:
        assert get_args(hint) == (str, str)
        if not isinstance(value, Mapping):
            raise ConfigError(f"{name}: expected a table, got {value!r}")
        # as the flag would be typed: true, not True
        return {str(k): v if isinstance(v, str) else json.dumps(v, default=str) for k, v in value.items()}
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise ConfigError(f"{name}: expected {hint.__name__}, got {value!r}")
    return value
