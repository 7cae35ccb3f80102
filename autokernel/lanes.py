"""A night on one GPU or on several: set up, go on where it ended, wait for the end. Imports no stage.

On one GPU the loop works in this working tree, on the branch that is checked out. On several, each GPU has a process, a working
tree of its own in workspace/lanes/gpu<n> and a branch <tag>-gpu<n>; the plan, the kept versions, the experiments and
results.tsv are the same for all, and a lock on each target keeps two GPUs from working on one.
"""

import contextlib
import hashlib
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path

import filelock
import msgspec
import torch

from autokernel import cli, experiments, hardware, kernels, results, state
from autokernel.agents import Agent, agent_of
from autokernel.errors import InputError
from autokernel.experiments import Experiment, Outcome
from autokernel.judge import sandbox
from autokernel.night import Lane, Night
from autokernel.repository import Repository
from autokernel.state import Plan
from autokernel.trial import Workbench

POLL_S = 1.0
SCRIPT: tuple[str, ...] = (str(state.ROOT / "orchestrate.py"),)  # whose subcommand `lane` is the loop on one GPU
RESTARTS = 5  # of a GPU's process that died, before it is given up
ENDED, GIVEN_UP = 0, 1


def check_agent(command: str, limit_s: float) -> Agent:
    """The agent; InputError if its program is missing, or if it could not be watched because there is no git repository."""
    agent = agent_of(command, limit_s)
    if not agent.trusted and Repository.at(state.ROOT) is None:
        raise InputError(
            "an agent's changes are kept and undone with git, and this folder is in no repository with a commit: "
            "run `git init && git add -A && git commit -m start` first"
        )
    return agent


@contextlib.contextmanager
def whole_night() -> Iterator[None]:
    """Have the workspace for one night; SIGTERM ends it as Ctrl-C does. InputError if a night is under way here."""
    state.WORKSPACE.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(state.WORKSPACE / ".night.lock")
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        raise InputError("a night is under way here already: wait for its end, or end it with Ctrl-C") from None
    try:
        _interruptible()
        yield
    finally:
        lock.release()


def run(
    agent: Agent,
    agent_s: float,
    experiments: int | None,
    hours: float | None,
    per_kernel_hours: float | None,
    gpus: Sequence[int],
    tag: str,
) -> None:
    """Experiment until the end, and say how it ended. A night of the same request that was interrupted is gone on with."""
    _check_gpus(gpus)
    asked = Night(
        tag=tag or f"night-{datetime.now():%m%d-%H%M}",
        agent=agent.name,
        agent_s=agent_s,
        experiments=experiments,
        hours=hours,
        per_kernel_hours=per_kernel_hours,
        gpus=tuple(gpus) if len(gpus) > 1 else (),
        plan_sha256=_plan_sha256(),
    )
    before = state.load_if_there(Night)
    if before is not None and not before.ended and before.same_request(asked):
        night = before
        cli.note(f"going on with {night.tag}, {night.elapsed_s / 60:.0f} minutes old")
    else:
        night = msgspec.structs.replace(asked, first=results.next_number())
        state.save(night)
    if agent.trusted and hardware.device().type == "cpu":
        cli.note("warning: without a GPU speed is unmeasured, so the tuner tries its versions and can keep none")
    left_s = math.inf if night.hours is None else night.hours * 3600 - night.elapsed_s
    if night.gpus:
        reason = _run_several(night, left_s)
    else:
        if gpus:
            torch.cuda.set_device(gpus[0])
        repository = Repository.at(state.ROOT)
        bench = Workbench(night.tag, agent, kernels.KERNEL, repository)
        bench.recover()
        _check_clean(repository, kernels.KERNEL)
        reason = Lane(night, bench, time.monotonic() + left_s).run()
    night = msgspec.structs.replace(state.load(Night), ended=reason)
    state.save(night)
    for key, value in night_lines().items():
        cli.say(key, value)


def night_lines() -> dict[str, str]:
    """What `run` and `status` say of the last night; empty before the first."""
    night = state.load_if_there(Night)
    if night is None:
        return {}
    mine = [experiment for experiment in experiments.Log().finished() if experiment.number >= night.first]
    outcomes = Counter(experiment.outcome for experiment in mine)
    counts = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common()) or "none"
    lines = {
        "night": night.tag,
        "agent": night.agent,
        "ended": night.ended or "no, it is under way or was interrupted",
        "night_experiments": f"{len(mine)} ({counts})",
        "night_kept": str(outcomes[Outcome.KEPT]),
        "night_minutes": f"{night.elapsed_s / 60:.1f}",
    }
    seconds = [experiment.agent_s + experiment.judge_s for experiment in mine]
    if sum(seconds):
        lines["seconds_per_experiment"] = f"{statistics.median(seconds):.2f} (median)"
        lines["time_shares"] = _shares(mine, max(night.elapsed_s * max(len(night.gpus), 1), sum(seconds)))
    if night.elapsed_s:
        lines["experiments_per_hour"] = f"{len(mine) / night.elapsed_s * 3600:.0f}"
    return lines


def _shares(mine: Sequence[Experiment], total_s: float) -> str:
    agent = sum(experiment.agent_s for experiment in mine)
    compiling = sum(experiment.compile_s for experiment in mine)
    judge = sum(experiment.judge_s for experiment in mine) - compiling
    parts = {"judge": judge, "compilers": compiling, "agent": agent, "rest": total_s - judge - compiling - agent}
    return ", ".join(f"{name} {part / total_s:.0%}" for name, part in parts.items())


