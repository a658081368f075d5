"""RAGGED_FSDP_DEBUG=1 and the failures it makes visible; where a collective stands that does not finish."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate

import fsdp_inside
from fsdp_cases import Stack, Transformer, build, logged, ragged_only, rows, shard_blocks, tokens
from ragged_fsdp import DBuffer, fully_shard
from rank_pool import Rank, spmd

pytestmark = ragged_only


@contextmanager
def debug() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAGGED_FSDP_DEBUG", "1")
        yield


@spmd(2, 3)
def test_results_do_not_change(rank: Rank) -> None:
    """Released and new storage is NaN; training must not notice."""
    grads = []
    for enabled in (False, True):
        with debug() if enabled else nullcontext():
            model, _ = build(lambda: Transformer(layers=3), rank.device)
            shard_blocks(model, mesh=rank.mesh())
            for step in range(3):
                model(tokens(rank, step)).backward()
        grads.append([p.grad.to_local().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads))
    assert all(g.isfinite().all() for g in grads[1])


@spmd(2)
def test_freed_storage_is_poisoned(rank: Rank) -> None:
    with debug():
        buffer = DBuffer.distribute({"w": torch.ones(8, 8)}, rank.mesh())
        full = buffer.redistribute([Replicate()])
        full.release()
        full.materialize()
        assert full.tensor(0).isnan().all()


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, left_first: bool) -> torch.Tensor:
        first, second = (self.left, self.right) if left_first else (self.right, self.left)
        return second(first(x))


@spmd(3)
def test_divergent_order_names_the_rank(rank: Rank) -> None:
    """Without the check these ranks would gather one layer's bytes into the other's buffer."""
    with debug():
        model = Branches().to(rank.device)
        fully_shard(model.left, mesh=rank.mesh())
        fully_shard(model.right, mesh=rank.mesh())
        fully_shard(model, mesh=rank.mesh())
        x = torch.ones(2, 8, device=rank.device)
        model(x, True)
        with pytest.raises(
            RuntimeError, match=r"rank 0 has .*all_gather of group 'left'', rank 2 has .*'right'"
        ):
            model(x, rank.rank < 2)
        model.reset_iter_state()


@contextmanager
def another_stream(model: nn.Module) -> Iterator[None]:
    """A stream that has waited for nothing; on CPU the check is told that there is one."""
    if next(model.parameters()).device.type == "cuda":
        with torch.cuda.stream(torch.cuda.Stream()):
            yield
        return
    with fsdp_inside.stream_is(model, "another"):
        yield


@spmd(2)
def test_weights_belong_to_the_stream_that_waited_for_them(rank: Rank) -> None:
    with debug():
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(rank.device)
        fully_shard(model[0], mesh=rank.mesh(), reshard_after_forward=False)
        fully_shard(model, mesh=rank.mesh())
        x = torch.ones(2, 8, device=rank.device)
        for _ in range(2):
            model(x).sum().backward()
        loss = model(x).sum()
        with another_stream(model):
            with pytest.raises(RuntimeError, match=r"were waited for on stream .* and are used on stream"):
                model(x)
            with pytest.raises(RuntimeError, match=r"group '0' were waited for .* and are released on"):
                model[0].reshard()
            for module in (model, model[0]):
                module.unshard()  # from here on they belong to this stream
            model(x)
        with pytest.raises(RuntimeError, match="used on stream"):
            model(x)
        for module in (model, model[0]):
            module.unshard()
        loss.backward()
        model(x).sum().backward()


@spmd(2)
def test_a_failing_collective_says_where(rank: Rank) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(rank.device)
    fully_shard(model[0], mesh=rank.mesh())
    fully_shard(model, mesh=rank.mesh())

    class Broken:
        def __call__(self, **_: object) -> None:
            raise RuntimeError("timed out")

    model[0].set_custom_all_gather(Broken())
    with pytest.raises(RuntimeError, match="timed out") as caught:
        model(torch.ones(2, 8, device=rank.device))
    (note,) = caught.value.__notes__
    assert f"all-gather of group '0' failed on rank {rank.rank}" in note
    model.reset_iter_state()
    model[0].set_custom_all_gather(None)
    model(torch.ones(2, 8, device=rank.device)).sum().backward()


@pytest.mark.parametrize("phase", ["comparison of the plans", "all-gather", "reduce-scatter", "all-to-all"])
@spmd(3)
def test_a_collective_that_times_out_says_where(rank: Rank, phase: str) -> None:
    """The last rank stays away: the others raise and say in which collective they waited."""
    if rank.device == "cuda":
        pytest.skip("NCCL ends the process: tests/spmd/test_fsdp_hang.py")
    short = dist.new_group()
    dist.barrier(short)
    # only now: on a busy machine the ranks may need longer than this to connect
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=3), short)
    mesh = DeviceMesh.from_group(short, rank.device)
    away = rank.rank == 2
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

    def train() -> None:
        fully_shard(
            model[1], mesh=mesh, reduction="all_to_all" if phase == "all-to-all" else "reduce_scatter"
        )
        if away and phase == "all-gather":
            return
        loss = model(torch.ones(2, 8)).sum()
        if not away:
            loss.backward()

    if away:
        if phase != "comparison of the plans":
            train()
    else:
        with pytest.raises(RuntimeError) as caught:
            train()
        (note,) = caught.value.__notes__
        assert f"{phase} of group 'weight' failed on rank {rank.rank} (rank {rank.rank} of 3 of '" in note
    dist.barrier()


@spmd(2)
def test_late_collectives_are_reported_once(rank: Rank) -> None:
    """Where nothing raises, a thread looks at the events of what was launched."""

    class Event:
        """Is done where its stream is."""

        def __init__(self, device: torch.device) -> None:
            assert device == cpu

        def record(self, stream: bool) -> None:
            self.query = lambda: stream

    pg, watch = rank.mesh().get_group(), fsdp_inside.Watch(remembered=4)
    cpu, done, stuck = torch.device("cpu"), True, False
    timeout_s = 100  # the pool's
    with pytest.MonkeyPatch.context() as patch, logged() as said:
        patch.setattr(torch, "Event", Event)
        for phase, name, stream in (
            ("all-gather", "forgotten", stuck),
            ("all-gather", "forgotten too", stuck),
            ("all-gather", "layers.0", done),
            ("all-gather", "layers.1", stuck),
            ("reduction of the gradients", "layers.2", stuck),
            ("all-gather", "layers.3", stuck),
        ):
            watch.launch(phase, name, pg, cpu, stream)
        now = time.monotonic()
        watch.report(now + 0.4 * timeout_s)
        watch.shift_newest(0.3 * timeout_s)  # the host still launches: no event may be asked
        watch.report(now + 0.6 * timeout_s)
        watch.shift_newest(-0.3 * timeout_s)
        assert not said
        for _ in range(2):
            watch.report(now + 0.6 * timeout_s)
    (line,) = said
    assert f"rank {rank.rank}: all-gather of group 'layers.1' (rank {rank.rank} of 2" in line
    assert "launched 60 s ago" in line and "gives up after 100 s" in line


@spmd(2)
def test_a_collective_that_raised_is_not_waited_for(rank: Rank) -> None:
    """It is over: the watch must not say of a process that goes on, or is looked at, that it hangs."""

    def fail(*_: object, **__: object) -> None:
        raise ValueError("on purpose")

    model, _ = build(lambda: Stack(layers=2), rank.device)
    shard_blocks(model)
    loss = model(rows(rank, 0)).square().mean()
    hook = next(model.layers[1].parameters()).register_post_accumulate_grad_hook(fail)
    with logged() as said:
        with pytest.raises(ValueError, match="on purpose"):
            loss.backward()
        fsdp_inside.look_for_late_collectives(model, 1e9)
        hook.remove()
        model.reset_iter_state()
        model.layers[0].set_custom_all_gather(fail)
        with pytest.raises(ValueError, match="on purpose"):
            model(rows(rank, 0))
        fsdp_inside.look_for_late_collectives(model, 1e9)
    assert not said


def _reported(watch: fsdp_inside.Watch, folder: Path) -> list[str]:
    """What is logged of a collective that is found late, while all ranks keep records in ``folder``."""
    watch.keep_records(folder)
    try:
        with logged() as said:
            # the first to look writes, the others follow, then those that wait compare
            for seconds in (0, 60, 60, 60):
                watch.report(time.monotonic() + seconds)
                dist.barrier()
    finally:
        watch.keep_records(None)
    return said


@spmd(3)
def test_ranks_that_did_not_arrive_are_named_from_what_all_have_launched(rank: Rank) -> None:
    """Rank 2 never comes to the second gather: it is in no collective, and writes its launches too."""
    pg = dist.new_group(timeout=timedelta(seconds=100))
    watch, folder = fsdp_inside.Watch(remembered=3), rank.shared_dir / "hangs"
    watch.begin("all-gather", "layers.0", pg, returns=True)
    if rank.rank < 2:
        watch.begin("all-gather", "layers.1", pg, returns=False)
    said = _reported(watch, folder)
    assert len(said) == (2 if rank.rank < 2 else 0), said
    records = {path.name: json.loads(path.read_text()) for path in folder.iterdir()}
    assert sorted(records) == [f"rank-0000{number}.json" for number in range(3)]
    assert records["rank-00002.json"]["waits_in"] is None
    for number in range(2):
        record = records[f"rank-0000{number}.json"]
        assert record["waits_in"]["phase"] == "all-gather" and record["waits_in"]["group"] == "layers.1"
        assert record["did_not_arrive"] == ["rank 2 (last: all-gather of 'layers.0')"]
        assert record["launched_another"] == []
        own = [launch for launch in record["last_launches"] if launch["process_group"] == pg.group_name]
        assert [launch["number"] for launch in own] == [1, 2]
    if rank.rank < 2:
        assert "all-gather of group 'layers.1': did not arrive: rank 2 (last:" in said[1]


@spmd(3)
def test_a_rank_that_lost_the_order_is_named_with_the_first_collective_that_differs(rank: Rank) -> None:
    """All have launched as many: by numbers alone the collective itself would seem to stand still."""
    pg = dist.new_group(timeout=timedelta(seconds=100))
    watch = fsdp_inside.Watch(remembered=4)
    order = ["layers.0", "layers.2", "layers.1"] if rank.rank == 1 else ["layers.0", "layers.1", "layers.2"]
    for name in order:
        watch.begin("all-gather", name, pg, returns=name != order[-1])
    said = _reported(watch, rank.shared_dir / "hangs")
    here, there = "all-gather of 'layers.1'", "all-gather of 'layers.2'"
    if rank.rank != 1:
        assert f"launched another collective in its place: rank 1 ({there}, here {here}). The" in said[1]
    else:
        assert f"rank 0 ({here}, here {there}), rank 2 ({here}, here {there})" in said[1]


@spmd(1)
def test_what_is_launched_may_be_written_at_any_moment(rank: Rank) -> None:
    """An error there would end the thread, and with it the watch."""
    fsdp_inside.Watch(remembered=3).look_at_begin("all-gather", rank.mesh().get_group())


@spmd(1)
def test_a_folder_that_cannot_be_reached_does_not_end_the_watch(rank: Rank) -> None:
    """Its file system may be what everybody waits for."""

    def gone(path: Path) -> None:
        raise OSError(116, "stale file handle")

    watch = fsdp_inside.Watch(remembered=3)
    watch.keep_records(rank.shared_dir / "hangs")
    try:
        with pytest.MonkeyPatch.context() as patch, logged() as said:
            patch.setattr(Path, "is_dir", gone)
            watch.report(time.monotonic())
    finally:
        watch.keep_records(None)
    (line,) = said
    assert "hangs: " in line and "stale file handle" in line
