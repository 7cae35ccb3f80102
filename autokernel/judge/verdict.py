"""From gates and clock to a verdict and the row of results.tsv. Do not edit."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import torch

from autokernel import hardware, results
from autokernel.judge import cases
from autokernel.judge.cases import Case
from autokernel.judge.clock import Timing, measure
from autokernel.judge.gates import GATES, GateResult, Gates
from autokernel.judge.precompile import compile_side_by_side
from autokernel.kernels import Kernel
from autokernel.results import Status
from autokernel.state import ROOT, Target

HARNESS = ("bench.py", "reference.py", "autokernel/judge", "autokernel/ops", "autokernel/inputs.py")


@dataclass(frozen=True)
class Figures:
    """What a timing says, against the ceilings of this GPU; percentages are None when the ceilings are unknown."""

    timing: Timing
    tflops: float
    gb_s: float
    pct_peak_compute: float | None
    pct_peak_bandwidth: float | None
    bottleneck: str  # "compute", "memory" or "unmeasured"

    @property
    def pct_peak(self) -> float | None:
        """The percentage of the ceiling that bounds the operation."""
        return self.pct_peak_compute if self.bottleneck == "compute" else self.pct_peak_bandwidth


@dataclass(frozen=True)
class Verdict:
    """How a kernel was judged. `status` is PASS only when all five gates were passed and nothing was wrong with the clock."""

    kernel: Kernel
    target: Target | None
    status: Status | None  # None: a quick run, which ends before the last gates
    reason: str
    gates: dict[str, GateResult]
    timed: Case
    figures: Figures | None  # None: unmeasured


def judge(
    kernel: Kernel,
    target: Target | None,
    targets: tuple[Target, ...],
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    quick: bool = False,
    progress: Callable[[str], None] = lambda message: None,
) -> Verdict:
    """Judge a kernel as an answer to `target` (or to the operation's standard shapes): gates, then the clock on a GPU.

    `targets` are the plan's calls of the same operation: they join the shape sweep. `dtype` is timed when there is no target.
    """
    timed = cases.timed_case(kernel.operation, target, dtype, device)
    if device.type == "cuda":
        progress(f"{kernel.path.name}: compiling")
        compile_side_by_side(kernel.path, seed)
    gates = Gates(kernel, targets, timed, device, seed, progress)
    last = gates.run(GATES[:2] if quick else GATES)
    status, reason = last.status, f"{last.name}: {last.reason}" if last.reason else ""
    figures = None
    if status is Status.PASS and device.type == "cuda":
        progress(f"{kernel.path.name}: timing")
        figures = time_kernel(kernel, timed, device)
        for what, percent in (("compute", figures.pct_peak_compute), ("bandwidth", figures.pct_peak_bandwidth)):
            if percent is not None and percent > 100:
                status = Status.INVALID
                reason = f"timing: {percent:.1f}% of peak {what} is above the ceiling: the measurement is at fault"
    if quick and status is Status.PASS:
        status = None
    return Verdict(kernel, target, status, reason, gates.results, timed, figures)


def time_kernel(kernel: Kernel, case: Case, device: torch.device) -> Figures:
    """Time one call on a GPU and relate it to the roofline."""
    operation = kernel.operation
    timing = measure(kernel.function, operation.reference, lambda seed: case.arguments(operation, device, seed), device)
    dtype = hardware.dtype_name(case.dtype)
    flops, moved = operation.flops(case.shape), operation.bytes(case.shape, case.dtype.itemsize)
    tflops = hardware.achieved_tflops(flops, timing.kernel_us)
    gb_s = hardware.achieved_gb_s(moved, timing.kernel_us)
    limits = hardware.limits()
    if limits is None:
        return Figures(timing, tflops, gb_s, None, None, "unmeasured")
    return Figures(
        timing,
        tflops,
        gb_s,
        hardware.percent(tflops, limits.peak_tflops[dtype]),
        hardware.percent(gb_s, limits.bandwidth_gb_s),
        limits.bound(flops, moved, dtype),
    )


def row_of(verdict: Verdict, description: str, tag: str) -> results.Row:
    """The row of results.tsv; `verdict.status` must not be None. The experiment's number is assigned when it is appended."""
    assert verdict.status is not None
    versions, figures = hardware.versions(), verdict.figures
    timing = figures.timing if figures else None
    return results.Row(
        experiment=0,
        tag=tag,
        kernel_type=verdict.kernel.operation.name,
        throughput_tflops=figures.tflops if figures else None,
        latency_us=timing.kernel_us if timing else None,
        pct_peak=figures.pct_peak if figures else None,
        speedup_vs_pytorch=timing.speedup if timing else None,
        correctness=verdict.status,
        peak_vram_mb=timing.peak_vram_mb if timing else None,
        description=description,
        target=verdict.target.name if verdict.target else "",
        dtype=hardware.dtype_name(verdict.timed.dtype),
        shape=dict(verdict.timed.shape),
        speedup_low=timing.low if timing else None,
        speedup_high=timing.high if timing else None,
        baseline_us=timing.baseline_us if timing else None,
        bottleneck=figures.bottleneck if figures else "unmeasured",
        reason=verdict.reason,
        kernel_sha256=verdict.kernel.sha256,
        harness_sha256=harness_sha256(),
        gpu=hardware.gpu_name(),
        torch=versions.torch,
        triton=versions.triton,
        time=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


def harness_sha256() -> str:
    """SHA-256 over the names and the text of everything that decides a verdict."""
    digest = hashlib.sha256()
    for name in HARNESS:
        path = ROOT / name
        files: list[Path] = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        for file in files:
            digest.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()
