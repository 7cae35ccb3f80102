"""The stages one after another, each in a process of its own: profile, extract, bench, verify. Imports none of them."""

import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from autokernel import cli, hardware, report, state
from autokernel.errors import InputError
from autokernel.state import Machine, Plan, Verification


def _logs() -> Path:
    # what the stages of the last run said
    return state.WORKSPACE / "logs"


@dataclass(frozen=True)
class Outcome:
    """How a stage ended: its exit status and its standard output."""

    status: int
    said: str


def make_plan(model_arguments: Sequence[str]) -> bool:
    """Prepare the machine if it was not yet, profile the model and extract its kernels; whether all that went well."""
    shutil.rmtree(_logs(), ignore_errors=True)
    machine = state.load_if_there(Machine)
    if (machine is None or machine.device != hardware.device().type) and not _needed("prepare.py"):
        return False
    if not _needed("profile.py", *model_arguments):
        return False
    # what an earlier run verified is not this run's result, should this one end early
    state.path_of(Verification).unlink(missing_ok=True)
    return _needed("extract.py", "--top", "5")


def bench() -> dict[str, str]:
    """Judge the extracted kernels; target -> verdict."""
    names = [target.name for target in state.load(Plan).targets]
    return _verdicts(_stage("bench.py", "--target", *names), names)


def verify() -> bool:
    """Put the kernels back into the model; whether its output is right. Says the result in two lines."""
    state.path_of(Verification).unlink(missing_ok=True)
    status = _stage("verify.py").status
    verification = state.load_if_there(Verification)
    if verification is None:
        cli.say("verification", "CRASH")
        return False
    cli.say("verification", report.verdict(verification))
    cli.say("speedup_end_to_end", report.speedup_text(verification))
    return status == cli.OK and verification.correct


def _verdicts(outcome: Outcome, names: Sequence[str]) -> dict[str, str]:
    """Target -> verdict. A PASS counts if its row was written, and the exit status agrees with all the verdicts."""
    blocks = [dict(re.findall(r"^(\w+): (.*)$", block, flags=re.MULTILINE)) for block in outcome.said.split("\n\n")]
    judged = {block["target"]: block for block in blocks if {"target", "correctness", "experiment"} <= block.keys()}
    verdicts = {name: judged[name]["correctness"] if name in judged else "CRASH" for name in names}
    all_passed = all(verdict == "PASS" for verdict in verdicts.values())
    if outcome.status != (cli.OK if all_passed else cli.FAILED):  # a judge that died in the end has not passed anything
        verdicts = {name: "CRASH" if verdict == "PASS" else verdict for name, verdict in verdicts.items()}
    for name, verdict in verdicts.items():
        block = judged.get(name, {})
        why = "" if verdict == "PASS" else f" ({block.get('reason', 'see its log')})"
        cli.note(f"  {name}: {verdict}{why}, speed-up over PyTorch: {block.get('speedup_vs_pytorch', report.UNMEASURED)}")
    return verdicts


def _needed(script: str, *arguments: str) -> bool:
    # a stage that the next one needs
    outcome = _stage(script, *arguments)
    if outcome.status != cli.OK:
        cli.say(Path(script).stem, f"CRASH (exit status {outcome.status}; see {_logs().relative_to(state.ROOT)}/)")
    return outcome.status == cli.OK


def _stage(script: str, *arguments: str) -> Outcome:
    """Run one stage: its progress is passed on, its output logged. InputError with its own sentence if it exits with 2."""
    cli.note(f"> {' '.join((script, *arguments))}")
    started = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, state.ROOT / script, *arguments],
        cwd=state.ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
    )
    assert process.stdout is not None
    assert process.stderr is not None
    progress: list[str] = []
    # both pipes must be read at once, or a stage that fills one of them waits for ever
    listener = threading.Thread(target=_pass_on, args=(process.stderr, progress), daemon=True)
    with process, cli.console.status(script):
        listener.start()
        said = process.stdout.read()
        listener.join()
    log = "\n".join((" ".join((script, *arguments)), said, *progress)) + "\n"
    state.write_text(_logs() / f"{Path(script).stem}.log", log)
    if process.returncode == cli.BAD_INPUT:
        sentences = [found[1] for line in progress if (found := re.match(r"(?:\S+: )?error: (.*)", line))]
        raise InputError(sentences[-1] if sentences else f"{script} refused its input: see {_logs().relative_to(state.ROOT)}/")
    cli.note(f"  {script} took {time.monotonic() - started:.0f} s")
    return Outcome(process.returncode, said)


def _pass_on(stream: IO[str], lines: list[str]) -> None:
    for line in stream:
        lines.append(line.rstrip())
        if not line.startswith("error: "):  # the sentence of bad input is ours to print, once, at the end
            cli.note(f"  {line.rstrip()}")
