"""From gates and clock to a verdict and the row of results.tsv. Do not edit."""

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

import torch

from autokernel import hardware, results
from autokernel.judge import cases, ncu, sanitize
from autokernel.judge.cases import Case
from autokernel.judge.clock import Timing
from autokernel.judge.gates import GATES, GateResult, Gates
from autokernel.judge.isolated import Judge, Worker
from autokernel.judge.process import WorkerFault
from autokernel.judge.timing import Bench
from autokernel.kernels import KernelFile
from autokernel.results import Status
from autokernel.state import ROOT, Target

HARNESS = ("bench.py", "reference.py", "autokernel/judge", "autokernel/ops", "autokernel/inputs.py", "autokernel/kernels.py")


@dataclass(frozen=True)
class Options:
    """What is asked of a judgement besides the five gates and the clock."""

    quick: bool = False  # end after the shape sweep, without a verdict
    allow_torch: bool = False  # operators of torch may do the work; written into the row
    sanitize: bool = False
    ncu: bool = False
    incumbent: KernelFile | None = None  # timed beside the candidate
    screen: bool = False  # time it briefly beside the incumbent first, and go on only if it looks faster
    all_dtypes: bool = False  # time the other dtypes too


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

    def above_ceiling(self) -> str:
        """Why these figures cannot be; "" if they can."""
        for what, percent in (("compute", self.pct_peak_compute), ("bandwidth", self.pct_peak_bandwidth)):
            if percent is not None and percent > 100:
                return f"{percent:.1f}% of peak {what} is above the ceiling: the measurement is at fault"
        return ""


@dataclass
class Verdict:
    """How a kernel was judged. `status` is PASS only when all five gates were passed and nothing was wrong with the clock."""

    kernel: KernelFile
    target: Target | None
    timed: Case
    gates: dict[str, GateResult]
    allow_torch: bool
    incumbent: KernelFile | None = None  # that was to be timed beside it
    status: Status | None = None  # None: a quick run, which ends before the last gates
    reason: str = ""
    figures: Figures | None = None  # None: unmeasured
    by_dtype: dict[str, Figures] = field(default_factory=dict)
    sanitizer: str = ""  # "" where it was not asked for
    counters: ncu.Counters | None = None
    isolation: str = results.UNMEASURED
    seconds: float = 0.0
    compile_s: float = 0.0  # of those, waited for compilers

    def refuse(self, status: Status, reason: str) -> None:
        """End with this status and reason."""
        self.status, self.reason = status, reason


def judge(
    session: Judge,
    kernel: KernelFile,
    target: Target | None,
    targets: tuple[Target, ...],
    dtype: torch.dtype,
    seed: int,
    options: Options,
    progress: Callable[[str], None] = lambda message: None,
) -> Verdict:
    """Judge a kernel as an answer to `target` (or to the operation's standard shapes): gates, then the clock on a GPU.

    `session` may judge many kernels, one after another; each gets a process of its own. `targets` are the plan's calls of the
    same operation: they join the shape sweep. `dtype` is timed when there is no target.
    """
    began, harness = time.perf_counter(), harness_sha256()
    timed = cases.timed_case(kernel.operation, target, dtype, session.device)
    results_of_gates = {name: GateResult(name) for name in GATES}
    verdict = Verdict(kernel, target, timed, results_of_gates, options.allow_torch, options.incumbent)
    verdict.sanitizer = "not run" if options.sanitize else ""
    verdict.counters = ncu.Counters("", {}, "not run") if options.ncu else None
    worker: Worker | None = None
    try:
        worker = session.worker(kernel, ahead=not options.screen)
        _judge(verdict, session, worker, targets, seed, options, progress)
    except WorkerFault as fault:  # while the file was imported, or timed; the gates keep their own
        verdict.refuse(fault.status, f"{'timing' if worker else 'import'}: {fault}")
    finally:
        if worker is not None:
            worker.close()
            verdict.compile_s = worker.compile_s
    verdict.isolation = session.isolation or results.UNMEASURED
    if harness_sha256() != harness:
        verdict.refuse(Status.INVALID, "the harness changed while the kernel was judged: restore it, and judge again")
    if options.quick and verdict.status is Status.PASS:
        verdict.status = None
    verdict.seconds = time.perf_counter() - began
    return verdict


