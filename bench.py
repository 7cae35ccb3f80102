"""Judge a kernel: five correctness gates, then its speed against PyTorch and the roofline; one row of results.tsv.

    uv run bench.py                            kernel.py, as an answer to the plan's current target, beside its kept version
    uv run bench.py --target kernel_matmul_1   workspace/kernel_matmul_1.py, as an answer to that target; or several targets
    uv run bench.py --kernel softmax           a starter, on the operation's standard shapes
    uv run bench.py --all                      all starters, in all dtypes, with a table last
    uv run bench.py --quick                    smoke and shape sweep alone: never a PASS, no row
    uv run bench.py --incumbent FILE           time another kernel file beside it: which of the two is faster?
    uv run bench.py --sanitize --ncu           also compute-sanitizer on edge cases, and figures of Nsight Compute

The kernel runs in a process of its own, which is killed in the end. Exit status 0 only for PASS, 1 for any other verdict, 2 for
bad input. Do not edit: this file is hashed into every row.
"""

import os
import runpy
import secrets
import time
from collections.abc import Sequence
from pathlib import Path

# Before torch is imported, which takes seconds: the judge's other process imports it at the same time.
EARLY = None
if __name__ == "__main__":
    EARLY = runpy.run_path(str(Path(__file__).with_name("autokernel") / "judge" / "early.py"))["start"]()

from autokernel import cli, experiments, hardware, kernels, ops, results
from autokernel.errors import InputError
from autokernel.judge import cases
from autokernel.judge.isolated import Judge
from autokernel.judge.lines import Line, lines_of, lines_unread, log_of, number, shape_text
from autokernel.judge.process import CannotStart
from autokernel.judge.verdict import Options, Verdict, judge, row_of
from autokernel.kernels import KernelFile
from autokernel.results import UNMEASURED, Status
from autokernel.state import WORKSPACE, Plan, Target, load, load_if_there


def main(argv: Sequence[str] | None = None) -> int:
    parser = cli.parser(__doc__)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--target", metavar="NAME", nargs="+", help="judge workspace/NAME.py as an answer to the plan's target")
    which.add_argument("--kernel", metavar="OP", help="judge the starter of this operation")
    which.add_argument("--all", action="store_true", help="judge all starters")
    parser.add_argument("--dtype", choices=[hardware.dtype_name(d) for d in cases.DTYPES], help="timed dtype (float16)")
    parser.add_argument("--quick", action="store_true", help="stop after the shape sweep; never writes a verdict")
    parser.add_argument("--incumbent", metavar="FILE", type=Path, help="time this kernel file beside it")
    parser.add_argument("--allow-torch", action="store_true", help="operators of torch may do the work; written into the row")
    parser.add_argument("--sanitize", action="store_true", help="run compute-sanitizer's memcheck and racecheck too")
    parser.add_argument("--ncu", action="store_true", help="add a few figures of Nsight Compute")
    parser.add_argument("--description", default="", help="what was changed, for the row")
    parser.add_argument("--tag", default="", help="a label for the row, such as the name of a night")
    given = parser.parse_args(argv)
    if given.incumbent and (given.all or len(given.target or ()) > 1):
        raise InputError("--incumbent compares one kernel: name it with --kernel or --target")
    options = Options(
        quick=given.quick,
        allow_torch=given.allow_torch,
        sanitize=given.sanitize,
        ncu=given.ncu,
        all_dtypes=given.all,
    )
    if given.all:
        return _judge_all(options, given.description, given.tag)
    chosen = []
    for path, target in _choose(given.target, given.kernel):
        if target is not None and given.dtype not in (None, target.dtype):
            raise InputError(f"{target.name} is a {target.dtype} call: leave --dtype out, or use --kernel {target.operation}")
        chosen.append((_read(path, target), target))
    incumbent = _incumbent(given.incumbent, chosen[0][0]) if given.incumbent else _kept(*chosen[0])
    options = Options(**{**vars(options), "incumbent": incumbent})
    passed = True
    with _session() as session:
        for number, (kernel, target) in enumerate(chosen):
            verdict = _judge_one(session, kernel, target, given.dtype or "float16", options)
            if number:
                print()
            else:
                verdict.seconds = max(verdict.seconds, _since_start())  # the first has waited for the imports too
            _print(lines_of(verdict))
            _record(verdict, given.description, given.tag)
            passed &= verdict.status is Status.PASS
    return cli.OK if passed else cli.FAILED


def _choose(names: Sequence[str] | None, operation: str | None) -> list[tuple[Path, Target | None]]:
    """The files to judge and the targets that they answer, if any."""
    if operation is not None:
        return [(kernels.starter(operation), None)]
    if names is not None:
        plan = load(Plan)
        return [(WORKSPACE / f"{name}.py", _target(plan, name)) for name in names]
    there = load_if_there(Plan)
    if there is None or there.current is None:
        return [(kernels.KERNEL, None)]
    return [(kernels.KERNEL, _target(there, there.current))]


