"""Is the model with kernels still the same model: which kernel goes where, the exact output, the distance from it."""

import copy
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autokernel import cli, hardware, kernels, models, results, state
from autokernel.capture import Call, Capture, call_of
from autokernel.errors import InputError
from autokernel.graph import Region
from autokernel.kernels import Kernel
from autokernel.models import LoadedModel
from autokernel.pieces import Pieces
from autokernel.state import Plan, Target
from autokernel.substitute import SiteFault, Substitution

INPUTS = 3  # drawn afresh in each run

ERROR_FACTOR = 1.25
ERROR_FLOOR = 2.0**-20

NOT_JUDGED = "not judged"

# A model's positional and keyword arguments.
Inputs = tuple[tuple[Any, ...], dict[str, Any]]
Forward = Callable[..., Any]


@dataclass(frozen=True)
class Chosen:
    """A kernel and the places in the model that make its target's call."""

    target: Target
    kernel: Kernel
    verdict: str  # of its last row in results.tsv, or NOT_JUDGED
    regions: tuple[Region, ...]


@dataclass(frozen=True)
class Choice:
    """What is put into a model, and what is not."""

    chosen: tuple[Chosen, ...]
    left_out: dict[str, str]  # target -> why
    sites_found: int  # places that make the call of a target, whether a kernel is put there or not

    def kernels(self, without: str | None = None) -> dict[Region, Callable[..., Any]]:
        """Region -> kernel, for `substitute`; all, or all but those of one target."""
        return {r: c.kernel.function for c in self.chosen if c.target.name != without for r in c.regions}

    def targets(self) -> dict[Region, str]:
        """Region -> name of the target."""
        return {region: chosen.target.name for chosen in self.chosen for region in chosen.regions}


def choose(plan: Plan, captured: Capture | Pieces) -> Choice:
    """The plan's kernels for the regions of this capture that make the very calls of its targets.

    The file of a target is workspace/<name>.py, and kernel.py while it is the plan's current one. A kernel whose last
    verdict is not PASS is left out; one that was never judged is used. InputError for a file that cannot be loaded.
    """
    places: dict[Any, list[Region]] = {}
    for region in captured.regions:
        places.setdefault(call_of(region).key, []).append(region)
    chosen, left_out, found = [], {}, 0
    for target in plan.targets:
        call = Call(target.operation, target.shape, target.tensors, target.dtype)
        regions = tuple(places.pop(call.key, ()))
        found += len(regions)
        if not regions:
            left_out[target.name] = "this model makes no such call"
            continue
        kernel = kernels.load(kernels.KERNEL if plan.current == target.name else state.WORKSPACE / f"{target.name}.py")
        if kernel.operation.name != target.operation:
            raise InputError(
                f"{kernel.path.name} is a kernel for {kernel.operation.name}, but {target.name} is a {target.operation}: "
                "run `uv run orchestrate.py next`, or correct its KERNEL_TYPE"
            )
        row = results.last_for(kernel.sha256)
        verdict = str(row.correctness) if row is not None else NOT_JUDGED
        if verdict in (str(results.Status.PASS), NOT_JUDGED):
            chosen.append(Chosen(target, kernel, verdict, regions))
        else:
            left_out[target.name] = f"the last verdict on {kernel.path.name} is {verdict}"
    return Choice(tuple(chosen), left_out, found)


@contextmanager
def full_precision() -> Iterator[None]:
    """float32 means IEEE float32 inside: no TF32 in products and convolutions."""
    products, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = convolutions


def exact_dtype(dtype: torch.dtype) -> torch.dtype:
    """The precision in which a model of this dtype is computed to be compared with: float64 for float32, else float32."""
    return torch.float64 if dtype in (torch.float32, torch.float64) else torch.float32


def cast(values: Any, dtype: torch.dtype, device: torch.device | str | None = None) -> Any:
    """The same nested values with their floating-point tensors in `dtype`, all tensors on `device`."""

    def one(tensor: Tensor) -> Tensor:
        return tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)

    return pytree.tree_map_only(Tensor, one, values)


def exact_copy(model: nn.Module, dtype: torch.dtype, device: torch.device | str) -> nn.Module:
    """A copy of the model with the very same weights, in a higher precision; the model stays as it is."""
    # What is in the memo counts as copied already, so the weights are converted once and tied ones stay tied.
    memo: dict[int, Any] = {}
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        values = cast(tensor.detach(), dtype, device)
        values = values.clone() if values.data_ptr() == tensor.data_ptr() else values
        memo[id(tensor)] = nn.Parameter(values, requires_grad=False) if isinstance(tensor, nn.Parameter) else values
    return copy.deepcopy(model, memo)


def exact_outputs(loaded: LoadedModel, batches: Sequence[Inputs]) -> list[list[Tensor]]:
    """The model's output tensors for each of the inputs, computed in `exact_dtype`; they lie on the CPU.

    Where the copy does not fit on the GPU beside the model it is computed on the CPU.
    """
    home = torch.device(loaded.source.device)
    try:
        return _exact_outputs(loaded, batches, home)
    except torch.OutOfMemoryError:
        if home.type == "cpu":
            raise
    torch.cuda.empty_cache()  # outside the handler: the exception holds the frames that hold the copy
    cli.note("the exact copy of the model does not fit on the GPU: computing it on the CPU")
    return _exact_outputs(loaded, batches, torch.device("cpu"))


