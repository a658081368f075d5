"""Nodes and rails, from what each rank says its node is."""

import ctypes
import types
from pathlib import Path

import pytest
import torch

from ragged_fsdp import topology
from ragged_fsdp.topology import Levels, given_ranks_per_node


def test_nodes_and_rails() -> None:
    levels = Levels.of("aaaabbbb")
    assert levels.nodes == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert levels.rails == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert levels.find(6) == (1, 2) and levels.has_two
    assert str(levels) == "8 ranks on 2 nodes of 4"


@pytest.mark.parametrize(
    ("domains", "nodes"),
    [
        ("a", ((0,),)),
        ("aaa", ((0, 1, 2),)),
        ("abc", ((0,), (1,), (2,))),
        ("abab", ((0, 2), (1, 3))),  # ranks dealt out to hosts in turns
        ("aaaabb", ((0, 1), (2, 3), (4, 5))),  # 4 and 2: three times 2
        ("aaabb", ((0,), (1,), (2,), (3,), (4,))),  # 3 and 2 have no common part
        ("abbaab", ((0, 3, 4), (1, 2, 5))),
    ],
)
def test_any_way_to_lie_on_nodes(domains: str, nodes: tuple) -> None:
    levels = Levels.of(domains)
    assert levels.nodes == nodes
    assert sorted(rank for rail in levels.rails for rank in rail) == list(range(len(domains)))
    for rail in levels.rails:
        assert list(rail) == sorted(rail), "a process group counts its ranks in this order"
    for node in levels.nodes:
        assert len({domains[rank] for rank in node}) == 1, "no node may reach over two hosts"


def test_a_rail_whose_order_is_not_that_of_the_nodes() -> None:
    levels = Levels.of("abba")
    assert levels.nodes == ((0, 3), (1, 2)) and levels.rails == ((0, 1), (2, 3))


def test_the_argument_comes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert given_ranks_per_node(None) is None
    monkeypatch.setenv("RAGGED_FSDP_RANKS_PER_NODE", "8")
    assert given_ranks_per_node(None) == 8 and given_ranks_per_node(4) == 4
    monkeypatch.setenv("RAGGED_FSDP_RANKS_PER_NODE", "eight")
    with pytest.raises(ValueError, match=r"RAGGED_FSDP_RANKS_PER_NODE must be an int >= 1, got 'eight'"):
        given_ranks_per_node(None)


@pytest.mark.parametrize("value", [0, -1, True, 2.0, "8"])
def test_a_wrong_number_of_ranks_is_named(value: object) -> None:
    with pytest.raises(ValueError, match="ranks_per_node must be an int >= 1, got"):
        given_ranks_per_node(value)  # type: ignore[arg-type]


class _Library:
    """NVIDIA's library, as functions in C that get what ctypes passes."""

    def __init__(self, cluster: bytes, state: int, *, status: int = 0, refuses: bool = False) -> None:
        text, pointer = ctypes.c_char_p, ctypes.c_void_p

        def find(uuid: bytes, handle: int) -> int:
            assert uuid == b"GPU-7"
            ctypes.c_void_p.from_address(handle).value = 42
            return 0

        def fill(handle: int, at: int) -> int:
            assert handle == 42
            info = topology._FabricInfo.from_address(at)
            assert info.version == 36 | 2 << 24, "the size of the structure, and its version"
            info.cluster_uuid[:] = cluster.ljust(16, b"\0")
            info.clique_id, info.state, info.status = 3, state, status
            return int(refuses)

        self.nvmlInit_v2 = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 0)
        self.nvmlDeviceGetHandleByUUID = ctypes.CFUNCTYPE(ctypes.c_int, text, pointer)(find)
        self.nvmlDeviceGetGpuFabricInfoV = ctypes.CFUNCTYPE(ctypes.c_int, pointer, pointer)(fill)


@pytest.mark.parametrize(
    ("cluster", "state", "options", "found"),
    [
        (b"rack", 3, {}, True),
        (b"rack", 1, {}, False),
        (b"", 3, {}, False),
        (b"rack", 3, {"status": 1}, False),
        (b"rack", 3, {"refuses": True}, False),
    ],
)
def test_the_nvlink_domain_of_a_rack(
    monkeypatch: pytest.MonkeyPatch, cluster: bytes, state: int, options: dict, found: bool
) -> None:
    monkeypatch.setattr(topology, "_management_library", lambda: _Library(cluster, state, **options))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(uuid=7))
    domain = topology._nvlink_domain(torch.device("cuda"))
    assert (domain == f"{cluster.ljust(16, bytes(1)).hex()} 3") if found else domain is None


def test_no_library_and_one_that_does_not_know_of_domains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(uuid=7))

    def absent() -> None:
        raise OSError

    for library in (absent, lambda: object()):
        monkeypatch.setattr(topology, "_management_library", library)
        assert topology._nvlink_domain(torch.device("cuda")) is None


def test_a_host_that_cannot_be_read_has_a_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A rank that raised here would be alone: the others are in a collective."""
    monkeypatch.delenv("NCCL_HOSTID", raising=False)
    monkeypatch.setattr(topology, "_BOOT_ID", tmp_path)
    assert topology._own_domain(torch.device("cpu"))
