"""The parts of the trainer that need no process group: settings, data order, schedule, model, FLOPs."""

import dataclasses
import io
import itertools
import math
import sys
import time
import types

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.testing._internal.distributed.fake_pg import FakeStore

from ragged_fsdp.models import BUILT_IN_SIZES, MoEConfig, MoETransformer
from ragged_fsdp.models.flops import active_parameters, flops_per_token
from ragged_fsdp.models.materialize import materialize
from ragged_fsdp.models.source import find_model
from ragged_fsdp.policy import BlockCodes, Elements, Rows, Whole, parse_codes, parse_granularity
from ragged_fsdp.trainer.batches import Batches, permuted, share
from ragged_fsdp.trainer.config import OptimizerConfig, TrainConfig
from ragged_fsdp.trainer.config_check import check
from ragged_fsdp.trainer.config_file import ConfigError, from_values, load_toml, save_toml, section_of
from ragged_fsdp.trainer.data import open_tokens
from ragged_fsdp.trainer.loggers import check_loggers, open_loggers
from ragged_fsdp.trainer.metrics import read_metrics
from ragged_fsdp.trainer.optimizers import build_optimizer
from ragged_fsdp.trainer.progress import open_view
from ragged_fsdp.trainer.ranks import _mesh, allocator_variables, rank_variables, recorder_variables
from ragged_fsdp.trainer.sampling import sample_tokens
from ragged_fsdp.trainer.schedule import lr_factor


