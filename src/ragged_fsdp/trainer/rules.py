"""Settings by parameter name, such as ``granularity``: whose rule each is, and whether it fits."""

import fnmatch
from collections.abc import Callable, Collection, Iterable
from typing import Any

from torch import nn

from ragged_fsdp.placement import block_numel
from ragged_fsdp.policy import Tiles, parse_codes, parse_granularity
from ragged_fsdp.trainer.config_file import ConfigError
from ragged_fsdp.weights.names import plain_name

__all__ = ["check_rules", "freeze", "match_rules", "stores_tiles"]

_PARSERS: dict[str, Callable[[str], Any]] = {"granularity": parse_granularity, "gather_codes": parse_codes}


def stores_tiles(granularity: dict[str, str]) -> bool:
    """Whether some rule stores parameters in tiles."""
    return any(isinstance(parse_granularity(text), Tiles) for text in granularity.values())


def match_rules(model: nn.Module, setting: str, rules: dict[str, str]) -> dict[nn.Parameter, Any]:
    """The rule of each parameter that has one; the first that matches its full name wins.

    Raises ``ConfigError`` for a rule that cannot be read or that matches nothing.
    """
    try:
        parsed = {pattern: _PARSERS[setting](text) for pattern, text in rules.items()}
    except ValueError as error:
        raise ConfigError(str(error)) from None
    found = _first_matches(setting, model.named_parameters(), parsed)
    return {parameter: parsed[pattern] for parameter, pattern in found.items()}


def _first_matches(
    setting: str, named: Iterable[tuple[str, nn.Parameter]], patterns: Collection[str]
) -> dict[nn.Parameter, str]:
    """The first pattern that matches each parameter, if any; ``ConfigError`` for one that matches nothing."""
    chosen: dict[nn.Parameter, str] = {}
    used: set[str] = set()
    for name, parameter in named:
        for pattern in patterns:
            if fnmatch.fnmatchcase(plain_name(name), pattern):
                used.add(pattern)
                chosen.setdefault(parameter, pattern)
    if unused := sorted(set(patterns) - used):
        raise ConfigError(f"{setting} {unused[0]!r} matches no parameter name of the model")
    return chosen


def freeze(model: nn.Module, patterns: list[str]) -> None:
    """Let parameters whose name, or one of several that they share, matches a pattern have no gradient.

    Raises ``ConfigError`` for a pattern that matches nothing, and if nothing would be trained.
    """
    for parameter in _first_matches("freeze", model.named_parameters(remove_duplicate=False), patterns):
        parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(f"freeze = {patterns} leaves no parameter that is trained")


def check_rules(
    model: nn.Module, setting: str, rules: dict[str, str], granularity: dict[str, str] | None = None
) -> None:
    """Raise ``ConfigError``, naming the parameter, for a rule whose blocks do not fit a shape.

    ``granularity`` are the rules beside those of codes: codes of a parameter in tiles need not divide it.
    """
    stored = match_rules(model, "granularity", granularity) if granularity else {}
    for parameter, rule in match_rules(model, setting, rules).items():
        try:
            if setting == "granularity":
                block_numel(parameter.shape, rule)
            elif not isinstance(stored.get(parameter), Tiles):
                rule.check(parameter.shape)
        except ValueError as error:
            name = next(plain_name(name) for name, p in model.named_parameters() if p is parameter)
            raise ConfigError(f"{name}: {error}") from None
