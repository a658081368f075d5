"""Hugging Face models under the trainer's machinery: meta-device init, loading, sharding, export."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from ragged_fsdp import weights
from ragged_fsdp.checkpoint.store import read_manifest
from ragged_fsdp.cli.inspect import command as inspect
from ragged_fsdp.trainer.config_file import ConfigError
from ragged_fsdp.trainer.exporting import export
from rank_pool import spmd
from train_cases import on_one, said_on_pool, save_words, train

COMMON = {
    "hidden_size": "32",
    "num_hidden_layers": "2",
    "num_attention_heads": "4",
    "num_key_value_heads": "2",
    "intermediate_size": "48",
    "vocab_size": "256",
}
DEEPSEEK = {
    "n_routed_experts": "4",
    "num_experts_per_tok": "2",
    "moe_intermediate_size": "16",
    "kv_lora_rank": "8",
    "q_lora_rank": "8",
    "qk_rope_head_dim": "8",
    "qk_nope_head_dim": "8",
    "v_head_dim": "8",
    "n_group": "1",
    "topk_group": "1",
    "first_k_dense_replace": "1",
    "num_key_value_heads": "4",
}
FAMILIES = {
    "LlamaConfig": {"tie_word_embeddings": "true"},
    "Qwen3MoeConfig": {"num_experts": "4", "num_experts_per_tok": "2", "moe_intermediate_size": "16"},
    "GptOssConfig": {"num_local_experts": "4", "num_experts_per_tok": "2", "head_dim": "8"},
    "DeepseekV3Config": DEEPSEEK,
}


def _unsharded(source):
    from ragged_fsdp.models.materialize import materialize

    model, twin = source.build(), source.build()
    materialize(model, twin, source.init_with(twin), seed=3, device=torch.device("cpu"))
    return model


@pytest.mark.parametrize("family", FAMILIES)
@spmd(2)
def test_a_sharded_model_equals_the_library_s(rank, family):
    """Initial values, one step's gradients, and weights loaded from the library's own files."""
    from ragged_fsdp import fully_shard
    from ragged_fsdp.models.materialize import materialize
    from ragged_fsdp.models.source import find_model
    from ragged_fsdp.trainer.sharding import transformer_layers

    source = find_model(family, {**COMMON, **FAMILIES[family]})
    plain = _unsharded(source)
    model, twin = source.build(), source.build()
    for layer in transformer_layers(model):
        fully_shard(layer)
    fully_shard(model)
    materialize(model, twin, source.init_with(twin), seed=3, device=torch.device("cpu"))
    ids = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(1))
    expected = plain(ids).logits
    got = model(ids).logits
    assert torch.allclose(got, expected, atol=1e-5)
    expected.logsumexp(-1).mean().backward()
    got.logsumexp(-1).mean().backward()
    grads = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        if grads[name].grad is not None:
            assert torch.allclose(parameter.grad.full_tensor(), grads[name].grad, atol=1e-5), name

    folder = rank.shared_dir / "library"
    if rank.rank == 0:
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter.add_(0.01)
        plain.save_pretrained(folder)
    torch.distributed.barrier()
    weights.load(model, folder)
    stored = load_file(folder / "model.safetensors")
    streamed = dict(weights.stream(model).tensors())  # a layer's single experts are views of its buffer
    assert streamed.keys() == stored.keys()
    assert all(torch.equal(streamed[name], value) for name, value in stored.items())
    again = model(ids).logits
    if rank.rank == 0:
        assert torch.allclose(again, plain(ids).logits, atol=1e-5)
    if family == "LlamaConfig":
        (folder / "model.safetensors").rename(folder / "gone") if rank.rank == 0 else None
        torch.distributed.barrier()
        with pytest.raises((ValueError, RuntimeError), match=r"has no \*\.safetensors"):
            weights.load(model, folder)


def test_a_local_folder_is_trained_and_exported_for_the_library(tmp_path):
    """From the library's folder to ours, two steps, and back: transformers loads what export wrote."""
    from transformers import AutoModelForCausalLM

    from ragged_fsdp.models.source import find_model

    family = "Qwen3MoeConfig"
    source = find_model(family, {**COMMON, **FAMILIES[family], "tie_word_embeddings": "true"})
    _unsharded(source).save_pretrained(tmp_path / "library")
    settings = json.loads((tmp_path / "library/config.json").read_text())
    (tmp_path / "library/config.json").write_text(json.dumps({**settings, "use_cache": True}))
    save_words(tmp_path / "library", ["the", "a"])
    common = {"model": str(tmp_path / "library"), "tokenizer": "bytes"}
    with pytest.raises(ConfigError, match=r"weights: .*/library has no tensor for 'model\.layers\.2\."):
        train(tmp_path / "other", model_set={"num_hidden_layers": "3"}, **common)
    assert not (tmp_path / "other").exists()
    train(tmp_path / "run", steps=2, **common)
    checkpoint = tmp_path / "run/checkpoints/step-00000002"
    files = export(checkpoint, tmp_path / "export", max_file_bytes=20_000)
    assert len(files) > 1 and (tmp_path / "export/model.safetensors.index.json").exists()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    stored = json.loads((tmp_path / "export/config.json").read_text())
    assert stored["model_type"] == "qwen3_moe" and "family" not in stored
    assert stored["use_cache"] is True and stored["tie_word_embeddings"] is True
    assert {"tokenizer.json", "generation_config.json"} <= {p.name for p in (tmp_path / "export").iterdir()}
    assert not list(tmp_path.glob(".*")), "temporary folders are left"
    with pytest.raises(ValueError, match="exists and is not empty"):
        export(checkpoint, tmp_path / "export")
    assert export(checkpoint, tmp_path / "export", overwrite=True) == [tmp_path / "export/model.safetensors"]
    shown = CliRunner().invoke(inspect, [str(tmp_path / "export"), "--json"], catch_exceptions=False)
    names = [tensor["name"] for tensor in json.loads(shown.output)["tensors"]]
    assert "lm_head.weight" not in names and "model.layers.0.mlp.experts.0.gate_proj.weight" in names
    trained = AutoModelForCausalLM.from_config(loaded.config)
    weights.load(trained, checkpoint)
    prompt = torch.arange(1, 9)[None]
    written = [
        model.eval().generate(prompt, max_new_tokens=8, do_sample=False) for model in (loaded, trained)
    ]
    assert torch.equal(*written)
    metrics = [json.loads(line) for line in Path(tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    reported = [row["loss"] for row in metrics if row["kind"] == "eval"][-1]
    assert _evaluate(loaded) == pytest.approx(reported, abs=1e-4)


def _evaluate(model) -> float:
    """The evaluation of the run, by hand."""
    import train_cases
    from ragged_fsdp.trainer.batches import Batches
    from ragged_fsdp.trainer.config_file import from_values
    from ragged_fsdp.trainer.data import open_tokens

    config = from_values(train_cases.settings(Path("unused")))
    rows = Batches(open_tokens(config.data).evaluation, 32, 0).sequences(range(3))
    with torch.no_grad():
        logits = model(rows[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).item()


def _library_folder(folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 48, "vocab_size": 64}
    LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)).save_pretrained(
        folder
    )
    save_words(folder, ["the", "a", "import", "def", "from", "return", "<e>"], eos="<e>")


@spmd(2)
def test_a_run_of_a_library_s_folder_survives_an_upgrade_but_no_other_tokenizer(rank):
    folder, run = rank.shared_dir / "library", rank.shared_dir / "run"
    on_one(rank, lambda: _library_folder(folder))
    common = {"steps": 4, "seq_len": 8, "batch": 4, "eval_sequences": 2}
    said = said_on_pool(run, model=str(folder), **common, stop_at=2)
    assert f"tokenizer {folder} (8 tokens); documents end with token 7" in said
    assert f"weights: those in {folder}" in said
    manifest = run / "checkpoints/step-00000002/manifest.json"

    def older_release() -> None:
        """The checkpoint as a release wrote it that knew one field less, and a folder of another name."""
        stored = json.loads(manifest.read_text())
        stored["info"]["model"]["transformers_version"] = "4.99.0"
        del stored["info"]["model"]["rms_norm_eps"]
        del stored["crc32"]
        manifest.write_text(json.dumps(stored))
        folder.rename(rank.shared_dir / "moved")

    on_one(rank, older_release)
    moved = str(rank.shared_dir / "moved")
    said = said_on_pool(run, model=moved, **common, stop_at=3)
    assert "step-00000002 at step 2" in said and "weights:" not in said
    assert ", was 4.99.0" in said and "rms_norm_eps is 1e-06, was None" in said
    on_one(rank, lambda: save_words(Path(moved), ["a", "the", "<e>"], eos="<e>"))
    said = said_on_pool(run, model=moved, **common)
    assert "the tokenizer is another; the tokens are others; --resume-changed goes on" in said
    assert "seq_len is 4, was 8" in said_on_pool(run, model=moved, **{**common, "seq_len": 4})
    assert "is stored in torch.float32, this run has it in torch.float64" in said_on_pool(
        run, model=moved, precision="fp64", **common
    )
    said = said_on_pool(
        run, model=moved, resume_changed=True, **common, sample_tokens=3, sample_prompt="the a"
    )
    assert "the tokenizer is another" in said and "at step 3" in said
    assert "a sample of 3 tokens:\na" in said or "a sample of 3 tokens:\nthe a" in said
    assert read_manifest(run / "checkpoints/step-00000004")["info"]["step"] == 4


def _check_balance_loss(rank, model):
    """``output_router_logits`` adds the library's balance loss of a rank's sequences, however experts lie."""
    from ragged_fsdp.trainer.metrics import read_metrics
    from train_cases import train_on_pool

    changes = {"output_router_logits": "true", "router_aux_loss_coef": "0.5"}
    found = []
    for name, ep in (("plain balance", 1), ("spread balance", 4)):
        folder = rank.shared_dir / name
        settings = {**model, "model_set": {**model["model_set"], **changes}}
        train_on_pool(folder, **settings, steps=2, ep=ep, save_at_end=False)
        rows = [row for row in read_metrics(folder) if row["kind"] == "train"]
        found.append([(row["loss"], row["balance_loss"]) for row in rows])
        # two experts of four for each token: 2.0 if all get as many, times the coefficient
        assert all(0.9 < row["balance_loss"] < 2.0 for row in rows), rows
    assert torch.allclose(torch.tensor(found[0]), torch.tensor(found[1]), atol=1e-5)


EXPERT_RUNS = {
    "gathered": {"ep": 4, "tp": 2, "dispatch": "all_gather", "activation_checkpointing": 1},
    "capacity": {"ep": 4, "expert_capacity": 4.0, "dispatch": "two_level", "ranks_per_node": 2},
    "two levels": {"ep": 4, "dispatch": "two_level", "ranks_per_node": 2},
    "fsdp2": {"ep": 2, "sharding": "fsdp2"},
    "moves": {"ep": 2, "rebalance": 2},
}


@spmd(4, timeout=400)
def test_experts_of_the_library_s_models_are_spread(rank):
    """``--ep`` alone and with ``--tp``, dispatch, moves: the losses of a plain run; checkpoints; export."""
    from ragged_fsdp.trainer.metrics import losses_by_step, read_metrics
    from train_cases import train_on_pool

    model = {
        "model": "Qwen3MoeConfig",
        "model_set": {**COMMON, **FAMILIES["Qwen3MoeConfig"], "head_dim": "8"},
    }
    plain = rank.shared_dir / "plain"
    train_on_pool(plain, **model, steps=4)
    expected = losses_by_step(plain)
    for name, changes in EXPERT_RUNS.items():
        folder = rank.shared_dir / name
        train_on_pool(folder, **model, steps=4, save_at_end=False, **changes)
        got = losses_by_step(folder)
        assert got.keys() == expected.keys()
        assert all(abs(got[step] - expected[step]) < 1e-5 for step in got), (name, got, expected)
        rows = [row["experts"] for row in read_metrics(folder) if row["kind"] == "train"]
        assert all(row["busiest_rank"] >= 1 and row["dropped"] == 0 for row in rows), (name, rows)
    _check_balance_loss(rank, model)
    moved = rank.shared_dir / "moved"
    for changes in (
        {"ep": 2, "stop_at": 1},
        {"ep": 4, "tp": 2, "stop_at": 2},
        {"replicas": 2, "stop_at": 3},
        {"ep": 4},
    ):
        train_on_pool(moved, **model, steps=4, **changes)
    got = losses_by_step(moved)
    assert all(abs(got[step] - expected[step]) < 1e-4 for step in expected), (got, expected)
    if rank.rank == 0:
        from transformers import AutoModelForCausalLM

        outputs = []
        for run in (plain, moved):
            export(run / "checkpoints/step-00000004", run / "export")
            loaded = AutoModelForCausalLM.from_pretrained(run / "export")
            outputs.append(loaded(torch.arange(12).view(1, -1)).logits)
        assert torch.allclose(outputs[0], outputs[1], atol=1e-3)
