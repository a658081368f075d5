"""The Transformers ``Trainer`` itself, with torch's ``fully_shard`` and with ours.

Same losses, settings honoured, checkpoints of one resumed by the other.
"""

from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.distributed.tensor import DTensor

from integration_cases import assert_ragged, fsdp_on_cpu, llama
from rank_pool import spmd

STEPS = 4


def _rows(name, parameter):
    from ragged_fsdp import Rows

    return Rows(2) if parameter.ndim == 2 else None


def _train(
    folder: Path,
    *,
    ragged: bool,
    resume: Path | None = None,
    config: dict | None = None,
    optimizer=None,
    policy=_rows,
    **arguments,
):
    """The trainer after its run, and its losses by step and of an evaluation."""
    from transformers import Trainer, TrainingArguments

    from ragged_fsdp.integrations.substitute import ragged_fully_shard

    fsdp_config = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], **(config or {})}
    data = [
        {"input_ids": ids, "labels": ids}
        for ids in torch.randint(64, (64, 16), generator=torch.Generator().manual_seed(1))
    ]
    with fsdp_on_cpu() as count_as_accelerator, ragged_fully_shard(policy) if ragged else nullcontext():
        settings = TrainingArguments(
            output_dir=str(folder),
            fsdp=True,
            fsdp_config=fsdp_config,
            per_device_train_batch_size=2,
            learning_rate=1e-2,
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
            **{"max_steps": STEPS, "save_strategy": "no", "use_cpu": True, **arguments},
        )
        count_as_accelerator()
        trainer = Trainer(
            model=llama(),
            args=settings,
            train_dataset=data,
            eval_dataset=data[:4],
            optimizer_cls_and_kwargs=optimizer,
        )
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
        losses = {line["step"]: line["loss"] for line in trainer.state.log_history if "loss" in line}
        evaluated = trainer.evaluate()["eval_loss"]
    return trainer, [*losses.values(), evaluated]


SETTINGS = {
    "defaults": {},
    "kept after forward": {"reshard_after_forward": False},
    "recomputed": {"activation_checkpointing": True},
    "offloaded": {"cpu_offload": True},
    "other layers": {"transformer_layer_cls_to_wrap": ["LlamaMLP", "LlamaAttention"]},
    "loaded on rank 0": {"cpu_ram_efficient_loading": True},
}


@spmd(2)
def test_settings_are_honoured(rank):
    """Every setting reaches the model, and none changes the losses of torch's FSDP2."""
    from ragged_fsdp import CPUOffloadPolicy, FSDPModule
    from ragged_fsdp.integrations import substitute

    _, expected = _train(rank.shared_dir / "stock", ragged=False)
    for name, config in SETTINGS.items():
        with mock.patch.object(substitute, "fully_shard", wraps=substitute.fully_shard) as called:
            trainer, losses = _train(rank.shared_dir / name, ragged=True, config=config)
        assert losses == pytest.approx(expected, abs=2e-5), name
        assert_ragged(trainer.model)
        offloaded = {
            isinstance(call.kwargs.get("offload_policy"), CPUOffloadPolicy) for call in called.mock_calls
        }
        assert offloaded == {name == "offloaded"}
        sharded = {n for n, module in trainer.model.named_modules() if isinstance(module, FSDPModule)}
        assert any(n.endswith("mlp") for n in sharded) == (name == "other layers")
        recomputed = any("_checkpoint_wrapped_module" in n for n, _ in trainer.model.named_modules())
        assert recomputed == (name == "recomputed")
        ids = torch.zeros(1, 4, dtype=torch.long)
        trainer.model(input_ids=ids, labels=ids)
        query = next(m for n, m in trainer.model.named_modules() if n.endswith("q_proj"))
        assert isinstance(query.weight, DTensor) == (name != "kept after forward"), name


@spmd(2)
def test_precision_accumulation_and_clipping(rank):
    common = {"bf16": True, "gradient_accumulation_steps": 2, "max_grad_norm": 0.5}
    _, expected = _train(rank.shared_dir / "stock", ragged=False, **common)
    trainer, losses = _train(rank.shared_dir / "ragged", ragged=True, **common)
    assert losses == pytest.approx(expected, abs=2e-3)
    assert_ragged(trainer.model)
    assert all(parameter.dtype == torch.float32 for parameter in trainer.model.parameters())


@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
@spmd(2)
def test_checkpoints_resume(rank, kind):
    """Stopped and resumed is bit for bit the undisturbed run; torch's resumes here, ours there."""
    config = {"state_dict_type": kind}
    saving = {"save_strategy": "steps", "save_steps": 2}
    folders = {ragged: rank.shared_dir / str(ragged) for ragged in (True, False)}
    ends = {}
    for ragged, folder in folders.items():
        _, ends[ragged] = _train(folder, ragged=ragged, config=config, **saving)
    assert ends[True] == pytest.approx(ends[False], abs=2e-5)
    for writer, reader in ((True, False), (False, True), (True, True)):
        trainer, losses = _train(
            rank.shared_dir / "resumed", ragged=reader, resume=folders[writer] / "checkpoint-2", config=config
        )
        wanted = ends[writer]
        assert losses == (wanted if writer == reader else pytest.approx(wanted, abs=2e-5)), (writer, reader)
        if reader:
            assert_ragged(trainer.model)
    if kind == "FULL_STATE_DICT":
        _check_saved_model(trainer, folders[True] / f"checkpoint-{STEPS}")


def _check_saved_model(trainer, folder):
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(folder)
    for name, parameter in trainer.model.named_parameters():
        torch.testing.assert_close(loaded.get_parameter(name), parameter.full_tensor(), atol=0, rtol=0)


@spmd(2)
def test_our_optimizer_trains_and_resumes(rank):
    """Made by the Trainer before it shards; its 8-bit state goes through the checkpoint."""
    from ragged_fsdp.optim import AdamW8bit, block_policy

    def run(folder, **more):
        return _train(
            rank.shared_dir / folder,
            ragged=True,
            config={"state_dict_type": "SHARDED_STATE_DICT"},
            optimizer=(AdamW8bit, {"lr": 1e-2, "min_8bit_numel": 512}),
            policy=block_policy(min_numel=512),
            **more,
        )

    trainer, losses = run("first", save_strategy="steps", save_steps=2)
    assert_ragged(trainer.model)
    state = trainer.optimizer.optimizer.state[trainer.model.lm_head.weight]
    assert state["exp_avg_codes"].dtype == torch.uint8
    _, exact = _train(rank.shared_dir / "exact", ragged=True)
    assert len(set(losses)) == len(losses)
    assert losses == pytest.approx(exact, abs=0.05)  # torch's AdamW, in fp32
    _, resumed = run("second", resume=rank.shared_dir / "first" / "checkpoint-2")
    assert resumed == losses
