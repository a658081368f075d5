"""The door to torch: every private name is recorded and checked there, and used nowhere else."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import ragged_fsdp
from ragged_fsdp import torch_internals
from ragged_fsdp.dtensor import patches

SOURCE = Path(ragged_fsdp.__file__).parent
DOOR = SOURCE / "torch_internals.py"
PUBLIC_IN_EFFECT = ("_foreach_", "_fused_")
SELF = ("self", "cls", "super")

KNOWN = {part for r in torch_internals.PRIVATE for name in r.names for part in name.split(".")}
ATTRIBUTES = {part for part in KNOWN if part.startswith("_") and not part.startswith("__")}


def _is_private(name: str) -> bool:
    private = name.startswith("_") and not name.startswith("__")
    return private and not name.startswith(PUBLIC_IN_EFFECT)


def _imported(node: ast.AST) -> Iterator[tuple[str, str]]:
    """(local name, full path) of what an import statement takes from torch."""
    if isinstance(node, ast.Import):
        names = [(alias.asname or alias.name.partition(".")[0], alias.name) for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and not node.level:
        names = [(alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names]
    else:
        return
    yield from ((local, path) for local, path in names if path.partition(".")[0] == "torch")


def _root(node: ast.expr) -> str:
    """The name that a chain of attributes, calls and subscripts begins with."""
    while isinstance(node, (ast.Attribute, ast.Call, ast.Subscript)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def private_uses(text: str) -> list[str]:
    """``line: what`` for every use of a private name of torch in a program."""
    tree, found = ast.parse(text), []
    imports = [(node.lineno, *item) for node in ast.walk(tree) for item in _imported(node)]
    from_torch = {local for _, local, _ in imports}
    found += [f"{line}: {path}" for line, _, path in imports if any(map(_is_private, path.split(".")))]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            direct = node.value.id if isinstance(node.value, ast.Name) else ""
            of_self = (direct or _root(node.value)) in SELF and (direct or isinstance(node.value, ast.Call))
            of_torch = _root(node.value) in from_torch and not isinstance(node.value, ast.Call)
            if of_torch or (node.attr in ATTRIBUTES and not of_self):
                found.append(f"{node.lineno}: {ast.unparse(node)}")
        if isinstance(node, ast.Call) and _root(node.func) in ("getattr", "hasattr", "setattr"):
            name = node.args[1] if len(node.args) > 1 else None
            if isinstance(name, ast.Constant) and name.value in ATTRIBUTES:
                found.append(f"{node.lineno}: {ast.unparse(node)}")
    return found


def _files() -> list[Path]:
    return [file for file in sorted(SOURCE.rglob("*.py")) if file != DOOR]


def test_no_private_name_of_torch_is_used_outside_the_door():
    found = [f"{f.relative_to(SOURCE)}:{use}" for f in _files() for use in private_uses(f.read_text())]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "program",
    [
        "from torch.distributed.tensor._dtensor_spec import DTensorSpec",
        "from torch.distributed.utils import _to_kwargs",
        "import torch.utils._pytree as pytree",
        "import torch\nx = torch._C._current_graph_task_id()",
        "import torch.distributed as dist\nx = dist._make_nccl_premul_sum",
        "from torch import nn\nnn.Module._register_load_state_dict_pre_hook",
        "def f(tensor): return tensor._local_tensor",
        "def f(model): return model.weights()[0]._spec.mesh",
        "def f(self): return self.sharded._local_tensor",
        "def f(param): return getattr(param, '_spec', None)",
        "def f(param, local): param._local_tensor = local",
    ],
)
def test_the_lint_sees_private_names(program):
    assert private_uses(program)


@pytest.mark.parametrize(
    "program",
    [
        "import torch\ntorch._foreach_mul_([], 2)",
        "import torch\naten = torch.ops.aten\nx = aten._to_copy.default",
        "class Own:\n    def f(self): return self._spec",
        "class Own(Base):\n    def _apply(self, fn): return super()._apply(fn)",
        "def f(buffer): return buffer._index_of",
        "import os\nos._exit(0)",
    ],
)
def test_the_lint_leaves_other_names_alone(program):
    assert not private_uses(program)


def test_every_record_is_complete():
    for record in torch_internals.PRIVATE:
        assert record.names and record.reason and record.until, record
        assert record.last_seen in ("2.11", "2.12", "2.13", "2.14", "2.15")
        assert record.tag in ("", "optional", "costly", record.last_seen)
    names = [f"{r.home}:{name}" for r in torch_internals.PRIVATE for name in r.names]
    assert len(names) == len(set(names))


def test_what_costs_much_to_look_up_is_there():
    costly = [
        (record, name)
        for record in torch_internals.PRIVATE
        if record.tag == "costly"
        for name in record.names
    ]
    assert costly
    for record, name in costly:
        assert record.found(name) is not None, f"{record.home}.{name}"


def test_what_is_replaced_has_a_replacement():
    tables = {name for r in torch_internals.REPLACED if not r.parameters for name in r.names}
    functions = {name for r in torch_internals.REPLACED if r.parameters for name in r.names}
    assert functions == set(patches.REPLACEMENTS)
    assert all(isinstance(torch_internals.STOCK[name], dict) for name in tables)


@pytest.mark.parametrize(
    "change, named",
    [
        ("del torch._C._set_grad_enabled", "torch._C._set_grad_enabled is missing"),
        ("del torch.autograd.Variable._execution_engine", "_execution_engine.queue_callback is missing"),
        (
            "import torch.distributed.tensor._redistribute as m; m.redistribute_local_tensor = len",
            "redistribute_local_tensor has no parameter 'local_tensor'",
        ),
    ],
)
def test_a_torch_without_a_name_is_refused_in_one_line(change, named):
    program = f"import torch, torch.distributed.tensor\n{change}\nimport ragged_fsdp.dtensor\n"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert result.returncode
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: ragged_fsdp supports torch 2.11 to 2.15; in torch")
    assert torch.__version__ in last and named in last


def test_a_torch_that_is_too_old_is_refused():
    with pytest.raises(ImportError, match=r"torch 2\.11 to 2\.15; this is torch 2\.10\.1"):
        torch_internals.require_supported("2.10.1+cpu")
    torch_internals.require_supported("2.16.0.dev1")


def test_a_group_without_a_backend_is_not_asked_to_join_gathers():
    """Groups of ranks that are threads, as torch's own tests have them, know no backend for a device."""
    group = torch.distributed.ProcessGroup(0, 2)
    assert not torch_internals.joins_gathers(group, torch.device("cpu"))


def test_gathers_over_gloo_are_not_joined():
    """Two threads of gloo that end such works at once corrupt the heap; some time later the process dies."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        assert not torch_internals.joins_gathers(dist.group.WORLD, torch.device("cpu"))
    finally:
        dist.destroy_process_group()


def test_ranks_that_are_threads_name_their_groups_apart():
    """Two groups under one name wait for ever, or receive each other's data."""

    def made() -> str:
        return dist.new_group([0], use_local_synchronization=True).group_name

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        with ThreadPoolExecutor(1) as thread:
            theirs = torch_internals.new_group_named("theirs")
            with torch_internals.new_group_named("ours"):
                thread.submit(theirs.__enter__).result()
                assert made() == "ours"
            assert thread.submit(made).result() == "theirs", "we have left, they are still at it"
            thread.submit(theirs.__exit__, None, None, None).result()
            assert not {made(), thread.submit(made).result()} & {"ours", "theirs"}
    finally:
        dist.destroy_process_group()
