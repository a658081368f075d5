"""``python -m benchmarks.step``: the same commands as ``ragged-fsdp bench``."""

from .app import app

if __name__ == "__main__":
    app()
