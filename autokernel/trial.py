"""One experiment: the kept version into kernel.py, the agent's edit, the judge's row, kept or not. Imports no stage.

An experiment is begun and ended by a record in its folder, and its row is written once, under its number; what was killed in
between is ended by `recover`, from that row, or as interrupted.
"""

import contextlib
import hashlib
import secrets
import time
import traceback
from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

import msgspec

from autokernel import cli, experiments, hardware, keeping, kernels, results, state
from autokernel.agents import Agent, Edit, Task
from autokernel.errors import InputError
from autokernel.experiments import Begun, Experiment, Outcome
from autokernel.guard import Watch, clean_up
from autokernel.judge.isolated import Judge
from autokernel.judge.lines import log_of
from autokernel.judge.verdict import Options, Verdict, harness_sha256, judge, row_of, row_unread
from autokernel.kernels import KernelFile
from autokernel.repository import Repository
from autokernel.results import Row, Status
from autokernel.state import Plan, Target

FAULTS = 3  # that are not the kernel's, one after another, before the loop gives up
WAIT_S = 5.0  # after a fault of git or of a file, before the next attempt


@dataclass
class Trial:
    """An experiment under way. Without an agent it judges the target's version as it is."""

    number: int
    target: Target
    with_agent: bool
    kept: str  # the version that it begins with
    edit: Edit = field(default_factory=Edit)
    text: str = ""  # the edited version
    row: Row | None = None  # that judged it
    agent_s: float = 0.0
    judge_s: float = 0.0
    compile_s: float = 0.0


