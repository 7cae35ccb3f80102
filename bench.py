"""Judge a kernel: five correctness gates, then its speed against PyTorch and the roofline; one row of results.tsv.

    uv run bench.py                            kernel.py, as an answer to the plan's current target
    uv run bench.py --target kernel_matmul_1   workspace/kernel_matmul_1.py, as an answer to that target
    uv run bench.py --kernel softmax           a starter, on the operation's standard shapes
    uv run bench.py --all                      all starters, in all dtypes, with a table last
    uv run bench.py --quick                    smoke and shape sweep alone: never a PASS, no row

Exit status 0 only for PASS, 1 for any other verdict, 2 for bad input. Do not edit: this file is hashed into every row.
"""

import secrets
from collections.abc import Sequence
from pathlib import Path

from autokernel import cli, hardware, kernels, ops, results
from autokernel.errors import InputError
from autokernel.judge import cases
from autokernel.judge.gates import GATES
from autokernel.judge.verdict import Figures, Verdict, judge, row_of, time_kernel
from autokernel.results import Status
from autokernel.state import ROOT, WORKSPACE, Plan, Target, load, load_if_there

UNMEASURED = "unmeasured"


def main(argv: Sequence[str] | None = None) -> int:
    parser = cli.parser(__doc__)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--target", metavar="NAME", help="judge workspace/NAME.py as an answer to the plan's target NAME")
    which.add_argument("--kernel", metavar="OP", help="judge the starter of this operation")
    which.add_argument("--all", action="store_true", help="judge all starters")
    parser.add_argument("--dtype", choices=[hardware.dtype_name(d) for d in cases.DTYPES], help="timed dtype (float16)")
    parser.add_argument("--quick", action="store_true", help="stop after the shape sweep; never writes a verdict")
    parser.add_argument("--description", default="", help="what was changed, for the row")
    parser.add_argument("--tag", default="", help="a label for the row, such as the name of a night")
    options = parser.parse_args(argv)
    if options.all:
        return _judge_all(options.description, options.tag, options.quick)
    path, target = _choose(options.target, options.kernel)
    if target is not None and options.dtype not in (None, target.dtype):
        raise InputError(f"{target.name} is a {target.dtype} call: leave --dtype out, or use --kernel {target.operation}")
    verdict = _judge_one(path, target, options.dtype or "float16", options.quick)
    _print(verdict)
    _record(verdict, options.description, options.tag)
    return cli.OK if verdict.status is Status.PASS else cli.FAILED


def _choose(target_name: str | None, operation: str | None) -> tuple[Path, Target | None]:
    """The file to judge and the target that it answers, if any."""
    if operation is not None:
        return kernels.starter(operation), None
    if target_name is not None:
        return WORKSPACE / f"{target_name}.py", _target(load(Plan), target_name)
    plan = load_if_there(Plan)
    if plan is None or plan.current is None:
        return kernels.KERNEL, None
    return kernels.KERNEL, _target(plan, plan.current)


def _target(plan: Plan, name: str) -> Target:
    for target in plan.targets:
        if target.name == name:
            return target
    known = ", ".join(target.name for target in plan.targets)
    raise InputError(f"the plan has no target {name}: use one of {known}")


def _judge_one(path: Path, target: Target | None, dtype: str, quick: bool) -> Verdict:
    try:
        kernel = kernels.load(path)
    except InputError as fault:
        cli.say("correctness", "CRASH")
        cli.say("reason", fault)
        raise
    operation = kernel.operation.name
    if target is not None and operation != target.operation:
        raise InputError(
            f"{path.name} sets KERNEL_TYPE to {operation!r}, but {target.name} is a {target.operation}: "
            "set it to the target's operation, or run `uv run orchestrate.py next`"
        )
    plan = load_if_there(Plan)
    targets = tuple(t for t in plan.targets if t.operation == operation) if plan else ()
    device = hardware.device()
    seed = secrets.randbits(31)
    return judge(kernel, target, targets, hardware.dtype(dtype), device, seed, quick, cli.note)


