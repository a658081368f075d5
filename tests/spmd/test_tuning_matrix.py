"""Fine-tuning through the libraries people use: LoRA, QLoRA and full, in four loops, on 1 to 4 ranks.

A cell of the matrix trains two steps on two ranks, saves, goes on from there on three (a plain loop on the
CPU: from one to four), and writes what a user takes away: the adapter, its merge, the merged weights of the
run. All of it equals one process that trains the unsharded model on the same rows, and the losses equal
FSDP2's. It needs transformers, peft, accelerate, trl and, for QLoRA, bitsandbytes: ``make test-tuning`` has
them. On NCCL ranks (``tests/gpu/run.py --only tuning``) cells whose libraries are not there are skipped, by
name.
"""

import importlib
import importlib.util
import json
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)

import rank_pool
from integration_cases import assert_ragged, fsdp_on_cpu, keep_code_order, mean
from rank_pool import DEVICE

_FAILED_IMPORT = (ImportError, RuntimeError)  # transformers wraps the one in the other
METHODS = ("lora", "qlora", "full")
LOOPS = ("plain", "accelerate", "trainer", "trl")
ROWS, STEPS, HALF, VOCABULARY = 12, 4, 2, 64
TRAINED = StateDictOptions(ignore_frozen_params=True, strict=False)
WHOLE = StateDictOptions(ignore_frozen_params=True, full_state_dict=True, cpu_offload=True)
SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
TARGETS = ["q_proj", "v_proj", "up_proj", "down_proj"]


def _tokens(step):
    return torch.randint(VOCABULARY, (ROWS, 12), generator=torch.Generator().manual_seed(step))


@contextmanager
def _fsdp_anywhere():
    """On a GPU Accelerate offers FSDP by itself; its state is the process's, and each run needs another."""
    if DEVICE == "cpu":
        with fsdp_on_cpu() as count_as_accelerator:
            yield count_as_accelerator
        return
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        yield lambda: None
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


@contextmanager
def _own_environment():
    """Trainers leave variables for the rest of the process; the legs of other cells run in it too."""
    before = dict(os.environ)
    if DEVICE == "cuda":
        os.environ["LOCAL_RANK"] = str(torch.cuda.current_device())  # Accelerate's barrier is on that device
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _base(method, folder):
    """The base that ``folder`` holds; made by a user as here."""
    import transformers

    quantized = None
    if method == "qlora":
        quantized = transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
        )
    device = torch.cuda.current_device() if DEVICE == "cuda" else DEVICE  # Accelerate compares the number
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "base", dtype=torch.float32, quantization_config=quantized, device_map={"": device}
    )
    return keep_code_order(model)


def _lora():
    import peft

    return peft.LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS, task_type="CAUSAL_LM")


def _adapted(method, folder):
    import peft

    model = _base(method, folder)
    torch.manual_seed(1)  # adapters begin alike on every rank and in every run
    return model if method == "full" else peft.get_peft_model(model, _lora())


def _optimizer(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


class Leg:
    """A part of a run: what is trained how, from which checkpoint, and where to."""

    def __init__(self, rank, method, how, start, stop):
        self.method, self.how, self.start, self.stop = method, how, start, stop
        self.folder = rank.shared_dir
        self.checkpoint = rank.shared_dir / f"{how}-checkpoint"
        self.ranks = rank.world_size

    def rows(self, step):
        """This rank's rows of a step."""
        return _tokens(step)[dist.get_rank() :: self.ranks].to(DEVICE)

    @property
    def resumes(self):
        return self.start > 0

    @property
    def saves(self):
        return self.stop < STEPS and self.how == "ours"


def _plain(leg):
    model = _adapted(leg.method, leg.folder)
    if leg.how != "whole":
        import torch.distributed.fsdp as stock

        import ragged_fsdp

        fully_shard = {"ours": ragged_fsdp, "stock": stock}[leg.how].fully_shard
        base = model if leg.method == "full" else model.get_base_model()
        for layer in base.model.layers:
            fully_shard(layer)
        fully_shard(model)
    optimizer, losses = _optimizer(model), []
    if leg.resumes:
        weights, state = get_state_dict(model, optimizer, options=TRAINED)
        saved = {"model": weights, "optimizer": state}
        dcp.load(saved, checkpoint_id=leg.checkpoint)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=saved["model"],
            optim_state_dict=saved["optimizer"],
            options=TRAINED,
        )
    for step in range(leg.start, leg.stop):
        ids = leg.rows(step)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean(loss))
    if leg.saves:
        weights, state = get_state_dict(model, optimizer, options=TRAINED)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=leg.checkpoint)
    return model, losses