def _judge(
    verdict: Verdict,
    session: Judge,
    worker: Worker,
    targets: tuple[Target, ...],
    seed: int,
    options: Options,
    progress: Callable[[str], None],
) -> None:
    kernel, device = verdict.kernel, session.device
    if options.screen and options.incumbent is not None and device.type == "cuda":
        progress(f"{kernel.path.name}: brief timing")
        _screen(verdict, session, worker, options)
        if verdict.status is Status.SCREENED:
            return
    gates = Gates(worker, kernel, targets, verdict.timed, device, seed, progress, options.allow_torch, verdict.gates)
    last = gates.run(GATES[:2] if options.quick else GATES)
    verdict.refuse(last.status or Status.INVALID, f"{last.name}: {last.reason}" if last.reason else "")
    if verdict.status is Status.PASS and device.type == "cuda":
        progress(f"{kernel.path.name}: timing")
        _time(verdict, session, worker, options)
    if verdict.status is not Status.PASS or options.quick:
        return
    if device.type != "cuda":
        verdict.sanitizer = f"{results.UNMEASURED} (there is no GPU)" if options.sanitize else ""
        verdict.counters = ncu.Counters("", {}, "there is no GPU") if options.ncu else None
        return
    if options.sanitize:
        progress(f"{kernel.path.name}: compute-sanitizer")
        verdict.sanitizer, at_fault = sanitize.sanitize(kernel.path, kernel.operation, device)
        if at_fault:
            verdict.refuse(Status.FAIL, f"compute-sanitizer: {verdict.sanitizer}")
    if options.ncu:
        progress(f"{kernel.path.name}: Nsight Compute")
        verdict.counters = ncu.measure(kernel.path, kernel.operation.name, verdict.timed)


def _screen(verdict: Verdict, session: Judge, worker: Worker, options: Options) -> None:
    """Refuse what a brief timing shows to be no faster than the incumbent; WorkerFault as `_time`."""
    kernel = verdict.kernel
    with Bench(session, worker, kernel.operation, options.allow_torch, options.incumbent, brief=True) as bench:
        timing = bench.time(verdict.timed)
    assert timing.incumbent is not None
    speedup = timing.incumbent.speedup
    if speedup.value <= 1:
        verdict.figures = figures_of(kernel, verdict.timed, timing)
        interval = f"{speedup.low:.3f} to {speedup.high:.3f}"
        verdict.refuse(Status.SCREENED, f"timed briefly, it is {speedup.value:.3f} ({interval}) times as fast as the incumbent")


def _time(verdict: Verdict, session: Judge, worker: Worker, options: Options) -> None:
    """Fill in the figures; WorkerFault where a timed call, or the clock, is at fault."""
    kernel = verdict.kernel
    timed = [verdict.timed]
    if options.all_dtypes:
        others = (cases.timed_case(kernel.operation, None, dtype, session.device) for dtype in cases.DTYPES)
        timed += [case for case in others if case.dtype != verdict.timed.dtype]
    with Bench(session, worker, kernel.operation, options.allow_torch, options.incumbent) as bench:
        measured = [(case, figures_of(kernel, case, bench.time(case))) for case in timed]
        verdict.figures = measured[0][1]
        verdict.by_dtype = {hardware.dtype_name(case.dtype): figures for case, figures in measured}
        worker.close()
        reasons = [*(figures.above_ceiling() for figures in verdict.by_dtype.values()), bench.slowed()]
    reason = next(filter(None, reasons), "")
    if reason:
        verdict.refuse(Status.INVALID, f"timing: {reason}")


