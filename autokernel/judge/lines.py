"""A verdict as the `key: value` lines that bench.py prints: the same keys, in the same order, however it ended. Do not edit."""

from collections.abc import Iterator
from pathlib import Path

from autokernel import hardware
from autokernel.judge import cases
from autokernel.judge.clock import Estimate
from autokernel.judge.gates import GATES
from autokernel.judge.ncu import KEYS as NCU_KEYS
from autokernel.judge.verdict import Figures, Verdict
from autokernel.results import UNMEASURED, Status
from autokernel.state import ROOT, Target

# The lines of a timing, in this order; each is the word `unmeasured` without one.
FIGURES = """
    latency_us latency_interval clock_us graph_us launch_us pytorch_us throughput_tflops bandwidth_gb_s pct_peak_compute
    pct_peak_bandwidth bottleneck speedup_vs_pytorch speedup_interval timed_calls peak_vram_mb
""".split()

Line = tuple[str, str]


def lines_of(verdict: Verdict) -> list[Line]:
    """All lines of a verdict but the number of its row."""
    unchecked = [hardware.dtype_name(d) for d in cases.DTYPES if d not in cases.dtypes_checked(hardware.device())]
    lines = [
        ("kernel_type", verdict.kernel.operation.name),
        ("kernel", shown(verdict.kernel.path)),
        ("kernel_sha256", verdict.kernel.sha256),
        ("target", verdict.target.name if verdict.target else "none"),
        ("shape", shape_text(verdict)),
        ("dtype", hardware.dtype_name(verdict.timed.dtype)),
        ("gpu", hardware.gpu_name()),
        ("isolation", verdict.isolation),
        ("allow_torch", "yes" if verdict.allow_torch else "no"),
        ("not_checked", ", ".join(unchecked) + " (Triton's interpreter)" if unchecked else "nothing"),
        *((gate, str(verdict.gates[gate])) for gate in GATES),
    ]
    if verdict.sanitizer:
        lines.append(("sanitizer", verdict.sanitizer))
    lines.append(("correctness", verdict.status.value if verdict.status else "unfinished"))
    lines.append(("reason", verdict.reason or ("quick: the last gates were not run" if verdict.status is None else "none")))
    lines += _figures(verdict.figures)
    if verdict.counters is not None:
        lines.append(("ncu", verdict.counters.note or verdict.counters.kernel))
        lines += [(key, str(verdict.counters.figures.get(key, UNMEASURED))) for key in NCU_KEYS]
    lines.append(("seconds", f"{verdict.seconds:.1f}"))
    return lines


def log_of(verdict: Verdict) -> str:
    """The lines as one text."""
    return "".join(f"{key}: {value}\n" for key, value in lines_of(verdict))


def lines_unread(path: Path, target: Target | None, reason: str) -> list[Line]:
    """The same lines for a file that is no kernel."""
    return [
        ("kernel_type", "unknown"),
        ("kernel", shown(path)),
        ("target", target.name if target else "none"),
        *((gate, "not run") for gate in GATES),
        ("correctness", Status.CRASH.value),
        ("reason", reason),
        *_figures(None),
    ]


def shape_text(verdict: Verdict) -> str:
    """`M=4096 N=4096` of the call that was timed."""
    return " ".join(f"{key}={value}" for key, value in verdict.timed.shape.items())


def number(value: float | None, digits: int = 2) -> str:
    """A figure, or the word `unmeasured`."""
    return UNMEASURED if value is None else f"{value:.{digits}f}"


def shown(path: Path) -> str:
    """The path from the root of the project, if it lies there."""
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def _figures(figures: Figures | None) -> Iterator[Line]:
    if figures is None:
        yield from ((key, UNMEASURED) for key in FIGURES)
        return
    timing = figures.timing
    values = (
        number(timing.latency.value),
        _interval(timing.latency, 2),
        number(timing.clock_us),
        number(timing.graph_us) + (f" ({timing.note})" if timing.note else ""),
        number(timing.launch_us),
        number(timing.baseline.us),
        number(figures.tflops),
        number(figures.gb_s),
        number(figures.pct_peak_compute),
        number(figures.pct_peak_bandwidth),
        figures.bottleneck,
        number(timing.baseline.speedup.value, 3),
        _interval(timing.baseline.speedup, 3),
        str(timing.calls),
        number(timing.peak_vram_mb),
    )
    yield from zip(FIGURES, values, strict=True)
    incumbent = timing.incumbent
    if incumbent is not None:
        yield "incumbent_us", number(incumbent.us)
        yield "speedup_vs_incumbent", number(incumbent.speedup.value, 3)
        yield "speedup_vs_incumbent_interval", _interval(incumbent.speedup, 3)


def _interval(estimate: Estimate, digits: int) -> str:
    return f"{estimate.low:.{digits}f} to {estimate.high:.{digits}f}"
