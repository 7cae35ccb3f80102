"""What is tried: the named cases of each gate. Do not edit."""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from autokernel import hardware
from autokernel.inputs import InputMaker, Spec
from autokernel.ops import Arguments, Operation, Shape
from autokernel.state import Target

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
RANDOM_SHAPES = 3  # drawn afresh in every run


@dataclass(frozen=True)
class Case:
    """One call to judge: the shape, and which values and layouts its tensors get."""

    name: str
    shape: Shape
    dtype: torch.dtype
    values: str = "normal"
    layout: str = "contiguous"
    specs: Mapping[str, Spec] = field(default_factory=dict)  # exact tensors of a model's call
    exact: bool = False  # the rounded exact answer is the only right one

    def arguments(self, operation: Operation, device: torch.device, seed: int) -> Arguments:
        """Fresh arguments for `kernel_fn`; the same seed gives the same values."""
        generator = torch.Generator(device).manual_seed(seed)
        maker = InputMaker(self.dtype, device, generator, self.values, self.layout, self.specs)
        return operation.inputs(self.shape, maker)

    def __str__(self) -> str:
        shape = " ".join(f"{key}={value}" for key, value in self.shape.items())
        details = [f"{self.values} values"] * (self.values != "normal") + [self.layout] * (self.layout != "contiguous")
        return f"{self.name}, {hardware.dtype_name(self.dtype)}, {shape}" + "".join(f", {detail}" for detail in details)


def dtypes_checked(device: torch.device) -> tuple[torch.dtype, ...]:
    """All three on a GPU. Triton's interpreter truncates what it stores as bfloat16, so that is left out on a CPU."""
    return DTYPES if device.type == "cuda" else (torch.float16, torch.float32)


def target_case(target: Target) -> Case:
    """The call that a model makes: its shape, strides and dtypes."""
    specs = {name: Spec(s.shape, s.stride, hardware.dtype(s.dtype)) for name, s in target.tensors.items()}
    return Case(f"{target.name} as in the model", target.shape, hardware.dtype(target.dtype), specs=specs)


def timed_case(operation: Operation, target: Target | None, dtype: torch.dtype, device: torch.device) -> Case:
    """The call whose time is reported: the target's, or the first of the operation's sweep."""
    if target is not None:
        return target_case(target)
    sweep = operation.sweep if device.type == "cuda" else operation.sweep_cpu
    return Case("first of the sweep", sweep[0], dtype)


def shape_sweep(operation: Operation, targets: Sequence[Target], device: torch.device, seed: int) -> Iterator[Case]:
    """The standard shapes, the plan's own calls and some shapes drawn at random."""
    on_gpu = device.type == "cuda"
    rng = random.Random(seed)
    drawn = [operation.draw(rng, not on_gpu) for _ in range(RANDOM_SHAPES)]
    dtypes = dtypes_checked(device)
    for target in targets:
        case = target_case(target)
        if case.dtype in dtypes:
            yield case
        yield from (Case(f"shape of {target.name}", target.shape, dtype) for dtype in dtypes if dtype != case.dtype)
    for name, shapes in (("standard", operation.sweep if on_gpu else operation.sweep_cpu), ("drawn", drawn)):
        for shape in shapes:
            yield from (Case(name, shape, dtype) for dtype in dtypes)


def numerical_stability(operation: Operation, device: torch.device) -> Iterator[Case]:
    """Magnitudes at which a careless kernel overflows, underflows or cancels; integers whose exact answer is known."""
    for shape in operation.sweep_cpu[:2]:
        for dtype in dtypes_checked(device):
            for values in ("large", "small", "mixed", "constant"):
                yield Case("magnitudes", shape, dtype, values)
            if operation.exact_on_integers:
                yield Case("integers", shape, dtype, "integers", exact=True)


def edge_cases(operation: Operation, device: torch.device) -> Iterator[Case]:
    """Odd, prime, one row, one column, empty; then layouts that are not contiguous or not aligned."""
    for dtype in dtypes_checked(device):
        for shape in operation.edges:
            yield Case("edge", shape, dtype)
        for layout in ("padded", "transposed", "offset"):
            yield Case("layout", operation.sweep_cpu[0], dtype, layout=layout)
