"""The report of runs: what is drawn, what is left out of an axis, what is said of differences."""

import html
import json
import re
from xml.etree import ElementTree

import pytest

from ragged_fsdp.trainer.charts import Bars, Line, Panel, draw, robust_range, smooth
from ragged_fsdp.trainer.config_file import from_values, save_toml
from ragged_fsdp.trainer.report import write_report


def _run(folder, losses, **settings):
    folder.mkdir()
    save_toml(from_values({"run_dir": str(folder), **settings}), folder / "config.toml")
    rows = [{"kind": "start", "step": 0, "world_size": 2, "sharding": "ragged", "parameters": 9}]
    for step, loss in enumerate(losses, 1):
        memory, phases = {"allocated": 2**30}, {"forward": 0.25, "backward": 0.5}
        row = {"kind": "train", "step": step, "loss": loss, "grad_norm": 1.0, "lr": 0.1, "tokens_per_s": 5e4}
        rows.append({**row, "memory": memory, "phases_s": phases})
    rows.append({"kind": "eval", "step": len(losses), "loss": losses[-1]})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_one_outlier_does_not_flatten_a_panel():
    values = [2.0 - 0.01 * step for step in range(100)]
    assert robust_range([*values, 500.0]) == (values[-1], values[0])
    assert robust_range([*values, 2.3]) == (values[-1], 2.3)  # not far off: it belongs to the range
    assert robust_range([]) == (0.0, 1.0) and robust_range([float("nan"), 3.0]) == (3.0, 3.0)
    shown = draw(Panel("Loss", "note", "loss", [Line("a", range(101), [*values, 500.0], 0)]))
    assert "1 beyond the axis, drawn at its edge" in shown


def test_smoothing_is_a_mean_of_what_was():
    assert smooth([3.0, 5.0, 4.0]) == [3.0, 5.0, 4.0]  # too few to smooth
    curve = smooth([1.0, 0.0] * 100)
    assert curve[0] == 1.0 and all(0.4 < value < 0.6 for value in curve[100:])
    assert smooth([7.0] * 90) == pytest.approx([7.0] * 90)


def test_panels_have_titles_labels_and_values_to_hover():
    line = Line("a <b>", [1, 2], [1.0, float("nan")], 9)
    shown = draw(Panel("Loss & more", "a note", "nats", [line], marks=[(1, 0)]))
    tree = ElementTree.fromstring(shown)
    texts = [node.text for node in tree.iter() if node.tag.endswith("text")]
    assert {"Loss & more", "a note", "nats", "step"} <= set(texts)
    (stored,) = json.loads(tree.attrib["data-lines"])
    assert stored["label"] == "a <b>" and stored["color"] == 1
    assert [(step, value) for step, _, value in stored["points"]] == [(1, 1.0)]


def test_bars_have_whole_labels_and_room():
    """Labels were cut to their last nine letters, and many runs were squeezed into one height."""
    label = "four processes, then three"
    bars = draw(Bars("Time", "medians", "ms", ("a", "b"), [(label, [1.0, 3000.0])] * 12))
    assert bars.count(f">{label}</text>") == 12
    assert ">3,000</text>" in bars and f"<title>{label}: b 3,000</title>" in bars
    tree = ElementTree.fromstring(bars)
    boxes = [node.attrib for node in tree.iter() if node.tag.endswith("rect")][2:]
    ends = [float(box["y"]) + float(box["height"]) for box in boxes]
    starts = [float(box["y"]) for box in boxes]
    assert all(start - end > 12 for end, start in zip(ends[1::2], starts[2::2]))  # a label fits between
    assert ends[-1] < float(tree.attrib["viewBox"].split()[3])


def test_the_page_says_what_differs_and_fits_every_screen(tmp_path):
    runs = {
        "first": _run(tmp_path / "a", [3.0, 2.0], lr=0.1),
        "<second>": _run(tmp_path / "b", [3.0, 2.5], lr=0.2, model_set={"layers": "1"}, data="a.txt"),
    }
    write_report(runs, tmp_path / "out/page.html")
    page = (tmp_path / "out/page.html").read_text()
    settings = re.search(r"What differs in the settings</h2>(.*?)</table>", page).group(1)
    names = re.findall(r'data-name="setting">(\w+)<', settings)
    assert names == ["model_set", "data", "lr"] and ">0.1<" in settings and ">0.2<" in settings
    assert all(f">{value}<" in settings for value in ("none", "layers=1", "stdlib", "a.txt"))
    assert page.index("<h2>Curves") < page.index("What differs")  # a long list must not hide them
    assert 'name="viewport"' in page and "prefers-color-scheme:dark" in page and "max-width:640px" in page
    assert "<second>" not in page and html.escape("<second>") in page
    write_report(runs, tmp_path / "out/file.svg")
    tree = ElementTree.parse(tmp_path / "out/file.svg")
    assert len(tree.getroot().findall("{http://www.w3.org/2000/svg}svg")) == 6
    with pytest.raises(ValueError, match=r"has no metrics\.jsonl with training steps"):
        write_report({"x": tmp_path}, tmp_path / "x.html")
