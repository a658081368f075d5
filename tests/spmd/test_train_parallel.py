"""Tensor and expert parallelism in the trainer: the curve of a plain run; checkpoints move between splits."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from ragged_fsdp.trainer.metrics import losses_by_step, read_metrics
from rank_pool import spmd
from train_cases import tensors, train_on_pool

MODEL = {"kv_heads": "2"}
LLAMA = {
    "num_hidden_layers": "2",
    "hidden_size": "32",
    "num_attention_heads": "4",
    "num_key_value_heads": "2",
    "intermediate_size": "50",
    "vocab_size": "257",  # tp = 2 does not divide it
}
QWEN = {
    "num_hidden_layers": "2",
    "hidden_size": "32",
    "num_attention_heads": "4",
    "num_key_value_heads": "2",
    "head_dim": "8",
    "vocab_size": "257",
    "num_experts": "5",
    "num_experts_per_tok": "2",
    "moe_intermediate_size": "16",
}
SPLITS = {
    "tp2": {"tp": 2, "reduction": "all_to_all"},
    "tp4-fsdp1": {"tp": 4, "model_set": {"heads": "4", "kv_heads": "4"}},
    "tp2-hsdp": {"tp": 2, "replicas": 2, "accumulate": 2, "granularity": {"*.experts.*": "rows:8"}},
    "tp2-tied": {"tp": 2, "model_set": {**MODEL, "tied_embeddings": "true"}, "activation_checkpointing": 1},
    "tp2-fsdp2": {"tp": 2, "sharding": "fsdp2"},
    "ep2": {"ep": 2, "granularity": {"*.experts.*": "rows:8"}},
    "ep4-fsdp1": {"ep": 4, "activation_checkpointing": 1},
    "ep2-hsdp": {"ep": 2, "replicas": 2, "accumulate": 2, "reduction": "all_to_all"},
    "ep2-fsdp2": {"ep": 2, "sharding": "fsdp2"},
    "ep2-across": {"ep": 2, "ep_across_nodes": True, "granularity": {"*.experts.*": "rows:8"}},
    "ep2-across-uneven": {"ep": 2, "ep_across_nodes": True, "model_set": {**MODEL, "experts": "5"}},
    "ep2-across-fsdp2": {"ep": 2, "ep_across_nodes": True, "sharding": "fsdp2"},
    "ep4-across-tp2": {"ep": 4, "tp": 2, "ep_across_nodes": True},
    "ep4-uneven-tp2": {"ep": 4, "tp": 2, "model_set": {**MODEL, "experts": "5"}},
    "qwen-ep2-tp2": {"ep": 2, "tp": 2, "model": "Qwen3MoeConfig", "model_set": QWEN},
    "llama-tp2": {"tp": 2, "model": "LlamaConfig", "model_set": LLAMA},
}


def _assert_close(got: dict[int, float], expected: dict[int, float], tolerance: float, case: str) -> None:
    assert got.keys() == expected.keys(), case
    assert all(abs(got[step] - expected[step]) < tolerance for step in got), (case, got, expected)


def _mean_gradients(folder: Path) -> dict[str, torch.Tensor]:
    """AdamW's first moments after the last step, in fp64: means of the unclipped gradients of all steps.

    Its steps are the same for gradients that are twice as large; these are not.
    """
    found = tensors(folder / "checkpoints/step-00000004")
    return {name: t.double() for name, t in found.items() if name.endswith(".exp_avg")}


@spmd(4, timeout=400)
def test_a_split_run_has_the_curve_and_the_gradients_of_a_plain_one(rank):
    plain: dict[tuple[object, ...], Path] = {}
    for case, changes in SPLITS.items():
        model = {"model": "nano", "model_set": MODEL} | {k: v for k, v in changes.items() if "model" in k}
        key = (model["model"], *model["model_set"].items())
        common = {**model, "steps": 4, "clip": 0.0}
        if key not in plain:
            plain[key] = rank.shared_dir / f"plain-{len(plain)}"
            train_on_pool(plain[key], **common)
        folder = rank.shared_dir / case
        train_on_pool(folder, **{**common, **changes})
        _assert_close(losses_by_step(folder), losses_by_step(plain[key]), 2e-5, case)
        if rank.rank == 0:
            got, expected = _mean_gradients(folder), _mean_gradients(plain[key])
            assert got.keys() == expected.keys() and got, case
            for name, gradient in expected.items():
                assert (got[name] - gradient).norm() < 1e-4 * gradient.norm(), (case, name)


@spmd(4, timeout=400)
def test_auto_reduces_as_the_nodes_ask_and_says_so(rank):
    all_ranks, half = {"ranks_per_node": 4}, {"ranks_per_node": 2}
    runs = {
        "one": (all_ranks, ["gradients: all_to_all (auto), 4 ranks on one node"]),
        "two": (half, ["gradients: two_level (auto), 4 ranks on 2 nodes of 2"]),
        "two again": (
            {**half, "reduction": "two_level"},
            ["gradients: two_level, 4 ranks on 2 nodes of 2"],
        ),
        "fp32 between": (
            {**half, "internode_dtype": "fp32"},
            ["gradients: two_level (auto), 4 ranks on 2 nodes of 2"],
        ),
        "not wider": (
            {**half, "precision": "bf16-reduce"},
            ["gradients: reduce_scatter (auto), 4 ranks on 2 nodes of 2"],
        ),
        "ep": (
            {**half, "ep": 2},
            [
                "gradients: two_level (auto), 4 ranks on 2 nodes of 2",
                "gradients of what ep splits: all_to_all (auto), 2 ranks on 2 nodes of 1",
            ],
        ),
        "ep across": (
            {**half, "ep": 2, "ep_across_nodes": True},
            [
                "gradients: two_level (auto), 4 ranks on 2 nodes of 2",
                "gradients of what ep splits: all_to_all (auto), 2 ranks on one node",
            ],
        ),
    }
    losses = {}
    for name, (changes, expected) in runs.items():
        folder = rank.shared_dir / name
        train_on_pool(folder, **{"precision": "bf16", "steps": 3, "save_at_end": False, **changes})
        start = next(row for row in read_metrics(folder) if row["kind"] == "start")
        assert start["reductions"] == expected, name
        losses[name] = losses_by_step(folder)
    assert losses["two"] == losses["two again"] != losses["fp32 between"]
    _assert_close(losses["fp32 between"], losses["one"], 1e-2, "fp32 between")


@spmd(4, timeout=400)
def test_matrix_and_block_optimizers_under_splits(rank):
    """Muon gathers matrices over both dims; blocks of 8-bit Adam and of Shampoo stay whole on their ranks."""
    moves = {"ep": 4, "rebalance": 3}  # six experts lie 2, 2, 1, 1, and then elsewhere
    cases = {"muon": ({"tp": 2}, moves), "adam8bit": ({"tp": 2}, moves), "shampoo": (moves,)}
    wide = {"hidden": "64", "expert_hidden": "64", "experts": "6", **MODEL}
    for optimizer, splits in cases.items():
        common = {
            "optimizer": optimizer,
            "model_set": wide,
            "muon_dtype": "fp32",
            "steps": 8,
            "save_at_end": False,
        }
        train_on_pool(rank.shared_dir / optimizer, **common)
        for index, split in enumerate(splits):
            folder = rank.shared_dir / f"{optimizer}-{index}"
            train_on_pool(folder, **common, **split)
            case = f"{optimizer} {split}"
            _assert_close(losses_by_step(folder), losses_by_step(rank.shared_dir / optimizer), 2e-3, case)


@spmd(4, timeout=400)
def test_biases_of_experts_are_cut_between_experts(rank):
    """Six rows of 704 have the size of a matrix; a block of several would be cut by expert parallelism."""
    sizes = {"hidden_size": "32", "num_local_experts": "6", "intermediate_size": "352", "head_dim": "8"}
    sizes |= {"num_hidden_layers": "1", "num_attention_heads": "2", "num_key_value_heads": "2"}
    common = {"model": "GptOssConfig", "model_set": {**sizes, "vocab_size": "257"}, "save_at_end": False}
    common |= {"eval_every": 100}
    for optimizer in ("adam8bit", "shampoo"):
        losses = []
        for changes in ({}, {"ep": 4, "rebalance": 2}):
            folder = rank.shared_dir / f"{optimizer}-{len(losses)}"
            train_on_pool(folder, **common, optimizer=optimizer, steps=4, **changes)
            losses.append(losses_by_step(folder))
        _assert_close(*losses, 2e-3, optimizer)


@spmd(4, timeout=400)
def test_checkpoints_move_between_splits_and_are_exported(rank):
    from ragged_fsdp.trainer.exporting import export

    plain, same, moved = (rank.shared_dir / name for name in ("plain", "same", "moved"))
    common = {"model_set": MODEL, "sample_tokens": 2}
    train_on_pool(plain, **common)
    for changes in ({"stop_at": 3}, {"resume": "must"}):
        train_on_pool(same, tp=2, **common, **changes)
    chain = (
        {"tp": 2, "stop_at": 3},
        {"ep": 2, "stop_at": 4},
        {"ep": 2, "ep_across_nodes": True, "stop_at": 5},
        {"stop_at": 6},
        {"tp": 2, "replicas": 2},
    )
    for changes in chain:
        train_on_pool(moved, **common, **changes)
    straight = rank.shared_dir / "straight"
    train_on_pool(straight, tp=2, **common)
    _assert_close(losses_by_step(moved), losses_by_step(plain), 1e-4, "moved")
    assert losses_by_step(same) == losses_by_step(straight)
    first, second = (tensors(run / "checkpoints/step-00000008") for run in (same, straight))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    if rank.rank == 0:
        export(same / "checkpoints/step-00000008", rank.shared_dir / "export")
        written = load_file(rank.shared_dir / "export/model.safetensors")
        for name, tensor in tensors(plain / "checkpoints/step-00000008").items():
            if name.startswith("model."):
                assert torch.allclose(written.pop(name.removeprefix("model.")), tensor, atol=1e-4), name
        assert not written
