"""What an installed package offers: metadata, the command line, and one clear line where something lacks."""

import ast
import functools
import inspect
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import get_overloads

import pytest
import torch.distributed.fsdp

import ragged_fsdp

ROOT = Path(__file__).parents[2]
_FSDP2 = set(torch.distributed.fsdp.__all__) | {"DataParallelMeshDims", "StridedRaggedShard"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def _run(*arguments: str, program: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *(("-c", program) if program else ()), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "100"}
    return subprocess.run(command, capture_output=True, text=True, timeout=150, env=environment)


def test_metadata():
    assert re.fullmatch(r"\d+\.\d+\.\d+", ragged_fsdp.__version__)
    assert ragged_fsdp.__version__ in (ROOT / "CHANGELOG.md").read_text()
    assert {"cli", "hf", "test", "bench", "lint", "docs"} <= set(PROJECT["optional-dependencies"])
    assert (Path(ragged_fsdp.__file__).parent / "py.typed").exists()
    module, _, name = PROJECT["scripts"]["ragged-fsdp"].partition(":")
    assert callable(getattr(__import__(module, fromlist=[name]), name))


def test_the_wheel_s_description_renders_alone():
    """Its links lead somewhere from any page, and it is plain Markdown without pictures of the repository."""
    text = (ROOT / PROJECT["readme"]["file"]).read_text()
    targets = re.findall(r"\]\(([^)]+)\)", text)
    assert targets and all(target.startswith("https://") for target in targets) and "![" not in text
    assert PROJECT["urls"]["Paper"] in targets
    versions = [c.rpartition(" ")[2] for c in PROJECT["classifiers"] if "Python :: 3." in c]
    assert versions == ["3.11", "3.12", "3.13"]


def test_no_message_sends_users_to_a_registry_that_does_not_have_the_package():
    for path in [*(ROOT / "src").rglob("*.py"), *(ROOT / "docs").glob("*.md"), ROOT / "README.md"]:
        assert not re.search(r"pip install '?ragged-fsdp", path.read_text()), path


def test_every_import_of_the_package_is_declared():
    """Third-party modules the package imports are dependencies or in an extra."""
    declared = PROJECT["dependencies"] + [
        d for extra in PROJECT["optional-dependencies"].values() for d in extra
    ]
    names = {re.match(r"[\w-]+", d)[0].replace("-", "_") for d in declared} | {"ragged_fsdp", "triton"}
    names |= {"vllm", "sglang", "zmq"}  # imported by who has them, to send them weights
    names.add("fsspec")  # comes with torch
    found = set()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add((node.module or "").partition(".")[0])
    missing = found - names - set(sys.stdlib_module_names)
    assert not missing, missing


@pytest.mark.parametrize("name", ["ragged_fsdp", "ragged_fsdp.optim"])
def test_type_checkers_see_what_is_loaded_on_first_use(name):
    module = import_module(name)
    body = ast.parse(Path(module.__file__).read_text()).body
    block = next(node for node in body if isinstance(node, ast.If))
    packages = dict.fromkeys(getattr(module, "_SUBPACKAGES", ()), "ragged_fsdp")
    assert {
        alias.name: node.module for node in block.body for alias in node.names
    } == module._HOMES | packages
    assert set(module.__all__) <= set(dir(module))


def test_sub_packages_are_there_and_only_what_is_public_is_listed():
    program = "import ragged_fsdp as r; r.optim.Muon; r.planner.plan; r.fp8.fits; r.trainer; print(*dir(r))"
    listed = _run(program=program).stdout.split()
    assert {"optim", "planner", "fully_shard", "describe"} <= set(listed)
    assert [n for n in listed if n.startswith("_") and not n.startswith("__")] == [] and "sys" not in listed
    folders = {path.parent.name for path in (ROOT / "src" / "ragged_fsdp").glob("*/__init__.py")}
    assert folders - set(ragged_fsdp._SUBPACKAGES) == {"cli", "fsdp", "predict"}
    for name in (*ragged_fsdp.__all__, *ragged_fsdp._SUBPACKAGES):
        assert name in ragged_fsdp.__doc__ or name in ("dbuffer", "dtensor", "policy") or name in _FSDP2, name


def test_what_a_type_checker_sees_is_what_runs():
    """The overloads have the parameters of the function."""
    from ragged_fsdp import api

    runs = inspect.signature(api.fully_shard).parameters
    listed = {name: hint.__forward_arg__ for name, hint in api.Arguments.__annotations__.items()}
    assert listed == {name: runs[name].annotation for name in list(runs)[1:]}
    assert [list(inspect.signature(o).parameters) for o in get_overloads(api.fully_shard)] == [
        ["module", "arguments"]
    ] * 2
    for name in ragged_fsdp.optim.__all__:
        kinds = {p.kind for p in inspect.signature(getattr(ragged_fsdp.optim, name)).parameters.values()}
        assert inspect.Parameter.VAR_KEYWORD not in kinds, name


@pytest.mark.parametrize("arguments", [("--help",), ("plan", "-h"), ("--version",)])
def test_command_line_answers(arguments):
    result = _run("-m", "ragged_fsdp", *arguments)
    assert result.returncode == 0, result.stderr
    assert "ragged-fsdp" in result.stdout.strip().splitlines()[0]
    if arguments == ("--help",):
        for command in ("plan", "train", "demo", "export", "inspect", "report", "bench"):
            assert re.search(rf"^  {command} +\w", result.stdout, re.MULTILINE), command


def test_every_command_explains_itself():
    """``-h`` and ``--help`` answer at every level, and nothing but click parses a command line."""
    import click
    from click.testing import CliRunner

    from ragged_fsdp.cli.main import main

    waiting = [([], main)]
    for words, command in waiting:
        for flag in ("-h", "--help"):
            shown = CliRunner().invoke(main, [*words, flag], prog_name="ragged-fsdp")
            assert shown.exit_code == 0, (words, shown.output)
            assert shown.output.startswith(" ".join(["Usage: ragged-fsdp", *words])), words
        if isinstance(command, click.Group):
            context = click.Context(command)
            names = command.list_commands(context)
            waiting += [([*words, name], command.get_command(context, name)) for name in names]
    assert len(waiting) >= 19 and all(isinstance(command, click.Command) for _, command in waiting)


@pytest.mark.parametrize("name", ["plan", "predict", "calibrate", "train", "report", "inspect", "export"])
def test_the_examples_of_a_help_can_be_copied(name):
    """At 80 columns: no line is broken by the terminal, every flag is one, and it is a command of ours."""
    import click
    from click.testing import CliRunner

    from ragged_fsdp.cli.main import main

    shown = CliRunner().invoke(main, [name, "--help"], terminal_width=80).output
    block = re.search(r"^  Examples:\n((?:    .*\n)+)", shown, re.MULTILINE)[1]
    assert max(map(len, shown.splitlines())) <= 80
    examples = block.replace("\\\n", " ").splitlines()
    assert len(examples) >= 2 and not re.search(r"ragged-fsdp \w+ ", shown.replace(block, "")), shown
    for example in examples:
        words = shlex.split(example)
        command = main.get_command(click.Context(main), words[words.index("ragged-fsdp") + 1])
        known = {flag for option in command.params for flag in option.opts}
        flags = [word for word in words[words.index("ragged-fsdp") :] if re.fullmatch(r"--?[a-z].*", word)]
        assert set(flags) <= known, example


def test_a_refusal_is_the_message_alone():
    from click.testing import CliRunner

    from ragged_fsdp.cli.main import main

    shown = CliRunner().invoke(main, ["train", "--optimizer", "adan"])
    assert shown.exit_code == 2 and shown.output.startswith("Error: optimizer = 'adan'"), shown.output


def test_a_wrong_command_is_named():
    result = _run("-m", "ragged_fsdp", "trian")
    assert result.returncode == 2 and "trian" in result.stderr and "Traceback" not in result.stderr


def test_a_missing_command_line_package_is_one_line():
    program = "import sys; sys.modules['click'] = None; from ragged_fsdp.__main__ import main; main()"
    result = _run(program=program)
    assert result.returncode == 1
    assert result.stderr.strip() == "ragged-fsdp: click is not installed; in a checkout: pip install '.[cli]'"


@pytest.mark.parametrize("module", ["click", "ragged_fsdp.cli.plan"])
def test_an_interrupt_during_imports_ends_as_any_other(module):
    program = f"""
import sys
from ragged_fsdp.__main__ import main
class Interrupts:
    def find_spec(self, name, *_):
        if name == {module!r}:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupts())
sys.argv = ["ragged-fsdp", "plan", "gpt-oss-120b"]
main()
"""
    result = _run(program=program)
    assert result.returncode == 130 and not result.stderr, result.stderr


def test_a_missing_model_package_is_named_with_its_extra():
    program = (
        "import sys; sys.modules['transformers'] = None; sys.argv = ['ragged-fsdp', 'plan', 'gpt-oss-120b'];"
        "from ragged_fsdp.__main__ import main; main()"
    )
    result = _run(program=program)
    assert result.returncode == 2 and "pip install '.[hf]'" in result.stderr, result.stderr


def test_an_old_torch_is_refused_in_one_line():
    program = "import torch; torch.__version__ = '2.10.1+cu130'; from ragged_fsdp import fully_shard"
    result = _run(program=program)
    last = result.stderr.strip().splitlines()[-1]
    assert last == "ImportError: ragged_fsdp supports torch 2.11 to 2.15; this is torch 2.10.1+cu130."


def test_the_planner_needs_no_torch():
    program = "import sys, ragged_fsdp.planner as p; p.plan([8], [2], 2, 1); print('torch' in sys.modules)"
    result = _run(program=program)
    assert result.stdout.strip() == "False", result.stdout + result.stderr


def test_imports_and_models_bring_no_compiler():
    program = "import sys, ragged_fsdp.experts, ragged_fsdp.models; print('torch._dynamo' in sys.modules)"
    result = _run(program=program)
    assert result.stdout.strip() == "False", result.stdout + result.stderr


@functools.cache
def _sources() -> dict[str, ast.Module]:
    """Every file of the source tree, parsed, by its path in the checkout."""
    paths = sorted((ROOT / "src").rglob("*.py"))
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in paths}


