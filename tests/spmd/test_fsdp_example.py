"""The ported script: one line differs from stock FSDP2's, the losses do not."""

import contextlib
import difflib
import io
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ragged_fsdp.trainer.launch import launch

EXAMPLES = Path(__file__).parents[2] / "examples"
STOCK, PORTED = EXAMPLES / "charlm_fsdp2.py", EXAMPLES / "charlm_ragged.py"


def _under_torchrun(script, *arguments):
    """What the script prints, run as its page says."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(
        [*command, str(script), *arguments], env=env, capture_output=True, text=True, timeout=170, check=False
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return run.stdout


def _substituted(*arguments):
    """What a script of torch's ``fully_shard`` prints when ours is put in its place."""
    return launch("test_fsdp_example:substitute_on_rank", list(arguments), processes=2)


def substitute_on_rank(command, pipe):
    from ragged_fsdp.run import main

    os.environ.update(
        TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0", CUDA_VISIBLE_DEVICES=""
    )
    torch.set_num_threads(1)
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        main(command)
    return said.getvalue()


def _forked(script, *arguments):
    """The same from processes that have torch loaded: a start under torchrun imports it three times."""
    return launch("test_fsdp_example:run_on_rank", [str(script), *arguments], processes=2)


def run_on_rank(command, pipe):
    os.environ.update(
        TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0", CUDA_VISIBLE_DEVICES=""
    )
    torch.set_num_threads(1)
    sys.argv = command
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(command[0], run_name="__main__")
    return printed.getvalue()


def _losses(printed):
    return {int(step): loss for step, loss in re.findall(r"step +(\d+)  loss (\S+)", printed)}


def test_one_line_differs():
    changes = [
        line
        for line in difflib.ndiff(STOCK.read_text().splitlines(), PORTED.read_text().splitlines())
        if line[0] in "+-"
    ]
    assert changes == [
        "- from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard",
        "+ from ragged_fsdp import MixedPrecisionPolicy, fully_shard",
    ]


def test_the_ported_script_trains_alike_and_takes_over_a_stock_checkpoint(tmp_path):
    """Stock runs two steps and saves, the port goes on from there: together the losses of the port alone."""
    checkpoint = str(tmp_path / "stock")
    first = _losses(_forked(STOCK, "--steps", "2", "--checkpoint", checkpoint))
    ported = _losses(_forked(PORTED, "--steps", "4", "--checkpoint", checkpoint))
    straight = _losses(_under_torchrun(PORTED, "--steps", "4"))
    assert list(straight) == [1, 2, 3, 4]
    assert {**first, **ported} == straight


def test_the_notebook_runs(tmp_path):
    """Its cells in one namespace, in a process of its own; the outputs that are stored are of a whole run."""
    notebook = json.loads((EXAMPLES / "ragged_sharding.ipynb").read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["execution_count"] == number for number, cell in enumerate(code, 1))
    assert not any(output["output_type"] == "error" for cell in code for output in cell["outputs"])
    sources = ["".join(cell["source"]) for cell in code]
    program = f"if __name__ == '__main__':\n    for source in {sources!r}:\n        exec(source, globals())\n"
    (tmp_path / "notebook.py").write_text(program)
    paths = [str(EXAMPLES.parent / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, "notebook.py"],
        capture_output=True,
        text=True,
        timeout=150,
        cwd=tmp_path,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert "8 ranks:" in done.stdout and "step 4: loss 5." in done.stdout and "12 ####" in done.stdout


def test_the_stock_script_runs_with_ours_in_its_place(tmp_path):
    """The losses of the ported script to the bit, and checkpoints of the granularity that was asked for."""
    checkpoint = str(tmp_path / "substituted")
    options = ["--granularity", "*.weight=1rows"]
    script = [str(STOCK), "--steps", "2"]
    straight = _losses(_forked(PORTED, "--steps", "2"))
    assert _losses(_substituted(*options, *script, "--checkpoint", checkpoint)) == straight
    assert list(Path(checkpoint).iterdir())
    idle = tmp_path / "idle.py"
    idle.write_text("import sys\nprint(sys.argv[1:], __name__)\n")
    said = _substituted(str(idle), "--granularity", "is the script's")
    assert "['--granularity', \"is the script's\"] __main__" in said and "never called" in said


def test_projects_that_ask_placements_for_their_dim_get_fsdp2_s_chunks(tmp_path):
    """Where the script does not say: None, as libraries write it, says nothing."""
    script = tmp_path / "shards.py"
    script.write_text(
        "import torch.distributed.fsdp as f, torch.nn as n\nfrom torch.distributed.tensor import Shard\n"
        "for wish in (None, lambda p: Shard(p.ndim - 1)):\n"
        "    made = f.fully_shard(n.Linear(4, 4), shard_placement_fn=wish)\n"
        "    print([p.placements[0].dim for p in made.parameters()])\n"
    )
    assert "[0, 0]\n[1, 0]\n" in _substituted("--placement", "shard0", str(script))


def test_run_names_rules_that_nothing_took(tmp_path):
    script = tmp_path / "shards.py"
    script.write_text(
        "import torch.distributed.fsdp as f, torch.nn as n\nf.fully_shard(n.Sequential(n.Linear(4, 4)))\n"
    )
    rules = [f"--granularity={rule}" for rule in ("*weight=1rows", "0.*=whole", "0.weight=2rows", "up=whole")]
    said = _substituted(*rules, str(script))
    assert [line for line in said.splitlines() if "--granularity" in line] == [
        "ragged_fsdp.run: --granularity '0.weight': no parameter took this rule.",
        "ragged_fsdp.run: --granularity 'up': no parameter took this rule.",
    ]


def test_run_names_what_is_wrong(capsys):
    from ragged_fsdp.run import main

    for arguments, message in (
        (["nowhere.py"], "nowhere.py: no such script"),
        (["--granularity", "32rows", "x.py"], "expected PATTERN=UNIT"),
        (["--granularity", "*=32cows", "x.py"], "expected 32rows or rows:32"),
    ):
        with pytest.raises(SystemExit):
            main(arguments)
        assert message in capsys.readouterr().err