def figures_of(kernel: KernelFile, case: Case, timing: Timing) -> Figures:
    """Relate the time of a call to the roofline of this GPU."""
    operation, us = kernel.operation, timing.latency.value
    dtype = hardware.dtype_name(case.dtype)
    flops, moved = operation.flops(case.shape), operation.bytes(case.shape, case.dtype.itemsize)
    tflops, gb_s = hardware.achieved_tflops(flops, us), hardware.achieved_gb_s(moved, us)
    limits = hardware.limits()
    if limits is None:
        return Figures(timing, tflops, gb_s, None, None, results.UNMEASURED)
    return Figures(
        timing,
        tflops,
        gb_s,
        hardware.percent(tflops, limits.peak(dtype)),
        hardware.percent(gb_s, limits.bandwidth_gb_s),
        limits.bound(flops, moved, dtype),
    )


def row_of(verdict: Verdict, description: str, tag: str, experiment: int = 0) -> results.Row:
    """The row of results.tsv; `verdict.status` must not be None. Without a number it is given one when it is appended."""
    assert verdict.status is not None
    versions, figures = hardware.versions(), verdict.figures
    timing = figures.timing if figures else None
    rival = timing.incumbent if timing else None
    return results.Row(
        experiment=experiment,
        tag=tag,
        kernel_type=verdict.kernel.operation.name,
        throughput_tflops=figures.tflops if figures else None,
        latency_us=timing.latency.value if timing else None,
        pct_peak=figures.pct_peak if figures else None,
        speedup_vs_pytorch=timing.baseline.speedup.value if timing else None,
        correctness=verdict.status,
        peak_vram_mb=timing.peak_vram_mb if timing else None,
        description=description,
        target=verdict.target.name if verdict.target else "",
        dtype=hardware.dtype_name(verdict.timed.dtype),
        shape=dict(verdict.timed.shape),
        speedup_low=timing.baseline.speedup.low if timing else None,
        speedup_high=timing.baseline.speedup.high if timing else None,
        baseline_us=timing.baseline.us if timing else None,
        bottleneck=figures.bottleneck if figures else results.UNMEASURED,
        reason=verdict.reason,
        kernel_sha256=verdict.kernel.sha256,
        harness_sha256=harness_sha256(),
        gpu=hardware.gpu_name(),
        torch=versions.torch,
        triton=versions.triton,
        time=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        latency_low_us=timing.latency.low if timing else None,
        latency_high_us=timing.latency.high if timing else None,
        graph_us=timing.graph_us if timing else None,
        launch_us=timing.launch_us if timing else None,
        allow_torch=verdict.allow_torch,
        isolation=verdict.isolation,
        seconds=verdict.seconds,
        incumbent_sha256=verdict.incumbent.sha256 if verdict.incumbent else "",
        speedup_vs_incumbent=rival.speedup.value if rival else None,
        incumbent_low=rival.speedup.low if rival else None,
        incumbent_high=rival.speedup.high if rival else None,
    )


def row_unread(text: bytes, target: Target, reason: str, description: str, tag: str, experiment: int) -> results.Row:
    """The row of a file that is no kernel for the target, which was therefore not run."""
    versions = hardware.versions()
    return results.Row(
        experiment=experiment,
        tag=tag,
        kernel_type=target.operation,
        correctness=Status.CRASH,
        description=description,
        target=target.name,
        dtype=target.dtype,
        shape=target.shape,
        reason=reason,
        kernel_sha256=hashlib.sha256(text).hexdigest(),
        harness_sha256=harness_sha256(),
        gpu=hardware.gpu_name(),
        torch=versions.torch,
        triton=versions.triton,
    )


def harness_sha256(names: Sequence[str] = HARNESS) -> str:
    """SHA-256 over the names and the text of everything that decides a verdict."""
    digest = hashlib.sha256()
    for name in names:
        path = ROOT / name
        files: list[Path] = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        for file in files:
            digest.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()
