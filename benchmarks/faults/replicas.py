"""Kill -9 of whole replicas of an HSDP job under torchft, at random moments; then compare with a quiet run.

    python benchmarks/faults/replicas.py --replicas 2 --kills 25 --out benchmarks/faults/replicas-2x2.json
    python benchmarks/faults/replicas.py --backend nccl --layers 1 --kills 10 --out replicas-nccl.json
    python benchmarks/faults/replicas.py --replicas 3 --overlapping 120 --out overlapping.json
    python benchmarks/faults/replicas.py --rate --out benchmarks/faults/replicas-rate.json

A lighthouse and the replicas' managers are really started; a replica is two ranks, sharded inside. A rank
of a random replica is killed, the rest of it a moment later, as an agent would do; it is started again with
other weights and must copy those of a peer. At the end the same schedule of who contributed to which step is
computed again without torchft and without a kill: losses and all state must be the same to the bit. With
``--overlapping`` the next kill does not wait until the last victim is back.

Of each kill is noted where the survivor that waited longest spent its time: until the lighthouse had a new
quorum, connecting, and in the rest. With ``--backend nccl`` ranks share the GPUs that there are, without
NVIDIA's Multi-Process Service: a process that is killed there would end the others.
"""

import argparse
import hashlib
import itertools
import json
import multiprocessing as mp
import os
import platform
import random
import signal
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

RANKS = 2
_SAID_LETTERS = 4000
_DEVICES = {"gloo": "cpu", "nccl": "cuda"}
_CONTEXT = mp.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["torch", "torch.distributed.tensor", "ragged_fsdp.api", "ragged_fsdp.replicas"]
)


@dataclass(frozen=True)
class Setting:
    """What all processes of a run know."""

    folder: str
    replicas: int
    hidden: int = 64
    layers: int = 3
    backend: str = "gloo"
    timeout_s: float = 30.0
    connect_s: float = 1.0
    heartbeat_ms: int = 1000
    least: int = 1
    """Replicas without which no step is taken."""
    pause_s: float = 0.02
    """Added to each step, so that a replica can come back before the run has ended."""
    last_steps: int = 20
    """Taken by all after the last kill."""
    token: str = "a token of the benchmark"

    @property
    def device(self) -> str:
        """Where ranks compute."""
        return _DEVICES[self.backend]


class Net(nn.Module):
    """A stack of blocks, with a head that odd steps do not use: not all gradients are always there."""

    def __init__(self, hidden: int, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(hidden, hidden), nn.Tanh()) for _ in range(layers)
        )
        self.head, self.other = nn.Linear(hidden, 3), nn.Linear(hidden, 1)

    def forward(self, x: Tensor, step: int) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        loss = self.head(x).square().mean()
        return loss + self.other(x).square().mean() if step % 2 else loss


