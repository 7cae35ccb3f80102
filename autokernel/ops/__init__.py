"""The operations: one file each, found by its name. Imports neither the judge nor the substitution.

A file `autokernel/ops/<name>.py` holds one `OPERATION = Operation(...)`; a function of that name in `reference.py` says what
it computes and `kernels/<name>.py` is its starter. There is no list to edit.
"""

import importlib
import pkgutil
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import fx

import reference
from autokernel.graph import Region
from autokernel.inputs import InputMaker

# The sizes and options that describe one call, e.g. {"M": 1024, "N": 50257, "K": 768, "bias": False}. JSON as it stands.
Shape = Mapping[str, Any]
Arguments = dict[str, Any]


@dataclass(frozen=True)
class Operation:
    """Everything that the stages need to know of one operation."""

    name: str
    # Arguments for `reference.<name>` and `kernel_fn`, by name and in the order of the signature.
    inputs: Callable[[Shape, InputMaker], Arguments]
    # The shape of a call, from its arguments (real or fake tensors): the inverse of `inputs`.
    describe: Callable[[Arguments], Shape]
    # Floating-point operations of one call.
    flops: Callable[[Shape], int]
    # Bytes that one call must move at least, each input read once and each output written once; (shape, bytes per element).
    bytes: Callable[[Shape, int], int]
    # Standard shapes on a GPU, tiny to LLM-sized; the first is the one that a plain benchmark times.
    sweep: Sequence[Shape]
    # The same on a CPU, where an interpreter runs the kernel: each well under a second.
    sweep_cpu: Sequence[Shape]
    # Odd, prime, one row, one column, empty where the operation allows. Small enough for every machine.
    edges: Sequence[Shape]
    # A shape drawn at random; `small` asks for one that the interpreter runs in well under a second.
    draw: Callable[[random.Random, bool], Shape]
    # The operation's places in a captured graph. Overlaps are allowed: the capture keeps the larger region.
    match: Callable[[fx.GraphModule], Sequence[Region]]
    # With small integers as inputs the exact answer, rounded once, is the only right one.
    exact_on_integers: bool = False
    # Every known algorithm rounds an intermediate (probabilities, hidden activations) to the dtype before a second product.
    rounds_inside: bool = False
    # Models hide some of its inputs with -inf; `inputs` then leaves what every row needs.
    masks: bool = False
    # Uses tl.dot, which the interpreter cannot do in bfloat16.
    uses_dot: bool = False

    @property
    def reference(self) -> Callable[..., Any]:
        """The function of `reference.py` of the same name."""
        return getattr(reference, self.name)


@cache
def names() -> tuple[str, ...]:
    """Names of all operations, in alphabetical order."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


@cache
def get(name: str) -> Operation:
    """The operation called `name`; KeyError if no file of that name is here."""
    if name not in names():
        raise KeyError(name)
    return importlib.import_module(f"{__name__}.{name}").OPERATION