def _accelerate(leg, count_as_accelerator):
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin

    plugin = None
    if leg.how != "whole":
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
            cpu_ram_efficient_loading=False,
            state_dict_type="SHARDED_STATE_DICT",
        )
        count_as_accelerator()
    accelerator = Accelerator(cpu=DEVICE == "cpu", fsdp_plugin=plugin)
    model = _adapted(leg.method, leg.folder)
    model, optimizer = accelerator.prepare(model, _optimizer(model))
    if leg.resumes:
        accelerator.load_state(str(leg.checkpoint))
    losses = []
    for step in range(leg.start, leg.stop):
        ids = leg.rows(step)
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean(loss))
    if leg.saves:
        accelerator.save_state(str(leg.checkpoint))
    return accelerator.unwrap_model(model), losses


def _arguments(leg, kind):
    shards = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    return kind(
        output_dir=str(leg.checkpoint),
        max_steps=leg.stop,
        per_device_train_batch_size=ROWS // leg.ranks,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="steps" if leg.saves else "no",
        save_steps=HALF,
        report_to=[],
        disable_tqdm=True,
        use_cpu=DEVICE == "cpu",
        bf16=False,
        max_grad_norm=0.0,
        **({"gradient_checkpointing": False, "loss_type": "nll"} if kind.__name__ == "SFTConfig" else {}),
        **(
            {}
            if leg.how == "whole"
            else {"fsdp": True, "fsdp_config": {**shards, "state_dict_type": "SHARDED_STATE_DICT"}}
        ),
    )


def _finish(leg, trainer):
    trainer.train(resume_from_checkpoint=str(leg.checkpoint / f"checkpoint-{HALF}") if leg.resumes else None)
    logged = {line["step"]: line["loss"] for line in trainer.state.log_history if "loss" in line}
    return trainer.model, [logged[step + 1] for step in range(leg.start, leg.stop)]


def _trainer(leg, count_as_accelerator):
    from transformers import Trainer, TrainingArguments

    arguments = _arguments(leg, TrainingArguments)
    count_as_accelerator()
    data = [{"input_ids": ids, "labels": ids} for step in range(STEPS) for ids in _tokens(step)]
    return _finish(leg, Trainer(model=_adapted(leg.method, leg.folder), args=arguments, train_dataset=data))


