"""Which kernel next, how far things are, and the whole pipeline in one command.

    uv run orchestrate.py run                 profile, extract, bench, verify and report: GPT-2, or any model:
    uv run orchestrate.py run --model models/llama_7b.py --class-name LlamaModel --input-shape 1,512 --dtype float16
    uv run orchestrate.py next                put the kernel most worth working on into kernel.py
    uv run orchestrate.py status              every target: verdict, speed-up, time still to gain
    uv run orchestrate.py report              write workspace/report.md and report.png, and print the report

`run` takes the model arguments of profile.py. Exit status: 0 all passed, 1 a kernel or the verification failed, 2 bad input.
"""

import ast
import hashlib
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

import msgspec
import pandas as pd

from autokernel import cli, hardware, kernels, models, report, results, scheduler, state
from autokernel.errors import InputError
from autokernel.state import Machine, Plan, Profile, Target, Verification

# What `run` does without arguments: GPT-2 as published on a GPU, a tiny one where Triton's interpreter runs the kernels.
DEFAULT_MODEL = ("--model", "models/gpt2.py", "--class-name", "GPT2", "--dtype", "float16")
DEFAULT_SIZE = {
    "cuda": ("--input-shape", "1,1024"),
    "cpu": ("--input-shape", "1,32", "--model-args", "tiny"),
}


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser = cli.parser(__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="next | status | report | run")
    run = commands.add_parser("run", help="profile, extract, bench, verify and report")
    models.add_model_arguments(run, required=False)
    commands.add_parser("next", help="put the kernel most worth working on into kernel.py")
    commands.add_parser("status", help="every target: verdict, speed-up, time still to gain")
    commands.add_parser("report", help="write and print the report")
    arguments = parser.parse_args(argv)
    if arguments.command == "run":
        return run_pipeline(argv[1:] or (*DEFAULT_MODEL, *DEFAULT_SIZE[hardware.device().type]))
    return {"next": choose_next, "status": show_status, "report": show_report}[arguments.command]()


# next ---------------------------------------------------------------------------------------------------------------


def choose_next() -> int:
    """Put the target that is most worth working on into kernel.py."""
    plan = state.load(Plan)
    experiments = results.read()
    decision = scheduler.next_target(plan, experiments)
    if decision.candidate is None:
        cli.say(decision.kind.value, decision.reason)
        return cli.OK
    target = decision.candidate.target
    if plan.current == target.name and _kernel_type(kernels.KERNEL) == target.operation:
        kernel = "kernel.py (unchanged: it holds the work on this target)"
    else:
        source = state.WORKSPACE / f"{target.name}.py"
        if not source.is_file():
            raise InputError(f"workspace/{target.name}.py is missing: run `{Plan.MADE_BY}` to make it again")
        put_away(plan, experiments)
        state.write_text(kernels.KERNEL, source.read_text(encoding="utf-8"))
        state.save(msgspec.structs.replace(plan, current=target.name))
        kernel = f"kernel.py (copy of workspace/{target.name}.py)"
    cli.say(decision.kind.value, target.name)
    cli.say("reason", decision.reason)
    cli.say("kernel", kernel)
    cli.say("operation", target.operation)
    cli.say("shape", report.shape_text(target.shape))
    cli.say("dtype", target.dtype)
    cli.say("sites", report.sites_text(target.sites))
    cli.say("share", f"{target.share:.4f}")
    cli.say("time_us", f"{target.time_us:.1f}")
    cli.say("saved_us", report.figure(target.saved_us))
    cli.say("best_speedup", report.figure(decision.candidate.best_speedup, ".3f"))
    cli.say("experiments", decision.candidate.experiments)
    return cli.OK


def put_away(plan: Plan, experiments: pd.DataFrame) -> None:
    """Lose nothing of kernel.py before it is overwritten.

    A version judged PASS for the current target goes to workspace/<target>.py, where verify.py looks for it, unless a faster
    one is there. Any other that is nowhere else (git's HEAD, the workspace, the starters) goes to workspace/saved/.
    """
    if not kernels.KERNEL.is_file():
        return
    content = kernels.KERNEL.read_bytes()
    elsewhere = [*state.WORKSPACE.glob("kernel_*.py"), *kernels.STARTERS.glob("*.py")]
    if content in [path.read_bytes() for path in elsewhere]:
        return
    current = next((target for target in plan.targets if target.name == plan.current), None)
    if current is not None and _keep(current, content, scheduler.experiments_of(current, experiments)):
        return
    if content != _committed(kernels.KERNEL):
        cli.say("saved", f"{_shown(_save(plan.current or 'kernel', content))} is kernel.py as it was")


def _keep(target: Target, content: bytes, rows: pd.DataFrame) -> bool:
    # put a kernel that passed, and is no slower than the one there, into the target's own file
    speed = _speed(rows, content)
    home = state.WORKSPACE / f"{target.name}.py"
    incumbent = home.read_bytes() if home.is_file() else None
    if speed is None or (incumbent is not None and speed < (_speed(rows, incumbent) or 0.0)):
        return False
    if incumbent is not None:
        _save(target.name, incumbent)
    state.write_text(home, content.decode())
    cli.say("kept", f"{_shown(home)} is now kernel.py, which passed")
    return True


