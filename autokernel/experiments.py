"""workspace/experiments/<n>/: what was tried, how it ended and why; kept or not, it stays. Imports no stage.

    begun.json        written first, and experiment.json, the outcome, last: a folder with the first alone is of an
                      experiment under way, or of one that was killed
    kernel.py         the version that was tried
    change.diff       what that changes in the version it began from
    bench.log         what the judge said of it
    prompt.md         what an external agent was given, and agent.log what it printed

Numbers are those of results.tsv: an experiment whose kernel was judged has the row of the same number, any other has none.
"""

import difflib
import enum
from pathlib import Path

import msgspec

from autokernel import results, state
from autokernel.results import Status

RECORD, BEGUN = "experiment.json", "begun.json"


class Outcome(str, enum.Enum):
    """How an experiment ended. Only KEPT changed kernel.py for good."""

    STARTED = "started"  # the version that a target begins with, judged as it is
    KEPT = "kept"
    REVERTED = "reverted"  # judged, and no better than the version to beat
    REPEATED = "repeated"  # a version that was judged before: answered from its row
    REFUSED = "refused"  # another file than kernel.py was changed; it was put back
    UNCHANGED = "unchanged"  # kernel.py was left as it was
    AGENT_TIMEOUT = "agent timeout"
    AGENT_FAILED = "agent failed"  # ended with an exit status other than 0, and without an edit
    INTERRUPTED = "interrupted"

    def __str__(self) -> str:
        return self.value


class Experiment(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """experiment.json. Figures are None where nothing was measured."""

    number: int
    target: str
    operation: str
    agent: str  # "tuner", a command line, or "by hand"
    description: str  # what was changed
    outcome: Outcome
    reason: str = ""  # why it was kept, or not
    verdict: Status | None = None  # of the judge, or of the row that answered; None: not judged
    answered_by: int | None = None  # the earlier row that answered, for a repeated version
    kernel_sha256: str = ""  # "" where there was no edit
    parent_sha256: str = ""  # of the version that it began from and had to beat
    latency_us: float | None = None
    speedup_vs_pytorch: float | None = None
    speedup_vs_incumbent: float | None = None  # over the version to beat, timed in turn
    began: str = ""  # ISO 8601, UTC
    agent_s: float = 0.0
    judge_s: float = 0.0  # all of the judgement
    compile_s: float = 0.0  # of that, waiting for compilers before the first gate
    gpu: str = ""
    commit: str = ""  # of a kept version; "" outside a git repository


class Begun(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """begun.json: what is needed to end an experiment whose process was killed."""

    target: str
    operation: str
    agent: str
    parent_sha256: str
    kernel: str  # the kernel.py that was worked in
    trusted: bool  # the agent touches nothing but kernel.py
    began: str  # ISO 8601, UTC


def folder(number: int) -> Path:
    """The folder of one experiment; `results.reserve` makes it."""
    return state.WORKSPACE / "experiments" / str(number)


def begin(number: int, begun: Begun) -> None:
    """Write the record that begins the experiment."""
    state.write_text(folder(number) / BEGUN, _text(begun))


def finish(experiment: Experiment) -> None:
    """Write the record, which ends the experiment."""
    state.write_text(folder(experiment.number) / RECORD, _text(experiment))


def archive(number: int, kernel: bytes, log: str) -> None:
    """Keep a version that was judged, and what the judge said of it."""
    folder(number).mkdir(parents=True, exist_ok=True)
    state.write_text(folder(number) / "kernel.py", kernel.decode())
    state.write_text(folder(number) / "bench.log", log)


class Log:
    """All experiments that have ended, read anew only where something was added."""

    def __init__(self) -> None:
        self._known: dict[int, Experiment] = {}

    def finished(self) -> list[Experiment]:
        """In their order; a damaged record counts as one that was never finished."""
        for number in results.reserved():
            if number not in self._known:
                try:
                    self._known[number] = msgspec.json.decode((folder(number) / RECORD).read_bytes(), type=Experiment)
                except (FileNotFoundError, msgspec.DecodeError):
                    continue
        return [self._known[number] for number in sorted(self._known)]

    def unfinished(self) -> dict[int, Begun]:
        """Those that were begun and have not ended: under way, or killed."""
        self.finished()
        found = {}
        for number in results.reserved():
            if number not in self._known:
                try:
                    found[number] = msgspec.json.decode((folder(number) / BEGUN).read_bytes(), type=Begun)
                except (FileNotFoundError, msgspec.DecodeError):
                    continue
        return found


def _text(record: msgspec.Struct) -> str:
    return msgspec.json.format(msgspec.json.encode(record), indent=2).decode() + "\n"


def diff(before: str, after: str) -> str:
    """A unified diff of two versions of kernel.py, as git shows it; "" if they are equal."""
    lines = difflib.unified_diff(
        before.splitlines(keepends=True), after.splitlines(keepends=True), "a/kernel.py", "b/kernel.py"
    )
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
