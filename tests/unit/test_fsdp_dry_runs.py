"""Every mode without other ranks, and seen by whoever stands between it and the wire.

On torch's fake process group a step runs with the sizes of rank 1 of 4; no values arrive. The same modes run
over a process group that is written in Python, and with the functions of ``torch.distributed`` wrapped by
somebody who came after this package or, in a process of its own, before it.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import _create_work_from_future
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import fsdp_inside
from collective_calls import count, noted
from fsdp_cases import MODES, Mode, ragged_only
from ragged_fsdp import collectives, torch_internals
from rank_pool import DEVICE, Rank

pytestmark = [ragged_only, pytest.mark.skipif(DEVICE != "cpu", reason="dry runs need no device")]
RANKS, RANK = 4, 1


@pytest.fixture
def rank(tmp_path, request):
    """One of four ranks; the others are not there."""
    backend = getattr(request, "param", "fake")
    if backend == "own" and not hasattr(dist.Backend, "OWN"):
        dist.Backend.register_backend("own", lambda _, *where: OwnGroup(*where[:2]), devices="cpu")
    dist.init_process_group(backend, rank=RANK, world_size=RANKS, store=FakeStore())
    yield Rank(RANK, RANKS, tmp_path)
    dist.destroy_process_group()


def _check(mode, forward, backward):
    """Each group is gathered once in forward and reduced once in backward, over the replicas if there are."""
    groups = forward["gather"]
    assert groups >= 3 and forward == {"gather": groups}
    kind = mode.options.get("reduction", "reduce_scatter")
    expected = {"all_to_all": 2 * groups} if kind == "two_level" else {kind: groups}  # inside nodes, between
    expected |= {"all_reduce": groups} if mode.two_dims else {}
    assert {other: number for other, number in backward.items() if other != "gather"} == expected


@pytest.mark.parametrize("name", list(MODES))
def test_a_step_runs_without_other_ranks_and_its_collectives_are_seen(rank, name):
    mode = MODES[name]
    model = mode.model(rank)
    for step in range(2):
        with noted() as in_forward:
            loss, forward = count(lambda step=step: model(mode.batch(rank, step)).sum())
        with noted() as in_backward:
            _, backward = count(loss.backward)
        _check(mode, forward, backward)
        assert (in_forward.counts(), in_backward.counts()) == (forward, backward)
    for name, parameter in model.named_parameters():
        assert isinstance(parameter.grad, DTensor) and parameter.grad.placements == parameter.placements, name


class _Even(nn.Module):
    """A matrix per layer whose quarters are equal: each is sent as a view."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("rounds", [1, 3])
def test_an_exchange_of_views_runs_without_other_ranks(rank, rounds):
    """As for large shards on a device: lists of views, in rounds."""
    with pytest.MonkeyPatch.context() as patch, noted() as notes:
        fsdp_inside.exchange_in_rounds(patch, rounds)
        model = Mode(_Even, {"reduction": "all_to_all"}).model(rank)
        for _ in range(2):
            model(torch.ones(1, 64)).sum().backward()
    assert [call.name for call in notes.of("all_to_all")] == ["batch_isend_irecv"] * 2 * 3 * rounds


def test_pieces_on_a_device_run_without_other_ranks(rank, monkeypatch):
    """Torch's fake group copies part r sent to part r received, whatever their sizes: messages are used."""
    messages = []
    monkeypatch.setattr(dist, "batch_isend_irecv", messages.extend)
    on_gpu = dist.group.WORLD._get_backend(torch.device("cuda"))
    monkeypatch.setattr(torch_internals, "backend_of", lambda pg, device: on_gpu)  # meta stands for a GPU
    sent, received = (
        [torch.empty(n, device="meta") for n in sizes] for sizes in ((3, 2, 0, 1), (0, 2, 4, 1))
    )
    collectives.all_to_all_pieces(received, sent, dist.group.WORLD, async_op=True)
    assert [(m.op, m.group_peer, m.tensor.numel()) for m in messages] == [
        (dist.isend, 0, 3),
        (dist.isend, 3, 1),
        (dist.irecv, 2, 4),
        (dist.irecv, 3, 1),
    ]


