"""The commands as users call them."""

import contextlib
import dataclasses
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from ragged_fsdp.checkpoint.store import CheckpointStore, open_store
from ragged_fsdp.cli.main import main
from ragged_fsdp.trainer.config import TrainConfig
from ragged_fsdp.trainer.metrics import losses_by_step
from train_cases import settings, train


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("cli") / "run"
    train(path, checkpoint_every=4, keep_last=0)
    return path


def _call(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(main, [str(a) for a in arguments])
    return result.exit_code, result.output


def test_inspect_shows_and_verifies(run_dir, tmp_path):
    code, text = _call("inspect", run_dir, "--verify", "--all")
    assert code == 0 and "model.layers.1.experts.gate_up_proj" in text and "optim.state" in text
    assert "every file is as it was written" in text
    code, text = _call("inspect", run_dir / "checkpoints/step-00000004", "--json")
    summary = json.loads(text)
    assert summary["info"]["step"] == 4 and summary["info"]["world_size"] == 2
    by_name = {t["name"]: t for t in summary["tensors"]}
    assert by_name["model.layers.0.experts.down_proj"]["shape"] == [4, 32, 32]
    code, text = _call("inspect", tmp_path)
    assert code == 1 and "neither a checkpoint nor a run" in text


def test_export_writes_what_the_checkpoint_holds(run_dir, tmp_path):
    from ragged_fsdp.checkpoint.contents import CheckpointReader
    from ragged_fsdp.weights import block_fp8

    code, text = _call("export", run_dir, tmp_path / "out", "--dtype", "bf16")
    assert code == 0 and "model.safetensors" in text
    written = load_file(tmp_path / "out/model.safetensors")
    reader = CheckpointReader(run_dir / "checkpoints/step-00000008")
    stored = {t.name.removeprefix("model."): reader.load(t) for t in reader.tensors("model.")}
    assert written.keys() == stored.keys()
    assert all(torch.equal(written[name], stored[name].bfloat16()) for name in stored)
    code, _ = _call("export", run_dir, tmp_path / "codes", "--format", "fp8")
    coded = load_file(tmp_path / "codes/model.safetensors")
    assert code == 0 and stored.keys() < coded.keys()
    for name, value in stored.items():
        if f"{name}_scale_inv" not in coded:  # norms, router, embedding, head, and experts in one tensor
            assert torch.equal(coded[name], value), name
            continue
        codes, scales = block_fp8(value)
        assert torch.equal(coded[name].view(torch.uint8), codes.view(torch.uint8)), name
        assert torch.equal(coded[f"{name}_scale_inv"], scales), name
    assert "layers.0.self_attn.q_proj.weight_scale_inv" in coded
    code, _ = _call("export", run_dir, tmp_path / "cut", "--best", "--max-file-gib", 2e-5)
    index = json.loads((tmp_path / "cut/model.safetensors.index.json").read_text())
    parts = {}
    for file in set(index["weight_map"].values()):
        parts.update(load_file(tmp_path / "cut" / file))
    assert code == 0 and parts.keys() == stored.keys() == index["weight_map"].keys()
    code, text = _call("export", run_dir, tmp_path / "endless", "--max-file-gib", "inf")
    assert code == 2 and "inf is not in the range" in text
    for where in (tmp_path / "cut", f"file://{tmp_path}/cut"):
        code, text = _call("inspect", where, "--json")
        assert code == 0 and {t["name"] for t in json.loads(text)["tensors"]} == stored.keys()


def test_a_damaged_checkpoint_is_not_exported(run_dir, tmp_path):
    shutil.copytree(run_dir, tmp_path / "run")
    newest = tmp_path / "run/checkpoints/step-00000008"
    victim = next(newest.glob("*.distcp"))
    victim.write_bytes(victim.read_bytes()[:-1] + b"?")
    for arguments in ((newest,), (tmp_path / "run", "--best")):
        code, text = _call("export", arguments[0], tmp_path / "out", *arguments[1:])
        assert code == 1 and f"{victim} has changed since it was written" in text.replace("\n", "")
    code, text = _call("export", tmp_path / "run", tmp_path / "out")
    assert code == 0 and "passing over a damaged checkpoint" in text
    assert _call("inspect", newest, "--verify")[0] == 1


def test_report_draws_runs(run_dir, tmp_path):
    code, text = _call("report", run_dir)
    page = (run_dir / "report.html").read_text()
    assert code == 0 and str(run_dir / "report.html") in text
    assert page.count("<svg") == 6 and "validation" in page and '<td data-name="processes">2</td>' in page
    assert '<td data-name="reduction">reduce_scatter (auto), 2 ranks on ' in page
    assert "What differs" not in page  # there is one run
    code, _ = _call("report", f"a={run_dir}", f"b={run_dir}", "--out", tmp_path / "both.svg")
    assert code == 0 and (tmp_path / "both.svg").read_text().startswith("<?xml")
    assert _call("report", tmp_path / "nowhere")[0] != 0
    swept = [tmp_path / sweep / "lr=1e-3" for sweep in ("one", "two")]
    for folder in swept:
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_bytes((run_dir / "metrics.jsonl").read_bytes())
    assert _call("report", *swept, "--out", tmp_path / "swept.html")[0] == 0
    page = (tmp_path / "swept.html").read_text()
    assert all(f'<td data-name="run">{name}</td>' in page for name in ("lr=1e-3", swept[1]))
    assert "two runs are called 'a'" in _call("report", f"a={swept[0]}", f"a={swept[1]}")[1]
    assert "no metrics.jsonl" in _call("report", tmp_path)[1]


def test_mistakes_on_the_command_line(tmp_path):
    (tmp_path / "x.toml").write_text("[run]\nstep = 3\n")
    for arguments, message in (
        (("--config", tmp_path / "x.toml"), "did you mean 'steps'?"),
        (("--optimizer", "adam"), "optimizer = 'adam': did you mean 'adamw'?"),
        (("--tp", "0"), "tp = 0: expected at least 1"),
        (("--granularity", "rows"), "expected KEY=VALUE"),
        (("--granularity", "*=rows:2", "--granularity", "*=whole"), "--granularity *: given twice"),
        (("--stpes", "3"), "--steps"),
        (("--model", "nanoo"), "did you mean 'nano'?"),
    ):
        code, text = _call("train", *arguments)
        assert code == 2 and message in text, text
    assert "did you mean 'train'?" in _call("trian")[1]
    assert "holds 'x.toml', which no demo wrote" in _call("demo", "--out", tmp_path)[1]
    assert (tmp_path / "x.toml").exists()


def _train_command(run_dir: Path, **changes: object) -> list[str]:
    """The command line of a run of the tests, without a number of processes."""
    values = settings(run_dir, **changes)
    flags = [
        f"--{k.replace('_', '-')}={v[0] if isinstance(v, list) else v}"
        for k, v in values.items()
        if k not in ("tensorboard", "processes")
    ]
    return [str(Path(sys.executable).with_name("ragged-fsdp")), "train", "--no-tensorboard", *flags]


def test_help_has_every_setting_under_its_section():
    code, text = _call("train", "--help")
    assert code == 0
    for section, cls in TrainConfig.sections().items():
        part = text[text.index(f"[{section}]") :]
        for field in dataclasses.fields(cls):
            assert f"--{field.name.replace('_', '-')}" in part, field.name


def test_torchrun_runs_the_same_command(tmp_path):
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "--no-python",
    ]
    command = [*torchrun, *_train_command(tmp_path / "run", steps=2)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("gradients: reduce_scatter (auto), 2 ranks on one node") == 1
    assert "ragged over 2 cpu processes" in done.stdout and "step     2/2  loss" in done.stdout


def _srun(
    command: list[str], job: int, folders: tuple[Path, Path] | None = None
) -> list[subprocess.Popen[str]]:
    """Two processes with the variables that srun gives them, each in its own of ``folders``."""
    common = {"SLURM_NTASKS": "2", "SLURM_JOB_ID": str(job), "SLURM_STEP_NODELIST": "localhost"}
    return [
        subprocess.Popen(
            command,
            env={**os.environ, **common, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=folders[rank] if folders else None,
        )
        for rank in range(2)
    ]


def _free_job() -> int:
    """A job number whose port nobody uses."""
    while True:
        job = random.randrange(20_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("localhost", 20_000 + job))
            return job


def test_nodes_need_no_common_folder_when_checkpoints_are_in_an_object_store(tmp_path):
    """The run's folder is another one on each rank, as on nodes with disks of their own."""
    nodes = tmp_path / "a", tmp_path / "b"
    for node in nodes:
        node.mkdir()
    url = f"file://{tmp_path}/bucket"
    for steps in (2, 3):
        command = _train_command(Path("run"), steps=steps, checkpoint_dir=url, checkpoint_every=1)
        ranks = _srun(command, _free_job(), nodes)
        said = [rank.communicate(timeout=120)[0] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0, 0], said
    assert open_store(url).steps() == [2, 3] and list(losses_by_step(nodes[0] / "run")) == [1, 2, 3]
    assert not (nodes[1] / "run").exists()


def test_slurm_runs_the_same_command_and_its_warning_saves(tmp_path):
    """SIGUSR1 to one rank, as before a time limit, then SIGTERM to all: both save, end, and later go on."""
    run_dir, ranks = tmp_path / "run", []
    try:
        ranks = _srun(_train_command(run_dir, steps=100_000, timeout=20.0), _free_job())
        deadline = time.monotonic() + 120
        while len(losses_by_step(run_dir)) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        ranks[1].send_signal(signal.SIGUSR1)
        for rank in (*ranks, *ranks):
            rank.send_signal(signal.SIGTERM)
        said = [rank.communicate(timeout=60)[0] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [130, 130], said
        (stopped,) = CheckpointStore(run_dir / "checkpoints").steps()
        assert (
            stopped == max(losses_by_step(run_dir)) and f"checkpoint {run_dir}" in said[0] and said[1] == ""
        )
        outcome = train(run_dir, steps=stopped + 1)  # as after a requeue
        assert outcome["step"] == stopped + 1 and min(losses_by_step(run_dir)) == 1
    finally:
        for rank in ranks:
            rank.kill()
