"""Who gets the state of a replica, what is refused, and that it never changes under a copy."""

import contextlib
import json
import operator
import os
import pickle
import socket
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ragged_fsdp.replicas import (
    HealingError,
    ReplicaGradients,
    ReplicaState,
    StateServer,
    receive,
    transport,
)
from ragged_fsdp.replicas import state as state_module
from ragged_fsdp.replicas.transport import job_token

TOKEN = b"a token of the tests"


def _state(width: int = 4, steps: int = 2) -> ReplicaState:
    model = nn.Linear(width, width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.5), betas=(0.5, 0.75))
    for _ in range(steps):
        model(torch.ones(1, width)).sum().backward()
        optimizer.step()
    return ReplicaState(model, optimizer)


def _values(state: ReplicaState) -> dict[str, list[int]]:
    """The bytes of each tensor by its name."""
    offer, found = state.offer(), {}
    for pieces, run in zip(state.check(offer.header), offer.runs):
        parts = run.split([piece.nbytes for piece in pieces])
        found |= {piece.name: part.tolist() for piece, part in zip(pieces, parts)}
    return found


def _fail(*_: object, **__: object) -> None:
    raise RuntimeError("on purpose")


@pytest.fixture
def serve():
    servers = []

    def start(state: ReplicaState, step: int = 3, token: bytes = TOKEN) -> StateServer:
        servers.append(StateServer(token, "127.0.0.1", 2.0))
        servers[-1].offer(step, state.offer())
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def test_everything_is_copied(serve):
    ours, theirs = _state(steps=0), _state()
    got = receive(serve(theirs).address, TOKEN, 3, 2.0, ours.check)
    ours.load(got.header, got.runs)
    assert _values(ours) == _values(theirs)
    assert ours.offer().header["groups"] == theirs.offer().header["groups"]
    assert ours._optimizer.param_groups[0]["betas"] == (0.5, 0.75)
    assert isinstance(ours._optimizer.param_groups[0]["lr"], torch.Tensor)


@pytest.mark.parametrize("side", ["receiver", "server"])
def test_only_who_knows_the_token_is_one_of_us(serve, side):
    ours = _state()
    server = serve(_state(), token=TOKEN if side == "receiver" else b"another token of somebody")
    wrong = b"a token that is wrong" if side == "receiver" else TOKEN
    with pytest.raises(HealingError, match=r"token|ended the connection"):
        receive(server.address, wrong, 3, 2.0, ours.check)
    with pytest.raises(ValueError, match="at least 16"):
        job_token("short")


def test_strangers_are_sent_away_and_nothing_is_unpickled(serve):
    server = serve(_state())
    host, port = server.address.split(":")

    class Boom:
        def __reduce__(self):
            return pytest.fail, ("was unpickled",)

    for said in (b"", b"GET / HTTP/1.1\r\n\r\n" * 9, pickle.dumps(Boom()) * 9, bytes(100)):
        with socket.create_connection((host, int(port)), 2.0) as stranger:
            heard = b""
            with contextlib.suppress(OSError):  # it may be sent away while it still talks
                stranger.sendall(said)
                stranger.shutdown(socket.SHUT_WR)
                while part := stranger.recv(1000):
                    heard += part
        assert len(heard) <= 48  # a greeting, which tells nothing
    ours = _state()
    receive(server.address, TOKEN, 3, 2.0, ours.check)  # it still serves


@pytest.mark.parametrize("at", [60, 300, -40, -3])
def test_what_was_changed_on_its_way_is_refused_and_nothing_is_taken(serve, at):
    """A byte of the header, of its HMAC or behind it, of the last run, of the last HMAC."""
    theirs, ours = _state(), _state(steps=0)
    server = serve(theirs)
    listener = socket.create_server(("127.0.0.1", 0))

    def pass_on() -> None:
        near, _ = listener.accept()
        host, port = server.address.split(":")
        far = socket.create_connection((host, int(port)))

        def back() -> None:
            data = bytearray()
            far.settimeout(0.3)
            try:
                while part := far.recv(65536):
                    if len(data) == 0 and len(part) <= 48:
                        near.sendall(part)
                        continue
                    data += part
            except TimeoutError:
                pass
            data[at] ^= 1
            near.sendall(data)
            near.close()

        thread = threading.Thread(target=back)
        thread.start()
        while part := near.recv(1000):
            far.sendall(part)

    threading.Thread(target=pass_on, daemon=True).start()
    before = _values(ours)
    with pytest.raises(HealingError, match="changed on its way"):
        receive(f"127.0.0.1:{listener.getsockname()[1]}", TOKEN, 3, 3.0, ours.check)
    assert _values(ours) == before
    listener.close()


