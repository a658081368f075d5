"""The prices of networks, which the package has for its predictions.

``bench trees`` puts other source trees in the package's place, and older ones have none: those are timed with
the prices of this checkout.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if not TYPE_CHECKING and importlib.util.find_spec("ragged_fsdp.predict") is None:
    _FILE = Path(__file__).parents[2] / "src" / "ragged_fsdp" / "predict" / "network.py"
    _SPEC = importlib.util.spec_from_file_location("ragged_fsdp_prices", _FILE)
    _MODULE = sys.modules[_SPEC.name] = importlib.util.module_from_spec(_SPEC)  # dataclasses look there
    _SPEC.loader.exec_module(_MODULE)
    globals().update({name: getattr(_MODULE, name) for name in _MODULE.__all__})
else:
    from ragged_fsdp.predict.network import (
        PROFILES,
        Network,
        Place,
        Seconds,
        Traffic,
        WireName,
        exchange_price,
        network_of,
        price,
        wire_text,
    )

__all__ = [
    "PROFILES",
    "Network",
    "Place",
    "Seconds",
    "Traffic",
    "WireName",
    "exchange_price",
    "network_of",
    "price",
    "wire_text",
]
