"""Results of a script, with what they were made on."""

import json
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

__all__ = ["save"]


def save(out: Path, **found: Any) -> None:
    """Write ``found`` to ``out`` as JSON, behind device, versions and time; ``found`` may name the device."""
    machine = {
        "device": found.pop("device", None) or torch.cuda.get_device_name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "written": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({**machine, **found}, indent=1) + "\n")
