"""The one door to torch's internals: no other module of this package may know a private name of torch.

Two tables have a record of every such name. ``REPLACED`` has those in whose place
:mod:`ragged_fsdp.dtensor.patches` puts a function of ours, ``READ`` those that are used as they are::

    until <the upstream change that would retire these records>:
        <module>:<names in it>(<parameters that we rely on>) [<tag>]
            <why they are needed>

All are looked up once, at import, before anything is changed: a release that lacks one is refused in a line
that names it. A tag makes an exception: ``optional`` is what has moved or come between the supported releases
and is found by feature, never by version number, where it is used; ``costly`` is what only the compiler has,
which a test looks up. A number is the last release that has the names; without one it is the newest.

The names below the tables are torch's without the leading underscore, functions that read one attribute
(``local_of(dtensor)``) and small functions where a name must be looked up late. Readers of attributes are C
callables: they add no Python frame to a hot path.

Not private, though it begins with an underscore: ``torch._foreach_*`` and ``torch._fused_*``, which the
optimizers of torch document and use from outside, and the names of dispatcher ops such as
``torch.ops.aten._to_copy``, which exported programs contain and upstream keeps.
"""

# ruff: noqa: E402  (the check goes before the imports whose failure it explains)

from __future__ import annotations

import functools
import importlib
import inspect
import operator
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

__all__ = [
    "PRIVATE",
    "READ",
    "REGISTRY_KEY",
    "REPLACED",
    "STATE_KEY",
    "STOCK",
    "WIRE_DTYPES",
    "AsyncCollectiveTensor",
    "CreationMeta",
    "DTensorSpec",
    "DisableFuncTorch",
    "FakeTensorMode",
    "FrameAction",
    "FrameExecStrategy",
    "OpOverload",
    "OpSchema",
    "OutputSharding",
    "Private",
    "RuntimeSchemaInfo",
    "StridedShard",
    "TensorMeta",
    "TorchDispatchMode",
    "accelerator_get_stream",
    "all_gather",
    "are_functorch_transforms_active",
    "backend_name",
    "backend_of",
    "base_of",
    "bound_arguments",
    "checkpoint_wrapper",
    "composite_kernel",
    "concatenate_meshes",
    "current_graph_task_id",
    "current_mesh",
    "cut_order_of",
    "disable_compile",
    "disable_dynamo",
    "flatten_mesh",
    "functional",
    "get_registry",
    "get_root_modules",
    "has_expandable_segments",
    "is_traceable_wrapper_subclass",
    "joined_launch",
    "joins_gathers",
    "local_of",
    "make_wrapper_subclass",
    "new_group_named",
    "one_launch",
    "op_overloads",
    "parameters_of",
    "peek_interpreter_stack",
    "post_accumulate_grad_hooks_of",
    "profiler_enabled",
    "propagate_tensor_meta",
    "pytree",
    "queue_callback",
    "raise_if_partial",
    "reaches_host",
    "rebind",
    "reduce_scatter",
    "reduce_value",
    "register_constant_class",
    "replace",
    "require_supported",
    "return_and_correct_aliasing",
    "root_mesh",
    "schema_of",
    "set_code_exec_strategy",
    "set_creation_meta",
    "set_grad_enabled",
    "set_local",
    "spec_of",
    "storage_id",
    "timeout_of",
    "to_kwargs",
    "tracing",
    "unsafe_preserve_version_counter",
    "unset_fake_temporarily",
    "version_of",
    "with_recompile_limit",
]


_OLDEST = (2, 11)
_NEWEST = "2.15"
_SUPPORTED = f"ragged_fsdp supports torch 2.11 to {_NEWEST}"
_ENTRY = re.compile(r"([\w.]+):([^(\[]+)(?:\((.*)\))?(?: \[(.+)\])?")


