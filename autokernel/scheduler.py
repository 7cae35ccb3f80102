"""Which kernel is worth the next experiment: Amdahl's law on what was measured.

Reads a plan and the table of experiments; writes nothing. An experiment on a target is expected to close the same part of
the distance to its roofline as its last ones did. So a target that yields stays, one on a plateau makes way, and one that was
left long enough ago is tried again.
"""

import enum
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from autokernel.state import Plan, Target

# A kernel at 95% of its roofline is done: what is left is within the error of the ceilings themselves.
AT_ROOFLINE = 0.95

WINDOW = 30  # so many of a target's last experiments say what the next will yield
PRIOR = 0.1  # the part of the distance that an experiment on an untried target is expected to close
IDLE = 200  # after so many experiments on other targets, the prior counts twice
PLATEAU_OF_FAULTS = 5  # fewer kernels in a row that did not pass say nothing about how fast one can be
TURN = 8  # experiments before the next target has its turn, where nothing is measured
STAY = 1.1  # another target must promise so many times as much: each change costs a new start


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
    promise_us: float | None = None  # expected of the next experiment; None: unmeasured
    revisited: bool = False  # whether more than its first version was judged

    @property
    def done(self) -> bool:
        """Whether what is left to gain is too little to look for."""
        roofline_us = self.target.roofline_us
        return roofline_us is not None and roofline_us >= AT_ROOFLINE * self.current_us


class Kind(str, enum.Enum):
    """What to do next."""

    NEXT = "NEXT"  # begin with a target
    CONTINUE = "CONTINUE"  # go on with the one in kernel.py
    REVISIT = "REVISIT"  # go back to a target that was left
    WAIT = "WAIT"  # all that is left to do is being worked on elsewhere
    DONE = "DONE"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Decision:
    """What to work on, and why; no candidate when there is nothing to be done."""

    kind: Kind
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
            promise_us=None if gain_us is None else gain_us * _rate(target, rows[target.name], results),
            revisited=rows[target.name]["kernel_sha256"].nunique() > 1,
        )

    return sorted(map(candidate, plan.targets), key=_order)


def next_target(
    plan: Plan,
    results: pd.DataFrame,
    *,
    spent_s: Mapping[str, float] = {},
    per_kernel_s: float = math.inf,
    exhausted: Collection[str] = (),
    busy: Collection[str] = (),
) -> Decision:
    """The target whose next experiment promises most, with a preference for the one in kernel.py.

    Left out are targets at their rooflines, those on which `per_kernel_s` seconds were spent, `exhausted` ones (the agent has
    nothing more to try) and `busy` ones (another GPU has them), by their names. Targets without a roofline, as on a CPU, come
    last and take turns, the one with the fewest experiments first; one is left once it has TURN more than that.
    """
    candidates = rank(plan, results)
    if not candidates:
        return Decision(Kind.DONE, None, "the plan has no targets")
    out = {candidate.target.name: _out(candidate, spent_s, per_kernel_s, exhausted) for candidate in candidates}
    left = [candidate for candidate in candidates if not out[candidate.target.name]]
    if not left:
        return Decision(Kind.DONE, None, _why_done(list(out.values())))
    free = [candidate for candidate in left if candidate.target.name not in busy]
    if not free:
        return Decision(Kind.WAIT, None, f"the {len(left)} targets left are being worked on")
    best = max(free, key=_promise)
    current = next((candidate for candidate in free if candidate.target.name == plan.current), None)
    if current is not None and _stays(current, best):
        best = current
    kind = Kind.CONTINUE if best is current else Kind.REVISIT if best.revisited else Kind.NEXT
    return Decision(kind, best, _reason(best))


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


def _rate(target: Target, rows: pd.DataFrame, results: pd.DataFrame) -> float:
    """The part of the distance to the roofline that the next experiment is expected to close, 0 to 1."""
    assert target.roofline_us is not None
    closed: list[float] = []
    faults = 0
    current = target.time_us
    for verdict, speedup in zip(rows["correctness"], rows["speedup_vs_pytorch"], strict=True):
        if verdict not in ("PASS", "SCREENED"):
            faults += 1
            if faults >= PLATEAU_OF_FAULTS:
                closed.append(0.0)
            continue
        faults = 0
        after = current
        if verdict == "PASS" and speedup > 1:  # False where it is unmeasured
            after = min(current, target.time_us / speedup)
        distance = current - target.roofline_us
        closed.append((current - after) / distance if distance > 0 else 0.0)
        current = after
    since = len(results) if rows.empty else int((results["experiment"] > rows["experiment"].max()).sum())
    recent = closed[-WINDOW:]
    return min((sum(recent) + PRIOR * (1 + since / IDLE)) / (len(recent) + 1), 1.0)


def _promise(candidate: Candidate) -> tuple[float, float, float]:
    # measured ones by what they promise; of the others, and of equals, the least tried, then the larger
    promise = candidate.promise_us
    return (-1.0 if promise is None else promise, -candidate.experiments, candidate.target.time_us)


def _stays(current: Candidate, best: Candidate) -> bool:
    if best.promise_us is not None:
        return current.promise_us is not None and current.promise_us * STAY >= best.promise_us
    return current.experiments < best.experiments + TURN


def _out(candidate: Candidate, spent_s: Mapping[str, float], per_kernel_s: float, exhausted: Collection[str]) -> str:
    # why nothing is to be done on a target; "" if something is
    if candidate.done:
        return f"within {1 - AT_ROOFLINE:.0%} of their rooflines"
    if spent_s.get(candidate.target.name, 0.0) >= per_kernel_s:
        return "out of their time"
    return "out of ideas" if candidate.target.name in exhausted else ""


def _why_done(reasons: Sequence[str]) -> str:
    kinds = sorted(set(reasons))
    if len(kinds) == 1:
        return f"all {len(reasons)} targets are {kinds[0]}"
    return "of the targets, " + ", ".join(f"{reasons.count(kind)} are {kind}" for kind in kinds)


def _order(candidate: Candidate) -> tuple[bool, float, bool, float]:
    unmeasured = candidate.gain_us is None
    return (unmeasured, -(candidate.gain_us or 0.0), unmeasured and candidate.experiments > 0, -candidate.target.time_us)


def _reason(candidate: Candidate) -> str:
    if candidate.gain_us is None:
        return f"{candidate.experiments} experiments so far; what a kernel could gain is unmeasured"
    return (
        f"most to be expected: {candidate.promise_us:.1f} us of the next experiment, {candidate.gain_us:.1f} us of "
        f"{candidate.current_us:.1f} us to gain (whole model {candidate.whole_model:.2f}x at its roofline, estimate)"
    )


def _decoded(shape: Any) -> Any:
    try:
        return json.loads(shape)
    except (TypeError, ValueError):  # a row of an operation's own shapes may say something else; it is not this call
        return None