def test_what_does_not_fit_is_named_before_it_is_sent(serve):
    theirs = _state(width=5)
    with pytest.raises(HealingError, match=r"param\.weight: the peer has .*\(5, 5\).* this rank .*\(4, 4\)"):
        receive(serve(theirs).address, TOKEN, 3, 2.0, _state().check)
    ours = _state()
    header = ours.offer().header
    for change, match in (
        ({"version": 1}, "version 1"),
        ({"groups": []}, "0 groups"),
        ({"optimizer": "SGD"}, "optimizer is SGD, this rank's AdamW"),
        ({"extra": {"x": 1}}, "extra: the peer has"),
        ({"runs": header["runs"] + [[["optim.step.nobody", "float32", [], "plain"]]]}, "optim.step.nobody"),
        ({"runs": header["runs"] + header["runs"]}, "twice"),
        ({"runs": [[["param.weight", "float33", [4, 4], "plain"]]]}, "must be name, dtype"),
        ({"runs": [[["param.weight", "float32", [-4, 4], "plain"]]]}, "must be name, dtype"),
    ):
        with pytest.raises(ValueError, match=match):
            ours.check({**header, **change})
    stranger = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="no parameter of the model"):
        ReplicaState(nn.Linear(2, 2), torch.optim.SGD(stranger.parameters(), lr=1.0))


def test_a_state_of_another_step_is_not_given(serve):
    server = serve(_state(), step=4)
    with pytest.raises(HealingError, match="the peer says: it is at step 4"):
        receive(server.address, TOKEN, 3, 2.0, _state().check)  # that step is over
    server.offer(3, "TypeError: option x")
    with pytest.raises(HealingError, match="the peer says: TypeError: option x"):
        receive(server.address, TOKEN, 3, 2.0, _state().check)


def test_the_state_may_change_as_soon_as_it_is_withdrawn(serve):
    """Withdrawing waits for a copy under way; a receiver that stands still is cut."""
    theirs, ours = _state(width=1200), _state(width=1200)
    server = serve(theirs)
    begun, got = threading.Event(), []

    def slowly(header):
        begun.set()
        time.sleep(0.3)
        return ours.check(header)

    thread = threading.Thread(target=lambda: got.append(receive(server.address, TOKEN, 3, 9.0, slowly)))
    thread.start()
    assert begun.wait(5)
    expected = [run.clone() for run in theirs.offer().runs]
    server.withdraw()
    for run in theirs.offer().runs:
        run.zero_()
    thread.join()
    assert all(map(torch.equal, got[0].runs, expected))
    server.offer(3, theirs.offer())
    blocked = threading.Event()

    def stand_still(header):
        begun.set()
        blocked.wait(8)
        return ours.check(header)

    def fail() -> None:
        with pytest.raises(HealingError):
            receive(server.address, TOKEN, 3, 9.0, stand_still)

    stuck = threading.Thread(target=fail)
    begun.clear()
    stuck.start()
    assert begun.wait(5)
    began = time.monotonic()
    server.withdraw()
    assert time.monotonic() - began < 4  # the time-out of the server is 2 s
    blocked.set()
    stuck.join()


class _Stream:
    """A stream whose copies are made when its event is waited for, and that notes what it is told."""

    def __init__(self, said: list) -> None:
        self.said, self.copies = said, []

    def __enter__(self) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(torch.Tensor, "copy_", lambda to, source, non_blocking: self._later(to, source))

    def __exit__(self, *_: object) -> None:
        self.patch.undo()

    def _later(self, to: torch.Tensor, source: torch.Tensor) -> None:
        self.copies.append((to, source))

    def wait_event(self, event: object) -> None:
        self.said.append(event)

    def record_event(self) -> SimpleNamespace:
        (copy,) = self.copies
        self.copies = []
        return SimpleNamespace(synchronize=lambda: copy[0].set_(copy[1].clone()))