@dataclass(frozen=True)
class Private:
    """Names of torch that are not public API, of one module and for one reason."""

    home: str
    """The module that has the names."""
    names: list[str]
    """Paths inside the module."""
    reason: str
    until: str
    """The upstream change that would retire the record."""
    parameters: list[str]
    """Parameters of the function that we rely on."""
    tag: str
    """Why it is not looked up at import, or the last release that has it; empty for most."""
    last_seen: str

    def owner(self, name: str) -> Any:
        """The object, a module or a class, that has ``name`` as an attribute."""
        return functools.reduce(getattr, name.split(".")[:-1], importlib.import_module(self.home))

    def found(self, name: str) -> Any:
        """What torch has under ``name`` now; ``AttributeError`` or ``ImportError`` where it has nothing."""
        owner, last = self.owner(name), name.rpartition(".")[2]
        if last in getattr(owner, "__annotations__", {}) and not hasattr(owner, last):
            return None  # set on each instance
        try:
            return inspect.getattr_static(owner, last)  # a staticmethod stays one
        except AttributeError:
            return getattr(owner, last)


def _records(table: str) -> tuple[Private, ...]:
    """The records of a table whose indents are: what would retire them, the names of one, its reason."""
    records: list[Private] = []
    until = where = ""
    for line in table.strip().splitlines():
        text = line.strip()
        if not line.startswith(" "):
            until = text.removeprefix("until ").removesuffix(":")
        elif not line.startswith(" " * 8):
            where = f"{where} {text}".strip()
        else:
            match, where = _ENTRY.fullmatch(where), ""
            assert match is not None, f"no names above {text!r}"
            home, names, parameters, tag = match.groups(default="")
            known = parameters.replace(",", "").split()
            last_seen = tag if tag[:1].isdigit() else _NEWEST
            records.append(Private(home, names.split(), text, until, known, tag, last_seen))
    return tuple(records)


REPLACED = _records("""
until a public interface for placements that users write (rules, redistribution, construction):
    torch.distributed.tensor._dispatch:OpDispatcher._propagate_op_sharding_dispatch_slow_path(self,
    op_call, args, kwargs, op_info, try_cache)
        the sharding rules: the C++ dispatcher asks here on every cache miss
    torch.distributed.tensor:DTensor._op_dispatcher._custom_op_handlers
        these ops never reach the rules; argmax, for one, would be silently wrong
    torch.distributed.tensor._redistribute:redistribute_local_tensor(local_tensor, current_spec,
    target_spec, async_op)
        the moves of redistribute and of implicit redistribution
    torch.distributed.tensor._collective_utils:redistribute_cost(current_spec, target_spec)
        forbidding implicit moves (ExplicitRedistributionContext) asks what a move costs
    torch.distributed.tensor._redistribute:Redistribute.backward(ctx, grad_output)
        the gradient of Partial to ragged is gathered, as for Shard, instead of made Partial
    torch.distributed.tensor._utils:compute_local_shape_and_global_offset(global_shape, mesh, placements,
    skip_offset)
        local shapes for zeros, empty, from checkpoints; an offset only where the piece is one box
    torch.distributed.tensor._api:distribute_tensor(tensor, device_mesh, placements, src_data_rank)
        stock knows three kinds of placements and raises for others
    torch.distributed.tensor._api:_FromTorchTensor.forward(ctx, input, device_mesh, placements, run_check,
    shape, stride)
        from_local cannot infer a global shape from an uneven piece: ask for it, and check the piece
    torch.distributed.tensor._api:_ToTorchTensor.backward(ctx, grad_output)
        stock rebuilds the global stride from the local tensor; a ragged one needs the spec's
    torch.distributed.tensor._api:_dtensor_init_helper(init_op, size, device_mesh, placements)
        rand and randn draw with an offset that knows even shards only
    torch.distributed.tensor:DTensor._op_dispatcher.sharding_propagator.op_to_schema_info
    DTensor._op_dispatcher.sharding_propagator.op_to_schema_info_for_single_dim_strategy
        the C++ cache must know what decides a result where stock has no rule: a view's dtype, in 2.11 lists
until torch.save saving the elements of a view, not its storage:
    torch.distributed.tensor:DTensor.__reduce_ex__(self, proto)
        pickling a piece that lies inside a larger buffer
until deepcopy copying the elements of a view, not its storage:
    torch.distributed.tensor:DTensor.__deepcopy__(self, memo)
        copying a piece that lies inside a larger buffer
until the stager calling __deepcopy__:
    torch.distributed.checkpoint._state_dict_stager:StateDictStager._offload_tensor(self, x, memo,
    non_blocking)
        asynchronous checkpoints copy tensors to the host with a deepcopy of their own
until placements that tell a checkpoint their boxes:
    torch.distributed.tensor:DTensor.__create_write_items__(self, fqn, object)
        checkpoints: pieces as boxes
    torch.distributed.tensor:DTensor.__create_chunk_list__(self)
        checkpoints: pieces as boxes
    torch.distributed.tensor:DTensor.__get_tensor_shard__(self, index)
        checkpoints: the box asked for, as a view
until the writer splitting boxes of one name by itself:
    torch.distributed.checkpoint.hf_storage:HuggingFaceStorageWriter._split_by_storage_plan(self,
    storage_plan, items)
        a safetensors file holds one box of a tensor; a piece of several boxes needs several files
until state-dict utilities that call distribute_tensor or redistribute:
    torch.distributed._state_dict_utils:_distribute_tensors(local_state_dict, keys, device, pg)
        loading full state dicts and broadcast from rank 0
until state-dict utilities that compare before they broadcast:
    torch.distributed._state_dict_utils:_distribute_state_dict(full_state_dict, local_state_dict, device,
    pg)
        full state dicts that differ between ranks: an error on all, instead of the end of the process
""")
"""Names in whose place :mod:`ragged_fsdp.dtensor.patches` puts a function of ours."""

