"""The comparison of two runs to the bit: what it says of rows that differ, and of the committed reference."""

import json
import sys
from copy import deepcopy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.bits.run import ROWS, differences, write  # noqa: E402

_ROW = {
    "losses": [(2.0).hex(), (1.5).hex()],
    "grad_norms": [(1.0).hex(), (1.0).hex()],
    "weights_sha256": "a",
    "states_sha256": "b",
}
_RESULT = {"torch": "2.13.0", "cpu": "AVX2", "steps": 2, "rows": {"moe": _ROW, "dense": deepcopy(_ROW)}}


def test_equal_results_have_no_differences():
    assert differences(_RESULT, deepcopy(_RESULT)) == []


def test_differences_name_the_row_the_step_and_the_distance():
    other = deepcopy(_RESULT)
    other["rows"]["dense"] |= {"losses": [(2.0).hex(), (1.25).hex()], "weights_sha256": "c"}
    assert differences(_RESULT, other) == [
        "dense: other losses from step 2, by 2.5e-01 at most; weights",
    ]
    other["rows"]["dense"] = {"error": "ValueError: no"}
    del other["rows"]["moe"]
    other |= {"torch": "2.15.0"}
    torch, moe, dense = differences(_RESULT, other)
    assert torch.startswith("torch: 2.13.0 and 2.15.0") and moe == "moe: only in the first file"
    assert dense == "dense: failed: no error; ValueError: no"


def test_results_are_written_a_row_per_line(tmp_path):
    write(tmp_path / "made.json", _RESULT)
    assert json.loads((tmp_path / "made.json").read_text()) == _RESULT
    assert len((tmp_path / "made.json").read_text().splitlines()) == 7 + len(_RESULT["rows"])


def test_the_reference_has_every_row():
    reference = json.loads((ROOT / "benchmarks" / "bits" / "results" / "torch-2.13.json").read_text())
    assert list(reference["rows"]) == list(ROWS)
    assert not [name for name, row in reference["rows"].items() if "error" in row]
