"""What a night of experiments tried, as a section of the report. Reads what it is given; measures nothing."""

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from autokernel.experiments import Experiment, Outcome
from autokernel.report import figure, table
from autokernel.results import Status

DIFF_LINES = 120  # of one kept change; the rest is in its folder

# Outcomes from which something was learnt about speed; all others are wasted.
_USEFUL = (Outcome.STARTED, Outcome.KEPT)


def section(lines: Mapping[str, str], experiments: Sequence[Experiment], diff_of: Callable[[Experiment], str]) -> str:
    """The night in Markdown: its `key: value` lines, kept changes with their diffs, wasted experiments by reason."""
    if not experiments:
        return ""
    kept = [experiment for experiment in experiments if experiment.outcome is Outcome.KEPT]
    parts = ["## Experiments"]
    if lines:
        parts.append("\n".join(f"- {key}: {escaped(value)}" for key, value in lines.items()))
    parts += ["### Kept changes", _kept(kept) if kept else "None."]
    parts += [_diff(experiment, diff_of(experiment)) for experiment in kept]
    parts += ["### Wasted experiments", _wasted(experiments)]
    return "\n\n".join(parts)


def escaped(text: str) -> str:
    """Somebody's words as Markdown that shows them as they are, in one line."""
    return re.sub(r"([\\`*_{}\[\]<>()#+!|~&])", r"\\\1", " ".join(text.split()))


def reason_of(experiment: Experiment) -> str:
    """Why an experiment gained nothing, in few words."""
    if experiment.outcome is not Outcome.REVERTED:
        return str(experiment.outcome)
    verdicts = {Status.PASS: "correct, but not shown to be faster", Status.SCREENED: "no faster in a brief timing"}
    return verdicts.get(experiment.verdict or Status.FAIL, str(experiment.verdict))


def _kept(kept: Sequence[Experiment]) -> str:
    header = ("experiment", "target", "change", "over the version before", "over PyTorch", "us", "commit")
    rows = (
        (
            experiment.number,
            experiment.target,
            escaped(experiment.description),
            figure(experiment.speedup_vs_incumbent, ".3f", "x"),
            figure(experiment.speedup_vs_pytorch, ".3f", "x"),
            figure(experiment.latency_us, ".2f"),
            experiment.commit[:12] or "none",
        )
        for experiment in kept
    )
    return table(header, rows)


def _diff(experiment: Experiment, diff: str) -> str:
    lines = diff.splitlines()
    shown = lines[:DIFF_LINES]
    if len(lines) > DIFF_LINES:
        shown.append(f"... {len(lines) - DIFF_LINES} more lines in workspace/experiments/{experiment.number}/change.diff")
    ticks = max((len(run) for line in shown for run in re.findall("`+", line)), default=0)
    fence = "`" * max(ticks + 1, 3)
    title = f"**Experiment {experiment.number}, {experiment.target}**: {escaped(experiment.description)}"
    return "\n".join((title, "", f"{fence}diff", *shown, fence))


def _wasted(experiments: Sequence[Experiment]) -> str:
    groups: dict[str, list[Experiment]] = defaultdict(list)
    for experiment in experiments:
        if experiment.outcome not in _USEFUL:
            groups[reason_of(experiment)].append(experiment)
    if not groups:
        return "None."
    rows = (
        (
            reason,
            len(group),
            f"{len(group) / len(experiments):.0%}",
            f"{sum(e.agent_s + e.judge_s for e in group):.0f}",
            escaped(group[-1].reason)[:160],
        )
        for reason, group in sorted(groups.items(), key=lambda item: -len(item[1]))
    )
    return table(("reason", "experiments", "of all", "seconds", "the last one"), rows)