READ = _records("""
until a public way from a DTensor to its spec and local tensor that autograd does not see:
    torch.distributed.tensor:DTensor._local_tensor DTensor._spec
        to_local() records autograd, copies an asynchronous result and costs a frame
    torch.distributed.tensor._dtensor_spec:DTensorSpec TensorMeta
        a DTensor is built from a local tensor and a spec
until StridedShard becoming a documented placement:
    torch.distributed.tensor._dtensor_spec:DTensorSpec._maybe_convert_StridedShard_to_shard_order
        in which order the mesh dims of strided shards cut
    torch.distributed.tensor.placement_types:_StridedShard
        FSDP2's placement beside tensor parallelism
until a public interface for placements that users write (rules, redistribution, construction):
    torch.distributed.tensor:Partial._reduce_value
        a partial placement reduces in its own way (masked embeddings, norms)
    torch.distributed.tensor:DTensor._raise_if_contains_partial_placements
        a checkpoint of pending sums is refused with torch's own words
    torch.distributed.tensor._op_schema:OpSchema OutputSharding RuntimeSchemaInfo
        the answer to the C++ dispatcher, which caches it
    torch.distributed.tensor._op_schema:OpInfo.schema OpInfo.flat_args_schema [optional]
        what the C++ dispatcher asks
    torch.distributed.tensor._sharding_prop:ShardingPropagator.propagate_op_sharding_non_cached
    ShardingPropagator._propagate_tensor_meta_non_cached
        stock's rules for reductions, and the shapes and dtypes of results
until a public get_current_mesh in torch.distributed.device_mesh:
    torch.distributed.tensor._api:_mesh_resources.get_current_mesh [optional]
        the mesh of `with mesh:`, default of distribute_tensor
until the end of support for torch 2.11:
    torch.distributed.tensor.placement_types:_register_placements_as_opaque [optional]
        tells how dynamo takes placements: since 2.12 as opaque objects, before as pytree constants
until torch.library registering opaque types:
    torch._library.opaque_object:register_custom_class register_opaque_type MemberType [optional]
        dynamo takes our placements as constants, as it does stock's
until public functional collectives:
    torch.distributed._functional_collectives:AsyncCollectiveTensor _are_we_tracing all_to_all_single
    broadcast
        collectives that a compiled graph can contain, and their unfinished results
until the end of support for torch 2.12:
    torch.distributed._functional_collectives:all_gather_single reduce_scatter_single all_gather_tensor
    reduce_scatter_tensor [optional]
        renamed in 2.13, where the old names warn
until a public method of DeviceMesh:
    torch.distributed.device_mesh:DeviceMesh._flatten
        one shard group over several mesh dims
    torch.distributed.device_mesh:DeviceMesh._concatenate DeviceMesh._get_root_mesh [optional]
        joins the data-parallel mesh and that of the parameter; without it the root mesh is sliced
until both on ProcessGroup itself:
    torch.distributed:ProcessGroup._get_backend
        its name, the timeout of its collectives and the allocator of its memory
until a public way to launch several collectives as one:
    torch.distributed.distributed_c10d:_coalescing_manager(group, device, async_ops)
        two buffers of a group are gathered with one launch, and so are the rows of a rank's experts sent
    torch.distributed.distributed_c10d:_world.pg_coalesce_state
        what was called before an error is forgotten
until a public timeout of the backend's options:
    torch._C._distributed_c10d:Backend.Options._timeout [optional]
        how long a collective may take before the watch reports it
until a public registry of composable APIs:
    torch.distributed._composable.contract:REGISTRY_KEY STATE_KEY _get_registry
        modules say which API manages them: checkpoints, replicate and pipelines ask
    torch.distributed.utils:_to_kwargs _get_root_modules
        inputs go to the device, and modules are grouped, exactly as FSDP2 does
until a public wrapper for activation checkpointing:
    torch.distributed.algorithms._checkpoint.checkpoint_wrapper:checkpoint_wrapper
        recomputation of a layer that leaves names of parameters alone
until a public way to swap a parameter of a module:
    torch.nn:Module._parameters
        parameters change places without Module.__setattr__, which would register them again
until a public hook of Module.to and its relatives:
    torch.nn:Module._apply
        overridden: who moves or casts a sharded module moves the shards of its parameters
until public autograd functions of that name:
    torch._C._autograd:CreationMeta _set_creation_meta
        views made without autograd are used with it
    torch._C:_current_graph_task_id
        whether a backward runs in this thread
    torch.autograd:_unsafe_preserve_version_counter
        gathered weights are refilled behind autograd's back
    torch.autograd:_profiler_enabled
        labels are made only where somebody reads them
    torch:Tensor._base Tensor._version
        whether a tensor is a view, or was written
until a public hook at the end of a backward:
    torch.autograd:Variable._execution_engine.queue_callback
        what ends the backward: it waits for pending reductions
until torch.no_grad() in C++:
    torch._C:_set_grad_enabled
        turns autograd off without the frames of a context manager, 2 per hook
until public queries of functorch's state:
    torch._C:_are_functorch_transforms_active _DisableFuncTorch
        parameters are handled outside the transforms that run on activations
    torch._C._functorch:peek_interpreter_stack
        inside a transform no memory is taken for later: its tensors have no storage
until a public way to keep the compiler out of a code object without importing it:
    torch._C._dynamo.eval_frame:_FrameAction _FrameExecStrategy set_code_exec_strategy
        hooks of compiled modules run as they are
    torch:_disable_dynamo
        step() and forwards of experts are not compiled, and the compiler is not imported to say so
until torch.compiler.disable that dynamo traces as it does this one:
    torch._dynamo:disable [costly]
        a hook that is traced as a part of its caller runs outside the graph
until a public recompile limit of torch.compile:
    torch._dynamo.config:patch recompile_limit [costly]
        Newton-Schulz iterations are compiled for the shape of each matrix
until a public way to call the hooks of a tensor:
    torch:Tensor._post_accumulate_grad_hooks
        hooks of the user run when the sharded gradient is final
until storages that compare and hash by identity:
    torch:UntypedStorage._cdata
        a storage is the same object in memory though Python wraps it anew
until torch.accelerator.current_stream in C++:
    torch._C:_accelerator_getStream [optional]
        the current stream without two frames of Python
until a public way to read the settings of the allocator:
    torch.cuda.memory:_snapshot
        memory that may grow in place is not kept between steps
until new_group taking a name:
    torch.distributed.distributed_c10d:_hash_ranks_to_str _world.group_count
        it counts the groups that a rank is in: one that is in more would wait under another name
until a public context manager of FakeTensorMode:
    torch._subclasses.fake_tensor:unset_fake_temporarily
        ranks compare real values also while memory is estimated with fake tensors
    torch._subclasses.fake_tensor:FakeTensorMode
        what a layer computes and keeps is counted without a device
until a public name of the class that modes derive from:
    torch.utils._python_dispatch:TorchDispatchMode
        the same: every operation is seen with its tensors
until their documentation: subclasses outside torch use both:
    torch.utils._python_dispatch:is_traceable_wrapper_subclass return_and_correct_aliasing
        tensor subclasses that wrap others, and views that ops return
    torch:Tensor._make_wrapper_subclass
        a weight of codes and scales that linear layers compute with
until torch.utils.pytree with these functions in all supported releases:
    torch.utils._pytree:tree_leaves register_constant
        the tensors in an op's arguments
until a public schema of an op overload:
    torch:_ops.OpOverload ops.aten.add.Tensor._schema
        which arguments an op writes, and their names
until public queries of the dispatcher:
    torch._C:_dispatch_get_all_op_names _dispatch_has_kernel_for_dispatch_key
    DispatchKey.CompositeImplicitAutograd
        all ops on lists, and which ops decompose by themselves
""")
"""Names that are used as they are; in the place of one :func:`new_group_named` puts a function of ours."""

