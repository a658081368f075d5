"""A Chrome trace of a few steps."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from ragged_fsdp.trainer.config import LogConfig

__all__ = ["StepProfiler"]


class StepProfiler:
    """Records steps ``profile_from`` to ``profile_from + profile - 1`` of this start of the run."""

    def __init__(
        self, config: LogConfig, run_dir: Path, first_step: int, say: Callable[[str], None], *, enabled: bool
    ) -> None:
        self._say = say
        self._first = config.profile_from
        self._last = config.profile_from + config.profile - 1
        self._done = 0
        self._path = run_dir / "trace" / f"steps-{first_step + self._first}-{first_step + self._last}.json"
        self._profile: profile | None = None
        self._enabled = enabled and config.profile > 0
        if self._enabled and self._first == 1:
            self._begin()

    def step(self) -> None:
        """A step is done."""
        self._done += 1
        if self._enabled and self._done == self._first - 1:
            self._begin()
        elif self._profile is not None and self._done == self._last:
            self.close()

    def close(self) -> None:
        """Write the trace, also of a run that ended within it."""
        if self._profile is not None:
            self._profile.__exit__(None, None, None)
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._profile.export_chrome_trace(str(self._path))
            self._profile = None
            self._say(f"trace {self._path}")
        elif self._enabled and self._done < self._first - 1:
            self._say(f"no trace: profile_from = {self._first}, but this start made {self._done} steps")

    def _begin(self) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities, record_shapes=True)
        self._profile.__enter__()
