"""Load a kernel file by its path."""

import hashlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autokernel import ops
from autokernel.errors import InputError
from autokernel.state import ROOT

STARTERS = ROOT / "kernels"
KERNEL = ROOT / "kernel.py"


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


def load(path: Path) -> Kernel:
    """Import the file and check KERNEL_TYPE and kernel_fn; InputError says what is missing or which line is wrong."""
    name = path.name
    if not path.is_file():
        raise InputError(f"there is no kernel file {path}: run `uv run extract.py`, or name an existing one")
    sha256 = sha256_of(path)
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
        known = ", ".join(ops.names())
        raise InputError(f"{name} sets KERNEL_TYPE to {kernel_type!r}, which is no operation: use one of {known}")
    function = getattr(module, "kernel_fn", None)
    if not callable(function):
        raise InputError(f"{name} defines no function kernel_fn: it must, with the arguments of reference.{kernel_type}")
    return Kernel(path, ops.get(kernel_type), function, sha256)


def starter(operation: str) -> Path:
    """The starter's path; InputError for an unknown operation."""
    if operation not in ops.names():
        raise InputError(f"there is no operation {operation!r}: use one of {', '.join(ops.names())}")
    return STARTERS / f"{operation}.py"