PRIVATE = (*REPLACED, *READ)


def require_supported(version: str) -> None:
    """Raise ``ImportError`` unless ``version`` is at least the oldest release that is tested.

    Newer releases than those tested are judged by what they have.
    """
    match = re.match(r"(\d+)\.(\d+)", version)
    if match and (int(match[1]), int(match[2])) < _OLDEST:
        raise ImportError(f"{_SUPPORTED}; this is torch {version}.")


def _check() -> None:
    """Raise ``ImportError``, naming it, for the first name that this torch lacks or defines otherwise."""
    for record in PRIVATE:
        for name in () if record.tag in ("optional", "costly") else record.names:
            try:
                found = _plain(record.found(name))
            except (AttributeError, ImportError):
                raise _refusal(f"{record.home}.{name} is missing") from None
            known = inspect.signature(found).parameters if record.parameters else ()
            for parameter in record.parameters:
                if parameter not in known:
                    raise _refusal(f"{record.home}.{name} has no parameter {parameter!r}")


def _refusal(what: str) -> ImportError:
    return ImportError(f"{_SUPPORTED}; in torch {torch.__version__} {what}.")


def _plain(found: Any) -> Any:
    return found.__func__ if isinstance(found, staticmethod) else found


require_supported(torch.__version__)
_check()

