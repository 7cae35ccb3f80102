"""A few figures of Nsight Compute that tell what to do next; they take no part in the verdict. Do not edit."""

import csv
import re
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from autokernel.judge.cases import Case
from autokernel.judge.watched import Unwatched, watch
from autokernel.results import UNMEASURED

TIMEOUT_S = 120.0
# Whole sections, as each GPU has its own metrics: one that a GPU lacks is left out, where a metric by name is an error.
SECTIONS = ("SpeedOfLight", "ComputeWorkloadAnalysis", "Occupancy", "WarpStateStats")
DURATION = r"gpu__time_duration\.sum"
PERCENTAGES = {
    "ncu_dram_pct": r"(gpu__dram|dram)__?throughput\.avg\.pct_of_peak_sustained_elapsed",
    "ncu_tensor_pct": r"sm__(inst_executed_pipe|pipe)_tensor\w*\.avg\.pct_of_peak_sustained_(active|elapsed)",
    "ncu_occupancy_pct": r"sm__warps_active\.avg\.pct_of_peak_sustained_active",
}
STALL = re.compile(r"smsp__average_warps?_\w*issue_stalled_(\w+?)(_not_issued)?_per_(issue_active|warp_active)\.(ratio|pct)")
KEYS = (*PERCENTAGES, "ncu_top_stall")


@dataclass(frozen=True)
class Counters:
    """The kernel that took longest in one call, and its figures, ready to print. `note` says why there are none."""

    kernel: str
    figures: Mapping[str, str]
    note: str = ""


def measure(path: Path, operation: str, case: Case) -> Counters:
    """Profile one call of the kernel with the clocks as they are."""
    with tempfile.TemporaryDirectory(prefix="autokernel-ncu-") as folder:
        log = Path(folder) / "log.csv"
        options = ["--clock-control", "none", "--profile-from-start", "off", "--target-processes", "all"]
        options += ["--csv", "--page", "raw", "--print-units", "base", "--log-file", str(log)]
        options += [word for section in SECTIONS for word in ("--section", section)]
        try:
            printed = watch(("ncu", *options), path, operation, [case], Path(folder), TIMEOUT_S)
        except Unwatched as fault:
            return Counters("", {}, str(fault))
        text = log.read_text(errors="replace") if log.exists() else ""
        if "ERR_NVGPUCTRPERM" in text + printed:
            return Counters("", {}, "this user may not read the GPU's performance counters (ERR_NVGPUCTRPERM)")
        return parse(text)


def parse(text: str) -> Counters:
    """The figures of the longest kernel in what ncu printed: a header, a line of units, then one line for each kernel."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    rows = list(csv.DictReader(lines))
    launched = [row for row in rows if _number(_first(row, DURATION)) is not None]
    if not launched:
        reason = next((line for line in text.splitlines() if line.startswith("==ERROR==")), "ncu saw no kernel")
        return Counters("", {}, reason.removeprefix("==ERROR==").strip())
    longest = max(launched, key=lambda row: _number(_first(row, DURATION)) or 0.0)
    figures = {}
    for key, pattern in PERCENTAGES.items():
        values = [value for value in map(_number, _matching(longest, pattern)) if value is not None]
        figures[key] = f"{max(values):.1f}" if values else UNMEASURED
    return Counters(longest.get("Kernel Name") or "", figures | {"ncu_top_stall": _top_stall(longest)})


def _top_stall(row: Mapping[str, str]) -> str:
    stalls: dict[str, float] = {}
    for name, text in row.items():
        found, value = STALL.fullmatch(name or ""), _number(text)
        if found and value is not None and found.group(1) != "selected":  # a warp that issues is not stalled
            stalls[found.group(1)] = max(value, stalls.get(found.group(1), 0.0))
    if not stalls:
        return UNMEASURED
    worst = max(stalls, key=lambda reason: stalls[reason])
    return f"{worst} ({100 * stalls[worst] / sum(stalls.values()):.0f}% of stalls)" if sum(stalls.values()) else "none"


def _matching(row: Mapping[str, str], pattern: str) -> Iterable[str]:
    return (text for name, text in row.items() if name and re.fullmatch(pattern, name))


def _first(row: Mapping[str, str], pattern: str) -> str:
    return next(iter(_matching(row, pattern)), "")


def _number(text: str | None) -> float | None:
    try:
        return float((text or "").replace(",", ""))
    except ValueError:
        return None  # a unit, or n/a