def _speed(rows: pd.DataFrame, content: bytes) -> float | None:
    # best speed-up of this very text among its passes; 0 if it passed unmeasured, None if it never passed
    sha256 = hashlib.sha256(content).hexdigest()
    passed = rows[(rows["correctness"] == "PASS") & (rows["kernel_sha256"] == sha256)]
    return None if passed.empty else float(passed["speedup_vs_pytorch"].fillna(0.0).max())


def _save(name: str, content: bytes) -> Path:
    path = state.WORKSPACE / "saved" / f"{name}_{hashlib.sha256(content).hexdigest()[:8]}.py"
    state.write_text(path, content.decode())
    return path


def _committed(path: Path) -> bytes | None:
    # the text in git's HEAD; None outside a repository, without git, or when it was never committed
    try:
        shown = subprocess.run(["git", "show", f"HEAD:./{path.name}"], cwd=path.parent, capture_output=True, check=False)
    except FileNotFoundError:
        return None
    return shown.stdout if shown.returncode == 0 else None


def _kernel_type(path: Path) -> str | None:
    # read, not imported: importing would run the file's code here
    try:
        tree = ast.parse(path.read_bytes())
    except (FileNotFoundError, SyntaxError):
        return None
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "KERNEL_TYPE" for t in node.targets):
            value = node.value.value if isinstance(node.value, ast.Constant) else None
            return value if isinstance(value, str) else None
    return None


# status and report --------------------------------------------------------------------------------------------------


def show_status() -> int:
    """Every target: what its experiments showed and what is still to gain."""
    plan = state.load(Plan)
    experiments = results.read()
    verification = state.load_if_there(Verification)
    candidates = scheduler.rank(plan, experiments)
    cli.say("model", report.source_text(plan.source))
    cli.say("gpu", plan.gpu)
    cli.say("total_us", f"{plan.total_us:.1f}")
    cli.say("current", plan.current or "none")
    cli.say("targets", len(plan.targets))
    cli.say("targets_passed", sum(candidate.verdict == "PASS" for candidate in candidates))
    cli.say("experiments", sum(candidate.experiments for candidate in candidates))
    _say_verification(verification)
    print(report.target_table(candidates))
    return cli.OK


def show_report() -> int:
    """Write workspace/report.md and report.png and print the former."""
    print(write_report())
    return cli.OK


def write_report() -> str:
    """Write both files; the text."""
    profile, plan = state.load_if_there(Profile), state.load_if_there(Plan)
    candidates = scheduler.rank(plan, results.read()) if plan is not None else []
    text = report.markdown(state.load_if_there(Machine), profile, plan, candidates, state.load_if_there(Verification))
    if profile is not None:
        report.plot(state.WORKSPACE / report.PLOT, profile, candidates)
        text += f"\n![Where the time goes]({report.PLOT})\n"
    state.write_text(state.WORKSPACE / "report.md", text)
    return text


def _shown(path: Path) -> str:
    return str(path.relative_to(state.ROOT))


def _say_verification(verification: Verification | None) -> None:
    cli.say("verification", "not verified yet" if verification is None else report.verdict(verification))
    cli.say("speedup_end_to_end", report.UNMEASURED if verification is None else report.speedup_text(verification))


# run ----------------------------------------------------------------------------------------------------------------


def _logs() -> Path:
    # what the stages of the last run said
    return state.WORKSPACE / "logs"


@dataclass(frozen=True)
class Outcome:
    """How a stage ended: its exit status and its standard output."""

    status: int
    said: str


def run_pipeline(model_arguments: Sequence[str]) -> int:
    """Profile, extract, bench the extracted kernels, verify, report; each stage in a process of its own."""
    shutil.rmtree(_logs(), ignore_errors=True)
    machine = state.load_if_there(Machine)
    if (machine is None or machine.device != hardware.device().type) and not _needed("prepare.py"):
        return cli.FAILED
    if not _needed("profile.py", *model_arguments):
        return cli.FAILED
    # what an earlier run verified is not this run's result, should this one end early
    state.path_of(Verification).unlink(missing_ok=True)
    if not _needed("extract.py", "--top", "5"):
        return cli.FAILED
    names = [target.name for target in state.load(Plan).targets]
    verdicts = _verdicts(_stage("bench.py", "--target", *names), names)
    verified = _stage("verify.py")
    print(write_report())
    for name, verdict in verdicts.items():
        cli.say(name, verdict)
    verification = state.load_if_there(Verification)
    if verification is None:
        cli.say("verification", "CRASH")
    else:
        _say_verification(verification)
    cli.say("report", _shown(state.WORKSPACE / "report.md"))
    correct = verified.status == cli.OK and verification is not None and verification.correct
    passed = correct and all(verdict == "PASS" for verdict in verdicts.values())
    return cli.OK if passed else cli.FAILED


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
        cli.say(Path(script).stem, f"CRASH (exit status {outcome.status}; see {_shown(_logs())}/)")
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
        raise InputError(sentences[-1] if sentences else f"{script} refused its input: see {_shown(_logs())}/")
    cli.note(f"  {script} took {time.monotonic() - started:.0f} s")
    return Outcome(process.returncode, said)


def _pass_on(stream: IO[str], lines: list[str]) -> None:
    for line in stream:
        lines.append(line.rstrip())
        if not line.startswith("error: "):  # the sentence of bad input is ours to print, once, at the end
            cli.note(f"  {line.rstrip()}")


if __name__ == "__main__":
    cli.run_stage(main)