import torch.distributed._functional_collectives as functional
import torch.distributed.distributed_c10d as c10d
import torch.distributed.tensor._api as _api
import torch.utils._pytree as pytree
from torch._C import _are_functorch_transforms_active as are_functorch_transforms_active
from torch._C import _current_graph_task_id as current_graph_task_id
from torch._C import _DisableFuncTorch as DisableFuncTorch
from torch._C import _set_grad_enabled as set_grad_enabled
from torch._C._autograd import CreationMeta
from torch._C._autograd import _set_creation_meta as set_creation_meta
from torch._C._functorch import peek_interpreter_stack
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.autograd import _unsafe_preserve_version_counter as unsafe_preserve_version_counter
from torch.distributed import ProcessGroup
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed._composable.contract import _get_registry as get_registry
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._functional_collectives import _are_we_tracing as tracing
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding, RuntimeSchemaInfo
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.distributed.utils import _get_root_modules as get_root_modules
from torch.distributed.utils import _to_kwargs as to_kwargs
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    is_traceable_wrapper_subclass,
    return_and_correct_aliasing,
)

local_of: Callable[[Any], torch.Tensor] = operator.attrgetter("_local_tensor")
make_wrapper_subclass = torch.Tensor._make_wrapper_subclass
spec_of: Callable[[Any], DTensorSpec] = operator.attrgetter("_spec")
schema_of: Callable[[Any], Any] = operator.attrgetter("_schema")
base_of: Callable[[torch.Tensor], torch.Tensor | None] = operator.attrgetter("_base")
version_of: Callable[[torch.Tensor], int] = operator.attrgetter("_version")
storage_id: Callable[[torch.UntypedStorage], int] = operator.attrgetter("_cdata")
parameters_of: Callable[[torch.nn.Module], dict[str, Any]] = operator.attrgetter("_parameters")
post_accumulate_grad_hooks_of: Callable[[torch.Tensor], Any] = operator.attrgetter(
    "_post_accumulate_grad_hooks"
)

