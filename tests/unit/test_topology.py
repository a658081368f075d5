"""Nodes and rails, from what each rank says its node is."""

import ctypes
import sys
import types

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


class _Fabric(ctypes.Structure):
    """What NVIDIA's library fills in."""

    _fields_ = (("clusterUuid", ctypes.c_ubyte * 16), ("cliqueId", ctypes.c_uint), ("state", ctypes.c_ubyte))


def _library(cluster: bytes, state: int) -> types.ModuleType:
    made = types.ModuleType("pynvml")

    def fill(handle: str, info: _Fabric) -> None:
        assert handle == "handle of GPU-7"
        info.clusterUuid[:] = cluster.ljust(16, b"\0")
        info.cliqueId, info.state = 3, state

    made.NVMLError = type("NVMLError", (Exception,), {})
    made.nvmlInit = lambda: None
    made.c_nvmlGpuFabricInfoV_t = _Fabric
    made.NVML_GPU_FABRIC_STATE_COMPLETED = 3
    made.nvmlDeviceGetHandleByUUID = lambda uuid: f"handle of {uuid}"
    made.nvmlDeviceGetGpuFabricInfoV = fill
    return made


@pytest.mark.parametrize(
    ("cluster", "state", "found"), [(b"rack", 3, True), (b"rack", 1, False), (b"", 3, False)]
)
def test_the_nvlink_domain_of_a_rack(
    monkeypatch: pytest.MonkeyPatch, cluster: bytes, state: int, found: bool
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", _library(cluster, state))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(uuid=7))
    domain = topology._nvlink_domain(torch.device("cuda"))
    assert (domain == f"{cluster.ljust(16, bytes(1)).hex()} 3") if found else domain is None


def test_a_library_that_does_not_know_of_domains(monkeypatch: pytest.MonkeyPatch) -> None:
    library = _library(b"rack", 3)

    def fails() -> None:
        raise library.NVMLError

    library.nvmlInit = fails
    monkeypatch.setitem(sys.modules, "pynvml", library)
    assert topology._nvlink_domain(torch.device("cuda")) is None
