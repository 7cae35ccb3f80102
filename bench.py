"""Judge a kernel: five correctness gates, then its speed against PyTorch and the roofline; one row of results.tsv.

    uv run bench.py                            kernel.py, as an answer to the plan's current target
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

from autokernel import cli, hardware, kernels, ops, results
from autokernel.errors import InputError
from autokernel.judge import cases
from autokernel.judge.clock import Estimate
from autokernel.judge.gates import GATES
from autokernel.judge.isolated import Judge
from autokernel.judge.ncu import KEYS as NCU_KEYS
from autokernel.judge.process import CannotStart
from autokernel.judge.verdict import Figures, Options, Verdict, judge, row_of
from autokernel.kernels import KernelFile
from autokernel.results import UNMEASURED, Status
from autokernel.state import ROOT, WORKSPACE, Plan, Target, load, load_if_there

# The lines of a timing, in this order; each is the word `unmeasured` without one.
FIGURES = """
    latency_us latency_interval clock_us graph_us launch_us pytorch_us throughput_tflops bandwidth_gb_s pct_peak_compute
    pct_peak_bandwidth bottleneck speedup_vs_pytorch speedup_interval timed_calls peak_vram_mb
""".split()


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
    if given.incumbent:
        options = Options(**{**vars(options), "incumbent": _incumbent(given.incumbent, chosen[0][0])})
    passed = True
    with _session() as session:
        for number, (kernel, target) in enumerate(chosen):
            verdict = _judge_one(session, kernel, target, given.dtype or "float16", options)
            if number:
                print()
            else:
                verdict.seconds = max(verdict.seconds, _since_start())  # the first has waited for the imports too
            _print(verdict)
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
        _print_unread(path, target, str(fault))
        raise
    return kernel


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


def _print(verdict: Verdict) -> None:
    say = cli.say
    say("kernel_type", verdict.kernel.operation.name)
    say("kernel", _shown(verdict.kernel.path))
    say("kernel_sha256", verdict.kernel.sha256)
    say("target", verdict.target.name if verdict.target else "none")
    say("shape", _shape(verdict))
    say("dtype", hardware.dtype_name(verdict.timed.dtype))
    say("gpu", hardware.gpu_name())
    say("isolation", verdict.isolation)
    say("allow_torch", "yes" if verdict.allow_torch else "no")
    unchecked = [hardware.dtype_name(d) for d in cases.DTYPES if d not in cases.dtypes_checked(hardware.device())]
    say("not_checked", ", ".join(unchecked) + " (Triton's interpreter)" if unchecked else "nothing")
    for gate in GATES:
        say(gate, verdict.gates[gate])
    if verdict.sanitizer:
        say("sanitizer", verdict.sanitizer)
    say("correctness", verdict.status.value if verdict.status else "unfinished")
    say("reason", verdict.reason or ("quick: the last gates were not run" if verdict.status is None else "none"))
    _print_figures(verdict.figures)
    if verdict.counters is not None:
        say("ncu", verdict.counters.note or verdict.counters.kernel)
        for key in NCU_KEYS:
            say(key, verdict.counters.figures.get(key, UNMEASURED))
    say("seconds", f"{verdict.seconds:.1f}")


def _print_figures(figures: Figures | None) -> None:
    say = cli.say
    if figures is None:
        for key in FIGURES:
            say(key, UNMEASURED)
        return
    timing = figures.timing
    incumbent = timing.incumbent
    values = (
        _number(timing.latency.value),
        _interval(timing.latency, 2),
        _number(timing.clock_us),
        _number(timing.graph_us) + (f" ({timing.note})" if timing.note else ""),
        _number(timing.launch_us),
        _number(timing.baseline.us),
        _number(figures.tflops),
        _number(figures.gb_s),
        _number(figures.pct_peak_compute),
        _number(figures.pct_peak_bandwidth),
        figures.bottleneck,
        _number(timing.baseline.speedup.value, 3),
        _interval(timing.baseline.speedup, 3),
        timing.calls,
        _number(timing.peak_vram_mb),
    )
    for key, value in zip(FIGURES, values, strict=True):
        say(key, value)
    if incumbent is not None:
        say("incumbent_us", _number(incumbent.us))
        say("speedup_vs_incumbent", _number(incumbent.speedup.value, 3))
        say("speedup_vs_incumbent_interval", _interval(incumbent.speedup, 3))


def _print_unread(path: Path, target: Target | None, reason: str) -> None:
    """The same lines for a file that is no kernel."""
    cli.say("kernel_type", "unknown")
    cli.say("kernel", _shown(path))
    cli.say("target", target.name if target else "none")
    for gate in GATES:
        cli.say(gate, "not run")
    cli.say("correctness", Status.CRASH)
    cli.say("reason", reason)
    _print_figures(None)


def _record(verdict: Verdict, description: str, tag: str) -> None:
    if verdict.status is None:
        cli.say("experiment", "none (a quick run writes no row)")
        return
    cli.say("experiment", results.append(row_of(verdict, description, tag)))


def _judge_all(options: Options, description: str, tag: str) -> int:
    titles = ("verdict", "ours us", "eager us", "eager/ours", "seconds")
    lines = [f"{'operation':<18}{'dtype':<10}{titles[0]:<11}{titles[1]:>10}{titles[2]:>10}{titles[3]:>11}{titles[4]:>9}  shape"]
    passed = True
    with _session() as session:
        for name in ops.names():
            verdict = _judge_one(session, _read(kernels.starter(name), None), None, "float16", options)
            _print(verdict)
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
        ours, eager = _number(timing.latency.value), _number(timing.baseline.us)
        ratio = _number(timing.baseline.speedup.value)
    start = f"{verdict.kernel.operation.name:<18}{dtype:<10}{status:<11}"
    # one judgement covers all dtypes
    seconds = f"{verdict.seconds:.1f}" if dtype == hardware.dtype_name(verdict.timed.dtype) else ""
    return f"{start}{ours:>10}{eager:>10}{ratio:>11}{seconds:>9}  {_shape(verdict)}"


def _shape(verdict: Verdict) -> str:
    return " ".join(f"{key}={value}" for key, value in verdict.timed.shape.items())


def _interval(estimate: Estimate, digits: int) -> str:
    return f"{estimate.low:.{digits}f} to {estimate.high:.{digits}f}"


def _number(value: float | None, digits: int = 2) -> str:
    return UNMEASURED if value is None else f"{value:.{digits}f}"


def _shown(path: Path) -> str:
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


if __name__ == "__main__":
    cli.run_stage(main)
