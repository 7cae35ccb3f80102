"""workspace/experiments/<n>/: what was tried, how it ended and why; kept or not, it stays. Imports no stage.

    experiment.json   the outcome, written last: a folder without it is of an experiment under way, or one that was killed
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

RECORD = "experiment.json"


class Outcome(str, enum.Enum):
    """How an experiment ended. Only the first changed kernel.py for good."""

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
    reason: str = ""  # why it was not kept; "" if it was
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


def folder(number: int) -> Path:
    """The folder of one experiment; `results.reserve` makes it."""
    return state.WORKSPACE / "experiments" / str(number)


def finish(experiment: Experiment) -> None:
    """Write the record, which ends the experiment."""
    text = msgspec.json.format(msgspec.json.encode(experiment), indent=2).decode() + "\n"
    state.write_text(folder(experiment.number) / RECORD, text)


def archive(number: int, kernel: bytes, log: str) -> None:
    """Keep a version that was judged, and what the judge said of it."""
    folder(number).mkdir(parents=True, exist_ok=True)
    state.write_text(folder(number) / "kernel.py", kernel.decode())
    state.write_text(folder(number) / "bench.log", log)


def finished() -> list[Experiment]:
    """All experiments that have ended, in their order; a damaged record counts as one that was never finished."""
    found = []
    for number in results.reserved():
        try:
            found.append(msgspec.json.decode((folder(number) / RECORD).read_bytes(), type=Experiment))
        except (FileNotFoundError, msgspec.DecodeError):
            continue
    return found


def unfinished() -> list[int]:
    """Numbers of folders without a record: under way, or killed."""
    done = {experiment.number for experiment in finished()}
    return [number for number in results.reserved() if number not in done]


def diff(before: str, after: str) -> str:
    """A unified diff of two versions of kernel.py, as git shows it; "" if they are equal."""
    lines = difflib.unified_diff(
        before.splitlines(keepends=True), after.splitlines(keepends=True), "a/kernel.py", "b/kernel.py"
    )
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