def _print(verdict: Verdict) -> None:
    say, figures = cli.say, verdict.figures
    say("kernel_type", verdict.kernel.operation.name)
    say("kernel", _shown(verdict.kernel.path))
    say("kernel_sha256", verdict.kernel.sha256)
    say("target", verdict.target.name if verdict.target else "none")
    say("shape", " ".join(f"{key}={value}" for key, value in verdict.timed.shape.items()))
    say("dtype", hardware.dtype_name(verdict.timed.dtype))
    say("gpu", hardware.gpu_name())
    unchecked = [hardware.dtype_name(d) for d in cases.DTYPES if d not in cases.dtypes_checked(hardware.device())]
    say("not_checked", ", ".join(unchecked) + " (Triton's interpreter)" if unchecked else "nothing")
    for gate in GATES:
        say(gate, verdict.gates[gate])
    say("correctness", verdict.status.value if verdict.status else "unfinished")
    say("reason", verdict.reason or ("quick: the last gates were not run" if verdict.status is None else "none"))
    timing = figures.timing if figures else None
    say("latency_us", _number(timing and timing.kernel_us))
    say("pytorch_us", _number(timing and timing.baseline_us))
    say("throughput_tflops", _number(figures and figures.tflops))
    say("bandwidth_gb_s", _number(figures and figures.gb_s))
    say("pct_peak_compute", _number(figures and figures.pct_peak_compute))
    say("pct_peak_bandwidth", _number(figures and figures.pct_peak_bandwidth))
    say("bottleneck", figures.bottleneck if figures else UNMEASURED)
    say("speedup_vs_pytorch", _number(timing and timing.speedup, 3))
    say("speedup_interval", f"{timing.low:.3f} to {timing.high:.3f}" if timing else UNMEASURED)
    say("peak_vram_mb", _number(timing and timing.peak_vram_mb))


def _record(verdict: Verdict, description: str, tag: str) -> None:
    if verdict.status is None:
        cli.say("experiment", "none (a quick run writes no row)")
        return
    cli.say("experiment", results.append(row_of(verdict, description, tag)))


def _judge_all(description: str, tag: str, quick: bool) -> int:
    lines = [f"{'operation':<18}{'dtype':<10}{'verdict':<11}{'ours us':>10}{'eager us':>10}{'eager/ours':>11}  shape"]
    passed = True
    for name in ops.names():
        verdict = _judge_one(kernels.starter(name), None, "float16", quick)
        _print(verdict)
        _record(verdict, description, tag)
        print(flush=True)
        passed &= verdict.status is Status.PASS
        lines += [_line(verdict, dtype, figures) for dtype, figures in _in_all_dtypes(verdict).items()]
    print("\n".join(lines), flush=True)
    return cli.OK if passed else cli.FAILED


def _in_all_dtypes(verdict: Verdict) -> dict[str, Figures | None]:
    device = hardware.device()
    figures: dict[str, Figures | None] = {}
    for dtype in cases.dtypes_checked(device):
        case = cases.timed_case(verdict.kernel.operation, None, dtype, device)
        if dtype == verdict.timed.dtype or verdict.figures is None:
            figures[hardware.dtype_name(dtype)] = verdict.figures
        else:
            figures[hardware.dtype_name(dtype)] = time_kernel(verdict.kernel, case, device)
    return figures


def _line(verdict: Verdict, dtype: str, figures: Figures | None) -> str:
    status = verdict.status.value if verdict.status else "unfinished"
    shape = " ".join(f"{key}={value}" for key, value in verdict.timed.shape.items())
    timing = figures.timing if figures else None
    cells = (_number(timing and timing.kernel_us), _number(timing and timing.baseline_us), _number(timing and timing.speedup))
    start = f"{verdict.kernel.operation.name:<18}{dtype:<10}{status:<11}"
    return f"{start}{cells[0]:>10}{cells[1]:>10}{cells[2]:>11}  {shape}"


def _number(value: float | None, digits: int = 2) -> str:
    return UNMEASURED if value is None else f"{value:.{digits}f}"


def _shown(path: Path) -> str:
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


if __name__ == "__main__":
    cli.run_stage(main)