def _exact_outputs(loaded: LoadedModel, batches: Sequence[Inputs], device: torch.device) -> list[list[Tensor]]:
    dtype = exact_dtype(hardware.dtype(loaded.source.dtype))
    exact = exact_copy(loaded.model, dtype, device)
    outputs = []
    with torch.no_grad(), full_precision():
        for batch in batches:
            args, kwargs = cast(batch, dtype, device)
            outputs.append([tensor.cpu() for tensor in models.output_tensors(exact(*args, **kwargs))])
    return outputs


def relative_error(values: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """||value - exact|| / ||exact||, the largest over the tensors.

    Infinite for another shape, and for NaN or infinity where the exact value is finite; other elements are left out.
    """
    return max((_relative_error(value, right) for value, right in zip(values, exact, strict=True)), default=0.0)


def _relative_error(value: Tensor, exact: Tensor) -> float:
    if value.shape != exact.shape:
        return math.inf
    exact = exact.to(value.device)
    counted = torch.isfinite(exact)
    difference = torch.where(counted, value.to(exact.dtype) - exact, 0)
    error = float(torch.linalg.vector_norm(difference, dtype=torch.float64))
    size = float(torch.linalg.vector_norm(torch.where(counted, exact, 0), dtype=torch.float64))
    if not math.isfinite(error):
        return math.inf
    if size == 0:
        return 0.0 if error == 0 else math.inf
    return error / size


def agreement(values: Sequence[Tensor], exact: Sequence[Tensor]) -> float | None:
    """How often the largest element of the last dimension is the same one, in the first output with rows; None without one."""
    for value, right in zip(values, exact, strict=True):
        if value.dim() >= 2 and value.shape[-1] > 1 and value.shape == right.shape and value.numel():
            return float((value.argmax(-1) == right.to(value.device).argmax(-1)).double().mean())
    return None


@dataclass(frozen=True)
class Accuracy:
    """How far the model with kernels, and the one without, are from the exact output.

    An error is the `relative_error` of a forward pass, the worst over several random inputs. The model with kernels is correct
    when its error is at most 1.25 times the error of the unmodified model, plus 2^-20, and it has no NaN or infinity
    where the exact output is finite. Both errors come from as many roundings to the same dtype, in another order, so over
    the many elements of an output they have the same size: a quarter more covers the chance in that, while a kernel that
    drops a factor, a mask or a bit of precision is beyond it. 2^-20 is eight roundings of float32, for models that happen to
    be exact. `fault` says what is wrong whatever the error: a kernel failed in its place, was not called or wrote into a
    weight, or there is none.
    """

    error: float
    error_without: float
    agreement: float | None  # of the largest element in each row with that of the exact output
    agreement_without: float | None
    worst: int  # which of the inputs has the largest error
    fault: str = ""

    @property
    def limit(self) -> float:
        """The largest error that is still correct."""
        return ERROR_FACTOR * self.error_without + ERROR_FLOOR

    @property
    def correct(self) -> bool:
        """Whether the kernels keep the model's accuracy."""
        return not self.fault and math.isfinite(self.error) and self.error <= self.limit

    @property
    def reason(self) -> str:
        """Why it is not correct, in one clause; "" when it is."""
        if self.correct or self.fault:
            return self.fault
        if math.isinf(self.error):
            also = ", and so has the unmodified model" if math.isinf(self.error_without) else ""
            return f"the output has NaN, infinity or another shape where the exact output is finite{also}"
        return f"the error {self.error:.3g} is above the limit {self.limit:.3g}"


def check(model: nn.Module, substitution: Substitution, batches: Sequence[Inputs], exact: Sequence[list[Tensor]]) -> Accuracy:
    """Run both models on the same inputs; each site must be called once in each forward pass, and no weight be written.

    `exact` holds the output tensors of `exact_outputs` for each of `batches`. Afterwards the sites hold the counts of
    the last pass.
    """
    fault, worst = "", 0
    error, same = math.inf, None
    with torch.no_grad():
        theirs = [distance(model, batch, right) for batch, right in zip(batches, exact, strict=True)]
        before = fingerprint(model)
        ours = []
        try:
            for batch, right in zip(batches, exact, strict=True):
                substitution.reset_counts()
                ours.append(distance(substitution.module, batch, right))
                substitution.check_called()
        except SiteFault as site_fault:
            fault = str(site_fault)
        else:
            worst = max(range(len(ours)), key=lambda index: ours[index][0])
            error, same = ours[worst][0], _least(agreement for _, agreement in ours)
            if not substitution.sites:
                fault = "no kernel was put into the model"
            elif fingerprint(model) != before:
                fault = "a kernel wrote into a parameter or buffer of the model: it may only write its own result"
    return Accuracy(
        error=error,
        error_without=max(error for error, _ in theirs),
        agreement=same,
        agreement_without=_least(agreement for _, agreement in theirs),
        worst=worst,
        fault=fault,
    )


def distance(forward: Forward, batch: Inputs, exact: list[Tensor]) -> tuple[float, float | None]:
    """Relative error and agreement of one forward pass."""
    args, kwargs = batch
    values = models.output_tensors(forward(*args, **kwargs))
    return relative_error(values, exact), agreement(values, exact)


def _least(values: Iterable[float | None]) -> float | None:
    return min((value for value in values if value is not None), default=None)


def fingerprint(model: nn.Module) -> list[int]:
    """A checksum of the bytes of each parameter and buffer, to see whether a kernel wrote into one."""
    tensors = itertools.chain(model.parameters(), model.buffers())
    return [int(tensor.detach().contiguous().flatten().view(torch.uint8).sum(dtype=torch.int64)) for tensor in tensors]


def finite(error: float) -> float:
    """The error as a file can hold it: JSON has no infinity."""
    return error if math.isfinite(error) else sys.float_info.max