@pytest.mark.parametrize("nbytes", [0, 5, 16, 37])
def test_bytes_of_a_device_come_through_memory_that_was_there_before(monkeypatch, nbytes):
    """Nothing is allocated and no stream is made while a peer copies; a chunk is sent once it has come."""
    said = []
    monkeypatch.setattr(transport, "_CHUNK_BYTES", 8)
    monkeypatch.setattr(torch, "Stream", lambda device, priority: _Stream(said))
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda n, dtype, pin_memory: empty(n, dtype=dtype))
    staging = transport.Staging(torch.device("cuda"))
    for name in ("Stream", "empty"):
        monkeypatch.setattr(torch, name, lambda *_, **__: pytest.fail("made while a peer copies"))
    run = torch.arange(nbytes, dtype=torch.uint8)
    for _ in range(2):
        got = [chunk.tolist() for chunk in staging.chunks(run, "ready")]
        assert [byte for part in got for byte in part] == run.tolist()
        assert all(len(part) <= 8 for part in got)
    assert said == ["ready", "ready"]
    cut = staging.chunks(run, None)
    next(cut, None)
    cut.close()  # a peer that went away holds nothing up
    assert len(list(staging.chunks(run, None))) == -(-nbytes // 8)


def test_what_is_copied_for_an_offer_is_behind_the_last_write(monkeypatch):
    """A tensor that is not contiguous is copied; peers wait for the copy, and the copy for the optimizer."""
    said = []
    stream = SimpleNamespace(
        wait_event=lambda event: said.append(f"wait for {event}"),
        record_event=lambda: said.append("record") or "behind the copy",
    )
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda: stream)
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(torch.randn(4, 4).t())
    state = ReplicaState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    contiguous = torch.Tensor.contiguous
    monkeypatch.setattr(torch.Tensor, "contiguous", lambda t: said.append("copy") or contiguous(t))
    assert state.offer("the write").ready == "behind the copy"
    assert said == ["wait for the write", "copy", "record"]
    assert state.offer().ready is None


def test_a_scheduler_is_the_same_after_a_copy(serve):
    """JSON has texts for keys: with milestones "2" and "4" the learning rate would never change."""

    def build() -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, ReplicaState]:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], gamma=0.5)
        extra = {"scheduler": (scheduler.state_dict, scheduler.load_state_dict)}
        return optimizer, scheduler, ReplicaState(model, optimizer, extra)

    (theirs, their_scheduler, giving), (ours, our_scheduler, taking) = build(), build()
    theirs.step()
    their_scheduler.step()
    got = receive(serve(giving).address, TOKEN, 3, 2.0, taking.check)
    taking.load(got.header, got.runs)
    for _ in range(4):
        for optimizer, scheduler in ((theirs, their_scheduler), (ours, our_scheduler)):
            optimizer.step()
            scheduler.step()
        assert ours.param_groups[0]["lr"] == theirs.param_groups[0]["lr"]
    assert ours.param_groups[0]["lr"] == 0.25
    assert giving.options_hash() == taking.options_hash()
    ours.param_groups[0]["lr"] = 0.5
    assert giving.options_hash() != taking.options_hash()


def test_what_cannot_be_copied_is_refused_at_the_start():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(TypeError, match=r"extra data: a replica's state holds .*, got <object"):
        ReplicaState(model, optimizer, {"data": (object, print)})
    for given in (None, True, 3, 1e300, float("inf"), "a", [1, (2, [3])], {1: "a", (2, "b"): {"dict": ()}}):
        assert state_module._from_json(json.loads(json.dumps(state_module._as_json("it", given)))) == given


def test_buffers_are_those_of_now_and_do_not_change_under_a_copy(serve):
    """A forward may write to a buffer, or put another in its place; neither may spoil a copy.

    One that no checkpoint has may have another size in each replica, and stays.
    """
    theirs, ours = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    for model in (theirs, ours):
        model.register_buffer("table", torch.ones(1), persistent=False)
    giving, taking = (ReplicaState(m, torch.optim.SGD(m.parameters(), lr=1.0)) for m in (theirs, ours))
    for model, value in ((theirs, 2.0), (ours, 5.0)):
        model.running_mean = torch.full((3,), value)
        model.table = torch.ones(int(value))
    assert giving.fingerprint() == taking.fingerprint()
    server = serve(giving)
    theirs.running_mean.fill_(7.0)
    got = receive(server.address, TOKEN, 3, 2.0, taking.check)
    taking.load(got.header, got.runs)
    assert ours.running_mean.tolist() == [2.0] * 3 and len(ours.table) == 5


