"""What was found, in Markdown and in one picture. Reads the state that it is given; measures nothing."""

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from autokernel import scheduler
from autokernel.results import UNMEASURED
from autokernel.scheduler import Candidate
from autokernel.state import Machine, ModelSource, Plan, Profile, Verification

PLOT = "report.png"


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table, its columns padded so that it also reads as plain text."""
    cells = [[str(cell).replace("|", "\\|") for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def figure(value: float | None, form: str = ".1f", unit: str = "") -> str:
    """A number in this format with its unit, or the word `unmeasured`."""
    return UNMEASURED if value is None else f"{value:{form}}{unit}"


def shape_text(shape: Mapping[str, Any]) -> str:
    """`M=1024 N=768 K=3072 bias=True` of a shape."""
    return " ".join(f"{name}={value}" for name, value in shape.items())


def sites_text(sites: Sequence[str], most: int = 2) -> str:
    """The first sites by name, and how many more there are."""
    rest = len(sites) - most
    return ", ".join(sites[:most]) + (f" and {rest} more" if rest > 0 else "")


def source_text(source: ModelSource) -> str:
    """The model as its user would name it."""
    where = source.model or source.module or ""
    weights = source.pretrained or source.config_json
    arguments = " ".join(f"{name}={value}" for name, value in source.model_args.items())
    parts = [f"{source.class_name} of {where}", weights, arguments, f"input {'x'.join(map(str, source.input_shape))}"]
    return ", ".join(part for part in (*parts, source.dtype, source.device) if part)


def markdown(
    machine: Machine | None,
    profile: Profile | None,
    plan: Plan | None,
    candidates: Sequence[Candidate],
    verification: Verification | None,
    night: str = "",
) -> str:
    """The whole report. What is missing (None) is said in one line, with the command that makes it; `night` is a section."""
    sections = [
        "# AutoKernel report",
        _machine(machine),
        _profile(profile),
        _targets(profile, plan, candidates),
        _verification(plan, verification),
        night,
    ]
    return "\n\n".join(filter(None, sections)) + "\n"


def plot(path: Path, profile: Profile, candidates: Sequence[Candidate]) -> None:
    """Draw where the model's time goes and, where any was measured, the speed-up of each target's best kernel."""
    import matplotlib  # here, because the other commands need not wait for it

    matplotlib.use("Agg")  # no display is needed to write a file
    from matplotlib import pyplot

    measured = [candidate for candidate in candidates if candidate.best_speedup is not None]
    figure_, panels = pyplot.subplots(1, 2 if measured else 1, figsize=(12 if measured else 7, 4.5), squeeze=False)
    shares = _shares(profile)
    panel = panels[0][0]
    panel.barh([name for name, _ in shares], [100 * share for _, share in shares], color="tab:blue")
    panel.invert_yaxis()
    panel.set_xlabel(f"% of the time of one forward pass ({profile.clock})")
    panel.set_title(textwrap.fill(source_text(profile.source), 80), fontsize=9)
    if measured:
        panel = panels[0][1]
        panel.barh([c.target.name for c in measured], [c.best_speedup for c in measured], color="tab:green")
        panel.invert_yaxis()
        panel.axvline(1.0, color="black", linewidth=1)
        panel.set_xlabel("speed-up over PyTorch, best kernel that passed, in isolation")
    figure_.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure_.savefig(path, dpi=120)
    pyplot.close(figure_)


def _shares(profile: Profile) -> list[tuple[str, float]]:
    # by operation, largest first; everything unmatched together
    shares: dict[str, float] = {}
    for row in profile.rows:
        shares[row.operation] = shares.get(row.operation, 0.0) + row.share
    unmatched = sum(row.share for row in profile.unmatched)
    if unmatched:
        shares["unmatched"] = unmatched
    return sorted(shares.items(), key=lambda item: -item[1])


def _machine(machine: Machine | None) -> str:
    if machine is None:
        return f"Machine: not measured yet: run `{Machine.MADE_BY}`."
    versions = machine.versions
    software = f"Python {versions.python}, torch {versions.torch}, triton {versions.triton}"
    if versions.cuda:
        software += f", CUDA {versions.cuda}, driver {versions.driver}"
    lines = [f"Machine: {machine.name} ({machine.device}), {machine.memory_gb:.0f} GB; {software}."]
    if machine.ceilings is None:
        lines.append("Its ceilings are unmeasured: no GPU.")
    else:
        tflops = ", ".join(f"{dtype} {value:.0f} TFLOP/s" for dtype, value in machine.ceilings.matmul_tflops.items())
        lines.append(f"Measured ceilings: copy {machine.ceilings.copy_gb_s:.0f} GB/s; matrix products {tflops}.")
    return _list(lines)


def _profile(profile: Profile | None) -> str:
    title = "## Where the time goes"
    if profile is None:
        return f"{title}\n\nNot profiled yet: run `{Profile.MADE_BY}`."
    lines = [
        f"Model: {source_text(profile.source)}; {profile.parameters / 1e6:.1f} M parameters.",
        f"One forward pass: {profile.total_us / 1e3:.3f} ms ({profile.clock}), {profile.wall_us / 1e3:.3f} ms on the wall.",
    ]
    if not profile.captured:
        lines.append(f"The model could not be captured ({profile.not_captured_because}): no sites, no targets.")
    elif profile.not_captured_because:
        lines.append(f"The model is captured in {profile.graphs} pieces, not in one ({profile.not_captured_because}).")
    rows: list[Sequence[Any]] = [
        (
            row.operation,
            shape_text(row.shape),
            row.dtype,
            row.count,
            sites_text(row.sites),
            f"{row.time_us:.1f}",
            f"{row.share:.1%}",
            row.bound,
            figure(row.pct_roofline),
            figure(row.saved_us),
        )
        for row in profile.rows
    ]
    for other in profile.unmatched:
        rows.append(
            (
                "unmatched",
                other.operator,
                "",
                other.count,
                sites_text(other.sites),
                f"{other.time_us:.1f}",
                f"{other.share:.1%}",
                "",
                "",
                "",
            )
        )
    header = ("operation", "shape", "dtype", "calls", "sites", "us", "share", "bound by", "% of roofline", "us saved at it")
    return "\n\n".join((title, _list(lines), table(header, rows)))


def _targets(profile: Profile | None, plan: Plan | None, candidates: Sequence[Candidate]) -> str:
    title = "## Targets"
    if plan is None:
        return f"{title}\n\nNo targets yet: run `{Plan.MADE_BY}`."
    lines = []
    if profile is not None and profile.source != plan.source:
        lines.append(f"The plan is of another model ({source_text(plan.source)}): run `{Plan.MADE_BY}` again.")
    ceiling = scheduler.bound(plan)
    lines.append(f"Amdahl bound if every target reached its roofline: {figure(ceiling, '.2f', 'x (estimate)')}.")
    so_far = scheduler.with_best_kernels(plan, candidates)
    lines.append(f"With the best kernels so far, isolated figures at their word: {figure(so_far, '.2f', 'x (estimate)')}.")
    parts = [title, _list(lines), target_table(candidates)]
    faults = [f"{c.target.name}: its last experiment did not pass: {c.fault}" for c in candidates if c.fault]
    if faults:
        parts.append(_list(faults))
    return "\n\n".join(parts)


def target_table(candidates: Sequence[Candidate]) -> str:
    """The targets in the order in which they are worth working on."""
    header = ("target", "shape", "dtype", "share", "verdict", "speed-up", "experiments", "us now", "us to gain")
    rows = (
        (
            candidate.target.name,
            shape_text(candidate.target.shape),
            candidate.target.dtype,
            f"{candidate.target.share:.1%}",
            candidate.verdict,
            figure(candidate.best_speedup, ".2f", "x"),
            candidate.experiments,
            f"{candidate.current_us:.1f}",
            figure(candidate.gain_us),
        )
        for candidate in candidates
    )
    return table(header, rows)


def _verification(plan: Plan | None, v: Verification | None) -> str:
    title = "## End to end"
    if v is None:
        return f"{title}\n\nNot verified yet: run `{Verification.MADE_BY}`."
    lines = []
    if plan is not None and plan.source != v.source:
        lines.append(f"This is of another model ({source_text(v.source)}): run `{Verification.MADE_BY}` again.")
    error, plain, limit = (f"{value:.3g}" for value in (v.error, v.error_without, v.error_limit))
    lines += [
        f"Verification: {verdict(v)}. Relative error against {v.exact_dtype}: {error} with the kernels, {plain} without, "
        f"limit {limit}.",
        f"Sites replaced: {v.sites_replaced} of {v.sites_found}.",
        f"Speed-up end to end, the fastest way with kernels over the fastest without: {speedup_text(v)}.",
    ]
    parts = [title, _list(lines)]
    if v.replacements:
        rows = [(r.target, r.verdict, len(r.sites), sum(r.calls), sites_text(r.sites)) for r in v.replacements]
        parts.append(table(("kernel", "verdict", "sites", "calls", "where"), rows))
    if v.ways:
        ways = ((w.name, figure(w.ms, ".3f"), ", ".join(w.kernels), w.note) for w in v.ways)
        parts.append(table(("forward pass", "ms", "with the kernels", "why not"), ways))
    dropped = [(way.name, name, why) for way in v.ways for name, why in way.dropped.items()]
    if dropped:
        parts.append(table(("forward pass", "kernel not used", "why"), dropped))
    if v.left_out:
        parts.append(table(("left out", "why"), v.left_out.items()))
    return "\n\n".join(parts)


def verdict(verification: Verification) -> str:
    """PASS or FAIL."""
    return "PASS" if verification.correct else "FAIL"


def speedup_text(verification: Verification) -> str:
    """`1.08x (1.05 to 1.11)`, `none (no kernel makes the model faster)`, or `unmeasured`."""
    if verification.speedup is None:
        return "none (no kernel makes the model faster)" if verification.ways and not verification.ours else UNMEASURED
    interval = f" ({figure(verification.speedup_low, '.2f')} to {figure(verification.speedup_high, '.2f')})"
    return f"{verification.speedup:.2f}x{interval}"


def _list(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)