@dataclass
class Workbench:
    """Where experiments are made: one kernel.py, one agent, one warm judge. `shared`: other GPUs have the same plan."""

    tag: str
    agent: Agent
    kernel: Path
    repository: Repository | None
    shared: bool = False
    log: experiments.Log = field(default_factory=experiments.Log)
    _session: Judge | None = None
    _faults: int = 0

    def begin(self, target: Target, with_agent: bool) -> Trial:
        """Reserve the number and write the record that begins the experiment."""
        home = keeping.home(target.name)
        if not home.is_file():
            raise InputError(f"workspace/{target.name}.py is missing: run `{Plan.MADE_BY}` to make it again")
        number = results.reserve()
        begun = Begun(
            target=target.name,
            operation=target.operation,
            agent=self.agent.name if with_agent else "",
            parent_sha256=kernels.sha256_of(home),
            kernel=str(self.kernel),
            trusted=not with_agent or self.agent.trusted,
            began=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        )
        experiments.begin(number, begun)
        return Trial(number, target, with_agent, keeping.text_of(home))

    def carry_out(self, trial: Trial, busy: Collection[str] = ()) -> Experiment:
        """The whole experiment, however it ends; `busy` are targets that other GPUs work on.

        KeyboardInterrupt ends it as interrupted, and goes on. A fault of the judge ends it too, and one of git, or of a file of
        the workspace, is waited out; but after FAULTS of them in a row it goes on.
        """
        try:
            if trial.with_agent:
                self._place(trial)
                ended = self._end(trial, self._ask(trial, busy))
            else:
                trial.edit, trial.text = Edit("its first version"), trial.kept
                ended = self._judge_and_settle(trial)
        except KeyboardInterrupt:
            self._restore(trial)
            self._finish(trial, Outcome.INTERRUPTED, "by the user")
            raise
        except InputError as fault:  # the row, if there is one already, decides all the same
            self._faults += 1
            if self._faults >= FAULTS:
                raise
            cli.note(f"warning: {fault}")
            time.sleep(WAIT_S)
            self.recover()
            ended = next(one for one in self.log.finished() if one.number == trial.number)
        except Exception as fault:  # ours, not the kernel's: an overnight loop goes on with a fresh judge
            self.close()
            self._restore(trial)
            text = "".join(traceback.format_exception(fault))
            state.write_text(experiments.folder(trial.number) / "fault.log", text)
            ended = self._finish(trial, Outcome.INTERRUPTED, f"a fault of AutoKernel: {fault!r}")
            self._faults += 1
            if self._faults >= FAULTS:
                raise
        else:
            self._faults = 0
        return ended

    def recover(self) -> None:
        """End what a process that was killed left under way."""
        targets = {target.name: target for target in state.load(Plan).targets}
        rows = {row.experiment: row for row in results.rows()}
        for number, begun in self.log.unfinished().items():
            home = keeping.home(begun.target)
            if (self.shared and begun.kernel != str(self.kernel)) or begun.target not in targets or not home.is_file():
                continue  # another GPU's, or of another plan
            cli.note(f"experiment {number} was interrupted: ending it")
            if not begun.trusted and self.repository is not None:
                clean_up(self.repository, self.kernel, number)
            trial = Trial(number, targets[begun.target], bool(begun.agent), keeping.text_of(home))
            trial.row = rows.get(number)
            if trial.row is None:
                self._restore(trial)
                self._finish(trial, Outcome.INTERRUPTED, "the loop was killed")
                continue
            trial.edit = Edit(trial.row.description)
            trial.text = keeping.text_of(experiments.folder(number) / "kernel.py")
            trial.judge_s = trial.row.seconds or 0.0
            self._settle(trial, begun.parent_sha256)

    def close(self) -> None:
        """End the judge, if there is one."""
        if self._session is not None:
            session, self._session = self._session, None
            with contextlib.suppress(Exception):
                session.close()

    def _place(self, trial: Trial) -> None:
        """Have the kept version in kernel.py, committed."""
        plan = state.load(Plan)
        if not self.shared and plan.current != trial.target.name:
            state.save(msgspec.structs.replace(plan, current=trial.target.name))
        keeping.put_into(self.kernel, trial.kept, self.repository, f"start {trial.target.name}\n")

    def _ask(self, trial: Trial, busy: Collection[str]) -> list[str]:
        """Let the agent edit kernel.py; what else it changed, all of which is put back."""
        watch = None
        if not self.agent.trusted:
            assert self.repository is not None
            watch = Watch(self.repository, self.kernel, busy)
        began = time.monotonic()
        try:
            trial.edit = self.agent.edit(Task(trial.number, trial.target, self.kernel, self.log))
        finally:
            trial.agent_s = time.monotonic() - began
            offences = [] if watch is None else watch.offences(trial.number)
        return offences

    def _end(self, trial: Trial, offences: list[str]) -> Experiment:
        text = keeping.text_of(self.kernel)
        if text != trial.kept:
            trial.text = text
            self._archive(trial)
        outcome, reason = _without_judgement(trial, offences)
        if outcome is not None:
            self._restore(trial)
            return self._finish(trial, outcome, reason)
        trial.text = text
        trial.row = known_row(trial.target, text)
        if trial.row is not None:
            self._restore(trial)
            return self._finish(
                trial, Outcome.REPEATED, f"the version of experiment {trial.row.experiment}, {trial.row.correctness}"
            )
        return self._judge_and_settle(trial)

    def _judge_and_settle(self, trial: Trial) -> Experiment:
        began = time.monotonic()
        trial.row = self._judge(trial)
        trial.judge_s = time.monotonic() - began
        return self._settle(trial, hashlib.sha256(trial.kept.encode()).hexdigest())

    def _judge(self, trial: Trial) -> Row:
        """Judge the version and write its row."""
        target, number, text = trial.target, trial.number, trial.text.encode()
        try:
            kernel = kernels.read(self.kernel if trial.with_agent else keeping.home(target.name))
            if kernel.operation.name != target.operation:
                raise InputError(f"KERNEL_TYPE is {kernel.operation.name!r}, but {target.name} is a {target.operation}")
        except InputError as fault:
            row = row_unread(text, target, str(fault), trial.edit.description, self.tag, number)
            log = f"correctness: {row.correctness}\nreason: {row.reason}\n"
        else:
            kept = keeping.kept_row(target.name)
            beaten = trial.with_agent and kept is not None and kept.correctness is Status.PASS
            incumbent = kernels.read(keeping.home(target.name)) if beaten else None
            if self._session is None:
                self._session = Judge(hardware.device())
            verdict = judged(self._session, kernel, target, incumbent, screen=trial.with_agent and self.agent.trusted)
            trial.compile_s = verdict.compile_s
            row, log = row_of(verdict, trial.edit.description, self.tag, number), log_of(verdict)
        experiments.archive(number, text, log)
        results.append(row)
        return row

    def _settle(self, trial: Trial, parent_sha256: str) -> Experiment:
        """Keep the version or restore the kept one, as its row says; then end the experiment."""
        row = trial.row
        assert row is not None
        if not trial.with_agent:
            return self._finish(
                trial, Outcome.STARTED, "" if row.correctness is Status.PASS else f"{row.correctness}: {row.reason}"
            )
        decision = keeping.decide(row, results.last_for(parent_sha256, trial.target.name))
        if not decision.keep:
            self._restore(trial)
            return self._finish(trial, Outcome.REVERTED, decision.reason)
        message = keeping.message_of(row, decision.reason)
        commit = keeping.keep(trial.target.name, trial.text, self.kernel, self.repository, message)
        return self._finish(trial, Outcome.KEPT, decision.reason, commit)

    def _finish(self, trial: Trial, outcome: Outcome, reason: str, commit: str = "") -> Experiment:
        begun, row, text = self.log.unfinished()[trial.number], trial.row, trial.text
        ended = Experiment(
            number=trial.number,
            target=trial.target.name,
            operation=trial.target.operation,
            agent=begun.agent,
            description=trial.edit.description,
            outcome=outcome,
            reason=reason,
            verdict=None if row is None else row.correctness,
            answered_by=row.experiment if row is not None and row.experiment != trial.number else None,
            kernel_sha256=hashlib.sha256(text.encode()).hexdigest() if text else "",
            parent_sha256=begun.parent_sha256,
            latency_us=None if row is None else row.latency_us,
            speedup_vs_pytorch=None if row is None else row.speedup_vs_pytorch,
            speedup_vs_incumbent=None if row is None else row.speedup_vs_incumbent,
            began=begun.began,
            agent_s=trial.agent_s,
            judge_s=trial.judge_s,
            compile_s=trial.compile_s,
            gpu=hardware.gpu_name(),
            commit=commit,
        )
        experiments.finish(ended)
        return ended

    def _restore(self, trial: Trial) -> None:
        """Put the kept version back into kernel.py; what was in its place is in the experiment's folder."""
        if not trial.with_agent:
            return  # kernel.py was not touched
        there = self.kernel.read_bytes().decode(errors="replace") if self.kernel.is_file() else ""
        if there == trial.kept:
            return
        if there and not trial.text:
            trial.text = there
            self._archive(trial)
        state.write_text(self.kernel, trial.kept)

    def _archive(self, trial: Trial) -> None:
        folder = experiments.folder(trial.number)
        state.write_text(folder / "kernel.py", trial.text)
        state.write_text(folder / "change.diff", experiments.diff(trial.kept, trial.text))


