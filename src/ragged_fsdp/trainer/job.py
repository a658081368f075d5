"""A training run as one rank lives it: set up, resume, loop, finish."""

import math
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ragged_fsdp.checkpoint import dcp
from ragged_fsdp.checkpoint.store import open_store
from ragged_fsdp.description import Description, describe
from ragged_fsdp.experts import ExpertLoad, balanced_splits, expert_parallel, load_of, move_experts
from ragged_fsdp.fp8 import Watch
from ragged_fsdp.models.flops import flops_per_token
from ragged_fsdp.models.materialize import materialize
from ragged_fsdp.models.source import ModelSource
from ragged_fsdp.trainer.batches import Batches
from ragged_fsdp.trainer.config import TrainConfig
from ragged_fsdp.trainer.config_check import check_vocabulary, likely_mistakes
from ragged_fsdp.trainer.config_file import ConfigError, save_toml
from ragged_fsdp.trainer.data import Tokens, open_tokens
from ragged_fsdp.trainer.loggers import Loggers, open_loggers
from ragged_fsdp.trainer.optimizers import LearningRate, build_optimizer, granularity_for
from ragged_fsdp.trainer.profiling import StepProfiler
from ragged_fsdp.trainer.progress import Silent, open_view
from ragged_fsdp.trainer.ranks import (
    Ranks,
    has_agent,
    lay_out,
    on_every_rank,
    on_first_rank,
    seed_everything,
)
from ragged_fsdp.trainer.rules import freeze
from ragged_fsdp.trainer.run_folder import (
    Identity,
    how_to_go_on,
    identity_of,
    refuse_unshared,
    starting_point,
    take_places,
)
from ragged_fsdp.trainer.sampling import sample_text
from ragged_fsdp.trainer.schedule import lr_factor
from ragged_fsdp.trainer.sharding import ShardedModel, dispatcher_for, prepare_layers, reductions, shard
from ragged_fsdp.trainer.state import Counters, restore, state_to_save
from ragged_fsdp.trainer.step import StepResult, evaluate, train_step
from ragged_fsdp.trainer.stop import StopRequest
from ragged_fsdp.trainer.timing import StepClock, device_name, memory_bytes, peak_flops
from ragged_fsdp.watch import keep_records
from ragged_fsdp.weights import load as load_weights
from ragged_fsdp.weights.names import plain_name

__all__ = ["TrainingJob"]