def _target(plan: Plan, name: str) -> Target:
    for target in plan.targets:
        if target.name == name:
            return target
    known = ", ".join(target.name for target in plan.targets)
    raise InputError(f"the plan has no target {name}: use one of {known}")


def _read(path: Path, target: Target | None) -> KernelFile:
    """The file, read and not run; InputError, after the lines that a program reads, if it is no kernel for the target."""
    try:
        kernel = kernels.read(path)
        if target is not None and kernel.operation.name != target.operation:
            raise InputError(
                f"{path.name} sets KERNEL_TYPE to {kernel.operation.name!r}, but {target.name} is a {target.operation}: "
                "set it to the target's operation, or run `uv run orchestrate.py next`"
            )
    except InputError as fault:
        _print(lines_unread(path, target, str(fault)))
        raise
    return kernel


def _kept(kernel: KernelFile, target: Target | None) -> KernelFile | None:
    """The kept version of the target that kernel.py is to answer, if it is another and has passed: what is to be beaten."""
    home = WORKSPACE / f"{target.name}.py" if target is not None else None
    if kernel.path != kernels.KERNEL or target is None or home is None or not home.is_file():
        return None
    row = results.last_for(kernels.sha256_of(home), target.name)
    if row is None or row.correctness is not Status.PASS or row.kernel_sha256 == kernel.sha256:
        return None
    return _incumbent(home, kernel)


def _incumbent(path: Path, kernel: KernelFile) -> KernelFile:
    incumbent = kernels.read(path)
    if incumbent.operation.name != kernel.operation.name:
        raise InputError(
            f"{path.name} is a kernel for {incumbent.operation.name}, not for {kernel.operation.name}: name another"
        )
    return incumbent


def _session() -> Judge:
    try:
        return Judge(hardware.device(), started=EARLY)
    except CannotStart as fault:
        raise InputError(f"the judge cannot start: {fault}") from None


def _judge_one(session: Judge, kernel: KernelFile, target: Target | None, dtype: str, options: Options) -> Verdict:
    plan = load_if_there(Plan)
    targets = tuple(t for t in plan.targets if t.operation == kernel.operation.name) if plan else ()
    seed = secrets.randbits(31)
    try:
        with session.turn(cli.note):
            return judge(session, kernel, target, targets, hardware.dtype(dtype), seed, options, cli.note)
    except CannotStart as fault:
        raise InputError(f"the judge cannot start: {fault}") from None


def _since_start() -> float:
    """Seconds since this process began, imports included; 0 where the system does not tell."""
    stat = Path("/proc/self/stat")
    if not stat.exists():
        return 0.0
    # the 22nd field, 20 after the name in brackets: ticks since the machine started
    ticks = int(stat.read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def _print(lines: Sequence[Line]) -> None:
    for key, value in lines:
        cli.say(key, value)


def _record(verdict: Verdict, description: str, tag: str) -> None:
    if verdict.status is None:
        cli.say("experiment", "none (a quick run writes no row)")
        return
    number = results.append(row_of(verdict, description, tag))
    experiments.archive(number, verdict.kernel.text, log_of(verdict))
    cli.say("experiment", number)


def _judge_all(options: Options, description: str, tag: str) -> int:
    titles = ("verdict", "ours us", "eager us", "eager/ours", "seconds")
    lines = [f"{'operation':<18}{'dtype':<10}{titles[0]:<11}{titles[1]:>10}{titles[2]:>10}{titles[3]:>11}{titles[4]:>9}  shape"]
    passed = True
    with _session() as session:
        for name in ops.names():
            verdict = _judge_one(session, _read(kernels.starter(name), None), None, "float16", options)
            _print(lines_of(verdict))
            _record(verdict, description, tag)
            print(flush=True)
            passed &= verdict.status is Status.PASS
            dtypes = [hardware.dtype_name(dtype) for dtype in cases.dtypes_checked(session.device)]
            lines += [_line(verdict, dtype) for dtype in dtypes]
    print("\n".join(lines), flush=True)
    return cli.OK if passed else cli.FAILED


def _line(verdict: Verdict, dtype: str) -> str:
    status = verdict.status.value if verdict.status else "unfinished"
    ours = eager = ratio = UNMEASURED
    if dtype in verdict.by_dtype:
        timing = verdict.by_dtype[dtype].timing
        ours, eager = number(timing.latency.value), number(timing.baseline.us)
        ratio = number(timing.baseline.speedup.value)
    start = f"{verdict.kernel.operation.name:<18}{dtype:<10}{status:<11}"
    # one judgement covers all dtypes
    seconds = f"{verdict.seconds:.1f}" if dtype == hardware.dtype_name(verdict.timed.dtype) else ""
    return f"{start}{ours:>10}{eager:>10}{ratio:>11}{seconds:>9}  {shape_text(verdict)}"


if __name__ == "__main__":
    cli.run_stage(main)
