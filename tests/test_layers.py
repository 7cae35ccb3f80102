"""The arrows of the design run one way: stages -> autokernel -> reference -> torch. Read from the imports, not run."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SHARED = sorted((ROOT / "autokernel").rglob("*.py"))
SCRIPTS = sorted(path for path in ROOT.glob("*.py") if path.name not in ("reference.py", "kernel.py"))
SOURCES = sorted([*ROOT.glob("*.py"), *SHARED, *(p for d in ("kernels", "models", "tests") for p in (ROOT / d).rglob("*.py"))])
OPERATIONS = sorted(path.stem for path in (ROOT / "autokernel" / "ops").glob("*.py") if path.stem != "__init__")
MOST_LINES = 400


def imported(path: Path) -> set[str]:
    """Dotted names of every module that the file may import: `from a import b` gives a and a.b."""
    return imported_by(path.read_text(encoding="utf-8"), path.relative_to(ROOT))


def imported_by(text: str, path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = (
                ".".join((*path.parts[: -node.level], *([node.module] if node.module else []))) if node.level else node.module
            )
            assert base is not None
            names |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    return names


def outside(names: set[str]) -> set[str]:
    """Top-level modules among the names that are not of the standard library."""
    return {name.split(".")[0] for name in names} - sys.stdlib_module_names


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_the_reader_of_imports_sees_every_form() -> None:
    text = "import a.b\nfrom c import d\ndef f():\n    from . import e\n    from ..g import h\n"
    assert imported_by(text, Path("autokernel/ops/x.py")) == {
        *("a.b", "c", "c.d"),
        *("autokernel.ops", "autokernel.ops.e"),
        *("autokernel.g", "autokernel.g.h"),
    }


@pytest.mark.parametrize("path", SHARED, ids=relative)
def test_shared_code_imports_no_stage_and_no_kernel(path: Path) -> None:
    roots = {name.split(".")[0] for name in imported(path)}
    assert not roots & {script.stem for script in SCRIPTS}
    assert not roots & {"kernel", "kernels", "models", "tests"}


@pytest.mark.parametrize("path", SCRIPTS, ids=relative)
def test_a_stage_imports_no_other_stage(path: Path) -> None:
    roots = {name.split(".")[0] for name in imported(path)}
    assert not roots & {*(script.stem for script in SCRIPTS), "kernel", "kernels"}


@pytest.mark.parametrize("path", sorted((ROOT / "autokernel" / "ops").glob("*.py")), ids=relative)
def test_operations_know_nothing_of_judging_and_substituting(path: Path) -> None:
    ours = {name for name in imported(path) if name.split(".")[0] == "autokernel"}
    above = {name for name in ours if name.startswith(("autokernel.judge", "autokernel.substitute", "autokernel.capture"))}
    assert not above


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("reference.py", {"torch"}),
        ("autokernel/errors.py", set()),
        ("autokernel/inputs.py", {"torch"}),
        ("autokernel/graph.py", {"torch"}),
    ],
)
def test_the_lowest_modules_import_only_these(name: str, allowed: set[str]) -> None:
    assert outside(imported(ROOT / name)) <= allowed


def test_state_imports_only_the_errors() -> None:
    ours = {name for name in imported(ROOT / "autokernel" / "state.py") if name.startswith("autokernel")}
    assert ours <= {"autokernel.errors", "autokernel.errors.InputError"}


@pytest.mark.parametrize("path", sorted((ROOT / "kernels").glob("*.py")), ids=relative)
def test_a_starter_stands_alone(path: Path) -> None:
    # it is copied, edited and taken home, so it may need nothing of this project
    assert outside(imported(path)) <= {"torch", "triton"}


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_no_file_is_too_long(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MOST_LINES, "it is asking to be two files"


def function(path: Path, name: str) -> ast.FunctionDef:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return node
    raise AssertionError(f"{path.name} defines no function {name}")


def signature(node: ast.FunctionDef) -> list[tuple[str, str | None]]:
    """Parameters in order, each with its default as written; a parameter only by position or only by name fails."""
    arguments = node.args
    assert not any([arguments.posonlyargs, arguments.kwonlyargs, arguments.vararg, arguments.kwarg])
    defaults = [None] * (len(arguments.args) - len(arguments.defaults)) + [ast.unparse(d) for d in arguments.defaults]
    return [(argument.arg, default) for argument, default in zip(arguments.args, defaults, strict=True)]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_is_one_reference_one_file_and_one_starter(operation: str) -> None:
    starter = ROOT / "kernels" / f"{operation}.py"
    wanted = signature(function(ROOT / "reference.py", operation))
    assert wanted
    assert signature(function(starter, "kernel_fn")) == wanted
    assert f'KERNEL_TYPE = "{operation}"' in starter.read_text(encoding="utf-8").splitlines()


def test_every_starter_and_every_reference_belongs_to_an_operation() -> None:
    assert sorted(path.stem for path in (ROOT / "kernels").glob("*.py")) == OPERATIONS
    tree = ast.parse((ROOT / "reference.py").read_text(encoding="utf-8"))
    public = sorted(n.name for n in tree.body if isinstance(n, ast.FunctionDef) and not n.name.startswith("_"))
    assert public == OPERATIONS
