"""Load a kernel file by its path."""

import ast
import hashlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autokernel import ops
from autokernel.errors import InputError
from autokernel.state import ROOT

STARTERS = ROOT / "kernels"
KERNEL = ROOT / "kernel.py"


@dataclass(frozen=True)
class KernelFile:
    """A kernel file as it was read, not run: the operation that it names, its text and the SHA-256 of that."""

    path: Path
    operation: ops.Operation
    sha256: str
    text: bytes = field(repr=False)


@dataclass(frozen=True)
class Kernel:
    """A loaded kernel file: the operation that it names, its function and the SHA-256 of its text."""

    path: Path
    operation: ops.Operation
    function: Callable[..., Any]
    sha256: str


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def read(path: Path) -> KernelFile:
    """Read the file without running any of it; InputError says what is missing or which line is wrong.

    KERNEL_TYPE must therefore be written as plain text: `KERNEL_TYPE = "softmax"`.
    """
    text = _bytes_of(path)
    try:
        tree = ast.parse(text, path.name)
    except SyntaxError as fault:
        raise InputError(f"{path.name} has a syntax error in line {fault.lineno} ({fault.msg}): correct it") from None
    except (ValueError, RecursionError, MemoryError) as fault:  # a NUL byte, or nesting without end
        raise InputError(f"{path.name} cannot be parsed ({type(fault).__name__}: {fault}): correct it") from None
    bound = _bound_names(tree)
    kernel_type = _kernel_type(path.name, bound.get("KERNEL_TYPE", []))
    if "kernel_fn" not in bound:
        raise InputError(_no_function(path.name, kernel_type))
    return KernelFile(path, ops.get(kernel_type), hashlib.sha256(text).hexdigest(), text)


def load(path: Path) -> Kernel:
    """Import the file and check KERNEL_TYPE and kernel_fn; InputError says what is missing or which line is wrong."""
    name = path.name
    sha256 = hashlib.sha256(_bytes_of(path)).hexdigest()
    # Triton reads the source of a kernel from its file, and a module must be findable while it is imported.
    module_name = f"autokernel_kernel_{path.stem}_{sha256[:12]}"
    specification = importlib.util.spec_from_file_location(module_name, path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[module_name] = module
    try:
        specification.loader.exec_module(module)
    except SyntaxError as fault:
        raise InputError(f"{name} has a syntax error in line {fault.lineno} ({fault.msg}): correct it") from None
    except Exception as fault:  # whatever the file raises while it is imported is the file's fault
        raise InputError(f"{name} cannot be imported ({type(fault).__name__}: {fault}): correct it") from fault
    kernel_type = getattr(module, "KERNEL_TYPE", None)
    if kernel_type not in ops.names():
        raise InputError(_no_operation(name, kernel_type))
    function = getattr(module, "kernel_fn", None)
    if not callable(function):
        raise InputError(_no_function(name, kernel_type))
    return Kernel(path, ops.get(kernel_type), function, sha256)


def starter(operation: str) -> Path:
    """The starter's path; InputError for an unknown operation."""
    if operation not in ops.names():
        raise InputError(f"there is no operation {operation!r}: use one of {', '.join(ops.names())}")
    return STARTERS / f"{operation}.py"


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except (FileNotFoundError, IsADirectoryError):
        raise InputError(f"there is no kernel file {path}: run `uv run extract.py`, or name an existing one") from None


def _bound_names(tree: ast.Module) -> dict[str, list[ast.expr | None]]:
    """Names that the module's own code binds, each with what is assigned to it (None: not by a plain assignment)."""
    bound: dict[str, list[ast.expr | None]] = {}
    rest: list[ast.AST] = list(tree.body)
    while rest:
        node = rest.pop(0)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            bound.setdefault(node.name, []).append(None)
            continue  # what is assigned inside is not the module's, unless it says `global`
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name):
                    bound.setdefault(target.id, []).append(node.value)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.setdefault(node.id, []).append(None)
        elif isinstance(node, ast.alias):
            bound.setdefault(node.asname or node.name, []).append(None)
        rest += [child for child in ast.iter_child_nodes(node) if not (isinstance(child, ast.Name) and _is_target(node))]
    return bound


def _is_target(node: ast.AST) -> bool:
    return isinstance(node, (ast.Assign, ast.AnnAssign))


def _kernel_type(name: str, assigned: list[ast.expr | None]) -> str:
    if not assigned:
        raise InputError(_no_operation(name, None))
    texts = {node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None for node in assigned}
    kernel_type = texts.pop() if len(texts) == 1 else None
    if kernel_type is None:
        raise InputError(f'{name} must set KERNEL_TYPE once, to plain text such as "softmax": write it so')
    if kernel_type not in ops.names():
        raise InputError(_no_operation(name, kernel_type))
    return kernel_type


def _no_operation(name: str, kernel_type: Any) -> str:
    known = ", ".join(ops.names())
    return f"{name} sets KERNEL_TYPE to {kernel_type!r}, which is no operation: use one of {known}"


def _no_function(name: str, kernel_type: str) -> str:
    return f"{name} defines no function kernel_fn: it must, with the arguments of reference.{kernel_type}"