@pytest.mark.parametrize(
    ("sizes", "near", "groups"),
    [
        ({"shard": 2, "ep": 4}, None, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ({"shard": 2, "ep": 4}, 1, [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ({"shard": 4, "ep": 2}, 1, [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ({"replica": 2, "shard": 2, "ep": 2}, 1, [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ({"shard": 2, "ep": 4}, 2, [[0, 1, 4, 5], [2, 3, 6, 7]]),  # beside tp 2
        ({"shard": 8}, None, [[0, 1, 2, 3, 4, 5, 6, 7]]),
    ],
)
def test_a_group_of_experts_has_neighbours_or_ranks_across_nodes(sizes, near, groups):
    """The groups of the last dim; those of the dim before it are what is left, in order."""
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    try:
        mesh = _mesh(torch.device("cpu"), sizes, near).mesh
    finally:
        dist.destroy_process_group()
    assert tuple(mesh.shape) == tuple(sizes.values())
    assert mesh.view(-1, mesh.shape[-1]).tolist() == groups


def test_every_setting_has_one_home():
    keys = [f.name for cls in TrainConfig.sections().values() for f in dataclasses.fields(cls)]
    assert len(keys) == len(set(keys)) == len(section_of())


def test_a_saved_file_gives_the_same_settings_back(tmp_path):
    config = from_values(
        {"lr": 1e-4, "data": ["a", "b"], "granularity": {"*.experts.*": "rows:8"}, "steps": 7}
    )
    save_toml(config, tmp_path / "config.toml")
    assert from_values(load_toml(tmp_path / "config.toml")) == config
    assert from_values(load_toml(tmp_path / "config.toml"), {"steps": 9}).run.steps == 9


def test_a_full_disk_does_not_cost_the_settings(tmp_path, monkeypatch):
    """A file that is opened for writing is empty: the settings of a run were lost when it was resumed."""
    save_toml(from_values({"steps": 7}), tmp_path / "config.toml")

    def full(path, *args, **kwargs):
        path.open("w").close()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(tmp_path), "write_text", full)
    with pytest.raises(OSError, match="No space"):
        save_toml(from_values({"steps": 8}), tmp_path / "config.toml")
    assert load_toml(tmp_path / "config.toml")["steps"] == 7


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[optimizer]\nlearningrate = 1.0\n", "unknown key 'learningrate' in [optimizer]"),
        ("[optimiser]\nlr = 1.0\n", "unknown section [optimiser]; did you mean 'optimizer'?"),
        ("[optimizer]\nwarmpu = 1\n", "did you mean 'warmup'?"),
        ("[run]\nlr = 1.0\n", "it belongs to [optimizer]"),
        ("[run]\nsteps = 'many'\n", "steps: expected int, got 'many'"),
        ("[run]\nsteps = true\n", "steps: expected int, got True"),
        ("[run]\nsteps = 0\n", "steps = 0: expected at least 1"),
        ("[optimizer]\nlr = nan\n", "lr = nan: expected a finite number"),
        ("[optimizer]\nlr = inf\n", "lr = inf: expected a finite number"),
        ("[sharding]\ntimeout = 1e13\n", "timeout = 10000000000000.0: expected at most 1000000.0"),
        ("[run]\nseed = 9000000000000000\n", "seed = 9000000000000000: expected at most"),
        ("[optimizer]\nmin_lr = 1.5\n", "min_lr = 1.5: expected at most 1"),
        ("[optimizer]\nbeta1 = 1.0\n", "beta1 = 1.0: expected less than 1"),
        ("[data]\neval_fraction = 1\n", "eval_fraction = 1.0: expected less than 1"),
        ("[optimizer]\nschedule = 'cosin'\n", "did you mean 'cosine'?"),
        ("steps = 3\n", "unknown section"),
        ("[run\n", "not valid TOML"),
    ],
)
def test_bad_files_are_refused_by_name(tmp_path, text, message):
    (tmp_path / "x.toml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        from_values(load_toml(tmp_path / "x.toml"))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("values", "processes", "message"),
    [
        ({"batch": 2}, 3, "use at least 3"),
        ({"batch": 8, "accumulate": 4}, 3, "use at least 12"),
        ({"sharding": "none"}, 2, "for one process"),
        ({"sharding": "ddp", "replicas": 2}, 2, "replicas = 2 needs sharding"),
        ({"replicas": 3}, 4, "does not divide the 4 processes"),
        ({"sharding": "fsdp2", "reduction": "all_to_all"}, 2, "reduction = all_to_all needs sharding"),
        ({"sharding": "ddp", "ranks_per_node": 8}, 2, "ranks_per_node = 8 needs sharding = ragged, not ddp"),
        ({"sharding": "fsdp2", "internode_dtype": "fp32"}, 2, "internode_dtype = fp32 needs sharding"),
        (
            {"reduction": "all_to_all", "internode_dtype": "fp32"},
            2,
            "internode_dtype = fp32 needs reduction = two_level or auto, not all_to_all",
        ),
        ({"sharding": "fsdp2", "granularity": {"*": "rows"}}, 2, "granularity needs sharding = ragged"),
        ({"granularity": {"*": "colums:2"}}, 2, "'colums:2': expected 32rows or rows:32"),
        ({"granularity": {"*.experts.*": "rows:7"}}, 2, "gate_up_proj: granularity Rows(count=7) of"),
        ({"granularity": {"*.expert.*": "rows:7"}}, 2, "granularity '*.expert.*' matches no parameter"),
        ({"freeze": ["embed*", "*.expert.*"]}, 2, "freeze '*.expert.*' matches no parameter name"),
        ({"freeze": ["*"]}, 2, "freeze = ['*'] leaves no parameter that is trained"),
        ({"gather_codes": {"*.experts.*": "int8:7x8"}}, 2, "gate_up_proj: tiles of 7 x 8 do not cover"),
        ({"gather_codes": {"*": "int4"}}, 2, "codes 'int4': expected one of ('int8',"),
        ({"fp8": True, "sharding": "fsdp2"}, 2, "fp8 does not go with sharding = fsdp2"),
        ({"fp8": True, "precision": "fp64"}, 2, "fp8 does not go with precision = fp64"),
        (
            {"fp8": True, "model_set": {"hidden": "64"}},
            2,
            "q_proj.weight has matrices of 64 x 64; FP8 products need multiples of 128: store it",
        ),
        (
            {"fp8": True, "model_set": {"hidden": "64"}, "granularity": {"*.experts.*": "tiles:16x16"}},
            2,
            "fp8: layers.0.self_attn.q_proj.weight: tiles of 128 x 128 do not cover shape (64, 64)",
        ),
        ({"sharding": "ddp", "precision": "bf16-reduce"}, 2, "bf16-reduce needs sharding = ragged or fsdp2"),
        ({"model": "dmeo"}, 1, "did you mean 'demo'?"),
        ({"model": "LammaConfig"}, 1, "did you mean 'LlamaConfig'?"),
        ({"model_set": {"layer": "2"}}, 1, "did you mean 'layers'?"),
        ({"model_set": {"layers": "two"}}, 1, "expected int"),
        ({"model_set": {"heads": "3"}}, 1, "each head needs"),
        ({"tp": 2, "sharding": "ddp"}, 2, "tp = 2 needs sharding = ragged or fsdp2, not ddp"),
        ({"ep": 2, "sharding": "none"}, 1, "ep = 2 needs sharding = ragged or fsdp2, not none"),
        ({"tp": 2, "ep": 3}, 6, "so ep must be a multiple of tp"),
        ({"ep": 3}, 4, "ep = 3 does not divide the 4 processes; it can be 1, 2, 4"),
        ({"dispatch": "all_gather"}, 2, "dispatch = all_gather is for expert parallelism"),
        ({"ep_across_nodes": True}, 2, "ep_across_nodes = True is for expert parallelism"),
        ({"ep": 2, "dispatch": "all_gather", "expert_capacity": 2.0}, 2, "needs dispatch = all_to_all"),
        (
            {"ep": 3, "granularity": {"*.experts.*": "tiles:8x8"}},
            3,
            "process, which ep = 3 of 8 experts does not keep",
        ),
        ({"ep": 2, "rebalance": 5, "granularity": {"*.experts.*": "tiles"}}, 2, "rebalance = 5 of"),
        ({"tp": 2}, 3, "tp = 2 does not divide the 3 processes"),
        ({"ep": 2, "replicas": 2}, 6, "ep = 2 does not divide the 3 processes of each of 2 replicas"),
        ({"tp": 4}, 4, "tp = 4 does not divide the model's kv_heads = 2; for this model tp can be 1, 2"),
        (
            {"ep": 3, "batch": 3, "sharding": "fsdp2"},
            3,
            "does not divide the model's 8 experts, as sharding = fsdp2",
        ),
        ({"tp": 2, "batch": 1}, 4, "each of 2 groups of 2 processes; use at least 2"),
        ({"ep": 2, "model": "LlamaConfig"}, 2, "'LlamaConfig' has no experts that can be spread"),
        ({"tp": 2, "model": "GPT2Config"}, 2, "no tensor-parallel plan for GPT2Config"),
        ({"tp": 2, "model": "Qwen3Config"}, 2, "asks for 'replicated_with_grad_allreduce'"),
        ({"tp": 3, "model": "LlamaConfig"}, 3, "tp = 3 does not divide the model's num_attention_heads = 32"),
        ({"resume": "atuo"}, 1, "did you mean 'auto'?"),
        ({"run_dir": __file__ + "/run"}, 1, "is not a folder"),
        ({"steps": 3, "profile": 1}, 1, "profile_from = 5 is after the last of 3 steps"),
        ({"eval_fraction": 0.0}, 1, "eval_sequences needs eval_fraction"),
        ({"callback": ["hooks"]}, 1, "callback = 'hooks': expected MODULE:NAME or FILE.py:NAME"),
        ({"callback": ["json:Loger"]}, 1, "callback = 'json:Loger': json has no class or function 'Loger'"),
        ({"callback": ["nowhere.py:Logger"]}, 1, "callback = 'nowhere.py:Logger': [Errno 2]"),
        ({"callback": ["no_such:Logger"]}, 1, "No module named 'no_such'"),
        ({"model": "GPT2Config", "seq_len": 1025}, 1, "seq_len = 1025: GPT2Config has 1024 positions"),
    ],
)
def test_impossible_combinations_are_refused_before_a_start(values, processes, message):
    with pytest.raises(ConfigError) as caught:
        check(from_values(values), processes)
    assert message in str(caught.value)


def test_a_table_of_the_file_is_what_the_flag_would_be(tmp_path):
    """A false of TOML came to Hugging Face's configs as the text False."""
    (tmp_path / "x.toml").write_text(
        '[model]\nmodel = "LlamaConfig"\nmodel_set = {tie_word_embeddings = true, num_hidden_layers = 1, '
        "hidden_size = 64}\n"
    )
    chosen = from_values(load_toml(tmp_path / "x.toml")).model
    assert chosen.model_set["tie_word_embeddings"] == "true"
    assert find_model(chosen.model, chosen.model_set).settings["tie_word_embeddings"] is True


@pytest.mark.parametrize("sharding", ["ragged", "fsdp2", "ddp"])
def test_the_default_reduction_fits_every_sharding(sharding):
    config = from_values({"sharding": sharding})
    assert config.sharding.reduction == "auto"
    check(config, 2)


def test_codes_texts():
    assert parse_codes("int8") == BlockCodes() == parse_codes("int8:128x128")
    assert parse_codes("float8_e4m3fn:1x64") == BlockCodes("float8_e4m3fn", (1, 64))
    for bad in ("int4", "int8:", "int8:64", "int8:0x4", "int8:4x4x4", ""):
        with pytest.raises(ValueError, match="expected one of"):
            parse_codes(bad)
    for dtype, tile in (("int4", (8, 8)), ("int8", (8,)), ("int8", [8, 8]), ("int8", (8, 0))):
        with pytest.raises(ValueError, match="BlockCodes: "):
            BlockCodes(dtype, tile)


def test_granularity_texts():
    assert parse_granularity("rows:32") == parse_granularity("32rows") == Rows(32)
    assert parse_granularity("rows") == Rows(1)
    assert parse_granularity("elements:4096") == parse_granularity("4096elements") == Elements(4096)
    assert parse_granularity("whole") == Whole()
    for bad in ("", "rows:", "rows:0", "0rows", "4rows:4", "4whole", "whole:1", "rows32", "-1rows"):
        with pytest.raises(ValueError, match="expected 32rows or rows:32"):
            parse_granularity(bad)


@given(count=st.integers(1, 500), seed=st.integers(0, 99))
def test_an_epoch_visits_every_window_once(count, seed):
    key = f"{seed}/0".encode()
    assert sorted(permuted(i, count, key) for i in range(count)) == list(range(count))


@given(count=st.integers(0, 60), parts=st.integers(1, 9))
def test_shares_tile_in_order_and_differ_by_at_most_one(count, parts):
    ranges = [share(count, parts, index) for index in range(parts)]
    assert [i for r in ranges for i in r] == list(range(count))
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1


def test_targets_are_inputs_shifted_by_one_and_epochs_differ():
    batches = Batches(np.arange(1001), seq_len=10, seed=3)
    assert batches.windows == 100
    rows = batches.sequences(range(200))
    assert rows.shape == (200, 11)
    assert torch.equal(rows[:, :-1] + 1, rows[:, 1:])
    first, second = rows[:100, 0].tolist(), rows[100:, 0].tolist()
    assert sorted(first) == sorted(second) == list(range(0, 1000, 10)) and first != second
    assert torch.equal(batches.sequences(range(57, 60)), rows[57:60])


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
def test_schedules_warm_up_hold_and_end(schedule):
    config = OptimizerConfig(schedule=schedule, warmup=10, min_lr=0.1, decay=0.25)
    factors = [lr_factor(step, 100, config) for step in range(100)]
    assert factors[0] == pytest.approx(0.1) and factors[9] == pytest.approx(1.0)
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(factors[9:]))
    assert factors[-1] == pytest.approx(1.0 if schedule == "constant" else 0.1, abs=0.05)
    if schedule == "wsd":
        assert factors[70] == 1.0


def test_data_sources(tmp_path, monkeypatch):
    monkeypatch.setenv("RAGGED_FSDP_CACHE", str(tmp_path / "cache"))
    (tmp_path / "a.txt").write_text("hello " * 50)
    (tmp_path / "b.txt").write_text("world " * 50)
    settings = {"data": [str(tmp_path / "*.txt")], "seq_len": 8}
    tokens = open_tokens(from_values(settings).data)
    assert len(tokens.train) + len(tokens.evaluation) == 602
    assert "hello" in tokens.tokenizer.decode(tokens.train[:400].tolist())
    cached = list((tmp_path / "cache").iterdir())
    open_tokens(from_values(settings).data)
    assert list((tmp_path / "cache").iterdir()) == cached
    np.arange(500, dtype=np.uint16).tofile(tmp_path / "t.bin")
    flat = open_tokens(from_values({"data": [str(tmp_path / "t.bin")], "seq_len": 8}).data)
    assert flat.train[:3].tolist() == [0, 1, 2]
    np.save(tmp_path / "t.npy", np.arange(500))
    assert len(open_tokens(from_values({"data": [str(tmp_path / "t.npy")], "seq_len": 8}).data).train) == 475


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"data": ["/nowhere/*.txt"]}, "matches no file"),
        ({"data": ["/nowhere/t.bin"]}, "does not exist"),
        ({"data": []}, "at least one source"),
        ({"data": ["stdlib", "t.bin"]}, "t.bin holds tokens or a dataset"),
        ({"tokenizer": "/nowhere"}, "no such folder"),
        ({"seq_len": 10**9}, "less than one sequence"),
        ({"data": [__file__], "eval_fraction": 1e-9}, "leaves 0 tokens, less than a sequence of 257"),
    ],
)
def test_missing_data_is_refused(values, message):
    with pytest.raises(ConfigError) as caught:
        open_tokens(from_values(values).data)
    assert message in str(caught.value)


