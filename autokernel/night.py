"""The unattended loop: which target next, within which budgets, until when. Imports no stage.

Nothing depends on the agent's manners: it cannot end the loop, spend another target's time, or bring about a row.
"""

import math
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import ClassVar

import filelock
import msgspec

from autokernel import cli, keeping, results, scheduler, state
from autokernel.experiments import Experiment, Outcome
from autokernel.scheduler import Kind
from autokernel.state import Plan, State, Target
from autokernel.trial import Trial, Workbench, known_row

WAIT_S = 2.0  # before another look, while other GPUs work on all targets that are left
BACK_OFF_S = 300.0  # the longest pause after an agent that failed again and again


class Night(State, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """night.json: what was asked for, and how far it is. The same request goes on where it ended."""

    FILE: ClassVar[str] = "night.json"
    MADE_BY: ClassVar[str] = "uv run orchestrate.py run --agent tuner"

    tag: str
    agent: str
    agent_s: float = 0.0  # for one edit
    experiments: int | None = None  # budgets; None: no limit
    hours: float | None = None
    per_kernel_hours: float | None = None
    gpus: tuple[int, ...] = ()
    plan_sha256: str = ""
    first: int = 1  # number of its first experiment
    elapsed_s: float = 0.0
    ended: str = ""  # why; "" while it is under way

    def same_request(self, other: "Night") -> bool:
        """Whether the two ask for the same, whatever has become of them."""
        names = ("agent", "agent_s", "experiments", "hours", "per_kernel_hours", "gpus", "plan_sha256")
        return all(getattr(self, name) == getattr(other, name) for name in names)


@dataclass
class Lane:
    """The loop on one GPU."""

    night: Night
    bench: Workbench
    deadline: float = math.inf  # time.monotonic()
    _current: str | None = None
    _exhausted: set[str] = field(default_factory=set)
    _idle: int = 0
    _held: filelock.FileLock | None = None

    def run(self) -> str:
        """Experiment until a budget is used up or nothing is left to do; the reason."""
        began = time.monotonic()
        try:
            while True:
                chosen = self._choose()
                if isinstance(chosen, str):
                    return chosen
                if chosen is None:
                    time.sleep(WAIT_S)
                    continue
                trial, busy = chosen
                ended = self.bench.carry_out(trial, busy)
                cli.note(f"{ended.number} {ended.target}: {ended.outcome}, {ended.description} ({ended.reason or 'PASS'})")
                if trial.edit.exhausted:
                    self._exhausted.add(ended.target)
                if not self.bench.shared:
                    elapsed_s = self.night.elapsed_s + time.monotonic() - began
                    state.save(msgspec.structs.replace(self.night, elapsed_s=elapsed_s))
                self._pause(ended)
        finally:
            self.bench.close()
            self._let_go()

    def _choose(self) -> tuple[Trial, frozenset[str]] | str | None:
        """The next experiment, begun, and the targets of others; why there is none; None while others hold all that is left."""
        with filelock.FileLock(state.WORKSPACE / ".schedule.lock"):
            plan, night = state.load(Plan), self.night
            if self.bench.shared or self._current is not None:
                plan = msgspec.structs.replace(plan, current=self._current)
            ended = [experiment for experiment in self.bench.log.finished() if experiment.number >= night.first]
            begun = len(ended) + sum(number >= night.first for number in self.bench.log.unfinished())
            if night.experiments is not None and begun >= night.experiments:
                return f"all {night.experiments} experiments are done"
            if time.monotonic() >= self.deadline:
                return f"the {night.hours:g} hours are over"
            busy = frozenset(target.name for target in plan.targets if self._is_busy(target.name))
            unjudged = next((t for t in plan.targets if t.name not in busy and not _is_judged(t)), None)
            if unjudged is not None:
                return self._begin(unjudged, False, Kind.NEXT, "its first version was not judged here yet"), busy
            spent_s: dict[str, float] = defaultdict(float)
            for experiment in ended:
                spent_s[experiment.target] += experiment.agent_s + experiment.judge_s
            decision = scheduler.next_target(
                plan,
                results.read(),
                spent_s=spent_s,
                per_kernel_s=math.inf if night.per_kernel_hours is None else night.per_kernel_hours * 3600,
                exhausted=self._exhausted,
                busy=busy,
            )
            if decision.kind is Kind.WAIT:
                return None
            if decision.candidate is None:
                return decision.reason
            return self._begin(decision.candidate.target, True, decision.kind, decision.reason), busy

    def _begin(self, target: Target, with_agent: bool, kind: Kind, reason: str) -> Trial:
        if kind is not Kind.CONTINUE:
            cli.note(f"{kind}: {target.name} ({reason})")
        if self.bench.shared and self._current != target.name:
            self._let_go()
            self._held = _lock_of(target.name)
            self._held.acquire(timeout=0)
        self._current = target.name
        return self.bench.begin(target, with_agent)

    def _is_busy(self, name: str) -> bool:
        if not self.bench.shared or (self._held is not None and name == self._current):
            return False
        lock = _lock_of(name)
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            return True
        lock.release()
        return False

    def _let_go(self) -> None:
        if self._held is not None:
            self._held.release()
            self._held = None

    def _pause(self, ended: Experiment) -> None:
        """Wait, longer each time, after an agent that did nothing again."""
        nothing = (Outcome.UNCHANGED, Outcome.AGENT_FAILED, Outcome.AGENT_TIMEOUT)
        self._idle = self._idle + 1 if ended.outcome in nothing and not self.bench.agent.trusted else 0
        if self._idle > 1:
            time.sleep(max(min(2.0 ** min(self._idle - 2, 16), BACK_OFF_S, self.deadline - time.monotonic()), 0.0))


def _is_judged(target: Target) -> bool:
    home = keeping.home(target.name)
    return home.is_file() and known_row(target, keeping.text_of(home)) is not None


def _lock_of(target: str) -> filelock.FileLock:
    return filelock.FileLock(state.WORKSPACE / f".{target}.lock")
