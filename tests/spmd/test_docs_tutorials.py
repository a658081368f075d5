"""The tutorial of the command line, run as it stands."""

import shlex

from click.testing import CliRunner

from docs_blocks import blocks
from ragged_fsdp.cli.main import main
from ragged_fsdp.trainer.metrics import read_metrics


def test_pretraining_as_the_page_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAGGED_FSDP_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text").mkdir()
    for number in range(2):
        (tmp_path / f"text/{number}.txt").write_text("the quick brown fox jumps over the lazy dog. " * 80)
    texts = [text.replace("\\\n", " ") for _, text in blocks("docs/tutorial-pretrain.md", "bash")]
    commands = [line for text in texts for line in text.splitlines()]
    said = []
    for line in commands:
        program, *arguments = shlex.split(line)
        assert program == "ragged-fsdp"
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == 0, (line, result.output, result.exception)
        said.append(result.output)
    assert len(commands) == 6
    starts = [row for row in read_metrics(tmp_path / "runs/first") if row["kind"] == "start"]
    assert [(row["step"], row["world_size"]) for row in starts] == [(0, 2), (12, 1)]
    notes = [row["text"] for row in read_metrics(tmp_path / "runs/first") if row["kind"] == "note"]
    assert any(note.startswith("steps is 16, was 12") for note in notes)
    page = (tmp_path / "compare.html").read_text()
    assert "What differs in the settings" in page and ">muon<" in page
    assert "every file is as it was written" in said[4]
    assert (tmp_path / "exported/model.safetensors").exists()
