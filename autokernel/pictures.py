"""The pictures of a night: progress of each kernel, before and after on the roofline, where the model's time went.

Each function draws one figure and returns it as PNG bytes. Nothing is measured here; what is unmeasured is not drawn.
"""

import io
import math
from collections.abc import Sequence
from typing import Any

from autokernel import hardware, ops
from autokernel.experiments import Experiment, Outcome
from autokernel.hardware import Limits
from autokernel.results import Status
from autokernel.scheduler import Candidate
from autokernel.state import Plan

COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown", "tab:pink", "tab:olive", "tab:cyan")
DPI = 120


def progress(experiments: Sequence[Experiment]) -> bytes | None:
    """Speed-up over PyTorch of every experiment, a panel for each target, with the kept frontier; None: nothing was timed."""
    targets = list(dict.fromkeys(e.target for e in experiments if e.speedup_vs_pytorch is not None))
    if not targets:
        return None
    figure, panels = _figure(len(targets))
    for target, panel in zip(targets, panels, strict=False):
        mine = [e for e in experiments if e.target == target]
        timed = [e for e in mine if e.speedup_vs_pytorch is not None]
        fast = [e for e in timed if e.verdict is Status.PASS]
        brief = [e for e in timed if e.verdict is Status.SCREENED]
        failed = [e for e in mine if e.speedup_vs_pytorch is None]
        floor = min(e.speedup_vs_pytorch or 1.0 for e in timed) * 0.95
        for group, colour, marker, label in (
            (brief, "lightgray", "o", "no faster in a brief timing"),
            (fast, "gray", "o", "passed"),
        ):
            panel.plot(
                [e.number for e in group], [e.speedup_vs_pytorch for e in group], marker, color=colour, ms=4, label=label
            )
        panel.plot(
            [e.number for e in failed], [floor] * len(failed), "x", color="tab:red", ms=4, label="not judged, or did not pass"
        )
        frontier = [e for e in timed if e.outcome in (Outcome.STARTED, Outcome.KEPT)]
        steps = [*frontier, frontier[-1]] if frontier else []
        numbers = [e.number for e in frontier] + [mine[-1].number] if frontier else []
        panel.step(numbers, [e.speedup_vs_pytorch for e in steps], where="post", color="tab:green", label="kept")
        panel.axhline(1.0, color="black", linewidth=0.8)
        panel.set_title(target, fontsize=9)
        panel.set_xlabel("experiment")
        panel.set_ylabel("speed-up over PyTorch")
    panels[0].legend(fontsize=7)
    return _png(figure)


def roofline(candidates: Sequence[Candidate], limits: Limits | None) -> bytes | None:
    """Each target before (PyTorch) and after (its best kernel), on the roofline; None without a GPU."""
    if limits is None or not candidates:
        return None
    figure, (panel,) = _figure(1, width=8.0, height=5.0)
    dtypes = sorted({candidate.target.dtype for candidate in candidates})
    intensities: list[float] = []
    for candidate, colour in zip(candidates, _colours(len(candidates)), strict=True):
        target = candidate.target
        operation = ops.get(target.operation)
        flops = operation.flops(target.shape)
        intensity = flops / operation.bytes(target.shape, hardware.dtype(target.dtype).itemsize)
        intensities.append(intensity)
        before, after = (hardware.achieved_tflops(flops, us / target.count) for us in (target.time_us, candidate.current_us))
        panel.plot([intensity, intensity], [before, after], color=colour, linewidth=1)
        panel.plot([intensity], [before], "o", markerfacecolor="white", color=colour)
        panel.plot([intensity], [after], "o", color=colour, label=target.name)
    low, high = min(intensities) / 4, max(*intensities, limits.ridge(dtypes[0])) * 4
    for dtype in dtypes:
        ridge = limits.ridge(dtype)
        xs = [low, ridge, max(high, ridge)]
        panel.plot(xs, [min(x * limits.bandwidth_gb_s / 1e3, limits.peak(dtype)) for x in xs], color="black", linewidth=1)
        panel.annotate(f"{dtype}, {limits.origin}", (ridge, limits.peak(dtype)), fontsize=7, va="bottom")
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_xlabel("FLOP per byte")
    panel.set_ylabel("TFLOP/s (hollow: PyTorch in the model, full: best kernel)")
    panel.legend(fontsize=7)
    return _png(figure)


def time_split(plan: Plan, candidates: Sequence[Candidate]) -> bytes | None:
    """The time of one forward pass by target, before and with the best kernels; None when no kernel was timed."""
    if all(candidate.best_speedup is None for candidate in candidates):
        return None
    figure, (panel,) = _figure(1, width=8.0, height=3.2)
    rest = max(plan.total_us - sum(candidate.target.time_us for candidate in candidates), 0.0)
    left = [0.0, 0.0]
    parts = [(c.target.name, c.target.time_us, c.current_us) for c in candidates]
    for (name, before, after), colour in zip(
        [*parts, ("everything else", rest, rest)], [*_colours(len(parts)), "lightgray"], strict=True
    ):
        panel.barh(["before", "after"], [before, after], left=left, color=colour, label=name)
        left = [left[0] + before, left[1] + after]
    panel.invert_yaxis()
    panel.set_xlabel("us of one forward pass (after: isolated figures at their word)")
    panel.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.25), ncol=3)
    return _png(figure)


def _colours(count: int) -> list[str]:
    return [COLOURS[number % len(COLOURS)] for number in range(count)]


def _figure(count: int, width: float = 5.0, height: float = 3.5) -> tuple[Any, list[Any]]:
    import matplotlib  # here, because the other commands need not wait for it

    matplotlib.use("Agg")  # no display is needed to write a file
    from matplotlib import pyplot

    columns = min(count, 3)
    rows = math.ceil(count / columns)
    figure, panels = pyplot.subplots(rows, columns, figsize=(width * columns, height * rows), squeeze=False)
    flat = list(panels.flat)
    for panel in flat[count:]:
        panel.set_axis_off()
    return figure, flat


def _png(figure: Any) -> bytes:
    from matplotlib import pyplot

    figure.tight_layout()
    written = io.BytesIO()
    figure.savefig(written, format="png", dpi=DPI, bbox_inches="tight")
    pyplot.close(figure)
    return written.getvalue()
