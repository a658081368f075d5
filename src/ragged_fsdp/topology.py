"""Which ranks of a process group share a fast link, and the process groups of the two levels that follow.

A *node* is a set of ranks with links of their own (a host, or the NVLink domain of a rack); a *rail* is one
rank of every node, the ranks of one place. Eight ranks on two nodes::

    nodes   0 1 2 3 | 4 5 6 7        rails   0 4 | 1 5 | 2 6 | 3 7

Every rank can tell where it is: :func:`find_levels` lets the ranks of a group tell each other. Nodes that
hold different numbers of the group's ranks are divided into parts of equal size, the largest that fits all:
the levels of 8 + 4 ranks are three nodes of four. Where only one fits there is no level inside.

Users can set it with ``ranks_per_node``, or in the environment with ``RAGGED_FSDP_RANKS_PER_NODE``: that many
consecutive ranks of the world are then a node.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
import socket
import weakref
from collections import Counter
from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
import torch.distributed as dist

from ragged_fsdp.torch_internals import (
    new_group_named,
    timeout_of,
    unset_fake_temporarily,
)

__all__ = ["LevelGroups", "Levels", "find_levels", "given_ranks_per_node", "level_groups", "subgroup"]

_ENVIRONMENT = "RAGGED_FSDP_RANKS_PER_NODE"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Levels:
    """The ranks of a group by node, equally many in each; they count within the group."""

    nodes: tuple[tuple[int, ...], ...]
    largest_node: int
    """Most ranks of the group that share a fast link; more than a node has if nodes had to be divided."""

    @classmethod
    def of(cls, domains: Sequence[Hashable]) -> Levels:
        """From what each rank of the group says its node is."""
        found: dict[Hashable, list[int]] = {}
        for rank, domain in enumerate(domains):
            found.setdefault(domain, []).append(rank)
        size = math.gcd(*map(len, found.values()))
        nodes = (tuple(own[i : i + size]) for own in found.values() for i in range(0, len(own), size))
        return cls(tuple(sorted(nodes)), max(map(len, found.values())))

    @classmethod
    def flat(cls, ranks: int) -> Levels:
        """All ranks as one node."""
        return cls((tuple(range(ranks)),), ranks)

    @property
    def ranks_per_node(self) -> int:
        """Ranks of each node."""
        return len(self.nodes[0])

    @property
    def spans_nodes(self) -> bool:
        """Whether some ranks have no fast link to each other."""
        return len(self.nodes) > 1

    @property
    def has_two(self) -> bool:
        """Whether there is something to gain from going through the nodes first."""
        return self.spans_nodes and self.ranks_per_node > 1

    @property
    def in_order(self) -> bool:
        """Whether the ranks of each node follow each other."""
        return [rank for node in self.nodes for rank in node] == list(
            range(self.ranks_per_node * len(self.nodes))
        )

    @cached_property
    def rails(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each place, in the order in which a process group counts them."""
        return tuple(tuple(sorted(ranks)) for ranks in zip(*self.nodes))

    def find(self, rank: int) -> tuple[int, int]:
        """The node of ``rank`` and its place there."""
        return next((n, node.index(rank)) for n, node in enumerate(self.nodes) if rank in node)

    def __str__(self) -> str:
        ranks = len(self.nodes) * self.ranks_per_node
        if not self.spans_nodes:
            return f"{ranks} ranks on one node" if ranks > 1 else "one rank"
        if self.largest_node > self.ranks_per_node:
            return (
                f"{ranks} ranks on nodes of up to {self.largest_node}, as {len(self.nodes)} parts of "
                f"{self.ranks_per_node}"
            )
        return f"{ranks} ranks on {len(self.nodes)} nodes of {self.ranks_per_node}"


def given_ranks_per_node(argument: int | None) -> int | None:
    """How many ranks a node has, if the user says it: the argument, else the environment."""
    source, value = "ranks_per_node", argument
    text = os.environ.get(_ENVIRONMENT)
    if value is None and text:
        source = _ENVIRONMENT
        value = int(text) if text.isdecimal() else text  # type: ignore[assignment]
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ValueError(f"fully_shard: {source} must be an int >= 1, got {value!r}.")
    return value


def find_levels(group: dist.ProcessGroup, device: torch.device, ranks_per_node: int | None) -> Levels:
    """The levels of ``group``, the same on all its ranks.

    Unless the user said how large nodes are, that is a collective of 8 bytes per rank, once for the group.
    """
    key = ranks_per_node or 0
    known = _LEVELS.setdefault(group, {})
    if key not in known:
        ranks = dist.get_process_group_ranks(group)
        if ranks_per_node is not None:
            known[key] = Levels.of([rank // ranks_per_node for rank in ranks])
        else:
            known[key] = Levels.of(_told(_own_domain(device), group, device))
    return known[key]


_LEVELS: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, Levels]] = weakref.WeakKeyDictionary()


