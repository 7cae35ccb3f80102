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
DRAWN = "drawn"  # their name
LONG_BYTES = {"cuda": 1 << 26, "cpu": 1 << 17}  # a case of a long reduction reads and writes at most this much in float16


@dataclass(frozen=True)
class Case:
    """One call to judge: the shape, and which values and layouts its tensors get; `name` says both."""

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
        return f"{self.name}, {hardware.dtype_name(self.dtype)}, {shape}"


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
    for name, shapes in (("standard", operation.sweep if on_gpu else operation.sweep_cpu), (DRAWN, drawn)):
        for shape in shapes:
            yield from (Case(name, shape, dtype) for dtype in dtypes)


def numerical_stability(operation: Operation, device: torch.device) -> Iterator[Case]:
    """Values at which a careless kernel overflows, underflows, cancels or gives NaN, and some whose exact answer is known.

    On small shapes and on a long reduction: large and small magnitudes, scales that differ by row, constant rows, ones (the
    answer is a closed form: 1 / N for softmax), -inf masks where models have them, and integers for what is linear in them.
    """
    long = long_reduction(operation, device)
    tried = [("large values", "large"), ("small values", "small"), ("mixed scales", "mixed"), ("constant rows", "constant")]
    tried += [("known answer", "ones")] + [("-inf mask", "masked")] * operation.masks
    for dtype in dtypes_checked(device):
        for shape in operation.sweep_cpu[:2]:
            yield from (Case(name, shape, dtype, values) for name, values in tried)
            if operation.exact_on_integers:
                yield Case("integers", shape, dtype, "integers", exact=True)
        yield Case("long reduction, mixed scales", long, dtype, "mixed")
        if operation.masks:
            yield Case("long reduction, -inf mask", long, dtype, "masked")


def long_reduction(operation: Operation, device: torch.device) -> Shape:
    """The standard shape with the longest dimension among those within LONG_BYTES."""

    def longest(shape: Shape) -> int:
        return max(size for size in shape.values() if isinstance(size, int))

    standard = operation.sweep if device.type == "cuda" else operation.sweep_cpu
    small = [shape for shape in standard if operation.bytes(shape, 2) <= LONG_BYTES[device.type]]
    return max(small or operation.sweep_cpu, key=longest)


def edge_cases(operation: Operation, device: torch.device) -> Iterator[Case]:
    """Odd, prime, one row, one column, empty; then layouts that are not contiguous or not aligned."""
    for dtype in dtypes_checked(device):
        for shape in operation.edges:
            yield Case("edge", shape, dtype)
        for layout in ("padded", "transposed", "offset"):
            yield Case(f"{layout} layout", operation.sweep_cpu[0], dtype, layout=layout)