queue_callback: Callable[[Callable[[], None]], None] = (
    torch.autograd.Variable._execution_engine.queue_callback
)
profiler_enabled: Callable[[], bool] = torch.autograd._profiler_enabled
disable_dynamo: Callable[..., Any] = torch._disable_dynamo
flatten_mesh = DeviceMesh._flatten
concatenate_meshes: Callable[[list[DeviceMesh]], DeviceMesh] | None = getattr(
    DeviceMesh, "_concatenate", None
)
accelerator_get_stream: Callable[[int], Any] = getattr(
    torch._C, "_accelerator_getStream", torch.accelerator.current_stream
)
raise_if_partial = DTensor._raise_if_contains_partial_placements
cut_order_of = DTensorSpec._maybe_convert_StridedShard_to_shard_order

_frames: Any = torch._C._dynamo.eval_frame
FrameAction = _frames._FrameAction
FrameExecStrategy = _frames._FrameExecStrategy
set_code_exec_strategy = _frames.set_code_exec_strategy

all_gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
reduce_scatter = getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor


WIRE_DTYPES = frozenset(
    {
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float64,
        torch.uint8,
        torch.int8,
        torch.int32,
        torch.int64,
    }
)
"""What every backend sends as it is; others (float8, complex, ...) travel as bytes."""


_REPLACED = {name: record for record in REPLACED for name in record.names}

STOCK: dict[str, Any] = {name: _plain(record.found(name)) for name, record in _REPLACED.items()}
"""What torch had under each name of ``REPLACED`` before :func:`replace`: what takes its place may call it."""


def replace(name: str, ours: Callable[..., Any]) -> None:
    """Put ``ours`` in the place of a name of ``REPLACED``.

    A function of a module is replaced under every name that loaded modules know it by.
    """
    record = _REPLACED[name]
    owner, found = record.owner(name), record.found(name)
    if not inspect.ismodule(owner):
        setattr(
            owner, name.rpartition(".")[2], staticmethod(ours) if isinstance(found, staticmethod) else ours
        )
        return
    rebind(found, ours, skip=ours.__module__)


def rebind(old: Callable[..., Any], new: Callable[..., Any], *, skip: str) -> None:
    """Replace ``old`` in every loaded module that holds it by name; not in ``skip`` or below it."""
    for module_name, module in list(sys.modules.items()):
        if module_name == skip or module_name.startswith(f"{skip}."):
            continue
        for name, value in list((getattr(module, "__dict__", None) or {}).items()):
            if value is old:
                setattr(module, name, new)