def _plan_sha256() -> str:
    plan = msgspec.structs.replace(state.load(Plan), current=None)
    return hashlib.sha256(msgspec.json.encode(plan)).hexdigest()


def _check_gpus(gpus: Sequence[int]) -> None:
    there = torch.cuda.device_count()
    missing = [gpu for gpu in gpus if gpu >= there]
    if missing:
        have = f"has {there}, numbered from 0" if there else "has no GPU: leave --gpus out"
        raise InputError(f"there is no GPU {missing[0]}: this machine {have}")


def _check_clean(repository: Repository | None, kernel: Path) -> None:
    """InputError if something in the working tree would be mistaken for an agent's change, or lost."""
    if repository is None:
        cli.note("no git repository here: kept versions lie in workspace/ and are not committed")
        there = kernel.read_bytes() if kernel.is_file() else b""
        elsewhere = [*state.WORKSPACE.glob("kernel_*.py"), *kernels.STARTERS.glob("*.py")]
        if there and there not in [path.read_bytes() for path in elsewhere]:
            saved = state.WORKSPACE / "saved" / f"kernel_{hashlib.sha256(there).hexdigest()[:8]}.py"
            state.write_text(saved, there.decode(errors="replace"))
        return
    changed = repository.changed()
    kept = [path.read_bytes() for path in state.WORKSPACE.glob("kernel_*.py")]
    if kernel.name in changed and kernel.is_file() and kernel.read_bytes() in kept:
        changed.remove(kernel.name)  # it is saved, and the next start commits what is there then
    if changed:
        shown = ", ".join(changed[:3]) + (f" and {len(changed) - 3} more" if len(changed) > 3 else "")
        raise InputError(f"changes that are not committed would be mistaken for an agent's: commit or put back {shown}")


def _interruptible() -> None:
    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)


# several GPUs --------------------------------------------------------------------------------------------------------


def run_lane(gpu: int, seconds: float) -> int:
    """The loop on one of several GPUs, in a process that sees that GPU alone; the parent has made its working tree."""
    sandbox.die_with_parent(signal.SIGTERM)
    _interruptible()
    night = state.load(Night)
    folder = _folder(gpu)
    repository = Repository(folder)
    bench = Workbench(night.tag, agent_of(night.agent, night.agent_s), folder / kernels.KERNEL.name, repository, shared=True)
    bench.recover()
    _check_clean(repository, bench.kernel)
    cli.say("ended", Lane(night, bench, time.monotonic() + seconds).run())
    return cli.OK


def _folder(gpu: int) -> Path:
    return state.WORKSPACE / "lanes" / f"gpu{gpu}"


def _run_several(night: Night, left_s: float) -> str:
    """Start a process for each GPU, again if it dies, until all have ended; the reason of the last."""
    repository = Repository.at(state.ROOT)
    if repository is None:
        raise InputError("several GPUs need a git repository: run `git init && git add -A && git commit -m start` first")
    for gpu in night.gpus:
        _make_tree(repository, night, gpu)
    began = time.monotonic()
    running = {gpu: _start(gpu, left_s) for gpu in night.gpus}
    died: Counter[int] = Counter()
    reasons: list[str] = []
    try:
        while running:
            time.sleep(POLL_S)
            elapsed_s = night.elapsed_s + time.monotonic() - began
            state.save(msgspec.structs.replace(night, elapsed_s=elapsed_s))
            for gpu, process in list(running.items()):
                if process.poll() is None:
                    continue
                del running[gpu]
                said = process.stdout.read() if process.stdout else ""
                if process.returncode == ENDED:
                    reasons.append(said.strip().rpartition("ended: ")[2])
                    continue
                died[gpu] += 1
                if died[gpu] > RESTARTS or process.returncode == cli.BAD_INPUT:
                    reasons.append(f"GPU {gpu} was given up: its process ended with exit status {process.returncode}")
                    continue
                cli.note(f"the process of GPU {gpu} ended with exit status {process.returncode}: starting another")
                running[gpu] = _start(gpu, left_s - (time.monotonic() - began))
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait()
    return "; ".join(dict.fromkeys(reasons))


def _make_tree(repository: Repository, night: Night, gpu: int) -> None:
    """A working tree for this GPU, on a branch of the night's; one that is there already is gone on with."""
    folder, branch = _folder(gpu), f"{night.tag}-gpu{gpu}"
    repository.git("worktree", "prune")
    if folder.exists():
        old = Repository(folder)
        if old.position().branch == f"refs/heads/{branch}":
            return
        _check_clean(old, folder / kernels.KERNEL.name)
        repository.git("worktree", "remove", "--force", str(folder))
    repository.git("worktree", "add", "-q", "-b", branch, str(folder), "HEAD")


def _start(gpu: int, seconds: float) -> "subprocess.Popen[str]":
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    name = visible.split(",")[gpu] if visible else str(gpu)
    return subprocess.Popen(
        [sys.executable, *SCRIPT, "lane", "--gpu", str(gpu), "--seconds", str(seconds)],
        cwd=state.ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": name},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        encoding="utf-8",
    )