def test_an_optimizer_that_refuses_leaves_the_weights_as_they_were(serve, monkeypatch):
    theirs, ours = _state(), _state(steps=0)
    got = receive(serve(theirs).address, TOKEN, 3, 2.0, ours.check)
    before = _values(ours)
    monkeypatch.setattr(ours._optimizer, "load_state_dict", _fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        ours.load(got.header, got.runs)
    assert _values(ours) == before


def test_who_trickles_holds_nobody_longer_than_the_time_out(monkeypatch):
    """A time-out for each read would let a byte now and then go on for ever."""
    monkeypatch.setattr(transport, "_GREETING_S", 0.4)
    server = StateServer(TOKEN, "127.0.0.1", 0.4)
    host, port = server.address.split(":")

    def trickle(connection: socket.socket) -> float:
        began = time.monotonic()
        with contextlib.suppress(OSError):
            while time.monotonic() - began < 3:
                connection.sendall(b"\0")
                time.sleep(0.05)
        return time.monotonic() - began

    with socket.create_connection((host, int(port))) as stranger:
        assert trickle(stranger) < 2
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=lambda: trickle(listener.accept()[0]), daemon=True).start()
    began = time.monotonic()
    with pytest.raises(HealingError, match="timed out"):
        receive(f"127.0.0.1:{listener.getsockname()[1]}", TOKEN, 3, 0.4, _state().check)
    assert time.monotonic() - began < 2
    listener.close()
    server.close()


def test_copies_leave_no_files_and_no_threads(monkeypatch):
    """Over many copies; and a server that is closed listens no more, and serves again after a bad moment."""

    def held() -> list[int]:
        return [len(os.listdir("/proc/self/fd")), threading.active_count()]

    before, accept, bad = held(), socket.socket.accept, [OSError(24, "too many open files")]

    def accept_or_not(listener: socket.socket) -> tuple[socket.socket, object]:
        if bad:
            raise bad.pop()
        return accept(listener)

    ours, server = _state(), StateServer(TOKEN, "127.0.0.1", 5.0)
    monkeypatch.setattr(socket.socket, "accept", accept_or_not)
    for number in range(200):
        server.offer(number, ours.offer())
        receive(server.address, TOKEN, number, 5.0, ours.check)
        server.withdraw()

    def wait_for_nothing() -> None:
        with pytest.raises(HealingError, match="it has left"):
            receive(server.address, TOKEN, 200, 5.0, ours.check)

    waiting = threading.Thread(target=wait_for_nothing)
    waiting.start()
    time.sleep(0.1)
    server.close()
    waiting.join(3)
    assert not waiting.is_alive()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", server._port), 1.0).close()
    until = time.monotonic() + 3
    while any(map(operator.gt, held(), before)) and time.monotonic() < until:
        time.sleep(0.01)
    assert not any(map(operator.gt, held(), before)) and not bad


def test_memory_that_is_missing_is_a_copy_that_failed(serve, monkeypatch):
    """Any other error would be taken for a replica that left, and tried again for ever."""
    server = serve(_state())
    ours = _state()

    monkeypatch.setattr(torch, "empty", _fail)
    with pytest.raises(HealingError, match="on purpose"):
        receive(server.address, TOKEN, 3, 2.0, ours.check)


def test_gradients_are_laid_out_anew_when_parameters_change_their_shape():
    """As where experts move to other ranks; one that is frozen is in no buffer, one that nobody has goes."""
    model = nn.Linear(4, 4, bias=False)
    gradients = ReplicaGradients(model)
    for rows in (4, 1, 3):
        model.weight.data = torch.zeros(rows, 4)
        model.weight.grad = torch.full((rows, 4), float(rows))
        present, flats = gradients.collect()
        assert [flat.tolist() for flat in flats] == [[float(rows)] * rows * 4]
        gradients.hand_over(present)
    assert gradients.times_laid_out == 3
    gradients.hand_over(torch.zeros(1, dtype=torch.int64))
    assert (
        model.weight.grad is None
    )  # no replica contributed one: zeros would let the optimizer decay it here
    model.requires_grad_(False)
    assert gradients.collect()[1] == [] and gradients.times_laid_out == 4


def test_state_of_a_device_needs_a_server_made_for_it():
    state = _state()
    offer = state.offer()
    offer = replace(offer, runs=(torch.empty(4, dtype=torch.uint8, device="meta"), *offer.runs))
    server = StateServer(TOKEN, "127.0.0.1", 2.0)
    with pytest.raises(ValueError, match="the state is on meta; the server was made for the host"):
        server.offer(3, offer)
    server.close()


def test_a_rank_without_gradients_says_so_where_its_parameters_are():
    """It holds nothing that trains; what is added up over replicas must be of their backend's device."""
    model = nn.Linear(4, 4, device="meta").requires_grad_(False)
    present, flats = ReplicaGradients(model).collect()
    assert present.is_meta and present.shape == (2,) and flats == []
    frozen_elsewhere = nn.Linear(4, 4).requires_grad_(False)
    present, flats = ReplicaGradients(nn.Sequential(frozen_elsewhere, model.requires_grad_(True))).collect()
    assert present.is_meta and [flat.device.type for flat in flats] == ["meta"]