class TrainingJob:
    """Owns the model, the optimizer and the counters of a run on one rank."""

    def __init__(self, config: TrainConfig, device: torch.device, stop: StopRequest) -> None:
        self.config, self._stop = config, stop
        self.ranks, self._source = lay_out(config, device)
        self._run_dir = Path(config.run.run_dir)
        checkpoints = config.checkpoint
        self._store = open_store(
            config.checkpoint_place, keep_last=checkpoints.keep_last, keep_best=checkpoints.keep_best
        )
        # Half of the time that the other ranks wait for the answer.
        wait_s = config.sharding.timeout / 2 if has_agent() else 0.0
        self._places = on_first_rank(lambda: take_places(config, self._store, wait_s), self.ranks)
        try:
            refuse_unshared(config, self._store, self._places, self.ranks)
            self._set_up()
        except Exception:  # refused or failed: nothing has been written yet, so nothing is left behind
            if self._places is not None:
                self._places.undo()
            raise

    def _set_up(self) -> None:
        """Everything that can refuse to start; nothing is written before it is done."""
        config, ranks, checkpoints = self.config, self.ranks, self.config.checkpoint
        self._saver = dcp.Saver(
            self._store, background=checkpoints.async_checkpoint, timeout_s=config.sharding.timeout
        )
        self._tokens = _open_together(config, ranks)
        twin, self._identity = on_every_rank(
            "build the model", self._twin, ranks.control, lambda made: made[1].lines()
        )
        self._begin = starting_point(config, self._store, self._identity, ranks)
        seed_everything(config.run.seed, ranks.data_index)
        self._build(twin)
        self._counters = Counters()
        self._clock = StepClock(ranks.device)
        self._view: Silent = Silent()
        self._metrics: Loggers | None = None
        self._pending: tuple[int, StepResult, dict[str, Any]] | None = None
        self._rows_since_move: dict[str, torch.Tensor] = {}
        self._messages = self._resume()

    def run(self) -> dict[str, Any]:
        """Train to the last step, or until asked to stop; returns what came of it."""
        self._start()
        config, counters = self.config, self._counters
        profiler = StepProfiler(
            config.log, self._run_dir, counters.step, self._view.say, enabled=self.ranks.rank == 0
        )
        reason = self._stop.agreed(self.ranks.control)
        saved_step = first_step = counters.step
        last_step = min(config.run.steps, config.run.stop_at or config.run.steps)
        if counters.step >= config.run.steps:
            self._view.say(f"all {config.run.steps} steps are done; a larger --steps goes on")
        elif counters.step >= last_step:
            self._view.say(
                f"stop_at = {last_step}: the run is at step {counters.step} already, so nothing is trained; "
                "a larger --stop-at goes on, 0 to the end"
            )
        while counters.step < last_step and reason is None:
            self._step()
            profiler.step()
            if _due(counters.step, config.eval.eval_every) or counters.step == last_step:
                self._evaluate()
            if _due(counters.step, config.checkpoint.checkpoint_every):
                self._save()
                saved_step = counters.step
            reason = self._stop.agreed(self.ranks.control)
        profiler.close()
        self._flush()
        finished = counters.step >= config.run.steps
        wanted = config.checkpoint.save_at_end if finished else config.checkpoint.save_on_interrupt
        if wanted and saved_step != counters.step:
            self._save()
        self._saver.wait()
        if not finished and (reason is not None or not wanted):
            saved = f"saved; {how_to_go_on(config)} goes on from here" if wanted else "not saved"
            if counters.step == first_step:
                saved = "there is nothing new to save"
            why = {"time": "the time is up", "interrupted": "interrupted", None: "stopped"}[reason]
            self._view.say(f"{why} after step {counters.step} of {config.run.steps}; {saved}")
        return self._finish("finished" if finished else reason or "stopped")

    def _twin(self) -> tuple[nn.Module, Identity]:
        """The model, unsharded and on the meta device, and what a checkpoint must share with it."""
        check_vocabulary(self._source, self._tokens)
        twin = self._on_meta()
        return twin, identity_of(twin, self._source.settings, self._tokens, self.config)

    def _on_meta(self) -> nn.Module:
        """A new model without memory, in the dtype of its weights."""
        model = self._source.build()
        return model.double() if self.config.sharding.precision == "fp64" else model

    def _build(self, twin: nn.Module) -> None:
        """The model, sharded on the meta device, then given its values; and its optimizer.

        ``twin`` is the same model, of :meth:`_twin`.
        """
        config, ranks, source = self.config, self.ranks, self._source
        model = self._on_meta()
        freeze(twin, config.model.freeze)
        self._flops_per_token = flops_per_token(
            twin, layers=source.layers, attention_width=source.attention_width, seq_len=config.data.seq_len
        )
        self._parameters = sum(p.numel() for p in twin.parameters())
        self._trained = sum(p.numel() for p in twin.parameters() if p.requires_grad)
        if ranks.tp is not None:
            split = source.tp if ranks.ep is None else source.tp_beside_ep
            assert not isinstance(split, str)  # checked before the start
            split.apply(model, ranks.tp.inner)
        if ranks.ep is not None:
            expert_parallel(
                model,
                ranks.ep.inner,
                dispatcher=dispatcher_for(config.sharding),
                token_mesh=ranks.tp.inner if ranks.tp is not None else None,
            )
        freeze(model, config.model.freeze)
        prepare_layers(model, config.sharding)
        shard(model, config.sharding, ranks, granularity_for(config.optimizer, model))
        self._reductions = reductions(config.sharding, ranks)
        materialize(
            model,
            twin,
            source.init_with(twin),
            seed=config.run.seed,
            device=ranks.device,
            buffers_only=source.weights is not None,
        )
        if source.weights is not None and self._begin.path is None:
            shown = ranks.rank == 0 and sys.stderr.isatty()
            try:
                load_weights(model, source.weights, strict="missing", progress=shown, group=ranks.control)
            except ValueError as error:
                raise ConfigError(f"weights: {error}") from error
        self.model = ShardedModel(model, config.sharding, ranks)
        self._watch = Watch(model)
        self.optimizer = build_optimizer(config.optimizer, model)
        self.optimizer.register_step_pre_hook(lambda *_: self._saver.before_update())
        self._lr = LearningRate(self.optimizer)
        data = config.data
        vocab = source.vocab_size
        self._train_data = Batches(self._tokens.train, data.seq_len, config.run.seed, vocab)
        self._eval_data = Batches(self._tokens.evaluation, data.seq_len, 0, vocab)  # the same in every run

    def _start(self) -> None:
        """Take the folder into use, and say what is about to run."""
        ranks, config, step = self.ranks, self.config, self._counters.step
        layout = describe(self.model.module)
        if ranks.rank == 0:
            self._messages += self._begin.move_aside(self._store)
            self._store.remove_leftovers()
            self._run_dir.mkdir(parents=True, exist_ok=True)
            save_toml(config, self._run_dir / "config.toml")
            self._metrics = open_loggers(config, self._run_dir, step)
            self._metrics.write(
                "start",
                step,
                time=time.time(),
                torch=torch.__version__,
                device=device_name(ranks.device),
                world_size=ranks.world_size,
                sharding=config.sharding.sharding,
                mesh=ranks.mesh_text,
                parameters=self._parameters,
                trained_parameters=self._trained,
                flops_per_token=self._flops_per_token,
                padding=layout.padding_ratio,
                shard_bytes=layout.rank_bytes or None,
                reductions=self._reductions,
                data=self._tokens.description,
            )
        self._view = open_view(ranks.rank, config.run.steps, config.log.log_every, step)
        self._introduce(layout)
        for message in self._messages:
            self._view.say(message)
            if self._metrics is not None:
                self._metrics.write("note", step, text=message)
        if ranks.device.type == "cuda":
            (self._run_dir / "hangs").mkdir(
                parents=True, exist_ok=True
            )  # torch's flight recorder makes no folder
        keep_records(self._run_dir / "hangs" / f"step-{step:08d}{self._store.attempt}")
        self._clock.skip()

    def _introduce(self, layout: Description) -> None:
        ranks, config = self.ranks, self.config
        split = f" ({ranks.mesh_text})" if ranks.mesh_text else ""
        processes = f"{ranks.world_size} {ranks.device.type} process{'es' if ranks.world_size > 1 else ''}"
        trained = "" if self._trained == self._parameters else f" ({self._trained:,} trained)"
        self._view.say(
            f"{self._parameters:,} parameters{trained}, {config.sharding.sharding} over {processes}{split}; "
            f"{self._tokens.description}"
        )
        self._view.say(self._tokens.tokenizer_description)
        if self._begin.path is None:
            self._view.say(_first_weights(self._source, config))
        for line in (*self._reductions, *layout.group_table()):
            self._view.say(line)

    def _resume(self) -> list[str]:
        """Take up the checkpoint that ``--resume`` means, if any; returns what to tell the user."""
        begin, warnings = self._begin, likely_mistakes(self.config, self._source)
        if begin.path is None:
            return [*warnings, *begin.notes]
        notes = restore(begin.path, begin.info, self.model.module, self.optimizer, self.ranks)
        self._counters = Counters.from_info(begin.info)
        return [*warnings, *begin.notes, *notes, f"resumed from {begin.path} at step {self._counters.step}"]

    def _step(self) -> None:
        counters, config = self._counters, self.config
        lr = self._lr.set(lr_factor(counters.step, config.run.steps, config.optimizer))
        result = train_step(
            self.model, self.optimizer, self._train_data, counters.samples, config, self.ranks, self._clock
        )
        load = load_of(self.model.module) if self.ranks.ep is not None else None
        self._flush()  # the row of the step before: by now its work has ended, and asking costs no wait
        self._watch.mark()  # after it: the names it gives are those of the step before
        counters.step += 1
        counters.samples += config.data.batch
        counters.tokens += config.data.batch * config.data.seq_len
        wall, spans = self._clock.lap()
        measured = {"tokens": counters.tokens, "lr": lr, "wall": wall, "spans": spans, "load": load}
        self._pending = (counters.step, result, measured)
        if load is not None and config.sharding.rebalance:
            self._rebalance(load)

    def _rebalance(self, load: ExpertLoad) -> None:
        """Every ``rebalance`` steps let experts lie as the rows since the last time ask for."""
        for name, rows in load.rows.items():
            self._rows_since_move[name] = self._rows_since_move.get(name, 0) + rows
        if not _due(self._counters.step, self.config.sharding.rebalance):
            return
        self._flush()
        self._saver.before_update()
        splits = balanced_splits(replace(load, rows=self._rows_since_move))
        moved = move_experts(self.model.module, splits, self.optimizer)
        self._rows_since_move = {}
        if moved and self._metrics is not None:
            text = f"experts of {len(moved)} of {len(splits)} layers moved"
            self._metrics.write("note", self._counters.step, text=text)
        self._clock.skip()

    def _flush(self) -> None:
        """Write the row of the last step, once its numbers are there."""
        if self._pending is None:
            return
        step, result, timing = self._pending
        self._pending = None
        loss, grad_norm = float(result.loss), float(result.grad_norm)
        self._counters.train_loss = loss
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            where = self._seen_in_fp8()
            raise FloatingPointError(
                f"step {step}: loss {loss}, gradient norm {grad_norm}; lower lr or set clip{where}"
            )
        if self._metrics is None:
            return
        per_s = self.config.data.batch * self.config.data.seq_len / timing["wall"]
        flops = per_s * self._flops_per_token / self.ranks.world_size
        peak = peak_flops(self.ranks.device, self.config.log.peak_tflops)
        row = {
            "loss": loss,
            "balance_loss": float(result.balance_loss),
            "grad_norm": grad_norm,
            "experts": timing["load"].summary() if timing["load"] is not None else None,
            "lr": timing["lr"],
            "tokens": timing["tokens"],
            "tokens_per_s": per_s,
            "tflops_per_rank": flops / 1e12,
            "mfu": flops / peak if peak else None,
            "memory": memory_bytes(self.ranks.device),
            "step_s": timing["wall"],
            "phases_s": self._clock.seconds_by_phase(timing["spans"]),
            "time": time.time(),
        }
        self._metrics.write("train", step, **row)
        self._view.step(step, row)

    def _seen_in_fp8(self) -> str:
        """Where something not finite was seen first, on any rank; all call it, with a loss that all have."""
        seen: list[list[str]] = [[] for _ in range(self.ranks.world_size)]
        torch.distributed.all_gather_object(seen, self._watch.names(), group=self.ranks.control)
        # a rank whose inputs were finite saw it later, in gradients
        named = (names[0] for names in seen if names)
        first = min(named, key=lambda name: ": an input" not in name, default="")
        return f"; first not finite in FP8: {plain_name(first)}" if first else ""

    def _evaluate(self) -> None:
        self._flush()
        if not self.config.eval.eval_sequences:
            return
        loss = evaluate(self.model, self._eval_data, self.config, self.ranks)
        if not math.isfinite(loss):
            raise FloatingPointError(
                f"step {self._counters.step}: validation loss {loss}; lower lr or set clip"
            )
        self._counters.eval_loss, self._counters.eval_step = loss, self._counters.step
        if self._metrics is not None:
            self._metrics.write("eval", self._counters.step, loss=loss)
        self._view.say(f"step {self._counters.step:>5}/{self.config.run.steps}  validation loss {loss:.4f}")
        self._clock.skip()

    def _save(self) -> None:
        """Start a checkpoint of this step; training waits only while the state is copied."""
        self._flush()
        began = time.perf_counter()
        step = self._counters.step
        info = {
            **self._counters.to_info(),
            "world_size": self.ranks.world_size,
            "model": self._source.settings,
            "data": self._identity.data,
            "config": asdict(self.config),
        }
        state = state_to_save(self.model.module, self.optimizer, self.ranks)
        for name in state["model"].keys() & dict(self.model.module.named_buffers()).keys():
            state["model"][name] = state["model"][name].clone()  # the next forward may change it
        self._saver.save(step, state, info)
        if self._metrics is not None:
            self._metrics.write("checkpoint", step, blocked_s=time.perf_counter() - began)
        self._view.say(f"step {step:>5}/{self.config.run.steps}  checkpoint {self._store.final_path(step)}")
        self._clock.skip()

    def _finish(self, status: str) -> dict[str, Any]:
        counters, eval_config = self._counters, self.config.eval
        sample = None
        if eval_config.sample_tokens and status == "finished":
            sample = sample_text(self.model, self._tokens.tokenizer, self.config, self.ranks)
            self._view.say(f"a sample of {eval_config.sample_tokens} tokens:\n{sample}")
        outcome: dict[str, Any] = {
            "status": status,
            "step": counters.step,
            "train_loss": counters.train_loss,
            "eval_loss": counters.eval_loss,
            "run_dir": str(self._run_dir),
            "sample": sample,
        }
        if self._metrics is not None:
            self._metrics.write("end", **outcome)
            self._metrics.close()
        if self._places is not None:
            self._places.release()
        self._view.close()
        return outcome


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _open_together(config: TrainConfig, ranks: Ranks) -> Tokens:
    """Rank 0 opens the data first, so that a missing cache is built once; refuses ranks with other tokens.

    Each rank reads its own part of a batch: with files of its own it would train on something else.
    """
    data, model = config.data, config.model.model
    first = on_first_rank(lambda: open_tokens(data, model), ranks)

    def says(tokens: Tokens) -> str:
        count = f"{len(tokens.train):,} training and {len(tokens.evaluation):,} evaluation tokens"
        return f"{count} (digest {tokens.digest}), tokenizer {tokens.tokenizer.digest}"

    return on_every_rank("open the data", lambda: first or open_tokens(data, model), ranks.control, says)


def _first_weights(source: ModelSource, config: TrainConfig) -> str:
    """Where the weights of the first step come from, in words."""
    if source.weights is not None:
        return f"weights: those in {source.weights}"
    asked = ", as --weights random asks" if config.model.weights == "random" else ""
    return f"weights: random, from seed {config.run.seed}{asked}"
