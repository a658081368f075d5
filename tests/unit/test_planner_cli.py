"""``ragged-fsdp plan``: shapes, rules, tables, JSON, pictures, advice and errors."""

import gc
import json
import re
import subprocess
import sys
import weakref
import xml.etree.ElementTree as ElementTree

import pytest
from click.testing import CliRunner

from ragged_fsdp.cli.main import main
from ragged_fsdp.cli.plan_costs import (
    PlanSettings,
    advise,
    merge_equal,
    plan_model,
    recommendation,
    warnings_for,
)
from ragged_fsdp.cli.plan_display import ascii_picture
from ragged_fsdp.cli.plan_inputs import (
    TensorShape,
    expand_rules,
    load_shapes,
    parse_rule,
    parse_sizes,
    spec_of,
    wrap_groups,
)
from ragged_fsdp.layout import TensorSpec
from ragged_fsdp.models.published import PUBLISHED
from ragged_fsdp.models.source import find_model
from ragged_fsdp.planner import plan_group


def run(*arguments):
    return CliRunner().invoke(main, ["plan", *map(str, arguments)])


@pytest.fixture(autouse=True)
def _wide(monkeypatch):
    """As into a file: who runs the tests may have set how wide a line is."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture
def tensors(tmp_path):
    """A plain list: two equal layers and an embedding."""
    entries = [{"name": "embed.weight", "shape": [1000, 64]}]
    for layer in range(2):
        entries += [
            {"name": f"layers.{layer}.up.weight", "shape": [256, 64]},
            {"name": f"layers.{layer}.down.weight", "shape": [64, 256]},
            {"name": f"layers.{layer}.norm.weight", "shape": [64]},
        ]
    path = tmp_path / "tensors.json"
    path.write_text(json.dumps({"model": "tiny", "tensors": entries}))
    return path


@pytest.mark.parametrize(
    ("name", "parameters", "layer_tensors"),
    [
        ("gpt-oss-120b", 116_829_156_672, 17),
        ("gpt-oss-20b", 20_914_757_184, 17),
        ("deepseek-v3", 671_026_404_352, 781),
        ("llama-3-8b", 8_030_261_248, 9),
        ("llama-3-70b", 70_553_706_496, 9),
        ("qwen3-30b-a3b", 30_532_122_624, 393),
        ("qwen3-235b-a22b", 235_093_634_560, 393),
    ],
)
def test_named_models_have_their_published_shapes(name, parameters, layer_tensors):
    shapes = load_shapes(name, experts="published")
    assert sum(tensor.numel for tensor in shapes.tensors) == parameters
    groups = wrap_groups(shapes.tensors, ["layers"])
    assert len(groups[-1].tensors) == layer_tensors or len(groups[-2].tensors) == layer_tensors


def test_experts_fused_separate_and_expert_parallel(tmp_path):
    config = {"model_type": "qwen3_moe", "num_hidden_layers": 1, "num_experts": 8, "hidden_size": 64}
    config |= {"moe_intermediate_size": 32, "num_attention_heads": 4, "vocab_size": 100, "head_dim": 16}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    by_form = {
        form: load_shapes(str(path), experts=form).tensors for form in ("published", "built", "separate")
    }
    assert by_form["published"] == by_form["separate"]
    names = [tensor.name for tensor in by_form["separate"] if ".experts." in tensor.name]
    assert len(names) == 24 and "model.layers.0.mlp.experts.7.up_proj.weight" in names
    fused = {t.name: t.shape for t in by_form["built"] if ".experts." in t.name}
    assert fused["model.layers.0.mlp.experts.gate_up_proj"] == (8, 64, 64)
    local = load_shapes(str(path.parent), experts="separate", ep=4).tensors
    assert sum(".experts." in tensor.name for tensor in local) == 6
    with pytest.raises(ValueError, match="8 experts cannot be split over 3 ranks"):
        load_shapes(str(path), ep=3)


def test_rules():
    matrix, vector = TensorShape("a.experts.0.w", (48, 10)), TensorShape("a.norm", (48,))
    rules = [parse_rule("*.experts.*=16rows"), parse_rule("*=whole")]
    assert spec_of(matrix, rules) == TensorSpec("a.experts.0.w", 480, 160)
    assert spec_of(vector, rules).block_numel == 48
    assert spec_of(vector, [parse_rule("*=2rows")]).block_numel == 1  # rows are for matrices
    assert spec_of(matrix, [parse_rule("*=96elements")]).block_numel == 96
    assert spec_of(matrix, []).block_numel == 1
    assert spec_of(matrix, [parse_rule("*=20rows")], nearest=True).block_numel == 160
    assert spec_of(matrix, [parse_rule("*=100elements")], nearest=True).block_numel == 20
    with pytest.raises(ValueError, match=r"a.experts.0.w: 20 rows do not divide its 48 rows; .*=16rows"):
        spec_of(matrix, [parse_rule("*=20rows")])
    with pytest.raises(ValueError, match=r"blocks of 100 elements do not divide its 480 elements"):
        spec_of(matrix, [parse_rule("*=100elements")])
    assert [[r.text for r in rules] for rules in expand_rules(["a=1rows|2rows", "b=whole"])] == [
        ["a=1rows", "b=whole"],
        ["a=2rows", "b=whole"],
    ]
    for bad in ("128rows", "*=rows128", "=4rows", "*=0rows", "*=4whole"):
        with pytest.raises(ValueError, match="granularity"):
            parse_rule(bad)


def test_sizes():
    assert parse_sizes("8,2, 4") == [2, 4, 8]
    assert parse_sizes("8:32:8,100") == [8, 16, 24, 32, 100]
    assert parse_sizes("8:32") == [8, 16, 24, 32]
    for bad in ("", "0", "8:4", "a", "1:2:3:4", "-8"):
        with pytest.raises(ValueError, match="FSDP sizes"):
            parse_sizes(bad)


def test_wraps():
    names = ["embed.w", "layers.0.mlp.w", "layers.1.mlp.w", "head.w", "scale"]
    tensors = [TensorShape(name, (4,)) for name in names]
    grouped = lambda *wraps: {g.name: len(g.tensors) for g in wrap_groups(tensors, wraps)}  # noqa: E731
    assert grouped("layers") == {"root": 3, "layers.0": 1, "layers.1": 1}
    assert grouped("model") == {"root": 5}
    assert grouped("layers.*", "head") == {"root": 2, "layers.0": 1, "layers.1": 1, "head": 1}
    assert grouped("layers.*", "layers.*.mlp")["layers.0.mlp"] == 1
    with pytest.raises(ValueError, match=r"wrap 'blocks\.\*' matches no module"):
        grouped("blocks.*")


def test_table(tensors):
    result = run(tensors, "-n", "4", "-g", "*.up.*=16rows")
    assert result.exit_code == 0, result.output
    assert re.search(r"layers\.0-1 \(x2\) +3 ", result.output) and "proven" in result.output
    assert re.search(r"total +7 ", result.output)


def test_json_equals_the_planner(tensors):
    result = run(tensors, "-n", "4,6", "-g", "*.up.*=16rows", "--json", "--dtype", "fp32")
    content = json.loads(result.stdout)
    first = content["plans"][0]["sizes"][0]
    layer = next(group for group in first["groups"] if group["modules"] == ["layers.0", "layers.1"])
    specs = [
        TensorSpec("up.weight", 16384, 1024),
        TensorSpec("down.weight", 16384),
        TensorSpec("norm.weight", 64),
    ]
    layout = plan_group(specs, 4)
    assert layer["buffers"][0]["digest"] == layout.digest
    assert layer["bytes_per_rank"] == 4 * layout.shard_numel
    assert first["padding_ratio"] == first["buffer_numel"] / first["numel"] - 1
    assert first["numel"] == 64000 + 2 * layout.tensor_numel
    assert [size["ranks"] for size in content["plans"][0]["sizes"]] == [4, 6]


def test_tiles_have_a_buffer_of_their_own(tensors):
    rule = "*.weight=tiles:32x32"
    plan = json.loads(run(tensors, "-n", "4", "-g", rule, "--json").stdout)["plans"][0]
    assert plan["granularity"] == [rule]
    layer = next(
        group for group in plan["sizes"][0]["groups"] if group["modules"] == ["layers.0", "layers.1"]
    )
    matrices = [TensorSpec(f"{name}.weight", 16384, 1024, (32, 32)) for name in ("up", "down")]
    layouts = [plan_group([TensorSpec("norm.weight", 64)], 4), plan_group(matrices, 4)]
    assert [buffer["digest"] for buffer in layer["buffers"]] == [layout.digest for layout in layouts]
    assert "tiles of 32 x 32" in run(tensors, "-n", "4", "-g", rule, "--show", "layers.0").output


def _network(tmp_path, ranks, per_node, *options):
    """Levels and traffic of shards of 128 elements: bytes inside a node and over a card, by collective."""
    path = tmp_path / "tensors.json"
    path.write_text(json.dumps([{"name": "w", "shape": [128 * ranks]}]))
    result = run(path, "-n", ranks, "--ranks-per-node", per_node, "--json", *options)
    network = json.loads(result.stdout)["plans"][0]["sizes"][0]["network"]
    traffic = {}
    for entry in network.pop("traffic"):
        kind = f"{entry['collective']}: {entry['detail']}"
        traffic[kind] = (entry["inside_bytes"], entry["card_bytes"])
    return network, traffic


def test_the_bytes_of_each_level_of_equal_nodes(tmp_path):
    """16 ranks on 4 nodes: a bf16 buffer of B = 4096 bytes, 3/4 of which come from other nodes."""
    levels, traffic = _network(tmp_path, 16, 4)
    assert levels == {"nodes": 4, "ranks_per_node": 4, "largest_node": 4, "auto": "two_level"}
    assert traffic == {
        "gather: bf16, before forward and before backward": (2 * 3072, 2 * 768),  # B 3/4; B 3/4 / 4 cards
        "reduce_scatter: fp32 sums": (6144, 1536),
        "reduce_scatter: bf16 sums": (3072, 768),
        "all_to_all: bf16 gradients": (768, 3072),  # to 3 and to 12 ranks, 256 bytes each
        "two_level: bf16 gradients, bf16 between nodes": (3072, 768),  # B/4 to 3 ranks; 256 bytes to 3 nodes
        "two_level: bf16 gradients, fp32 between nodes": (3072, 1536),
    }


def test_the_bytes_of_each_level_of_nodes_that_differ(tmp_path):
    """A rank on the smaller of two nodes; slots are 256 bytes."""
    levels, traffic = _network(tmp_path, 12, 8)
    assert levels == {"nodes": 3, "ranks_per_node": 4, "largest_node": 8, "auto": "two_level"}
    assert traffic["reduce_scatter: bf16 sums"] == (9 * 256, 2 * 256)  # 8 slots over 4 cards
    assert traffic["all_to_all: bf16 gradients"] == (3 * 256, 8 * 256)
    assert traffic["two_level: bf16 gradients, bf16 between nodes"] == (9 * 256, 2 * 256)
    levels, traffic = _network(tmp_path, 14, 8)
    assert levels == {"nodes": 7, "ranks_per_node": 2, "largest_node": 8, "auto": "reduce_scatter"}
    assert traffic["reduce_scatter: bf16 sums"] == (13 * 256 - 342, 342)  # 8 slots over 6 cards
    # 7 slots to its neighbour; of 6 other parts, 2 are on its own node
    assert traffic["two_level: bf16 gradients, bf16 between nodes"] == ((7 + 2) * 256, 4 * 256)
    assert traffic["two_level: bf16 gradients, fp32 between nodes"] == ((7 + 4) * 256, 8 * 256)


def test_where_there_are_no_two_levels(tmp_path):
    levels, traffic = _network(tmp_path, 4, 8)
    assert levels["auto"] == "all_to_all" and not any("two_level" in kind for kind in traffic)
    assert all(card == 0 for _, card in traffic.values())
    levels, traffic = _network(tmp_path, 4, 1)
    assert levels["auto"] == "all_to_all" and traffic["all_to_all: bf16 gradients"] == (0, 3 * 256)
    shown = run(tmp_path / "tensors.json", "-n", "4", "--ranks-per-node", "1")
    (marked,) = (line for line in shown.output.splitlines() if line.rstrip().endswith(" auto"))
    assert marked.split()[0] == "all_to_all:"
    assert _network(tmp_path, 3, 2)[0]["auto"] == "reduce_scatter"  # nodes of two ranks and of one
    assert _network(tmp_path, 4, 2, "--dtype", "fp32")[0]["auto"] == "reduce_scatter"
    half = _network(tmp_path, 4, 2, "--dtype", "fp16")[1]
    assert [kind for kind in half if "two_level" in kind] == ["two_level: fp16 gradients, fp32 between nodes"]
    codes = _network(tmp_path, 4, 2, "--dtype", "fp8")[1]
    assert codes["gather: fp8, before forward and before backward"] == (2 * 2 * 128, 2 * 1 * 128)
    assert codes["all_to_all: bf16 gradients"] == (256, 2 * 256)


def test_fp8_beside_bf16():
    result = run("demo", "--fp8", "-n", "4,8", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    tiles, bands = found["left_out"]["tiles"], found["left_out"]["bands"]
    assert tiles["layers.0.router.weight"] == "Router has a forward of its own"
    assert tiles["lm_head.weight"].startswith("left out by its name: a head")
    assert tiles["embed_tokens.weight"] == "no matrix of a linear layer or of fused experts"
    assert "layers.0.self_attn.q_proj.weight" not in bands and "layers.3.experts.down_proj" not in bands
    assert bands["layers.1.self_attn.k_proj.weight"].startswith("has matrices of 64 x 128; FP8 products need")
    assert "layers.1.self_attn.k_proj.weight" not in tiles
    size = found["sizes"][0]
    assert size["ranks"] == 4 and size["bf16"]["coded_numel"] == 0
    coded = sum(numel for name, numel in _demo_numel().items() if name not in tiles)
    assert size["tiles"]["coded_numel"] == coded
    codes = size["tiles"]["bytes_per_coded_element"] * coded
    blocks = 4 * (4 + 8 * 2 + 8)  # q, k, v, o; two blocks of gate_up and one of down for each of 8 experts
    assert round(codes) == round(coded * (1 + size["tiles"]["coded_padding_ratio"])) + 4 * blocks
    text = run("demo", "--fp8", "-n", "4,8").output
    assert re.search(r"k_proj.weight +32,768 +FP8 in tiles; bf16 in bands", text)
    assert re.search(r"8 +bf16 .*\n.*bands of 128 rows.*\n.*tiles of 128 x 128", text)


def _demo_numel():
    return {t.name: t.numel for t in load_shapes("demo").tensors}


def test_fp8_goes_with_models_and_by_itself(tensors):
    for arguments, error in (
        ((tensors, "--fp8"), "--fp8: tiny is a list of tensors; name a model"),
        (("demo", "--fp8", "--advise"), "--fp8 compares ways of its own: leave --advise"),
        (("demo", "--fp8", "--dtype", "fp32"), "--fp8 compares ways of its own: leave --dtype"),
        (("demo", "--fp8", "--svg", "x.svg"), "--fp8 compares ways of its own: leave --svg"),
        (
            ("demo", "--fp8", "--advise", "--hardware", "h200", "--tokens-per-gpu", "8192"),
            "--fp8 compares ways of its own: leave --advise",
        ),
        (("demo", "--fp8", "-g", "*=whole"), "--fp8 compares ways of its own: leave --granularity"),
    ):
        result = run(*arguments)
        assert result.exit_code == 2 and error in result.output


def test_the_table_of_levels_marks_what_auto_picks(tensors):
    result = run(tensors, "-n", "4,16", "--ranks-per-node", "8")
    assert re.search(r"4 ranks on one node +gather: bf16", result.output)
    assert re.search(r"16 ranks on 2 nodes of 8 +gather: bf16", result.output)
    marked = [line.split(":")[0].split()[-1] for line in result.output.splitlines() if line.endswith("auto ")]
    assert marked == ["all_to_all", "two_level"]
    assert "--ranks-per-node N shows" not in result.output
    plain = run(tensors, "-n", "4,16")
    assert "--ranks-per-node N shows" in plain.output and "all_to_all" not in plain.output
    assert "network" not in run(tensors, "-n", "4", "--json").output


def test_plot_draws_one_line_per_granularity(tensors, tmp_path):
    target = tmp_path / "padding.svg"
    result = run(tensors, "-n", "2:8:2", "-g", "*.up.*=1rows|16rows|64rows", "--plot", target)
    assert result.exit_code == 0, result.output
    text = target.read_text()
    assert (
        all(f"*.up.*={rows}rows" in text for rows in (1, 16, 64)) and ElementTree.fromstring(text) is not None
    )
    assert run(tensors, "-n", "2", "--plot", tmp_path / "x.bmp").exit_code == 2


def test_no_two_tensors_of_a_picture_look_alike():
    """A layer of GPT-OSS has 17 kinds of tensors; one with more has more colours."""
    from ragged_fsdp.cli.plan_display import _svg_colours

    specs = [TensorSpec(f"layer.kind{chr(65 + kind)}.weight", 64 * (kind + 1)) for kind in range(40)]
    colours = _svg_colours(plan_group(specs, 4))
    assert len({colour for colour, _ in colours.values()}) == 40 and not any(
        several for _, several in colours.values()
    )


def test_pictures(tensors, tmp_path):
    shown = run(tensors, "-n", "4", "-g", "layers.*=64rows", "--show", "layers.1")
    assert shown.exit_code == 0 and shown.output.count("\nrank ") == 4 and "padding" in shown.output
    image = tmp_path / "layout.svg"
    assert (
        run(tensors, "-n", "4", "-g", "layers.*=64rows", "--show", "layers.0", "--svg", image).exit_code == 0
    )
    drawing = ElementTree.parse(image).getroot()
    titles = [title.text for title in drawing.iter("{http://www.w3.org/2000/svg}title")]
    assert any(title.startswith("up.weight elements 0 to") for title in titles)
    assert any(title.startswith("padding ") for title in titles)
    texts = [text.text for text in drawing.iter("{http://www.w3.org/2000/svg}text")]
    assert any(re.fullmatch(r"up\.weight [\d,]+", text) for text in texts)  # numbers stand on the bars
    missing = run(tensors, "-n", "4", "--show", "layers.9")
    assert missing.exit_code == 2 and "no such group" in missing.output
    assert run(tensors, "-n", "4,8", "--show", "layers.0").exit_code == 2


def test_the_picture_is_the_layout():
    specs = [TensorSpec("a", 10, 2), TensorSpec("b", 6, 3), TensorSpec("c", 5)]
    layout = plan_group(specs, 3, unit=4)
    cells = [line.split()[-1] for line in ascii_picture(layout, 8 + 8).plain.splitlines()[:3]]
    flat = ["."] * 24
    for index, (spec, start) in enumerate(zip(specs, layout.offsets)):
        flat[start : start + spec.numel] = spec.name * spec.numel if index % 2 == 0 else "B" * spec.numel
    assert "".join(cells).replace("░", ".") == "".join(flat)
    wide = plan_group([TensorSpec("w", 4096)], 200, unit=1)
    assert "176 more ranks" in ascii_picture(wide, 80, 24).plain


def test_warnings_name_the_cause_and_a_way_out():
    expert = (128, 2880, 5760)
    tensors = [TensorShape("l.0.experts.up", expert), TensorShape("l.0.experts.down", (128, 2880, 2880))]
    settings = PlanSettings((parse_rule("*.experts.*=128rows"),))
    groups = merge_equal(wrap_groups(tensors, ["layers"]), settings)
    warnings = warnings_for(plan_model(groups, 1024, settings), settings, 0.03, 8)
    assert len(warnings) == 1
    text = warnings[0].text
    assert "LCM rounding: experts.up, experts.down" in text and "multiple of 737,280 elements" in text
    assert re.search(r"FSDP size \d+ \(", text) and "=64rows (" in text and "--max-buffers 2 (" in text
    sizes = [int(size) for size in re.findall(r"FSDP size (\d+)", text)]
    padding = plan_model(groups, 1024, settings).padding_ratio
    assert all(plan_model(groups, size, settings).padding_ratio <= padding / 2 for size in sizes)
    whole = PlanSettings((parse_rule("*=whole"),))
    plan = plan_model(merge_equal(wrap_groups(tensors[:1], ["layers"]), whole), 4, whole)
    assert "more than a rank's share" in warnings_for(plan, whole, 0.03, 8)[0].text


def test_a_command_in_a_process_of_others_leaves_their_garbage_to_be_found(tensors):
    """What there was at its end was once frozen: cycles of the caller were never freed, nor their memory."""

    class Cycle:
        pass

    held = Cycle()
    held.itself = held
    alive = weakref.ref(held)
    assert run(tensors, "-n", "2").exit_code == 0 and gc.isenabled()
    del held
    gc.collect()
    assert alive() is None
    gc.disable()
    try:
        assert run(tensors, "-n", "2").exit_code == 0 and not gc.isenabled()
    finally:
        gc.enable()


def test_advice_takes_replicas_and_memory_into_account(tensors):
    shapes = load_shapes(str(tensors))
    settings = PlanSettings()
    groups = merge_equal(wrap_groups(shapes.tensors, ["layers"]), settings)
    plans = [plan_model(groups, ranks, settings) for ranks in (2, 4, 8)]
    free = advise(plans, 8, 16, None)
    assert [candidate.replicas for candidate in free] == [4, 2, 1]
    assert [candidate.recommended for candidate in free].count(True) == 1
    tight = advise(plans, 8, 16, free[1].state_bytes)
    assert not tight[0].fits and tight[1].recommended
    assert "FSDP over 4 ranks (HSDP, 2 replicas)" in recommendation(tight)
    assert "No FSDP size fits" in recommendation(advise(plans, 8, 16, 1))
    printed = run(tensors, "--advise", "--gpus", "16", "--node", "4")
    assert printed.exit_code == 0 and "Recommended: FSDP over" in printed.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-such-model"], "neither a file nor a known model"),
        (["llama-3-7b"], "did you mean 'llama-3-70b'?"),
        (["LamaConfig"], "did you mean 'LlamaConfig'?"),
        (["LlamaConfg"], "did you mean 'LlamaConfig'?"),
        (["Xyz_12"], "has no causal language model with this config class; valid names are"),
        (
            ["{tensors}", "-g", "*.upp.*=4rows"],
            "matches none of 7 parameters; they are named like 'layers.1.up.weight'",
        ),
        (["{tensors}", "-g", "*=whole", "-g", "*.up.*=4rows"], "earlier rules take every parameter"),
        (["{tensors}", "-n", "x"], "expected numbers"),
        (["{tensors}", "-g", "up"], "expected PATTERN=GRANULARITY"),
        (["{tensors}", "-g", "*.up.*=100rows"], "100 rows do not divide its 256 rows"),
        (["{tensors}", "-w", "blocks.*"], "matches no module"),
        (["{tensors}", "--threshold", "nan"], "'--threshold': nan is not in the range x>=0"),
        (["{tensors}", "--advise", "--memory", "-3"], "'--memory': -3.0 is not in the range x>0"),
        (["{tensors}", "--dtype", "int3"], "dtype must be one of"),
        (["{tensors}", "--experts", "some"], "experts must be built"),
        (["{tensors}", "--order", "bets", "-n", "2"], "order must be one of"),
        (["{tensors}", "--svg", "x.svg"], "writes the picture of --show"),
        (["{tensors}", "-n", "4", "--show", "layers.0", "--svg", "no/x.svg"], "No such file or directory"),
        (["{broken}"], "not valid JSON"),
        (["{nameless}"], "entry 0 must be an object with a name"),
        (["{shapeless}"], "w: shape must be a list of sizes"),
        (["{untyped}"], "the config has no model_type"),
        (["{unknown}"], "transformers cannot build this config"),
    ],
)
def test_errors_are_one_line(tensors, tmp_path, arguments, message):
    files = {"tensors": tensors, "broken": "{", "nameless": '[{"shape": [1]}]', "untyped": '{"hidden": 1}'}
    files |= {"shapeless": '[{"name": "w", "shape": 3}]', "unknown": '{"model_type": "no-such-type"}'}
    for name, content in files.items():
        if name != "tensors":
            (tmp_path / f"{name}.json").write_text(content)
            files[name] = tmp_path / f"{name}.json"
    result = run(*(argument.format(**files) for argument in arguments))
    assert result.exit_code == 2 and message in " ".join(result.output.split())
    assert "Traceback" not in result.output


@pytest.mark.parametrize("name", ["nano", "LlamaConfig", "Llama3_8B"])
def test_a_name_means_what_train_builds(name):
    """Same names, same shapes, in the same order; spelling with or without dashes."""
    built = find_model(name, {}, random_weights=True).build()
    expected = [(n, tuple(p.shape)) for n, p in built.named_parameters()]
    assert [(t.name, t.shape) for t in load_shapes(name).tensors] == expected


def test_the_help_names_every_model_and_its_examples_run_to_sound_advice():
    text = " ".join(run("--help").output.split())
    assert all(name in text for name in PUBLISHED)
    advice = run("llama-3-70b", "--advise", "--gpus", "512", "--memory", "60").output
    assert "Recommended: FSDP over 32 ranks (HSDP, 16 replicas)" in advice
    whole = run("llama-3-8b", "-g", "*=whole", "--advise", "--gpus", "16", "--memory", "20").output
    assert "use a finer granularity" in " ".join(whole.split()) and "more GPUs" not in whole
    small = run("llama-3-8b", "--advise", "--gpus", "8", "--memory", "9").output
    assert "Use more GPUs" in " ".join(small.split())


def test_fsdp2_s_padding_stands_beside_ours(tmp_path):
    """128 experts over 192 ranks: FSDP2 pads the first dim to 192, and a vector of 100 to 192."""
    path = tmp_path / "tensors.json"
    entries = [{"name": "l.0.experts", "shape": [128, 64, 96]}, {"name": "l.0.norm", "shape": [100]}]
    path.write_text(json.dumps(entries))
    (size,) = json.loads(run(path, "-n", "192", "--json").stdout)["plans"][0]["sizes"]
    numel = 128 * 64 * 96 + 100
    assert size["fsdp2_padding_ratio"] == (192 * 64 * 96 + 192) / numel - 1
    assert "50.0" in run(path, "-n", "192").output


def test_blocks_of_a_file_are_named_and_not_ruled_over(tmp_path):
    path = tmp_path / "tensors.json"
    path.write_text(
        json.dumps([{"name": "w", "shape": [64, 64], "block": 512}, {"name": "v", "shape": [64]}])
    )
    assert "tensors, blocks of the file\n" in run(path, "-n", "2").output
    assert "tensors, blocks of the file, v=whole\n" in run(path, "-n", "2", "-g", "v=whole").output
    refused = run(path, "-n", "2", "-g", "w=2rows")
    assert refused.exit_code == 2 and "or the file gives their blocks" in refused.stderr


@pytest.mark.parametrize("width", [80, 100, 140])
def test_tables_fit_the_terminal(tensors, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    for options in (["-n", "4,16"], ["-n", "4,16", "--ranks-per-node", "8"], ["--advise", "--gpus", "64"]):
        output = run(tensors, *options).output
        assert max(map(len, output.splitlines())) <= width
        assert "…" not in output
    told = "not shown at this width" in " ".join(run(tensors, "-n", "4").output.split())
    assert told == (width < 140)


def test_a_reader_that_has_seen_enough_is_no_error(tensors):
    command = f"{sys.executable} -m ragged_fsdp plan {tensors} -n 2:2000:2 --json | head -c 20"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.stdout.startswith('{\n "model": "tiny"') and done.stderr == ""
