"""Golden cases: arguments of each operation with the exact answer, computed once by prepare.py in float64 on the CPU.

One file per operation, workspace/golden/<operation>.pt: plain tensors and numbers, so that reading one runs no code.
"""

import pickle
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autokernel import hardware, ops, state
from autokernel.errors import InputError
from autokernel.inputs import InputMaker

# bfloat16 is left out: these cases also run in Triton's interpreter, whose tl.dot is wrong in bfloat16.
DTYPES = ("float32", "float16")
SHAPES_PER_OPERATION = 2


@dataclass(frozen=True)
class GoldenCase:
    """One call on the CPU: `arguments` by name in the case's dtype, `expected` in float64."""

    shape: dict[str, Any]
    dtype: str
    arguments: dict[str, Any]
    expected: Tensor


def path(operation: str) -> Path:
    """Where the operation's file lies."""
    return state.WORKSPACE / "golden" / f"{operation}.pt"


def write(operation: str) -> list[GoldenCase]:
    """Compute the operation's cases, on its first small shapes in each dtype, and replace its file with them."""
    shapes = ops.get(operation).sweep_cpu[:SHAPES_PER_OPERATION]
    cases = [_compute(operation, shape, dtype) for shape in shapes for dtype in DTYPES]
    file = path(operation)
    file.parent.mkdir(parents=True, exist_ok=True)
    # Renamed when complete, so that a reader never sees half of a file.
    temporary = file.with_suffix(".tmp")
    torch.save([asdict(case) for case in cases], temporary)
    temporary.replace(file)
    return cases


def load(operation: str) -> list[GoldenCase] | None:
    """The operation's cases, None if prepare.py has not run; InputError for a damaged file."""
    file = path(operation)
    if not file.exists():
        return None
    try:
        return [GoldenCase(**case) for case in torch.load(file, map_location="cpu", weights_only=True)]
    # What torch.load raises for a file that is no archive, is cut short, or holds other things than tensors and numbers.
    except (pickle.UnpicklingError, RuntimeError, EOFError, TypeError, KeyError, ValueError):
        raise InputError(f"workspace/golden/{file.name} is damaged: run `{state.Machine.MADE_BY}` to make it again") from None


def _compute(name: str, shape: ops.Shape, dtype: str) -> GoldenCase:
    operation = ops.get(name)
    # A seed of its own for every case, the same on each run.
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {sorted(shape.items())} {dtype}".encode()))
    arguments = operation.inputs(shape, InputMaker(hardware.dtype(dtype), torch.device("cpu"), generator))
    exact = {key: value.double() if _is_floating(value) else value for key, value in arguments.items()}
    return GoldenCase(dict(shape), dtype, arguments, operation.reference(**exact))


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
