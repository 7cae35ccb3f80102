"""Keep a version of a kernel or not, by what the judge wrote into its row; nobody else's figures count. Imports no stage.

The kept version of a target is workspace/<target>.py. `decide` depends on rows alone, so who asks again gets the same answer.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from autokernel import cli, kernels, results, state
from autokernel.repository import Repository
from autokernel.results import Row, Status
from autokernel.state import Plan


@dataclass(frozen=True)
class Decision:
    """Whether a version takes the place of the kept one, and why."""

    keep: bool
    reason: str


def decide(row: Row, kept: Row | None) -> Decision:
    """`row` judged the version, `kept` the one that it must beat; None: that was not judged.

    It is kept if it passed and the other did not, or if the whole interval of its speed-up over the other lies above 1. Where
    the two were not timed in turn, the intervals of their speed-ups over PyTorch must not overlap.
    """
    if row.correctness is not Status.PASS:
        return Decision(False, f"{row.correctness}: {row.reason}")
    if kept is None or kept.correctness is not Status.PASS:
        return Decision(True, "the first version that passed")
    if row.kernel_sha256 == kept.kernel_sha256:
        return Decision(False, "it is the kept version")
    if row.incumbent_sha256 == kept.kernel_sha256 and row.incumbent_low is not None:
        interval = f"{row.incumbent_low:.3f} to {row.incumbent_high:.3f}"
        factor = f"{row.speedup_vs_incumbent:.3f} times as fast as the kept version ({interval})"
        return Decision(True, factor) if row.incumbent_low > 1 else Decision(False, f"not shown to be faster: {factor}")
    if row.speedup_low is None or kept.speedup_high is None:
        return Decision(False, "it passed, but speed is unmeasured here, so nothing shows that it is better")
    ours, theirs = f"{row.speedup_low:.3f} to {row.speedup_high:.3f}", f"{kept.speedup_low:.3f} to {kept.speedup_high:.3f}"
    return Decision(row.speedup_low > kept.speedup_high, f"{ours} times as fast as PyTorch, the kept version {theirs}")


def home(target: str) -> Path:
    """Where the kept version of a target lies."""
    return state.WORKSPACE / f"{target}.py"


def text_of(path: Path) -> str:
    """The text of a kernel file, its line ends as they are."""
    return path.read_bytes().decode()


def kept_row(target: str) -> Row | None:
    """The last row of a target's kept version; None: there is none, or it was not judged."""
    path = home(target)
    return results.last_for(kernels.sha256_of(path), target) if path.is_file() else None


def keep(target: str, text: str, kernel: Path, repository: Repository | None, message: str) -> str:
    """Make this the kept version, have it in kernel.py and commit that alone; the commit, "" outside of a repository."""
    state.write_text(home(target), text)
    return put_into(kernel, text, repository, message)


def put_into(kernel: Path, text: str, repository: Repository | None, message: str) -> str:
    """Have this text in kernel.py and in HEAD; the commit, "" outside of a repository."""
    if kernel.is_symlink() or not kernel.is_file() or kernel.read_bytes() != text.encode():
        state.write_text(kernel, text)
    return "" if repository is None else repository.commit(kernel, message)


def message_of(row: Row, reason: str) -> str:
    """The message of the commit that keeps a version."""
    over = "" if row.speedup_vs_pytorch is None else f", {row.speedup_vs_pytorch:.2f}x PyTorch"
    lines = (
        f"{row.target}: {row.description or 'another version'}{over}",
        "",
        f"Experiment {row.experiment}: {reason}.",
        f"Judged on {row.gpu}, torch {row.torch}, triton {row.triton}; kernel {row.kernel_sha256[:12]}, "
        f"harness {row.harness_sha256[:12]}.",
    )
    return "\n".join(" ".join(line.split()) for line in lines) + "\n"


def put_away(plan: Plan) -> None:
    """Lose nothing of kernel.py before it is overwritten.

    A version that is to be kept goes to workspace/<target>.py, where verify.py looks for it. Any other that is nowhere else
    (git's HEAD, the workspace, the starters) goes to workspace/saved/.
    """
    if not kernels.KERNEL.is_file():
        return
    content = kernels.KERNEL.read_bytes()
    elsewhere = [*state.WORKSPACE.glob("kernel_*.py"), *kernels.STARTERS.glob("*.py")]
    if content in [path.read_bytes() for path in elsewhere]:
        return
    row = results.last_for(hashlib.sha256(content).hexdigest(), plan.current) if plan.current is not None else None
    if row is not None and decide(row, kept_row(row.target)).keep:
        if home(row.target).is_file():
            _save(row.target, home(row.target).read_bytes())
        state.write_text(home(row.target), content.decode())
        cli.say("kept", f"{shown(home(row.target))} is now kernel.py, which is to be kept")
    elif content != _committed():
        cli.say("saved", f"{shown(_save(plan.current or 'kernel', content))} is kernel.py as it was")


def _save(name: str, content: bytes) -> Path:
    path = state.WORKSPACE / "saved" / f"{name}_{hashlib.sha256(content).hexdigest()[:8]}.py"
    state.write_text(path, content.decode())
    return path


def _committed() -> bytes | None:
    """kernel.py in git's HEAD; None outside of a repository, or when it was never committed."""
    repository = Repository.at(kernels.KERNEL.parent)
    return None if repository is None else repository.committed(kernels.KERNEL)


def shown(path: Path) -> str:
    """The path from the root of the project."""
    return str(path.relative_to(state.ROOT))
