"""What an external agent is told for one experiment. Imports no stage."""

from collections import Counter
from pathlib import Path

from autokernel import experiments, hardware, keeping, ops, report, results, state
from autokernel.experiments import Experiment, Outcome
from autokernel.results import Row
from autokernel.state import Profile, Target

LAST = 12  # experiments that are told one by one
LINE = 300  # characters of one


def prompt(target: Target, kernel: Path, log: experiments.Log) -> str:
    """The text: the task, the call, where the roofline is, the profile, the experiments so far, the kernel."""
    row = keeping.kept_row(target.name)
    finished = [experiment for experiment in log.finished() if experiment.target == target.name]
    parts = (
        _task(target),
        "## The call\n\n" + "\n".join(_call(target)),
        "## Where it stands\n\n" + "\n".join(_standing(target, row)),
        "## Profile\n\n" + _profile(target, row),
        "## Experiments so far\n\n" + "\n".join(_experiments(finished)),
        f"## kernel.py as it is\n\n```python\n{kernel.read_text(encoding='utf-8')}```",
    )
    return "\n\n".join(parts) + "\n"


def _task(target: Target) -> str:
    return f"""# One experiment on {target.name}

Make the {target.operation} kernel in `kernel.py`, in this folder, faster for the call below. Read it, form one idea with a
reason why it should help for this very call, make that one edit, and exit. The judge then checks and times the result, and
keeps it only if it passes every gate and is measurably faster than the version below. You need not report figures.

- Edit `kernel.py` alone; a change to any other file is undone and the experiment refused. Do not commit.
- `kernel_fn` keeps its signature and does the work itself, in Triton, as `reference.{target.operation}` defines it, for
  every shape, stride and dtype. No call of the operation that it replaces, no cached results, no answer that knows its inputs.
- Do not repeat what was tried: a version that was judged before is answered from its row.
- The playbook in `program.md` says what helps where. There may be no time to run anything.
- Print, as your last line, what you changed and why, in one sentence."""


def _call(target: Target) -> list[str]:
    lines = [
        f"- operation: {target.operation}, dtype: {target.dtype}, shape: {report.shape_text(target.shape)}",
        *(f"- `{name}`: {spec.dtype} {spec.shape}, strides {spec.stride}" for name, spec in target.tensors.items()),
        f"- {target.count} such calls in one forward pass, {target.share:.1%} of the model's time",
        f"- where: {report.sites_text(target.sites)}",
    ]
    operation, itemsize = ops.get(target.operation), hardware.dtype(target.dtype).itemsize
    flops, moved = operation.flops(target.shape), operation.bytes(target.shape, itemsize)
    lines.append(f"- work of one call: {flops:,} FLOPs, {moved:,} bytes ({flops / moved:.1f} FLOPs per byte)")
    return lines


def _standing(target: Target, row: Row | None) -> list[str]:
    lines = [f"- bound by: {target.bound}"]
    if target.roofline_us is not None:
        lines.append(f"- roofline of one call: {target.roofline_us / target.count:.2f} us")
    lines.append(f"- PyTorch, in the model: {target.time_us / target.count:.2f} us for one call")
    if row is not None:
        lines.append(
            f"- the kept version: {row.correctness}, {report.figure(row.latency_us, '.2f')} us, "
            f"{report.figure(row.speedup_vs_pytorch, '.3f')} times as fast as PyTorch, "
            f"{report.figure(row.pct_peak, '.1f')}% of the peak compute rate"
        )
    return lines


def _profile(target: Target, row: Row | None) -> str:
    profile = state.load_if_there(Profile)
    rows = profile.rows if profile is not None else ()
    names = [k.name for r in rows if r.operation == target.operation and r.shape == target.shape for k in r.kernels]
    text = f"PyTorch runs: {', '.join(names)[:LINE]}\n\n" if names else ""
    path = None if row is None else experiments.folder(row.experiment) / "bench.log"
    if path is None or not path.is_file():
        return f"{text}The kept version has no log of the judge yet."
    return f"{text}The judge's log of the kept version:\n\n```\n{path.read_text(encoding='utf-8')}```"


def _experiments(finished: list[Experiment]) -> list[str]:
    if not finished:
        return ["None yet."]
    kept = [e for e in finished if e.outcome is Outcome.KEPT]
    lines = [f"{len(finished)} experiments, {len(kept)} kept. What was learnt:", ""]
    lines += [f"- helped: {_line(e)}" for e in kept[-LAST:]] or ["- nothing has helped yet"]
    faults = Counter(e.verdict for e in finished if e.verdict not in (None, results.Status.PASS, results.Status.SCREENED))
    lines += [f"- {count} ended as {verdict}" for verdict, count in faults.most_common()]
    lines += ["", f"The last {min(LAST, len(finished))}, newest first:", ""]
    return lines + [f"- {_line(e)}" for e in reversed(finished[-LAST:])]


def _line(experiment: Experiment) -> str:
    text = f"{experiment.number} {experiment.outcome}: {experiment.description or 'no description'} ({experiment.reason})"
    return " ".join(text.split())[:LINE]
