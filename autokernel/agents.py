"""Who changes kernel.py: the built-in tuner, or any command line. Imports no stage.

An agent is asked for one edit at a time and ends; what it says is a description for people, never a figure.
"""

import re
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from autokernel import experiments, keeping, prompt, results, tuner
from autokernel.errors import InputError
from autokernel.experiments import Outcome
from autokernel.results import Status
from autokernel.state import Target

TUNER = "tuner"
DESCRIPTION = 200  # characters at most
LOG_BYTES = 1 << 20  # of what an agent printed are kept
_LEASH = Path(__file__).with_name("leash.py")
_STOP_S = 90.0  # for the leash to end everything


@dataclass(frozen=True)
class Edit:
    """What became of one request. Without a fault, the edit is in kernel.py."""

    description: str = ""
    fault: Outcome | None = None  # AGENT_TIMEOUT or AGENT_FAILED
    reason: str = ""
    exhausted: bool = False  # it has nothing more to try on this target


@dataclass(frozen=True)
class Task:
    """One request: to improve the kept version of `target`, which is in `kernel`."""

    number: int  # of the experiment
    target: Target
    kernel: Path
    log: experiments.Log


class Agent(Protocol):
    """An agent by its name, and whether it must be watched."""

    name: str
    trusted: bool

    def edit(self, task: Task) -> Edit:
        """Change kernel.py, or say why not."""


def agent_of(command: str, limit_s: float) -> Agent:
    """The agent of `--agent`: "tuner" or a command line; InputError if its program does not exist."""
    return Tuner() if command == TUNER else External(command, limit_s)


class Tuner:
    """Varies the constants that the kernel declares tunable."""

    name, trusted = TUNER, True

    def edit(self, task: Task) -> Edit:
        """Write the next version; exhausted when nothing promising is left."""
        text = keeping.text_of(task.kernel)
        try:
            proposal = tuner.propose(text, _attempts(task.target))
        except InputError as fault:
            return Edit(fault=Outcome.AGENT_FAILED, reason=str(fault), exhausted=True)
        if proposal is None:
            return Edit(exhausted=True)
        task.kernel.write_text(proposal.text, encoding="utf-8")
        return Edit(proposal.description)


def _attempts(target: Target) -> list[tuner.Attempt]:
    found = []
    for row in results.rows():
        path = experiments.folder(row.experiment) / "kernel.py"
        if row.target == target.name and row.shape == target.shape and row.dtype == target.dtype and path.is_file():
            judged = row.correctness in (Status.PASS, Status.SCREENED)
            text = path.read_text(encoding="utf-8", errors="replace")
            found.append(tuner.Attempt(text, row.speedup_vs_pytorch if judged else None))
    return found


class External:
    """Any program: it is given the prompt on standard input, and where its command line says {prompt} or {prompt_file}.

    The command line is split into words as a shell would, but no shell sees it.
    """

    trusted = False

    def __init__(self, command: str, limit_s: float) -> None:
        self.name, self._limit_s = command, limit_s
        try:
            self._words = shlex.split(command)
        except ValueError as fault:
            raise InputError(f"--agent {command!r} cannot be split into words ({fault}): correct its quotation marks") from None
        if not self._words or shutil.which(self._words[0]) is None:
            program = self._words[0] if self._words else ""
            raise InputError(f"--agent names the program {program!r}, which is not there: install it, or give its path")

    def edit(self, task: Task) -> Edit:
        """Run it in the folder of kernel.py until it ends, or its time is up; then all that it started is killed."""
        folder = experiments.folder(task.number)
        text = prompt.prompt(task.target, task.kernel, task.log)
        path, said = folder / "prompt.md", folder / "agent.log"
        path.write_text(text, encoding="utf-8")
        words = [word.replace("{prompt_file}", str(path)).replace("{prompt}", text) for word in self._words]
        began = time.monotonic()
        with path.open("rb") as given, said.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-I", str(_LEASH), *words],
                cwd=task.kernel.parent,
                stdin=given,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is ours to handle
            )
            try:
                process.wait(self._limit_s)
            except subprocess.TimeoutExpired:
                return Edit(_description(said), Outcome.AGENT_TIMEOUT, f"it did not end within {self._limit_s:.0f} s")
            finally:
                if process.poll() is None:
                    process.terminate()
                    process.wait(_STOP_S)
        if said.stat().st_size > LOG_BYTES:
            said.write_bytes(said.read_bytes()[-LOG_BYTES:])
        if process.returncode:
            seconds = time.monotonic() - began
            reason = f"exit status {process.returncode} after {seconds:.1f} s"
            return Edit(_description(said), Outcome.AGENT_FAILED, reason)
        return Edit(_description(said))


def _description(log: Path) -> str:
    """The last line that it printed, without control characters."""
    with log.open("rb") as file:
        file.seek(max(log.stat().st_size - 4096, 0))
        lines = file.read().decode(errors="replace").splitlines()
    plain = (" ".join(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|[^\x20-\x7e\u00a0-\uffff]", " ", line).split()) for line in lines)
    return next(filter(None, reversed([*plain])), "")[:DESCRIPTION]