def _trl(leg, count_as_accelerator):
    import transformers
    from tokenizers import Tokenizer, models

    datasets, trl = _import("datasets"), _import("trl.trainer.sft_trainer")
    arguments = _arguments(leg, trl.SFTConfig)
    count_as_accelerator()
    words = Tokenizer(models.WordLevel({str(i): i for i in range(VOCABULARY)}, unk_token="0"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1")
    model = _base(leg.method, leg.folder)
    torch.manual_seed(1)
    trainer = trl.SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=datasets.Dataset.from_dict(
            {"input_ids": torch.cat([_tokens(s) for s in range(STEPS)]).tolist()}
        ),
        peft_config=None if leg.method == "full" else _lora(),
        processing_class=tokenizer,
    )
    return _finish(leg, trainer)


def _merged(model):
    """What the weights of an unsharded model are with its adapters, by their names without."""
    from peft.tuners.lora import LoraLayer
    from peft.utils.integrations import dequantize_module_weight

    found = {}
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            name = name.removeprefix("base_model.model.")
            delta = module.get_delta_weight("default").detach().float()
            found[f"{name}.weight"] = (
                dequantize_module_weight(module.get_base_layer()).detach().float() + delta
            )
    return found or {name: p.detach() for name, p in model.named_parameters()}


def _import(package):
    """Skip where a package is there and something that it needs is not."""
    try:
        return importlib.import_module(package)
    except _FAILED_IMPORT as error:
        pytest.skip(f"{package} cannot be imported: {error!r:.200}")


def load_libraries(rank, method):
    """Import what legs need; skips, with the reason, what cannot be run on this device."""
    for package in ("transformers.trainer", "accelerate", "peft"):
        _import(package)
    with suppress(*_FAILED_IMPORT):  # its own cells say why
        importlib.import_module("trl.trainer.sft_trainer")
    if method == "qlora":  # it can be imported without its library for this device
        import bitsandbytes

        try:
            bitsandbytes.functional.quantize_4bit(torch.ones(64, 64, device=DEVICE), quant_type="nf4")
        except Exception as error:
            pytest.skip(f"bitsandbytes {bitsandbytes.__version__} has no NF4 on {DEVICE}: {error!r:.200}")


def run_leg(rank, method, loop, how, start, stop):
    """On every rank: train, save; at the end write losses, adapter and merged weights as a user does."""
    from safetensors.torch import save_file

    from ragged_fsdp import weights
    from ragged_fsdp.integrations.substitute import ragged_fully_shard

    torch.set_num_threads(1)
    leg = Leg(rank, method, how, start, stop)
    with ExitStack() as stack:
        stack.enter_context(_own_environment())
        if loop == "plain":
            model, losses = _plain(leg)
        else:
            count_as_accelerator = stack.enter_context(_fsdp_anywhere())
            if how == "ours":
                stack.enter_context(ragged_fully_shard())
            run = {"accelerate": _accelerate, "trainer": _trainer, "trl": _trl}[loop]
            model, losses = run(leg, count_as_accelerator if how != "whole" else lambda: None)
        if how == "ours":
            assert_ragged(model)
        if how == "stock":
            return _note(leg, losses)
        if stop < STEPS:
            return _note(leg, losses)
        if how == "ours":
            trained = get_model_state_dict(model, options=WHOLE)
            weights.save(
                model, leg.folder / "exported", dtype=torch.float32
            )  # adapters merged, codes decoded
        else:
            trained = get_model_state_dict(model, options=WHOLE)
            save_file(
                {name: t.contiguous() for name, t in _merged(model).items()}, leg.folder / "whole.safetensors"
            )
    if dist.get_rank() == 0 and method != "full":
        model.save_pretrained(leg.folder / how, state_dict=trained)
    _note(leg, losses)
    return None


def _note(leg, losses):
    if dist.get_rank() == 0:
        (leg.folder / f"{leg.how}-{leg.start}.json").write_text(json.dumps(losses))
    dist.barrier()


def _losses(folder: Path, how: str, start: int) -> list[float]:
    return json.loads((folder / f"{how}-{start}.json").read_text())


def _run_on(ranks, function, folder, **params):
    rank_pool._pool(ranks).run("test_tuning_matrix", function, params, folder, 600)


def _need(*packages):
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")


@pytest.fixture(scope="module", params=METHODS)
def method(request, tmp_path_factory):
    """A method whose libraries are there, imported by the ranks of all sizes at the same time."""
    _need("transformers", "accelerate", "peft", *(["bitsandbytes"] if request.param == "qlora" else []))
    folder = tmp_path_factory.mktemp("load")

    def load(ranks):
        _run_on(ranks, "load_libraries", folder, method=request.param)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(load, (1, 2, 3, 4) if DEVICE == "cpu" else (1, 2, 3)))
    return request.param


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("loop", LOOPS)
def test_a_cell_equals_one_process_and_fsdp2(tmp_path, method, loop):
    if loop == "trl":
        _need("trl", "datasets")
    import peft
    import transformers
    from safetensors.torch import load_file

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **SIZES, vocab_size=VOCABULARY, use_cache=False, tie_word_embeddings=False
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "base")

    def run(ranks, how, start, stop):
        _run_on(ranks, "run_leg", tmp_path, method=method, loop=loop, how=how, start=start, stop=stop)

    first, second = (1, 4) if loop == "plain" and DEVICE == "cpu" else (2, 3)
    # FSDP2 of torch 2.11 takes no weights of integers
    has_stock = not (method == "qlora" and torch.__version__.startswith("2.11"))
    run(1, "whole", 0, STEPS)
    if has_stock:
        run(2, "stock", 0, HALF)
    run(first, "ours", 0, HALF)
    run(second, "ours", HALF, STEPS)
    # TRL casts the adapters of a quantised base to bf16: steps of one unit there
    close = 2e-2 if (method, loop) == ("qlora", "trl") else 1e-4
    # on a GPU products of fp32 add up in another order for another number of rows; a step is 1e-2
    close_weights = max(close, 1e-3) if DEVICE == "cuda" else close
    expected = _losses(tmp_path, "whole", 0)
    assert len(set(expected)) == STEPS
    if has_stock:
        assert _losses(tmp_path, "stock", 0) == pytest.approx(expected[:HALF], abs=close)
    assert [*_losses(tmp_path, "ours", 0), *_losses(tmp_path, "ours", HALF)] == pytest.approx(
        expected, abs=close
    )
    whole = load_file(tmp_path / "whole.safetensors")
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    for name, value in whole.items():
        got = exported.get_parameter(name)
        torch.testing.assert_close(got, value.float(), atol=close_weights, rtol=close_weights, msg=name)
    if method == "full":
        return
    adapters = [load_file(tmp_path / how / "adapter_model.safetensors") for how in ("ours", "whole")]
    assert adapters[0].keys() == adapters[1].keys()
    for name, value in adapters[1].items():
        bound = max(10 * close, close_weights)
        torch.testing.assert_close(adapters[0][name], value, atol=bound, rtol=bound, msg=name)
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    merged = peft.PeftModel.from_pretrained(base, tmp_path / "ours").merge_and_unload()
    assert type(merged) is type(base)
    if method == "lora":
        for name, value in whole.items():
            got = merged.get_parameter(name)
            torch.testing.assert_close(got, value, atol=close_weights, rtol=close_weights, msg=name)