def build(setting: Setting, seed: int, mesh: Any = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The sharded model of a replica and its optimizer."""
    from ragged_fsdp import fully_shard

    torch.manual_seed(seed)
    model = Net(setting.hidden, setting.layers).to(setting.device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def batch(setting: Setting, step: int, replica: int, rank: int) -> Tensor:
    """The rows that one rank of a replica sees in a step."""
    generator = torch.Generator().manual_seed(((step * 64) + replica) * 64 + rank)
    return torch.randn(4, setting.hidden, generator=generator).to(setting.device)


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of all parameters and optimizer state that this rank holds."""
    found = hashlib.sha256()
    for name, param in model.named_parameters():
        values = [param, *(value for _, value in sorted(optimizer.state[param].items()))]
        for value in values:
            local = value.to_local() if hasattr(value, "to_local") else value
            found.update(
                name.encode() + local.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            )
    return found.hexdigest()


def free_port() -> int:
    """A port that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def join(setting: Setting, where: str, rank: int, ranks: int, host: str) -> None:
    """A process group of this replica alone, whose ranks meet in a file: a port may be taken meanwhile."""
    torch.set_num_threads(1)
    os.environ["NCCL_HOSTID"] = host  # NCCL lets only "hosts" share a device
    if setting.device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    place = f"file://{Path(setting.folder).resolve()}/meeting-{where}"
    dist.init_process_group(setting.backend, init_method=place, rank=rank, world_size=ranks)


def timed(owner: Any, name: str, book: dict[str, float]) -> None:
    """Let ``book`` have the seconds that a method takes, under its name."""
    inner = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        began = time.monotonic()
        try:
            return inner(*args, **kwargs)
        finally:
            book[name] = book.get(name, 0.0) + time.monotonic() - began

    setattr(owner, name, call)


def run_rank(setting: Setting, lighthouse: str, replica: int, life: int, rank: int) -> None:
    """One rank of a replica: steps until the folder has a file ``stop``, which holds the last step."""
    from ragged_fsdp.integrations.torchft import Replicas

    folder = Path(setting.folder)
    with open(folder / f"said-{replica}-{life}-{rank}", "wb") as said:  # torchft says a lot
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
    join(setting, f"{replica}-{life}", rank, RANKS, f"{replica}-{rank}")
    model, optimizer = build(setting, seed=100 * life + replica)
    log = open(folder / f"log-{replica}-{life}-{rank}", "a", buffering=1)  # noqa: SIM115
    replicas = Replicas(
        model,
        optimizer,
        replica=replica,
        token=setting.token,
        lighthouse=lighthouse,
        timeout_s=setting.timeout_s,
        connect_s=setting.connect_s,
        host="127.0.0.1",
        on_change=lambda change: print(json.dumps({"change": str(change), **vars(change)}), file=log),
    )
    spent: dict[str, float] = {}
    for owner, name in (
        (replicas._manager, "_async_quorum"),
        (replicas._group, "configure"),
        (replicas, "average"),
    ):
        timed(owner, name, spent)
    while not (folder / "stop").exists() or replicas.step < int((folder / "stop").read_text()):
        replicas.begin()
        step = replicas.step
        loss = model(batch(setting, step, replica, rank), step)
        loss.backward()
        averaged = replicas.average()
        optimizer.step()
        optimizer.zero_grad()
        line: dict[str, Any] = {"step": averaged.step, "by": averaged.replicas, "time": time.time()}
        connect_s = spent.get("configure", 0.0)
        line["attempts"] = averaged.attempts
        line["quorum_s"], line["connect_s"] = spent["_async_quorum"] - connect_s, connect_s
        line["average_s"] = spent["average"]
        spent.clear()
        if replica in averaged.replicas:
            line["loss"] = loss.item().hex()
        print(json.dumps(line), file=log)
        time.sleep(setting.pause_s)
    print(json.dumps({"digest": digest(model, optimizer), "end": replicas.step}), file=log)
    os._exit(0)  # the manager's threads would keep the process


def rerun_rank(setting: Setting, schedule: list[list[int]], rank: int) -> None:
    """One rank of all replicas in one quiet job: the same steps with plain collectives of torch."""
    from torch.distributed.device_mesh import DeviceMesh

    from ragged_fsdp.replicas import ReplicaGradients

    join(setting, "again", rank, setting.replicas * RANKS, str(rank))
    replica, inner = divmod(rank, RANKS)
    mesh = DeviceMesh(
        setting.device, torch.arange(setting.replicas * RANKS).view(-1, RANKS), mesh_dim_names=("r", "s")
    )
    model, optimizer = build(setting, seed=schedule[0][0], mesh=mesh["s"])  # of whom all have their weights
    gradients = ReplicaGradients(model)
    losses = {}
    for step, contributors in enumerate(schedule):
        takes_part = replica in contributors
        if takes_part:
            loss = model(batch(setting, step, replica, inner), step)
            loss.backward()
            losses[step] = loss.item().hex()
        present, flats = gradients.collect()
        for flat in flats:
            dist.all_reduce(flat, group=mesh["r"].get_group())
            flat /= len(contributors)
        dist.all_reduce(present, group=mesh["r"].get_group())
        gradients.hand_over(present)
        optimizer.step()
        optimizer.zero_grad()
    result = {"losses": losses, "digest": digest(model, optimizer)}
    (Path(setting.folder) / f"again-{replica}-{inner}").write_text(json.dumps(result))
    dist.destroy_process_group()


def run_lighthouse(port: int, setting: Setting) -> None:
    """The process of a lighthouse."""
    from torchft.coordination import LighthouseServer

    with open(Path(setting.folder) / "lighthouse", "wb") as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
    server = LighthouseServer(
        bind=f"127.0.0.1:{port}",
        min_replicas=setting.least,
        join_timeout_ms=10_000,
        quorum_tick_ms=50,
        heartbeat_timeout_ms=setting.heartbeat_ms,
    )
    signal.pause()
    server.shutdown()


@contextmanager
def lighthouse(setting: Setting, port: int | None = None) -> Iterator[str]:
    """A lighthouse that takes a replica for dead after a silence of ``heartbeat_ms``."""
    port = port or free_port()
    process = _CONTEXT.Process(target=run_lighthouse, args=(port, setting))
    process.start()
    try:
        while process.is_alive():
            try:
                socket.create_connection(("127.0.0.1", port), 0.2).close()
                break
            except OSError:
                time.sleep(0.02)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()


@dataclass
class Job:
    """The replicas of a run, as their launcher sees them."""

    setting: Setting
    lighthouse: str
    lives: dict[int, int] = field(default_factory=dict)
    processes: dict[int, list[Any]] = field(default_factory=dict)

    def start(self, replica: int) -> None:
        """Start a replica, for the first time or again."""
        life = self.lives[replica] = self.lives.get(replica, -1) + 1
        self.processes[replica] = [
            _CONTEXT.Process(target=run_rank, args=(self.setting, self.lighthouse, replica, life, rank))
            for rank in range(RANKS)
        ]
        for process in self.processes[replica]:
            process.start()

    def kill(self, replica: int, choose: random.Random) -> None:
        """Kill one rank, and the others a moment later."""
        order = choose.sample(self.processes[replica], RANKS)
        assert order[0].exitcode is None, f"replica {replica} died by itself"
        for process in order:
            process.kill()  # the others may have noticed by then, and have ended
            time.sleep(choose.uniform(0, 0.05))
        self.end(replica)

    def end(self, replica: int) -> None:
        """Make sure that all ranks of a replica are gone."""
        for process in self.processes[replica]:
            process.kill()
        for process in self.processes.pop(replica):
            process.join()

    def start_all(self, patience_s: float) -> None:
        """Start every replica, and wait until all take part."""
        replicas = range(self.setting.replicas)
        for replica in replicas:
            self.start(replica)
        self.wait(lambda: all(map(self.contributes, replicas)), patience_s, "all replicas take part")

    def ended(self) -> dict[int, str]:
        """Replicas of which a rank ended by itself with an error, and what it said at last."""
        return {
            replica: f"rank {rank} of replica {replica} ended with {process.exitcode}; it said at last:\n"
            + self.said(replica, rank)
            for replica, processes in self.processes.items()
            for rank, process in enumerate(processes)
            if process.exitcode not in (None, 0)
        }

    def lines(self, replica: int, life: int | None = None, rank: int = 0) -> list[dict[str, Any]]:
        """What a rank has logged in one life."""
        life = self.lives[replica] if life is None else life
        path = Path(self.setting.folder) / f"log-{replica}-{life}-{rank}"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines() if line.endswith("}")]

    def steps(self, replica: int) -> list[dict[str, Any]]:
        """The steps that a replica has taken in its present life."""
        return [line for line in self.lines(replica) if "step" in line and "by" in line]

    def contributes(self, replica: int) -> bool:
        """Whether a replica takes part since it was last started."""
        return any(replica in line["by"] for line in self.steps(replica))

    def said(self, replica: int, rank: int) -> str:
        """The last of what a rank wrote to its console in its present life."""
        path = Path(self.setting.folder) / f"said-{replica}-{self.lives[replica]}-{rank}"
        return path.read_text(errors="replace")[-_SAID_LETTERS:] if path.exists() else ""

    def wait(self, what: Any, seconds: float, why: str) -> None:
        """Until ``what()``; raises if a process died by itself, or after so many seconds."""
        deadline = time.monotonic() + seconds
        while not what():
            for said in self.ended().values():
                raise RuntimeError(said)
            if time.monotonic() > deadline:
                raise TimeoutError(f"{why}: not within {seconds} s")
            time.sleep(0.01)


def disturbed(job: Job, kills: int, choose: random.Random, patience_s: float = 90.0) -> list[dict[str, Any]]:
    """Kill and restart replicas; what happened to the others at each kill."""
    replicas = range(job.setting.replicas)
    job.start_all(patience_s)
    story = []
    for number in range(kills):
        time.sleep(choose.uniform(0.0, 0.5))
        victim = choose.choice(list(replicas))
        others = [replica for replica in replicas if replica != victim]
        seen = {replica: len(job.steps(replica)) for replica in others}
        killed = time.time()
        job.kill(victim, choose)
        job.wait(lambda v=victim, o=others: all(_alone(job, r, v) for r in o), patience_s, "the others go on")
        usual = statistics.median(_gaps(job.steps(others[0]))[-50:])
        gap, slowest = max(
            (_longest(job.steps(r)[max(0, seen[r] - 2) :]) for r in others), key=lambda g: g[0]
        )
        time.sleep(choose.uniform(0.0, 0.5))
        started = time.time()
        job.start(victim)
        job.wait(lambda v=victim: job.contributes(v), patience_s, f"replica {victim} is back")
        story.append(
            {
                "replica": victim,
                "at_step": job.steps(others[0])[seen[others[0]] - 1]["step"],
                "others_went_on_after_s": round(gap - usual, 3),
                "usual_step_s": round(usual, 3),
                "attempts": slowest["attempts"],
                **{k: round(slowest[k], 3) for k in ("quorum_s", "connect_s", "average_s")},
                "back_after_s": round(time.time() - started, 2),
            }
        )
        print(f"{number + 1}/{kills}", story[-1], f"{time.time() - killed:.1f} s", flush=True)
        with (Path(job.setting.folder) / "kills").open("a") as book:
            print(json.dumps(story[-1]), file=book)
    finish(job, patience_s)
    return story


def overlapping(job: Job, seconds: float, choose: random.Random, patience_s: float = 90.0) -> dict[str, Any]:
    """Kill and restart replicas while others are coming back; one that contributes always stays.

    A replica may end by itself, such as one whose giver was killed; it is started again too.
    """
    replicas, back_at, ended = range(job.setting.replicas), dict[int, float](), list[str]()
    job.start_all(patience_s)
    kills, next_kill = 0, time.monotonic()
    until = next_kill + seconds
    while time.monotonic() < until + patience_s:
        now = time.monotonic()
        for replica, said in job.ended().items():
            ended.append(said)
            job.end(replica)
            back_at[replica] = now
        if next_kill < now < until:
            next_kill = now + choose.uniform(0.0, 1.5)
            steady = [r for r in job.processes if job.contributes(r) and _is_running(job, r)]
            others = [r for r in job.processes if steady and (len(steady) > 1 or r not in steady)]
            if others:
                victim = choose.choice(others)
                job.kill(victim, choose)
                kills, back_at[victim] = kills + 1, now + choose.uniform(0.0, 1.0)
        for replica in [r for r, moment in back_at.items() if moment <= now]:
            del back_at[replica]
            job.start(replica)
        if now > until and not back_at and all(map(job.contributes, replicas)):
            finish(job, patience_s)
            return {"kills": kills, "ended_by_themselves": ended}
        time.sleep(0.01)
    raise TimeoutError(f"all replicas are back: not within {patience_s} s")


def _is_running(job: Job, replica: int) -> bool:
    """Whether it has taken a step within the last half second."""
    return time.time() - job.steps(replica)[-1]["time"] < 0.5


def finish(job: Job, patience_s: float) -> None:
    """Let all replicas take the last steps and end."""
    last = max(job.steps(replica)[-1]["step"] for replica in job.processes) + job.setting.last_steps
    (Path(job.setting.folder) / "stop").write_text(str(last))
    running = [process for processes in job.processes.values() for process in processes]
    job.wait(lambda: all(p.exitcode == 0 for p in running), patience_s, "the end")


def _alone(job: Job, replica: int, victim: int) -> bool:
    """Whether ``replica`` has taken two steps without ``victim``."""
    newest = job.steps(replica)[-2:]
    return len(newest) == 2 and all(victim not in line["by"] for line in newest)


def _longest(steps: list[dict[str, Any]]) -> tuple[float, dict[str, Any]]:
    """The longest time between two steps, and the later one."""
    pairs = ((after["time"] - before["time"], after) for before, after in itertools.pairwise(steps))
    return max(pairs, key=lambda pair: pair[0])


def _gaps(steps: list[dict[str, Any]]) -> list[float]:
    return [after["time"] - before["time"] for before, after in itertools.pairwise(steps)] or [0.0]


def schedule_of(job: Job) -> tuple[list[list[int]], dict[tuple[int, int, int], str]]:
    """Who contributed to each step, as all replicas agree; the loss by replica, rank and step."""
    by_step: dict[int, list[int]] = {}
    losses: dict[tuple[int, int, int], str] = {}
    for replica, lives in job.lives.items():
        for life in range(lives + 1):
            for rank in range(RANKS):
                for line in job.lines(replica, life, rank):
                    if "by" not in line:
                        continue
                    step = line["step"]
                    known = by_step.setdefault(step, line["by"])
                    assert known == line["by"], f"step {step}: {known} and {line['by']}"
                    if "loss" in line:
                        assert losses.setdefault((replica, rank, step), line["loss"]) == line["loss"]
    assert sorted(by_step) == list(range(len(by_step))), "a step is missing"
    return [by_step[step] for step in range(len(by_step))], losses


def compare_with_quiet_run(job: Job) -> dict[str, Any]:
    """The same schedule without torchft and without a kill; raises if a bit differs."""
    schedule, losses = schedule_of(job)
    ranks = [
        _CONTEXT.Process(target=rerun_rank, args=(job.setting, schedule, rank))
        for rank in range(job.setting.replicas * RANKS)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
        assert process.exitcode == 0, "the quiet run failed"
    compared = 0
    for replica, life in job.lives.items():
        for rank in range(RANKS):
            again = json.loads((Path(job.setting.folder) / f"again-{replica}-{rank}").read_text())
            for (of_replica, of_rank, step), loss in losses.items():
                if (of_replica, of_rank) == (replica, rank):
                    assert again["losses"][str(step)] == loss, f"replica {replica}, rank {rank}, step {step}"
                    compared += 1
            end = job.lines(replica, life, rank)[-1]
            assert end["digest"] == again["digest"], f"the state of replica {replica}, rank {rank} differs"
    return {"steps": len(schedule), "losses_compared": compared, "state": "equal to the bit"}


def fallen_behind(job: Job) -> int:
    """Steps to which a replica that was alive and not coming back did not contribute."""
    count = 0
    for replica, lives in job.lives.items():
        for life in range(lives + 1):
            lines = [line for line in job.lines(replica, life) if "by" in line]
            taken = [replica in line["by"] for line in lines]
            count += taken[taken.index(True) :].count(False) if True in taken else 0
    return count


@contextmanager
def job_of(setting: Setting) -> Iterator[Job]:
    """A job with its lighthouse; none of its replicas is left behind."""
    with lighthouse(setting) as address:
        job = Job(setting, address)
        try:
            yield job
        finally:
            for replica in list(job.processes):
                job.end(replica)


def overlap_kills(setting: Setting, seconds: float, seed: int) -> dict[str, Any]:
    """A run through kills that overlap, and what came of it."""
    with job_of(setting) as job:
        found = overlapping(job, seconds, random.Random(seed))
    return {
        "setting": {"replicas": setting.replicas, "ranks": RANKS, "seconds": seconds, "seed": seed},
        "heartbeat_ms": setting.heartbeat_ms,
        **found,
        **compare_with_quiet_run(job),
    }


def kill_replicas(setting: Setting, kills: int, seed: int) -> dict[str, Any]:
    """A run through ``kills`` kills, and what came of it."""
    with job_of(setting) as job:
        story = disturbed(job, kills, random.Random(seed))
    pauses = sorted(entry["others_went_on_after_s"] for entry in story)
    beside = sorted(e["others_went_on_after_s"] - e["quorum_s"] for e in story)
    return {
        "setting": {"replicas": setting.replicas, "ranks": RANKS, "kills": kills, "seed": seed},
        "heartbeat_ms": setting.heartbeat_ms,
        "longest_pause_s": pauses[-1],
        "median_pause_s": statistics.median(pauses),
        "pauses_over_2_s": sum(pause > 2.0 for pause in pauses),
        "longest_without_the_quorum_s": round(beside[-1], 3),
        "median_without_the_quorum_s": round(statistics.median(beside), 3),
        "steps_lost": 0,  # else `schedule_of` below raises
        "contributions_lost_by_survivors": fallen_behind(job),
        "rejoins": len(story),
        **compare_with_quiet_run(job),
        "kills": story,
    }


# -- the rate of a copy ---------------------------------------------------------------------------------


def _plain_copy(data: Tensor) -> float:
    """Seconds to copy ``data`` over loopback with nothing but send and receive."""
    listener = socket.create_server(("127.0.0.1", 0))
    target = torch.empty_like(data)

    def send() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(data.numpy().data)

    sender = threading.Thread(target=send)
    sender.start()
    began, view = time.perf_counter(), target.numpy().data
    with socket.create_connection(listener.getsockname()) as connection:
        while len(view):
            view = view[connection.recv_into(view) :]
    sender.join()
    listener.close()
    return time.perf_counter() - began


def copy_rates(megabytes: int, rounds: int, device: torch.device) -> dict[str, Any]:
    """The rate of a healing copy beside that of a plain one of host memory over the same link."""
    from ragged_fsdp.replicas import ReplicaState, StateServer, receive

    torch.set_num_threads(1)
    width = int((megabytes * 2**20 / 12) ** 0.5)  # parameters, and two moments of Adam
    model = nn.Linear(width, width, device=device)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, width, device=device)).sum().backward()
    optimizer.step()
    state, token = ReplicaState(model, optimizer), b"a token of the benchmark"
    server = StateServer(token, "127.0.0.1", 60.0, device)
    on_gpu = device.type == "cuda"
    ready = torch.accelerator.current_stream().record_event() if on_gpu else None
    server.offer(1, state.offer(ready))
    plain, healing = [], []
    data = torch.zeros(state.offer().nbytes, dtype=torch.uint8)
    for _ in range(rounds):
        plain.append(_plain_copy(data))
        healing.append(receive(server.address, token, 1, 60.0, state.check, pin_memory=on_gpu).seconds)
    gigabytes = data.numel() / 1e9
    return {
        "bytes": data.numel(),
        "plain_gb_per_s": round(gigabytes / min(plain), 3),
        "healing_gb_per_s": round(gigabytes / min(healing), 3),
        "ratio": round(min(plain) / min(healing), 3),
        "ratio_of_medians": round(statistics.median(plain) / statistics.median(healing), 3),
        "rounds": rounds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--overlapping", type=float, help="seconds of kills that overlap, instead of --kills")
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo", help="nccl: on GPUs")
    parser.add_argument("--heartbeat-ms", type=int, default=1000, help="silence after which one is dead")
    parser.add_argument("--timeout", type=float, default=30.0, help="seconds that an average may take")
    parser.add_argument("--connect", type=float, help="seconds to meet; default: 1, over NCCL 5")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument(
        "--rate", action="store_true", help="only the rate of a copy; with nccl, of a GPU's state"
    )
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--folder", type=Path, help="where logs are kept; default: nowhere")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if given.rate:
            result = copy_rates(given.megabytes, 5, torch.device(_DEVICES[given.backend]))
        else:
            kept = given.folder or Path(folder)
            kept.mkdir(parents=True, exist_ok=True)
            setting = Setting(
                str(kept),
                given.replicas,
                layers=given.layers,
                backend=given.backend,
                heartbeat_ms=given.heartbeat_ms,
                timeout_s=given.timeout,
                connect_s=given.connect or (5.0 if given.backend == "nccl" else 1.0),
            )
            if given.overlapping:
                result = overlap_kills(setting, given.overlapping, given.seed)
            else:
                result = kill_replicas(setting, given.kills, given.seed)
    result["hardware"] = f"{os.cpu_count()} cores, {platform.machine()}, loopback"
    if given.backend == "nccl":
        result["hardware"] += f", {torch.cuda.get_device_name()}, shared by all ranks"
    result["versions"] = {"torch": torch.__version__, "python": platform.python_version()}
    if not given.rate:
        from importlib.metadata import version

        result["versions"]["torchft"] = version("torchft")
    usual = vars(parser.parse_args([]))
    told = {k: v for k, v in vars(given).items() if v != usual[k] and k not in ("folder", "out")}
    options = " ".join(f"--{k.replace('_', '-')}" + ("" if v is True else f" {v}") for k, v in told.items())
    result["command"] = f"python benchmarks/faults/replicas.py {options}".rstrip()
    print(json.dumps({key: value for key, value in result.items() if not isinstance(value, list)}, indent=1))
    if given.out:
        given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
