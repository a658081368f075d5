"""Each table of steps in the benchmark pages is what ``bench show`` makes of a committed result."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.predict.layers import stack_workload  # noqa: E402
from benchmarks.step import report  # noqa: E402
from benchmarks.step.compose import composed_table  # noqa: E402
from benchmarks.step.goals import GOALS, goal_table  # noqa: E402
from benchmarks.step.shapes import MODELS  # noqa: E402

from ragged_fsdp.predict.card import load_card  # noqa: E402
from ragged_fsdp.predict.network import PROFILES  # noqa: E402
from ragged_fsdp.predict.scale import Scale  # noqa: E402
from ragged_fsdp.predict.step import Setup, predict  # noqa: E402

RESULTS = ROOT / "benchmarks" / "step" / "results"
CARD = load_card(ROOT / "benchmarks" / "predict" / "results" / "h200-layers.json")
HEADLINES, METHOD, LOG = (
    (ROOT / "docs" / f"benchmarks{part}.md").read_text() for part in ("", "-method", "-log")
)


def _tables(text):
    """The tables of steps in a page, each with its title."""
    return re.findall(r"\*\*[^\n]*rank 0 of[^\n]*\*\*\n\n(?:\|[^\n]*\n)+", text)


@pytest.mark.parametrize(
    ("page", "option", "made", "least"),
    [(LOG, "--markdown", report.markdown, 12), (HEADLINES, "--headline", report.headline, 4)],
)
def test_tables_are_those_of_the_committed_results(page, option, made, least):
    files = sorted(RESULTS.glob("*.json"))
    steps = [found for path in files for found in report.other_tables(report.load([path]))[0]]
    committed = {made(result).strip() for result in steps}
    shown = _tables(page)
    assert len(shown) >= least, "the page has no tables"
    strange = [table.splitlines()[0] for table in shown if table.strip() not in committed]
    assert not strange, f"not what `bench show {option}` prints of results/*.json: {strange}"


@pytest.mark.parametrize(
    ("shallow", "deep"),
    [("gpt-oss-nodes-64-peers", "gpt-oss-nodes-64-more-kept"), ("llama-nodes-64", "llama-nodes-64-x8")],
)
def test_whole_models_are_composed_from_committed_results(shallow, deep):
    results = report.load([RESULTS / f"{shallow}.json", RESULTS / f"{deep}.json"])
    assert composed_table(results).strip() in HEADLINES


def test_a_headline_has_the_equal_rows_first():
    for table in _tables(HEADLINES):
        names = [line.split("|")[1].strip() for line in table.splitlines()[4:]]
        assert names[:3] == ["no sharding", "ragged_fsdp", "FSDP2"] or names[0] == "FSDP2"
        less = [any(word in name for word in ("all-to-all", "two levels", "bf16")) for name in names]
        assert any(less) and less == sorted(less)


def test_pages_keep_to_their_parts():
    assert "One GPU, modelled network" in METHOD.split("\n\n")[1].split(".")[0]
    for page in (HEADLINES, METHOD):
        assert not re.search(r"\b\d\d:\d\d\b", page), "times of day belong in the log"
    entries = re.findall(r"^## (\d{4}-\d\d-\d\d, \d\d:\d\d)", LOG, re.MULTILINE)
    assert entries == sorted(entries, reverse=True), "the log has the newest entry first"


def test_goals_are_compared_with_the_committed_results(tmp_path):
    table = goal_table(RESULTS)
    assert report.markdown_table(table) in LOG
    assert len(table) == 1 + len(GOALS) and all(reached for _, _, reached, *_ in table)
    missed = goal_table(tmp_path)  # nothing was measured there
    assert all(row[2:] == ("", "", "") for row in missed[1:])
    above = GOALS[0].cell(GOALS[0].limit + 0.01)
    assert above.startswith("**") and not GOALS[0].cell(GOALS[0].limit).startswith("**")


def _predicted(model, layers, ranks, **options):
    """ms of forward and backward, and peak allocated GiB, of layers of the benchmark over nodes."""
    setup = Setup(
        gpus=ranks,
        tokens_per_gpu={"gpt-oss-120b": 8192}.get(model, 4096),
        seq_len=MODELS[model].sequence,
        kept=False,
        scale=Scale(jitter=0.0),
        **options,
    )
    done = predict(stack_workload(model, layers), setup, CARD, PROFILES["h200-400g"]).replayed
    update = sum(span.end - span.start for span in done.spans if span.label == "optimizer")
    return (done.seconds - update) * 1e3, done.peak_bytes / 2**30


FSDP2, LEVELS, FLAT = {"sharding": "fsdp2"}, {"reduction": "two_level"}, {"reduction": "all_to_all"}


@pytest.mark.parametrize(
    ("sentence", "said", "predicted"),
    [
        ("`predict` has 590 ms for FSDP2", 590, lambda: _ms("gpt-oss-120b", 8, 256, replicas=2, **FSDP2)),
        ("and 454 for two levels there", 454, lambda: _ms("gpt-oss-120b", 8, 256, replicas=2, **LEVELS)),
        ("2.4 times FSDP2's time on GPT-OSS", 2.4, lambda: _slower("gpt-oss-120b", 8)),
        ("and 1.3 times on\nLlama", 1.3, lambda: _slower("llama-3-70b", 4)),
        ("nothing kept, 326 ms", 326, lambda: _ms("gpt-oss-120b", 8, 64, codes=True, **LEVELS)),
        ("Llama, 157 ms", 157, lambda: _ms("llama-3-70b", 4, 64, **LEVELS)),
        ("| FSDP2 | 89.5 |", 89.5, lambda: _predicted("deepseek-v3", 2, 256, **FSDP2)[1]),
        ("| 113.4 |", 113.4, lambda: _predicted("deepseek-v3", 3, 256, **FSDP2)[1]),
        ("| 116.5 |", 116.5, lambda: _predicted("deepseek-v3", 4, 256, **FSDP2)[1]),
        ("| two levels | 74.1 |", 74.1, lambda: _predicted("deepseek-v3", 2, 256, **LEVELS)[1]),
        ("| 98.6 |", 98.6, lambda: _predicted("deepseek-v3", 3, 256, **LEVELS)[1]),
        ("| 101.7 |", 101.7, lambda: _predicted("deepseek-v3", 4, 256, **LEVELS)[1]),
    ],
)
def test_what_the_page_predicts(sentence, said, predicted):
    """Within what `predict` itself is off by: its books may get better without the page."""
    assert sentence in HEADLINES
    assert predicted() == pytest.approx(said, rel=0.03)


def _ms(*case, **options):
    return _predicted(*case, **options)[0]


def _slower(model, layers):
    """The flat exchange over FSDP2."""
    return _ms(model, layers, 64, **FLAT) / _ms(model, layers, 64, **FSDP2)


def test_every_result_is_named_on_a_page():
    files = [path for path in RESULTS.rglob("*") if path.is_file()]
    text = HEADLINES + METHOD + LOG
    unnamed = [path.name for path in files if f"results/{path.relative_to(RESULTS)}" not in text]
    assert files and not unnamed
