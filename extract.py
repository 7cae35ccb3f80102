"""Turn a profile into kernels to write: the calls with the most time to save, each as one Triton file in workspace/.

    uv run extract.py
    uv run extract.py --top 5

Reads workspace/profile.json; writes workspace/plan.json and workspace/kernel_<operation>_<rank>.py. A kernel file that was
edited since it was extracted is kept in workspace/saved/.
"""

import ast
import hashlib
import re
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

from autokernel import cli, kernels, report, state
from autokernel.capture import shortened
from autokernel.errors import InputError
from autokernel.state import ModelSource, Plan, Profile, ProfileRow, Target, load, save, write_text

LINE_LENGTH = 120  # of the docstring that is written


def main(argv: Sequence[str] | None = None) -> int:
    parser = cli.parser(__doc__)
    parser.add_argument("--top", type=int, default=5, metavar="N", help="how many kernels to extract (5)")
    top = parser.parse_args(argv).top
    if top < 1:
        raise InputError(f"--top {top} asks for no kernel: give 1 or more")
    profile = load(Profile)
    targets = rank(profile, top)
    plan = Plan(source=profile.source, gpu=profile.gpu, total_us=profile.total_us, targets=targets)
    texts = {file_of(target): kernel_text(target, plan) for target in targets}
    for saved in keep_edited(texts):
        cli.note(f"an edited kernel was in the way: it is now {saved.relative_to(state.ROOT)}")
    for path, text in texts.items():
        write_text(path, text)
    plan_path = save(plan)
    cli.say("model", profile.source.class_name)
    cli.say("targets", len(targets))
    cli.say("plan", plan_path.relative_to(state.ROOT))
    print("\n" + report.table(HEADER, map(_cells, targets)) + "\n")
    return cli.OK


def rank(profile: Profile, top: int) -> tuple[Target, ...]:
    """The `top` rows with the most time to save; by the time itself where the roofline is unmeasured, as on a CPU."""
    if not profile.captured:
        raise InputError(
            f"the graph of {profile.source.class_name} could not be captured ({profile.not_captured_because}), so there is "
            "no operation to extract: change the model so that torch.export takes it, and profile it again"
        )
    if not profile.rows:
        raise InputError(f"no operation was recognised in {profile.source.class_name}: there is nothing to extract")
    rows = sorted(profile.rows, key=lambda row: (-_gain(row), -row.time_us))[:top]
    return tuple(_target(number, row) for number, row in enumerate(rows, 1))


def _gain(row: ProfileRow) -> float:
    return row.time_us if row.saved_us is None else row.saved_us


def _target(number: int, row: ProfileRow) -> Target:
    return Target(
        name=f"kernel_{row.operation}_{number}",
        rank=number,
        operation=row.operation,
        sites=row.sites,
        count=row.count,
        shape=row.shape,
        tensors=row.tensors,
        dtype=row.dtype,
        time_us=row.time_us,
        share=row.share,
        roofline_us=row.roofline_us,
        saved_us=row.saved_us,
        bound=row.bound,
    )


def file_of(target: Target) -> Path:
    """Where the kernel of a target lies."""
    return state.WORKSPACE / f"{target.name}.py"


def kernel_text(target: Target, plan: Plan) -> str:
    """The starter of the operation, its docstring headed by what is asked of this kernel."""
    starter = kernels.starter(target.operation)
    source = starter.read_text(encoding="utf-8")
    body = ast.parse(source).body
    opening = re.match(r"[rR]?(\"\"\"|''')", source)
    if opening is None or not body or not isinstance(body[0], ast.Expr):
        raise InputError(f"{starter.relative_to(state.ROOT)} does not begin with a docstring: it must")
    quote = opening.group()[-1]
    head = _heading(target, plan.source, plan.gpu, plan.total_us)
    # Paths and names are the user's: none may end the docstring or start an escape.
    head = head.replace("\\", "/").replace(quote, "'" if quote == '"' else '"')
    return f"{opening.group()}{head}\n\n{source[opening.end() :]}"


def _heading(target: Target, source: ModelSource, gpu: str, total_us: float) -> str:
    clock = "CPU time" if gpu == "cpu" else f"GPU time on {gpu}"
    times = f"{target.count} calls" if target.count > 1 else "one call"
    saved = "how much could be saved is unmeasured"
    if target.saved_us is not None:
        saved = f"{target.saved_us:.1f} us of it above the roofline ({target.bound}-bound)"
    lines = [
        f"{target.operation} of {report.source_text(source)}.",
        "",
        f"Share: {target.share:.1%} of {total_us:.1f} us {clock}: {times}, {target.time_us:.1f} us together, {saved}.",
        f"Sites: {shortened(target.sites)}",
        f"Shape: {report.shape_text(target.shape)}",
        f"Dtype: {target.dtype}",
        "Tensors, with strides in elements:",
    ]
    lines += [
        f"    {name}: {spec.dtype} {list(spec.shape)}, strides {list(spec.stride)}" for name, spec in target.tensors.items()
    ]
    wrapped = (
        textwrap.fill(line, LINE_LENGTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
        for line in lines
    )
    return "\n".join(wrapped)


def keep_edited(texts: dict[Path, str]) -> Iterable[Path]:
    """Clear the workspace of kernels of an earlier plan; those edited since go to workspace/saved/, and are returned.

    A file that already holds what will be written (`texts`) stays.
    """
    unedited = _as_extracted()
    for path in sorted(state.WORKSPACE.glob("kernel_*.py")):
        content = path.read_bytes()
        if texts.get(path, "").encode() == content:
            continue
        if unedited.get(path, "").encode() == content:
            path.unlink()
            continue
        saved = state.WORKSPACE / "saved" / f"{path.stem}_{hashlib.sha256(content).hexdigest()[:8]}.py"
        saved.parent.mkdir(exist_ok=True)
        path.replace(saved)
        yield saved


def _as_extracted() -> dict[Path, str]:
    """The kernel files as the plan that lies in the workspace had them; empty if there is none that can be read."""
    try:
        plan = load(Plan)
        return {file_of(target): kernel_text(target, plan) for target in plan.targets}
    except InputError:  # missing, damaged, or of operations that are gone: then nothing is known to be unedited
        return {}


HEADER = ("rank", "kernel", "count", "shape", "dtype", "us", "share", "bound", "saved us", "sites")


def _cells(target: Target) -> tuple[str, ...]:
    return (
        str(target.rank),
        f"workspace/{target.name}.py",
        str(target.count),
        report.shape_text(target.shape),
        target.dtype,
        f"{target.time_us:.1f}",
        f"{target.share:.1%}",
        target.bound,
        report.figure(target.saved_us),
        shortened(target.sites, most=3),
    )


if __name__ == "__main__":
    cli.run_stage(main)