def test_a_token_file_that_is_not_ours_to_read_is_refused(tmp_path, monkeypatch):
    def closed(*_, **__):
        raise PermissionError(13, "Permission denied")

    (tmp_path / "t.bin").write_bytes(bytes(4000))
    monkeypatch.setattr(np, "memmap", closed)
    with pytest.raises(ConfigError, match=r"data: .*t\.bin cannot be read: Permission denied"):
        open_tokens(from_values({"data": [str(tmp_path / "t.bin")]}).data)


def test_ranks_from_torchrun_and_slurm(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    assert rank_variables() is None
    monkeypatch.setenv("SLURM_NTASKS", "4")
    monkeypatch.setenv("SLURM_PROCID", "3")
    monkeypatch.setenv("SLURM_LOCALID", "1")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_STEP_NODELIST", "gpu[07-09,12],login1")
    found = rank_variables()
    assert found is not None and found["MASTER_ADDR"] == "gpu07" and found["LOCAL_RANK"] == "1"
    assert (found["RANK"], found["WORLD_SIZE"], found["MASTER_PORT"]) == ("3", "4", "20077")
    assert found["LOCAL_WORLD_SIZE"] == "4"  # where SLURM does not say how many are on this node
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", "8(x2),4")
    for node, tasks in enumerate(("8", "8", "4")):
        monkeypatch.setenv("SLURM_NODEID", str(node))
        assert rank_variables()["LOCAL_WORLD_SIZE"] == tasks
    for nodes, first in (("a,b", "a"), ("a", "a"), ("n[1,3-4]-ib,a", "n1-ib"), ("c[2-3]n[08-9]", "c2n08")):
        monkeypatch.setenv("SLURM_STEP_NODELIST", nodes)
        assert rank_variables()["MASTER_ADDR"] == first
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert rank_variables()["WORLD_SIZE"] == "2"


def test_the_allocator_s_setting_is_ours_unless_the_user_has_one():
    assert allocator_variables({}) == {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert allocator_variables({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}) == {}
    assert allocator_variables({"PYTORCH_CUDA_ALLOC_CONF": ""}) == {}


def test_the_flight_recorder_writes_into_the_run_unless_the_user_has_set_it():
    ours = recorder_variables({"TORCH_NCCL_TRACE_BUFFER_SIZE": "7"}, "runs/a")
    assert ours["TORCH_FR_DUMP_TEMP_FILE"].endswith("runs/a/hangs/nccl-rank-")
    assert "TORCH_FR_BUFFER_SIZE" not in ours and ours["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
    assert ours["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] == "2500"
    assert recorder_variables({**ours, "TORCH_FR_BUFFER_SIZE": "7"}, "runs/b") == {}


def test_a_model_of_a_missing_library_is_refused(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs transformers; in a checkout: pip install '\.\[hf\]'"):
        check(from_values({"model": "LlamaConfig"}), 1)


def _tiny(**changes):
    source = find_model("nano", {k: str(v) for k, v in changes.items()})
    model, twin = source.build(), source.build()
    materialize(model, twin, source.init_with(twin), seed=1, device=torch.device("cpu"))
    return model


def _nans(*shape, **options):
    return torch.full(shape[0] if isinstance(shape[0], tuple) else shape, math.nan, **options)


def test_a_model_made_outside_the_trainer_has_values():
    """As in README: memory that nobody has written would be NaNs sooner or later."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", _nans)  # fresh memory may be zeros
        model = MoETransformer(MoEConfig(hidden=32, layers=1, expert_hidden=32))
    assert all(0 < p.std() < 2 for p in model.parameters() if p.ndim > 1)


def test_the_model_is_causal_and_its_loss_is_a_mean_over_sequences():
    model = _tiny()
    ids = torch.randint(256, (4, 12))
    whole = model(ids)
    assert whole.logits.shape == (4, 12, 256) and whole.balance_loss.shape == (4,)
    changed = ids.clone()
    changed[:, 8:] = 0
    assert torch.allclose(model(changed).logits[:, :8], whole.logits[:, :8], atol=1e-5)
    parts = torch.cat([model(ids[i : i + 1]).balance_loss for i in range(4)])
    assert torch.allclose(parts, whole.balance_loss, atol=1e-6)
    # 1 when every expert gets its share, times the weight, for each of two layers
    assert math.isclose(whole.balance_loss.mean().item(), 2 * 0.01, rel_tol=0.2)


def test_every_parameter_gets_a_gradient():
    model = _tiny(experts=4, experts_per_token=2)
    output = model(torch.randint(256, (4, 64)))
    (output.logits.float().logsumexp(-1).mean() + output.balance_loss.mean()).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_initial_values_depend_on_seed_and_name_alone():
    a, b = _tiny(), _tiny()
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters()))
    assert not torch.equal(a.layers[0].self_attn.q_proj.weight, a.layers[1].self_attn.q_proj.weight)
    assert a.embed_tokens.weight.std().item() == pytest.approx(0.02, rel=0.05)
    tied = _tiny(tied_embeddings=True)
    assert torch.equal(tied.embed_tokens.weight, a.embed_tokens.weight)
    assert tied.lm_head.weight is tied.embed_tokens.weight


def test_greedy_samples_repeat_and_respect_the_context():
    model = _tiny()
    prompt = torch.tensor([1, 2, 3])
    seen = []

    def logits_of(ids):
        seen.append(ids.shape[1])
        return model(ids).logits

    options = {"context": 5, "temperature": 0.0, "seed": 0}
    first = sample_tokens(logits_of, prompt, 6, **options)
    assert torch.equal(first, sample_tokens(logits_of, prompt, 6, **options))
    assert first.shape == (9,) and max(seen) == 5


@pytest.mark.parametrize("name", BUILT_IN_SIZES)
def test_active_parameters_of_built_in_sizes(name):
    config = BUILT_IN_SIZES[name]
    with torch.device("meta"):
        model = MoETransformer(config)
    shapes = [(n, tuple(p.shape)) for n, p in model.named_parameters() if "embed" not in n]
    d, f, k = config.hidden, config.expert_hidden, config.experts_per_token
    attention = 2 * d * d + 2 * d * config.kv_heads * config.head_dim
    layer = attention + d * config.experts + k * 3 * d * f
    expected = config.layers * layer + config.vocab_size * d
    assert active_parameters(shapes, config.experts, k) == expected


def test_a_tied_head_is_multiplied_with_and_positions_are_not():
    """It has the name of the embedding that it is, and was left out of MFU; GPT-2's tables were counted."""
    sizes = {"layers": 2, "attention_width": 64, "seq_len": 8}
    for name, tie, values in (
        ("nano", "tied_embeddings", {}),
        ("GPT2Config", "tie_word_embeddings", {"n_layer": "2", "n_embd": "64", "n_head": "2"}),
    ):
        found = [find_model(name, {**values, tie: text}).build() for text in ("true", "false")]
        assert flops_per_token(found[0], **sizes) == flops_per_token(found[1], **sizes)
    d = 64
    matrices = 2 * 12 * d * d + 50257 * d
    assert flops_per_token(found[0], **sizes) == 6 * matrices + 3 * 4 * 2 * 64 * 8 / 2


@pytest.mark.parametrize("optimizer", ["adamw", "adam8bit", "shampoo", "muon"])
def test_only_matrices_decay(optimizer):
    """The biases of all experts of a layer are one tensor of two dims, and no matrix."""
    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "num_local_experts": 4}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 64}
    model = find_model("GptOssConfig", {k: str(v) for k, v in (sizes | heads).items()}).build()
    built = build_optimizer(OptimizerConfig(optimizer=optimizer, weight_decay=0.1), model)
    decayed = {id(p) for group in built.param_groups if group["weight_decay"] for p in group["params"]}
    names = {name for name, p in model.named_parameters() if id(p) in decayed}
    assert "model.layers.0.mlp.experts.gate_up_proj" in names
    assert not [name for name in names if "bias" in name or "norm" in name or "sinks" in name]


def test_bad_model_configs_are_refused():
    for changes in ({"hidden": 100, "heads": 3}, {"kv_heads": 3}, {"experts": 1}, {"layers": 0}):
        with pytest.raises(ValueError, match="model"):
            MoEConfig(**changes)


def test_one_interface_for_all_loggers(tmp_path, monkeypatch):
    """A callback from a file and a stand-in for Weights & Biases hear what the file of JSON lines holds."""
    heard = []

    class Run:
        def define_metric(self, name, step_metric):
            heard.append((name, step_metric))

        def log(self, values):
            heard.append(values)

        def finish(self):
            heard.append("finished")

    wandb = types.ModuleType("wandb")
    wandb.__spec__ = types.SimpleNamespace()
    wandb.init = lambda **options: heard.append(options) or Run()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    (tmp_path / "hooks.py").write_text(
        "class Spy:\n"
        "    def __init__(self, config): self.file = open(config.run.run_dir + '/spy', 'w')\n"
        "    def write(self, kind, step, values): print(kind, step, sorted(values), file=self.file)\n"
        "    def close(self): self.file.close()\n"
    )
    config = from_values({"run_dir": str(tmp_path), "callback": [f"{tmp_path}/hooks.py:Spy"], "wandb": True})
    check_loggers(config.log)
    for resumed in (0, 3):
        loggers = open_loggers(config, tmp_path, resumed)
        loggers.write("train", resumed + 1, loss=2.0, memory={"held": 3}, mfu=None)
        loggers.write("note", resumed + 1, text="hello")
        loggers.close()
    assert (tmp_path / "spy").read_text() == "train 4 ['loss', 'memory', 'mfu']\nnote 4 ['text']\n"
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 1, 4, 4]
    options, _, line, end, again, *_ = heard
    assert (
        options["id"] == again["id"]
        and len(options["id"]) == 16
        and options["config"]["run"]["run_dir"] == str(tmp_path)
    )
    assert line == {"step": 1, "train/loss": 2.0, "train/memory/held": 3} and end == "finished"
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 2.0), (4, 2.0)]
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="wandb = true needs the package wandb"):
        check(config, 1)


