"""``ragged-fsdp export``: a checkpoint as safetensors."""

from pathlib import Path
from typing import Any

import click

from ragged_fsdp.checkpoint.place import is_url
from ragged_fsdp.cli import ABOVE_ZERO, HELP_OPTIONS
from ragged_fsdp.cli.checkpoint_path import PLACE, find_checkpoint

__all__ = ["command"]

_DTYPES = {"keep": None, "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@click.command(context_settings={"show_default": True, **HELP_OPTIONS})
@click.argument("checkpoint", type=PLACE)
@click.argument("out", type=click.Path(file_okay=False))
@click.option("--dtype", type=click.Choice(list(_DTYPES)), default="keep", help="type of the weights")
@click.option(
    "--format",
    "kind",
    type=click.Choice(["plain", "fp8"]),
    default="plain",
    help="fp8: matrices as float8 codes with a scale per 128 x 128, as DeepSeek-V3's checkpoints",
)
@click.option("--max-file-gib", type=ABOVE_ZERO, default=5.0, help="largest file")
@click.option("--best", is_flag=True, help="of a run, the best checkpoint instead of the newest")
@click.option("--overwrite", is_flag=True, help="replace OUT if it is there")
def command(
    checkpoint: Any, out: str, dtype: str, kind: str, max_file_gib: float, best: bool, overwrite: bool
) -> None:
    """Write the model in CHECKPOINT (or in a run's newest checkpoint) to the folder OUT, ready to serve.

    CHECKPOINT is a folder, or a URL that fsspec knows. Tensors are streamed one at a time. Names are those
    of the model's library, so that transformers can load the folder; several files get an index. Tokenizer
    and generation settings of the folder that the run started from are copied. OUT appears when it is
    complete.

    \b
    Examples:
      ragged-fsdp export runs/first exported
      ragged-fsdp export runs/first exported --best --dtype bf16
    """
    import torch
    from rich.console import Console

    from ragged_fsdp.trainer.exporting import export

    if is_url(out):
        raise click.BadParameter(f"{out} is a URL; OUT is a folder", param_hint="OUT")
    source = find_checkpoint(checkpoint, best=best, verify=True)
    type_name = _DTYPES[dtype]
    with Console(stderr=True).status("") as status:
        try:
            files = export(
                source,
                Path(out),
                dtype=getattr(torch, type_name) if type_name else None,
                fp8=kind == "fp8",
                max_file_bytes=round(max_file_gib * 2**30),
                overwrite=overwrite,
                on_tensor=lambda name: status.update(f"writing {name}"),
            )
        except (ValueError, OSError) as error:
            raise click.ClickException(str(error)) from error
    for file in files:
        click.echo(f"{file}  {file.stat().st_size / 2**20:,.1f} MiB")
