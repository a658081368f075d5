"""Each table of steps in docs/benchmarks.md is what ``bench show --markdown`` makes of a committed result."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.step import report  # noqa: E402
from benchmarks.step.goals import GOALS, goal_table  # noqa: E402

RESULTS = ROOT / "benchmarks" / "step" / "results"


def test_tables_are_those_of_the_committed_results():
    files = sorted(RESULTS.glob("*.json"))
    steps = [found for path in files for found in report.other_tables(report.load([path]))[0]]
    committed = {report.markdown(result).strip() for result in steps}
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    shown = re.findall(r"\*\*[^\n]*rank 0 of[^\n]*\*\*\n\n(?:\|[^\n]*\n)+", text)
    assert len(shown) >= 8, "the page has no tables"
    strange = [table.splitlines()[0] for table in shown if table.strip() not in committed]
    assert not strange, f"not what `bench show --markdown` prints of results/*.json: {strange}"


def test_goals_are_compared_with_the_committed_results(tmp_path):
    table = goal_table(RESULTS)
    assert report.markdown_table(table) in (ROOT / "docs" / "benchmarks.md").read_text()
    assert len(table) == 1 + len(GOALS) and all(reached for _, _, reached, *_ in table)
    missed = goal_table(tmp_path)  # nothing was measured there
    assert all(row[2:] == ("", "", "") for row in missed[1:])
    above = GOALS[0].cell(GOALS[0].limit + 0.01)
    assert above.startswith("**") and not GOALS[0].cell(GOALS[0].limit).startswith("**")


def test_every_result_is_named_on_the_page():
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    files = [path for path in RESULTS.rglob("*") if path.is_file()]
    unnamed = [path.name for path in files if f"results/{path.relative_to(RESULTS)}" not in text]
    assert files and not unnamed