def _types_by_name() -> dict[str, set[str]]:
    """What each name of a type, a class or an alias of the whole source tree stands for."""
    found: dict[str, set[str]] = {}
    for path, tree in _sources().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, set()).add(f"the class of {path}")
            elif isinstance(node, ast.Assign):
                names = [target.id for target in node.targets if isinstance(target, ast.Name)]
                for name in filter(re.compile("_?[A-Z][a-z]").match, names):
                    found.setdefault(name, set()).add(ast.unparse(node.value))
    return found


def test_the_name_of_a_type_means_one_thing():
    """Who finds a ``Part`` in one file must not read another file's for it."""
    assert {name: meanings for name, meanings in _types_by_name().items() if len(meanings) > 1} == {}


_FRAGMENT = re.compile(r"(Of|As (``|many|long)|The same|Those|That of|Its|It|They|Their|Likewise)(?!\w)")


def _docstrings() -> Iterator[tuple[str, str]]:
    """Every docstring of the source tree, those of attributes too, with its place."""
    for path, tree in _sources().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                yield f"{path}:{node.lineno}", str(node.value.value)


def test_docstrings_stand_alone():
    """One that begins with "Of" or "The same" is half a sentence: its other half is somewhere else."""
    assert [(place, text) for place, text in _docstrings() if _FRAGMENT.match(text)] == []
