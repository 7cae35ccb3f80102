"""When is a kernel's answer right? One rule for every operation, dtype and gate. Do not edit."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# A kernel may be this much less accurate than PyTorch, in the largest error and in the root mean square.
LARGEST_FACTOR, RMS_FACTOR = 4.0, 2.0
# Below these multiples of the unit round-off u = eps / 2 the error is that of writing the answer down; float32 has no wider
# type to add in, so there the order of additions shows too, and may also double the error.
LARGEST_FLOOR, RMS_FLOOR = 8.0, 1.0
FLOAT32_FLOORS, FLOAT32_FACTORS = 16.0, 2.0
SAMPLE = 1 << 18  # elements of an answer in which the sensitivity check looks


@dataclass(frozen=True)
class Comparison:
    """Whether an answer is right; if not, one clause says by how much. `worst` is error / limit, right up to 1."""

    right: bool
    worst: float
    reason: str = ""


def compare(answer: Tensor, baseline: Tensor, oracle: Tensor, nudged: Callable[[], Tensor] | None = None) -> Comparison:
    """Compare a kernel's answer with the oracle, with a tolerance taken from what PyTorch itself achieves.

    `answer` and `baseline` (PyTorch's answer in the kernel's dtype) and `oracle` (float64, or float32 where float64 does not
    fit) have one shape. The error of an element is |answer - oracle| / (|oracle| + r), where r is the root mean square of
    the oracle's row (last dimension; of the whole, for a vector), so that neither a small element nor a small row is
    judged by the size of others. With e the errors of the answer, b those of the baseline and u = eps / 2 of the dtype:

        max(e) <= max(4 max(b), 8 u)    and    rms(e) <= max(2 rms(b), u)

    and in float32, where the order of additions counts, max(8 max(b), 128 u) and max(4 rms(b), 16 u), which is 1e-6: TF32 is
    off by 3e-4. So a kernel as accurate as PyTorch passes, one that is more accurate passes, and one that computes in a lower
    precision than it was given does not.

    Some inputs are ill-conditioned: a constant row has no variance, and what is left of it in any sum of float32 is rounding.
    `nudged` gives the oracle for the same inputs, each moved by one rounding (of float32, in which kernels compute): it is
    asked only when the answer would fail, and its errors then count as a second baseline.

    NaN and infinity must stand exactly where the oracle, rounded to the dtype, has them; elements at which PyTorch itself
    overflows or underflows to something else are left out.
    """
    if oracle.numel() == 0:
        return Comparison(True, 0.0)
    rounded = oracle.to(answer.dtype)
    counted = _same_specials(baseline, rounded)
    misplaced = counted & ~_same_specials(answer, rounded)
    if misplaced.any():
        wrong = answer[misplaced][0].item()
        right = rounded[misplaced][0].item()
        return Comparison(False, float("inf"), f"{int(misplaced.sum())} elements such as {wrong} where {right:.6g} is right")
    counted &= torch.isfinite(rounded)
    if not counted.any():
        return Comparison(True, 0.0)
    exact = torch.where(counted, oracle, 0)
    dims = (-1,) if oracle.dim() >= 2 else tuple(range(oracle.dim()))
    scale = exact.abs() + exact.square().mean(dim=dims, keepdim=True).sqrt()
    scale = torch.where(scale == 0, 1, scale)
    ours = _errors(answer, exact, scale, counted)
    theirs = _errors(baseline, exact, scale, counted)
    single = answer.dtype == torch.float32
    floor = torch.finfo(answer.dtype).eps / 2 * (FLOAT32_FLOORS if single else 1)
    factor = FLOAT32_FACTORS if single else 1
    limits = (
        max(factor * LARGEST_FACTOR * theirs[0], LARGEST_FLOOR * floor),
        max(factor * RMS_FACTOR * theirs[1], RMS_FLOOR * floor),
    )
    worst, reason = _against(ours, limits)
    if worst > 1 and nudged is not None:
        moved = _errors(nudged(), exact, scale, counted)
        worst, reason = _against(ours, (max(limits[0], LARGEST_FACTOR * moved[0]), max(limits[1], RMS_FACTOR * moved[1])))
    return Comparison(worst <= 1, worst, reason if worst > 1 else "")


def _against(errors: tuple[float, float], limits: tuple[float, float]) -> tuple[float, str]:
    worst, kind, error, limit = max(
        (error / limit, kind, error, limit)
        for kind, error, limit in zip(("largest", "root mean square"), errors, limits, strict=True)
    )
    return worst, f"{kind} relative error {error:.3g} against a limit of {limit:.3g}"


def compare_exactly(answer: Tensor, oracle: Tensor) -> Comparison:
    """For integer inputs to a linear operation: the exact answer, rounded once to the dtype, is the only right one."""
    rounded = oracle.to(answer.dtype)
    different = answer != rounded
    if not different.any():
        return Comparison(True, 0.0)
    wrong, right = answer[different][0].item(), rounded[different][0].item()
    return Comparison(False, float("inf"), f"{int(different.sum())} elements such as {wrong:g} where {right:g} is exact")


def says_something(baseline: Tensor, oracle: Tensor) -> bool:
    """Whether a wrong answer would be noticed: zeros, a constant and the answer's elements in another order must all fail.

    A case for which one of them is right (an output of zeros, of equal elements) proves nothing. Of a single number only
    zero is asked, of a large answer a sample of rows: what fails there fails as a whole.
    """
    baseline, oracle = _sample(baseline), _sample(oracle)
    fakes = [torch.zeros_like(oracle)]
    if oracle.numel() > 1:
        fakes += [oracle.mean().expand_as(oracle), oracle.flatten().roll(1).view_as(oracle)]
    return not any(compare(fake.to(baseline.dtype), baseline, oracle).right for fake in fakes)


def _sample(x: Tensor) -> Tensor:
    """At most about SAMPLE elements, in whole rows spread over the tensor."""
    if x.numel() <= SAMPLE:
        return x
    rows = x.reshape(-1, x.shape[-1]) if x.dim() >= 2 else x[:SAMPLE]
    return rows[:: max(1, x.numel() // SAMPLE)].contiguous() if x.dim() >= 2 else rows


def _same_specials(a: Tensor, b: Tensor) -> Tensor:
    finite = torch.isfinite(a) & torch.isfinite(b)
    return finite | (torch.isnan(a) & torch.isnan(b)) | (a == b)


def _errors(values: Tensor, exact: Tensor, scale: Tensor, counted: Tensor) -> tuple[float, float]:
    error = torch.where(counted, (values.to(exact.dtype) - exact).abs() / scale, 0)
    count = int(counted.sum())
    return float(error.max()), float((error.square().sum() / count).sqrt())
