"""Which kernel next, keep it or not, how far things are, and everything in one command: the pipeline, or a whole night.

    uv run orchestrate.py run                 profile, extract, bench, verify and report: GPT-2, or any model:
    uv run orchestrate.py run --model models/llama_7b.py --class-name LlamaModel --input-shape 1,512 --dtype float16
    uv run orchestrate.py run --agent tuner --hours 8     the same, with experiments all night instead of one bench each
    uv run orchestrate.py run --agent 'claude -p {prompt}' --experiments 100      with an agent of your own
    uv run orchestrate.py next                put the kernel most worth working on into kernel.py
    uv run orchestrate.py keep-or-revert      after a bench: commit kernel.py if its row says that it is better, else restore it
    uv run orchestrate.py status              every target: verdict, speed-up, time still to gain; with --watch, live
    uv run orchestrate.py report              write workspace/report.md, .png and .html, and print the first

`run` takes the model arguments of profile.py. With any of --agent, --experiments, --hours, --per-kernel and --gpus it goes on
from the plan of that model, and from a night that was interrupted: give the same command again. Exit status: 0 all passed, 1 a
kernel or the verification failed (keep-or-revert: it was not kept), 2 bad input.
"""

import argparse
import ast
import hashlib
import math
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.live import Live
from rich.text import Text

from autokernel import (
    chronicle,
    cli,
    experiments,
    hardware,
    keeping,
    kernels,
    lanes,
    models,
    page,
    pictures,
    pipeline,
    report,
    results,
    scheduler,
    state,
)
from autokernel.agents import TUNER
from autokernel.errors import InputError
from autokernel.experiments import Experiment, Outcome
from autokernel.repository import Repository
from autokernel.state import Machine, Plan, Profile, Verification