def set_local(tensor: DTensor, local: torch.Tensor, spec: DTensorSpec) -> None:
    """Give ``tensor`` another local tensor and spec; who holds the DTensor keeps the same object."""
    tensor._local_tensor, tensor._spec = local, spec


def current_mesh() -> DeviceMesh:
    """The mesh of the ``with mesh:`` that surrounds the call."""
    return _api._mesh_resources.get_current_mesh()


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that ``mesh`` was sliced from."""
    return mesh._get_root_mesh()


def backend_of(pg: ProcessGroup, device: torch.device) -> Any:
    """The backend that runs the collectives of ``pg`` on ``device``; ``RuntimeError`` where it has none."""
    return pg._get_backend(device)


def backend_name(pg: ProcessGroup, device: torch.device) -> str:
    """The name of the backend of ``pg`` on ``device``; empty where it has none, or none with a name."""
    try:
        return str(backend_of(pg, device).name())
    except (RuntimeError, AttributeError):  # a group in Python may have no backend, or be its own
        return ""


def joins_gathers(pg: ProcessGroup, device: torch.device) -> bool:
    """Whether several gathers over ``pg`` can be one launch; a backend of the user's is not asked for it.

    Gloo can, but may corrupt the heap (torch 2.11 to 2.15): whichever of its threads ends a work notes the
    name of its kind, without a lock and after it has said that the work is done. That of joined gathers, and
    of torch's functional ones, ``ALLGATHER_COALESCED``, is too long to lie in the string itself: a thread
    that ends another work at the same time writes to memory that the first has freed, or frees it again.
    """
    return backend_name(pg, device) in ("nccl", "fake")


def reaches_host(pg: ProcessGroup) -> bool:
    """Whether ``pg`` has collectives of tensors on the host, for which a device is not waited for."""
    try:
        return backend_of(pg, torch.device("cpu")) is not None
    except RuntimeError:
        return False


@contextmanager
def one_launch(
    pg: ProcessGroup, device: torch.device | None = None, async_ops: bool = False
) -> Iterator[Any]:
    """Collectives over ``pg`` that are called within it run as one at its end; gives what to wait for."""
    try:
        with c10d._coalescing_manager(pg, device, async_ops) as launched:
            yield launched
    except BaseException:  # else what was called before the error would be a part of the next launch
        c10d._world.pg_coalesce_state.pop(pg, None)
        raise


@contextmanager
def joined_launch(pg: ProcessGroup, device: torch.device, async_ops: bool) -> Iterator[list[Any]]:
    """Collectives over ``pg`` within it are one launch of NCCL; other backends run one after the other.

    Gives a list for what each call returns; with ``async_ops`` that list is afterwards what to wait for.
    """
    works: list[Any] = []
    if backend_of(pg, device).name() != "nccl":
        yield works
        return
    with one_launch(pg, device, async_ops) as launched:
        yield works
    works[:] = [launched]


def timeout_of(pg: ProcessGroup, device: torch.device) -> Any:
    """The ``timedelta`` after which a collective of ``pg`` on ``device`` fails; None if nobody tells."""
    try:
        return getattr(backend_of(pg, device).options, "_timeout", None)
    except (RuntimeError, AttributeError):  # a group in Python may have no backend, and that no options
        return None


class _OfThread(threading.local):
    """What a thread has asked for, which the others do not see."""

    group_name: str | None = None
    """See :func:`new_group_named`."""


_OF_THREAD = _OfThread()
_stock_group_name = c10d._hash_ranks_to_str


def _group_name(ranks: Any) -> str:
    """The name of a new group: what this thread has asked for, else torch's.

    It takes the place of torch's function for good: other threads may make groups at the same time, and one
    that put torch's back would take their names from them.
    """
    return _OF_THREAD.group_name or _stock_group_name(ranks)


@contextmanager
def new_group_named(name: str) -> Iterator[None]:
    """Within it a group made of its own ranks alone (``use_local_synchronization``) meets under ``name``.

    It has a communicator of its own also after ``init_process_group(device_id=...)``, whose device is
    forgotten meanwhile: torch would split it off the communicator of all ranks, and wait for those that know
    nothing of it. It is not counted either: since 2.14 torch names later groups by a count that it takes to
    be the same on all ranks, and those that made none of this would wait for them under another name.

    The name is this thread's alone. Ranks may be threads, as in torch's own tests: two groups under one name
    would wait for ever, or receive each other's data. The world, with device and count, is such a rank's own.
    """
    world = torch.distributed.group.WORLD
    assert world is not None
    device, count = world.bound_device_id, c10d._world.group_count
    c10d._hash_ranks_to_str, _OF_THREAD.group_name = _group_name, name
    world.bound_device_id = None
    try:
        yield
    finally:
        _OF_THREAD.group_name, c10d._world.group_count = None, count
        world.bound_device_id = device


def has_expandable_segments() -> bool:
    """Whether CUDA's allocator may grow a segment, so that no block need be kept whole for later."""
    if torch.cuda.get_allocator_backend() != "native":  # others do not tell
        return False
    return bool(torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"])


def disable_compile(function: Callable) -> Callable:
    """``function`` kept out of a graph that is being traced, with all that it calls."""
    return torch._dynamo.disable(function, recursive=True)


def with_recompile_limit(limit: int) -> AbstractContextManager[None]:
    """Lets the compiler keep ``limit`` variants of a function within it."""
    return torch._dynamo.config.patch(recompile_limit=limit)


def reduce_value(partial: Any, local: torch.Tensor, mesh: DeviceMesh, mesh_dim: int) -> torch.Tensor:
    """The reduction of a pending ``local`` along ``mesh_dim``, in the way of its ``partial`` placement."""
    return partial._reduce_value(local, mesh, mesh_dim)


def propagate_tensor_meta(propagator: Any, schema: OpSchema) -> Any:
    """Shapes, strides and dtypes of the results of the op of ``schema``."""
    return propagator._propagate_tensor_meta_non_cached(schema)


def register_constant_class(kind: type, members: tuple[str, ...]) -> None:
    """Let dynamo take instances of ``kind`` as constants and call their ``members`` while it traces."""
    if not hasattr(torch.distributed.tensor.placement_types, "_register_placements_as_opaque"):  # torch 2.11
        pytree.register_constant(kind)
        return
    import torch._library.opaque_object as opaque

    real = dict.fromkeys(members, opaque.MemberType.USE_REAL)
    if hasattr(opaque, "register_custom_class"):  # since torch 2.14
        opaque.register_custom_class(kind, typ="constant", members=real)
    else:
        opaque.register_opaque_type(kind, typ="value", members=real)


def op_overloads(prefixes: tuple[str, ...]) -> list[OpOverload]:
    """The aten ops of this torch whose names begin with one of ``prefixes``, every overload."""
    found = []
    for qualified in torch._C._dispatch_get_all_op_names():
        namespace, _, name = qualified.partition("::")
        packet, _, overload = name.partition(".")
        if namespace == "aten" and packet.startswith(prefixes):
            found.append(getattr(getattr(torch.ops.aten, packet), overload or "default"))
    return found


def composite_kernel(op: OpOverload) -> bool:
    """Whether ``op`` decomposes into others by itself (seen only in inference mode)."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(
        op.name(), torch._C.DispatchKey.CompositeImplicitAutograd
    )


def bound_arguments(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, defaults included."""
    bound = {a.name: a.default_value for a in op._schema.arguments if a.has_default_value()}
    bound.update(zip((a.name for a in op._schema.arguments), args))
    bound.update(kwargs)
    return bound