def _told(domain: str, group: dist.ProcessGroup, device: torch.device) -> list[int]:
    """What each rank of ``group`` calls its node, as a number."""
    value = int.from_bytes(hashlib.sha256(domain.encode()).digest()[:8], "big") >> 2
    with unset_fake_temporarily():  # memory is estimated with tensors that have no values
        own = torch.tensor([value], dtype=torch.int64, device=device)
        told = [own.clone() for _ in range(group.size())]  # in a dry run nobody answers: all are here
        if group.size() > 1:
            dist.all_gather(told, own, group=group)
        return torch.cat(told).tolist()


def _own_domain(device: torch.device) -> str:
    """The name of this rank's node: the NVLink domain if it is known, else the host as NCCL names it.

    It must not raise: the other ranks are about to ask.
    """
    host = os.environ.get("NCCL_HOSTID")
    if host:
        return host
    domain = _nvlink_domain(device) if device.type == "cuda" else None
    if domain is not None:
        return domain
    boot = ""
    with suppress(OSError):
        boot = _BOOT_ID.read_text().strip()
    return f"{socket.gethostname()} {boot}"


class _FabricInfo(ctypes.Structure):
    """``nvmlGpuFabricInfo_v2_t`` of NVIDIA's management library."""

    _fields_ = (
        ("version", ctypes.c_uint),
        ("cluster_uuid", ctypes.c_ubyte * 16),
        ("status", ctypes.c_int),
        ("clique_id", ctypes.c_uint),
        ("state", ctypes.c_ubyte),
        ("health_mask", ctypes.c_uint),
    )


_FABRIC_COMPLETED = 3  # NVML_GPU_FABRIC_STATE_COMPLETED


def _nvlink_domain(device: torch.device) -> str | None:
    """Cluster and clique of a GPU whose NVLink reaches beyond its host; None for all others.

    Without NVIDIA's management library, or with one that does not know, hosts are what there is to know.
    """
    try:
        library = _management_library()
        ask = library.nvmlDeviceGetGpuFabricInfoV
        find = library.nvmlDeviceGetHandleByUUID
        find.argtypes, ask.argtypes = (
            (ctypes.c_char_p, ctypes.POINTER(ctypes.c_void_p)),
            (ctypes.c_void_p, ctypes.POINTER(_FabricInfo)),
        )
        handle = ctypes.c_void_p()
        info = _FabricInfo(version=ctypes.sizeof(_FabricInfo) | 2 << 24)
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
        refused = library.nvmlInit_v2() or find(uuid, ctypes.byref(handle)) or ask(handle, ctypes.byref(info))
    except (OSError, AttributeError, RuntimeError):  # no library, an old one, no such device
        return None
    cluster = bytes(info.cluster_uuid)
    if refused or info.status or info.state != _FABRIC_COMPLETED or not any(cluster):
        return None
    return f"{cluster.hex()} {info.clique_id}"


def _management_library() -> ctypes.CDLL:
    return ctypes.CDLL("libnvidia-ml.so.1")


class LevelGroups:
    """The process groups of a rank inside its node and along its rail."""

    def __init__(
        self,
        levels: Levels,
        group: dist.ProcessGroup,
        local: dist.ProcessGroup,
        rail: dist.ProcessGroup | None,
    ) -> None:
        self.levels = levels
        self._group = weakref.ref(group)  # the groups of a process group must not keep it alive
        self.rank = group.rank()
        """This rank, within the group that has the levels."""
        self.local = local
        self.rail = rail
        """None where there is one node."""
        self.node, self.place = levels.find(self.rank)
        """This rank's node, and where it is there: the number of its rail."""

    def are_of(self, group: dist.ProcessGroup) -> bool:
        """Whether ``group`` is the one that has the levels."""
        return self._group() is group


_GROUPS: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Levels, LevelGroups]] = weakref.WeakKeyDictionary()
_MADE: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[int, ...]]] = weakref.WeakKeyDictionary()


def level_groups(group: dist.ProcessGroup, levels: Levels, device: torch.device) -> LevelGroups:
    """The groups of ``levels``, made once by all ranks of ``group`` together and used by everything there.

    Only the ranks of a new group take part in making it: meshes that other ranks do not know of, such as the
    stages of a pipeline, have levels too.
    """
    known = _GROUPS.setdefault(group, {})
    if levels not in known:
        node, place = levels.find(group.rank())
        local = subgroup(group, levels.nodes[node], device)
        rail = subgroup(group, levels.rails[place], device)
        known[levels] = LevelGroups(levels, group, local, rail)
    return known[levels]


def subgroup(group: dist.ProcessGroup, ranks: Sequence[int], device: torch.device) -> dist.ProcessGroup:
    """A process group of some ranks of ``group``, made by these ranks alone.

    They meet under a name that counts only what they made together. Torch's own counts what else a rank is
    in, and ranks that differ in that would wait for ever.
    """
    members = tuple(dist.get_global_rank(group, rank) for rank in ranks)
    made = _MADE.setdefault(group, Counter())
    made[members] += 1
    text = f"ragged_fsdp {group.group_name} {made[members]} {members}"
    with new_group_named(hashlib.sha256(text.encode()).hexdigest()[:40]):
        return dist.new_group(
            list(members),
            timeout=timeout_of(group, device),
            use_local_synchronization=True,
            group_desc="ragged_fsdp",
        )