@pytest.mark.timeout(180)
def test_the_real_weights_and_biases_writes_one_run_over_a_resume(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    config = from_values({"run_dir": str(tmp_path), "tensorboard": False, "wandb": True})
    for resumed in (0, 3):
        loggers = open_loggers(config, tmp_path, resumed)
        loggers.write("train", resumed + 1, loss=2.0, memory={"held": 3})
        loggers.close()
    identity = (tmp_path / "wandb-id").read_text()
    until = time.monotonic() + 60  # wandb's own process may still be writing
    while time.monotonic() < until:
        written = list(tmp_path.glob(f"wandb/offline-run-*-{identity}/run-{identity}.wandb"))
        if written and all(path.stat().st_size > 100 for path in written):
            return
        time.sleep(0.2)
    pytest.fail(f"wandb wrote {[(path.name, path.stat().st_size) for path in written]}")


@pytest.mark.parametrize(("sent", "failed"), [([("result", None)], False), ([], True)])
def test_a_rank_that_ends_without_a_result_has_failed(sent, failed):
    """Whatever ended it with status 0: the ranks that waited for it would seem to have failed first."""
    from types import SimpleNamespace

    from ragged_fsdp.trainer.launch import _collect, _Rank

    pipe = SimpleNamespace(poll=lambda: bool(sent), recv=lambda: sent.pop())
    rank = _Rank(1, SimpleNamespace(exitcode=0), pipe)
    _collect(rank)
    assert rank.ended and (rank.failed_at is not None) == failed


@pytest.mark.parametrize(
    ("processes", "told"),
    [(1, "see dmesg"), (2, "the other process was ended"), (4, "the other 3 processes were ended")],
)
def test_the_story_of_a_killed_rank_counts_the_others(processes, told):
    """One process has no others: it used to hear that 0 of them were ended."""
    from types import SimpleNamespace

    from ragged_fsdp.trainer.launch import _Rank, _story

    killed = _Rank(0, SimpleNamespace(exitcode=-9), None, failed_at=1.0)
    lines = _story([killed], processes, None).splitlines()
    assert lines[0] == "rank 0 died without a traceback:" and lines[1].startswith("killed by SIGKILL; ")
    assert lines[-1].endswith(told) and len(lines) == 2 + (processes > 1)


def test_a_sample_is_shown_whatever_the_terminal_can_show(monkeypatch):
    """In a locale without these characters a run that was done ended with a traceback."""
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="latin-1"))
    open_view(0, steps=3, log_every=1, first_step=0).say("def \ufffdé 日")
    assert written.getvalue() == "def ?é ?\n".encode("latin-1")