def judged(session: Judge, kernel: KernelFile, target: Target, incumbent: KernelFile | None, screen: bool) -> Verdict:
    """The verdict on this file as an answer to the target, timed beside the incumbent."""
    targets = tuple(t for t in state.load(Plan).targets if t.operation == target.operation)
    options, dtype = Options(incumbent=incumbent, screen=screen), hardware.dtype(target.dtype)
    with session.turn(cli.note):
        return judge(session, kernel, target, targets, dtype, secrets.randbits(31), options)


def known_row(target: Target, text: str) -> Row | None:
    """The last row of this very text as an answer to this target, by this judge on this GPU."""
    wanted = (
        hashlib.sha256(text.encode()).hexdigest(),
        *(target.name, target.shape, target.dtype, harness_sha256(), hardware.gpu_name()),
    )
    for row in reversed(results.rows()):
        if (row.kernel_sha256, row.target, row.shape, row.dtype, row.harness_sha256, row.gpu) == wanted:
            return row
    return None


def _without_judgement(trial: Trial, offences: list[str]) -> tuple[Outcome | None, str]:
    """The outcome of an experiment of which nothing is to be judged, and its reason."""
    edit = trial.edit
    if offences:
        return Outcome.REFUSED, f"it changed {', '.join(offences)}, and may change kernel.py alone"
    if edit.fault is Outcome.AGENT_TIMEOUT or (edit.fault is not None and not trial.text):
        return edit.fault, edit.reason
    if not trial.text:
        return Outcome.UNCHANGED, "nothing more to try" if edit.exhausted else "kernel.py was left as it was"
    return None, ""
