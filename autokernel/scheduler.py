"""Which kernel is worth the next hour: Amdahl's law on what was measured.

Reads a plan and the table of experiments; writes nothing.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from autokernel.state import Plan, Target

# A kernel at 95% of its roofline is done: what is left is within the error of the ceilings themselves.
AT_ROOFLINE = 0.95


def amdahl(share: float, speedup: float) -> float:
    """Speed-up of a whole of which the part `share` (0 to 1) becomes `speedup` times as fast (above 0, infinity allowed).

    Amdahl's law: what took 1 takes (1 - share) + share / speedup. So a part that takes a tenth of the time can never make
    the whole more than 1.11 times as fast. ValueError outside these ranges.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"share {share} is not between 0 and 1")
    if not speedup > 0:
        raise ValueError(f"speedup {speedup} is not above 0")
    rest = (1 - share) + share / speedup
    return math.inf if rest == 0 else 1 / rest


@dataclass(frozen=True)
class Candidate:
    """A target and what its experiments have shown so far. Times are of all its calls in one forward pass, in microseconds."""

    target: Target
    experiments: int
    verdict: str  # PASS if any experiment passed, else that of the last one, or "not benched"
    fault: str  # why the last experiment did not pass; "" if it did, or if there was none
    best_speedup: float | None  # of the fastest kernel that passed, over PyTorch; None: unmeasured
    current_us: float  # with the faster of that kernel and PyTorch
    gain_us: float | None  # current_us down to the roofline; None: unmeasured
    whole_model: float | None  # speed-up of the whole model, from now, if this target alone reached its roofline

    @property
    def done(self) -> bool:
        """Whether what is left to gain is too little to look for."""
        roofline_us = self.target.roofline_us
        return roofline_us is not None and roofline_us >= AT_ROOFLINE * self.current_us


@dataclass(frozen=True)
class Decision:
    """What to work on, and why; no candidate when there is nothing left to gain."""

    candidate: Candidate | None
    reason: str


def experiments_of(target: Target, results: pd.DataFrame) -> pd.DataFrame:
    """The rows of results.tsv that judged a kernel for this very call, in their order.

    A name such as kernel_matmul_1 comes back with every new plan, so the shape and dtype must agree too.
    """
    if results.empty:
        return results
    named = results[(results["target"] == target.name) & (results["kernel_type"] == target.operation)]
    same_call = [
        dtype == target.dtype and _decoded(shape) == target.shape
        for shape, dtype in zip(named["shape"], named["dtype"], strict=True)
    ]
    return named[pd.Series(same_call, index=named.index, dtype=bool)]


def rank(plan: Plan, results: pd.DataFrame) -> list[Candidate]:
    """The targets, the one with the most end-to-end time still to be gained first.

    Time to gain is from measured figures alone: the profiled time, divided by the best speed-up of a kernel that passed
    (never below 1: a kernel slower than PyTorch is not used), less the roofline. Targets without a roofline, as on a CPU,
    come after the others: those not yet benched first, then by their time.
    """
    rows = {target.name: experiments_of(target, results) for target in plan.targets}
    best = {name: _best_speedup(experiments) for name, experiments in rows.items()}
    current = {target.name: target.time_us / max(best[target.name] or 1.0, 1.0) for target in plan.targets}
    total_now = plan.total_us - sum(target.time_us - current[target.name] for target in plan.targets)

    def candidate(target: Target) -> Candidate:
        current_us, roofline_us = current[target.name], target.roofline_us
        gain_us = whole_model = None
        if roofline_us is not None:
            gain_us = max(current_us - roofline_us, 0.0)
            to_roofline = current_us / roofline_us if roofline_us else math.inf
            whole_model = amdahl(min(current_us / total_now, 1.0), to_roofline) if gain_us else 1.0
        return Candidate(
            target=target,
            experiments=len(rows[target.name]),
            verdict=_verdict(rows[target.name]),
            fault=_fault(rows[target.name]),
            best_speedup=best[target.name],
            current_us=current_us,
            gain_us=gain_us,
            whole_model=whole_model,
        )

    return sorted(map(candidate, plan.targets), key=_order)


def next_target(plan: Plan, results: pd.DataFrame) -> Decision:
    """The first target of the ranking that is not at its roofline."""
    candidates = rank(plan, results)
    if not candidates:
        return Decision(None, "the plan has no targets")
    for candidate in candidates:
        if not candidate.done:
            return Decision(candidate, _reason(candidate))
    return Decision(None, f"all {len(candidates)} targets are within {1 - AT_ROOFLINE:.0%} of their rooflines")


def bound(plan: Plan) -> float | None:
    """Estimate: the whole model's speed-up if every target reached its roofline; None where a roofline is unmeasured."""
    if any(target.saved_us is None for target in plan.targets):
        return None
    return _together(plan, sum(target.time_us - (target.saved_us or 0.0) for target in plan.targets))


def with_best_kernels(plan: Plan, candidates: Sequence[Candidate]) -> float | None:
    """Estimate: the whole model's speed-up with each target's best kernel, isolated figures taken at their word.

    None when no kernel has a measured speed. What the model really gains is for verify.py to measure.
    """
    if all(candidate.best_speedup is None for candidate in candidates):
        return None
    return _together(plan, sum(candidate.current_us for candidate in candidates))


def _together(plan: Plan, after_us: float) -> float | None:
    # all targets as one part: their share of the total, sped up by before / after
    before_us = sum(target.time_us for target in plan.targets)
    if not before_us:
        return None
    return amdahl(min(before_us / plan.total_us, 1.0), before_us / after_us if after_us else math.inf)


def _best_speedup(rows: pd.DataFrame) -> float | None:
    if rows.empty:
        return None
    passed = rows[rows["correctness"] == "PASS"]
    speedups = pd.to_numeric(passed["speedup_vs_pytorch"], errors="coerce").dropna()  # "unmeasured" is no number
    return None if speedups.empty else float(speedups.max())


def _verdict(rows: pd.DataFrame) -> str:
    if rows.empty:
        return "not benched"
    verdicts: Sequence[str] = [str(verdict) for verdict in rows["correctness"]]
    return "PASS" if "PASS" in verdicts else verdicts[-1]


def _fault(rows: pd.DataFrame) -> str:
    if rows.empty or rows["correctness"].iloc[-1] == "PASS":
        return ""
    return str(rows["reason"].iloc[-1])


def _order(candidate: Candidate) -> tuple[bool, float, bool, float]:
    unmeasured = candidate.gain_us is None
    return (unmeasured, -(candidate.gain_us or 0.0), unmeasured and candidate.experiments > 0, -candidate.target.time_us)


def _reason(candidate: Candidate) -> str:
    if candidate.gain_us is None:
        state = "not benched yet" if not candidate.experiments else "all targets benched"
        return f"{state}, most time; what a kernel could gain is unmeasured"
    return (
        f"most time still to gain: {candidate.gain_us:.1f} us of {candidate.current_us:.1f} us "
        f"(whole model {candidate.whole_model:.2f}x at its roofline, estimate)"
    )


def _decoded(shape: Any) -> Any:
    try:
        return json.loads(shape)
    except (TypeError, ValueError):  # a row of an operation's own shapes may say something else; it is not this call
        return None