# What `run` does without arguments: GPT-2 as published on a GPU, a tiny one where Triton's interpreter runs the kernels.
DEFAULT_MODEL = ("--model", "models/gpt2.py", "--class-name", "GPT2", "--dtype", "float16")
DEFAULT_SIZE = {
    "cuda": ("--input-shape", "1,1024"),
    "cpu": ("--input-shape", "1,32", "--model-args", "tiny"),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = cli.parser(__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="next | keep-or-revert | status | report | run")
    run = commands.add_parser("run", help="profile, extract, bench, verify and report; or a night of experiments")
    models.add_model_arguments(run, required=False)
    night = run.add_argument_group("night (any of these makes it one)")
    night.add_argument("--agent", metavar="'COMMAND'", help=f"who edits kernel.py: {TUNER} (the default), or a command line")
    night.add_argument("--experiments", type=_count, metavar="N", help="end after so many")
    night.add_argument("--hours", type=_positive, metavar="H", help="end after so many hours")
    night.add_argument("--per-kernel", type=_positive, metavar="H", help="spend at most so many hours on one kernel")
    night.add_argument("--gpus", type=_gpus, metavar="0,1", help="judge on these GPUs, a target on each at a time")
    night.add_argument("--agent-minutes", type=_positive, default=20.0, metavar="M", help="an agent's time for one edit (20)")
    night.add_argument("--tag", default="", help="a name for the night, for its rows")
    commands.add_parser("next", help="put the kernel most worth working on into kernel.py")
    commands.add_parser("keep-or-revert", help="commit kernel.py if its row says that it is better, else restore it")
    status = commands.add_parser("status", help="every target: verdict, speed-up, time still to gain")
    status.add_argument("--watch", action="store_true", help="again every two seconds, until Ctrl-C")
    commands.add_parser("report", help="write and print the report")
    lane = commands.add_parser("lane", help=argparse.SUPPRESS)
    lane.add_argument("--gpu", type=int, required=True)
    lane.add_argument("--seconds", type=float, required=True)
    given = parser.parse_args(argv)
    if given.command == "run":
        asked = (given.agent, given.experiments, given.hours, given.per_kernel, given.gpus)
        return run_pipeline(given) if all(value is None for value in asked) else run_night(given)
    if given.command == "lane":
        return lanes.run_lane(given.gpu, given.seconds)
    if given.command == "status":
        return watch() if given.watch else show_status()
    return {"next": choose_next, "keep-or-revert": keep_or_revert, "report": show_report}[given.command]()


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def _gpus(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isdigit() for part in parts) or len(set(map(int, parts))) < len(parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of different GPUs such as 0,1")
    return tuple(map(int, parts))


# next ---------------------------------------------------------------------------------------------------------------


def choose_next() -> int:
    """Put the target that is most worth working on into kernel.py."""
    plan = state.load(Plan)
    tried = results.read()
    decision = scheduler.next_target(plan, tried)
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
        keeping.put_away(plan)
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


# keep-or-revert -----------------------------------------------------------------------------------------------------


def keep_or_revert() -> int:
    """Commit kernel.py if the row that judged it says that it is better than the kept version; else restore that."""
    plan = state.load(Plan)
    target = next((target for target in plan.targets if target.name == plan.current), None)
    if target is None:
        raise InputError("no target is being worked on: run `uv run orchestrate.py next` first")
    home = keeping.home(target.name)
    if not home.is_file() or not kernels.KERNEL.is_file():
        missing = kernels.KERNEL if home.is_file() else home
        raise InputError(
            f"{keeping.shown(missing)} is missing: run `uv run orchestrate.py next` to have the kept version there"
        )
    repository = Repository.at(state.ROOT)
    others = [name for name in repository.changed() if name != kernels.KERNEL.name] if repository else []
    if others:
        raise InputError(f"only kernel.py may change, but so did {', '.join(others)}: put back what is not yours to change")
    text, kept = keeping.text_of(kernels.KERNEL), keeping.text_of(home)
    row = results.last_for(kernels.sha256_of(kernels.KERNEL), target.name)
    if row is None:
        raise InputError(f"this version of kernel.py was not judged for {target.name}: run `uv run bench.py` first")
    decision = keeping.decide(row, keeping.kept_row(target.name))
    same = text == kept
    commit = ""
    if decision.keep:
        message = keeping.message_of(row, decision.reason)
        commit = keeping.keep(target.name, text, kernels.KERNEL, repository, message)
    elif not same:
        state.write_text(experiments.folder(row.experiment) / "kernel.py", text)  # bench.py has put it there already
        state.write_text(kernels.KERNEL, kept)
    if not same:
        state.write_text(experiments.folder(row.experiment) / "change.diff", experiments.diff(kept, text))
        ended = Experiment(
            number=row.experiment,
            target=target.name,
            operation=target.operation,
            agent="by hand",
            description=row.description,
            outcome=Outcome.KEPT if decision.keep else Outcome.REVERTED,
            reason=decision.reason,
            verdict=row.correctness,
            kernel_sha256=row.kernel_sha256,
            parent_sha256=hashlib.sha256(kept.encode()).hexdigest(),
            latency_us=row.latency_us,
            speedup_vs_pytorch=row.speedup_vs_pytorch,
            speedup_vs_incumbent=row.speedup_vs_incumbent,
            began=row.time,
            judge_s=row.seconds or 0.0,
            gpu=row.gpu,
            commit=commit,
        )
        experiments.finish(ended)
    cli.say("KEEP" if decision.keep else "REVERT", target.name)
    cli.say("reason", decision.reason)
    cli.say("experiment", row.experiment)
    cli.say("commit", commit or "none")
    return cli.OK if decision.keep else cli.FAILED


# status and report --------------------------------------------------------------------------------------------------


WATCH_S = 2.0


def watch() -> int:
    """The same, again and again, in place where standard error is a terminal; until Ctrl-C."""
    state.load(Plan)
    with Live(console=cli.console, auto_refresh=False) as live:
        while True:
            live.update(Text(status_text()), refresh=True)
            time.sleep(WATCH_S)


def show_status() -> int:
    """Every target: what its experiments showed and what is still to gain."""
    print(status_text(), flush=True)
    return cli.OK


def status_text() -> str:
    """The lines of `status`, and its table."""
    plan = state.load(Plan)
    rows = results.read()
    verification = state.load_if_there(Verification)
    candidates = scheduler.rank(plan, rows)
    lines = {
        "model": report.source_text(plan.source),
        "gpu": plan.gpu,
        "total_us": f"{plan.total_us:.1f}",
        "current": plan.current or "none",
        "targets": len(plan.targets),
        "targets_passed": sum(candidate.verdict == "PASS" for candidate in candidates),
        "experiments": sum(candidate.experiments for candidate in candidates),
        **lanes.night_lines(),
        "verification": "not verified yet" if verification is None else report.verdict(verification),
        "speedup_end_to_end": report.UNMEASURED if verification is None else report.speedup_text(verification),
    }
    return "\n".join([*(f"{key}: {value}" for key, value in lines.items()), report.target_table(candidates)])


def show_report() -> int:
    """Write workspace/report.md, its pictures and report.html, and print the first."""
    print(write_report())
    return cli.OK


def write_report() -> str:
    """Write all of it; the text."""
    profile, plan = state.load_if_there(Profile), state.load_if_there(Plan)
    candidates = scheduler.rank(plan, results.read()) if plan is not None else []
    tried = experiments.Log().finished()
    night = chronicle.section(lanes.night_lines(), tried, _diff_of)
    text = report.markdown(state.load_if_there(Machine), profile, plan, candidates, state.load_if_there(Verification), night)
    drawn: dict[str, tuple[str, bytes | None]] = {}
    if profile is not None:
        report.plot(state.WORKSPACE / report.PLOT, profile, candidates)
        drawn[report.PLOT] = ("Where the time goes", (state.WORKSPACE / report.PLOT).read_bytes())
    if plan is not None:
        drawn["report_time.png"] = ("Before and after", pictures.time_split(plan, candidates))
        drawn["report_roofline.png"] = ("On the roofline", pictures.roofline(candidates, hardware.limits()))
        drawn["report_progress.png"] = ("Progress of each kernel", pictures.progress(tried))
    pngs = {name: png for name, (_, png) in drawn.items() if png is not None}
    for name, png in pngs.items():
        text += f"\n![{drawn[name][0]}]({name})\n"
        (state.WORKSPACE / name).write_bytes(png)
    state.write_text(state.WORKSPACE / "report.md", text)
    state.write_text(state.WORKSPACE / "report.html", page.page("AutoKernel report", text, pngs))
    return text


def _diff_of(experiment: Experiment) -> str:
    path = experiments.folder(experiment.number) / "change.diff"
    return path.read_text(encoding="utf-8") if path.is_file() else ""


# run ----------------------------------------------------------------------------------------------------------------


def run_pipeline(given: argparse.Namespace) -> int:
    """Profile, extract, bench the extracted kernels, verify, report; each stage in a process of its own."""
    if not pipeline.make_plan(_model_arguments(given)):
        return cli.FAILED
    verdicts = pipeline.bench()
    return _end(verdicts)


def run_night(given: argparse.Namespace) -> int:
    """Experiments on the plan of the model until a budget is used up or nothing is left to gain; then verify and report."""
    agent = lanes.check_agent(given.agent or TUNER, agent_s := given.agent_minutes * 60)
    with lanes.whole_night():
        if _needs_plan(given) and not pipeline.make_plan(_model_arguments(given)):
            return cli.FAILED
        lanes.run(
            agent=agent,
            experiments=given.experiments,
            hours=given.hours,
            per_kernel_hours=given.per_kernel,
            gpus=given.gpus or (),
            agent_s=agent_s,
            tag=given.tag,
        )
        plan, rows = state.load(Plan), results.read()
        return _end({candidate.target.name: candidate.verdict for candidate in scheduler.rank(plan, rows)})


def _end(verdicts: dict[str, str]) -> int:
    for name, verdict in verdicts.items():
        cli.say(name, verdict)
    correct = pipeline.verify()
    print(write_report())
    cli.say("report", keeping.shown(state.WORKSPACE / "report.md"))
    return cli.OK if correct and all(verdict == "PASS" for verdict in verdicts.values()) else cli.FAILED


def _model_arguments(given: argparse.Namespace) -> list[str]:
    if models.given(given):
        return models.arguments_of(given)
    return [*DEFAULT_MODEL, *DEFAULT_SIZE[hardware.device().type]]


def _needs_plan(given: argparse.Namespace) -> bool:
    """Whether the plan is missing, or of another model or GPU than is asked for."""
    plan = state.load_if_there(Plan)
    if plan is None:
        return True
    here = hardware.gpu_name() if hardware.device().type == "cuda" else "cpu"
    return plan.gpu != here or (models.given(given) and models.source_of(given) != plan.source)


if __name__ == "__main__":
    cli.run_stage(main)