def test_pieces_on_a_device_go_over_a_group_that_torch_does_not_know(rank, monkeypatch):
    """One in Python that nobody registered: torch's collectives take it, but do not tell its backend."""
    asked = []
    monkeypatch.setattr(dist, "all_to_all", lambda received, sent, group, async_op: asked.append(group))
    group = dist.ProcessGroup(0, 4)
    parts = [torch.empty(2, device="meta") for _ in range(4)]
    collectives.all_to_all_pieces(parts, parts, group)
    assert asked == [group]


_BEFORE = """
import json, pathlib, sys
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future
from torch.testing._internal.distributed.fake_pg import FakeStore
from collective_calls import FUNCTIONS, Noted, count

notes = Noted()
for name in FUNCTIONS:
    setattr(dist, name, notes.wrap(name))
assert "ragged_fsdp" not in sys.modules
from fsdp_cases import MODES
from rank_pool import Rank

rank = Rank({rank}, {ranks}, pathlib.Path())
dist.init_process_group("fake", rank=rank.rank, world_size=rank.world_size, store=FakeStore())
for name, mode in MODES.items():
    model = mode.model(rank)
    notes.calls.clear()
    try:
        _, ran = count(lambda: model(mode.batch(rank, 0)).sum().backward())
    except RuntimeError as error:
        ran = str(error)
    print(json.dumps([name, notes.counts(), ran]))
"""


def test_who_wraps_torch_s_functions_before_the_import_sees_every_collective():
    tests = Path(__file__).parents[1]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tests), *sys.path])}
    command = [sys.executable, "-c", _BEFORE.format(rank=RANK, ranks=RANKS)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=150, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [name for name, _, _ in found] == list(MODES)
    for name, seen, ran in found:
        assert seen == ran, name


class OwnGroup(dist.ProcessGroup):
    """A process group in Python: notes what is asked of it, and answers as if all ranks had said the same."""

    calls: Counter[str] = Counter()  # noqa: RUF012

    def _done(self, kind, result):
        OwnGroup.calls[kind] += 1
        future = torch.futures.Future()
        future.set_result(result)
        return _create_work_from_future(future)

    def all_gather_single(self, output, source, options=None):
        for part in output.chunk(self.size()):
            part.copy_(source)
        return self._done("gather", output)

    def reduce_scatter_single(self, output, source, options=None):
        output.copy_(source.chunk(self.size())[self.rank()])
        return self._done("reduce_scatter", output)

    def all_to_all_single(self, output, source, output_sizes=None, source_sizes=None, options=None):
        output.view(-1).copy_(source.view(-1))
        return self._done("all_to_all", output)

    def alltoall(self, outputs, sources, options=None):
        for output in outputs:
            output.copy_(sources[self.rank()])
        return self._done("all_to_all", outputs)

    def allgather(self, outputs, sources, options=None):
        for output in outputs[0]:
            output.copy_(sources[0])
        return self._done("gather of a list", outputs)

    def allreduce(self, tensors, options=None):
        return self._done("all_reduce", tensors)

    def broadcast(self, tensors, options=None):
        return self._done("broadcast", tensors)

    def barrier(self, options=None):
        return self._done("barrier", None)

    @property
    def group_name(self):
        return dist.distributed_c10d._world.pg_names[self]

    def getBackendName(self):
        return "own"

    # the names of older releases
    _allgather_base, _reduce_scatter_base, alltoall_base = (
        all_gather_single,
        reduce_scatter_single,
        all_to_all_single,
    )


@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize("rank", ["own"], indirect=True)
def test_a_process_group_of_one_s_own_sees_every_collective(rank, name):
    mode = MODES[name]
    model = mode.model(rank)
    OwnGroup.calls.clear()
    loss = model(mode.batch(rank, 0)).sum()
    forward = dict(OwnGroup.calls)
    OwnGroup.calls.clear()
    loss.backward()
    _check(mode, forward, OwnGroup.calls)
