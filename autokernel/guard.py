"""What an agent must leave alone: every file but kernel.py. Imports no stage.

Before the agent starts, what it could spoil is noted; afterwards whatever it changed is saved in the experiment's folder, put
back and named. Files that git ignores are compared where the loop depends on them: results.tsv, the state files and the kept
versions of the targets in workspace/; and bytecode that was written meanwhile is removed, for Python would run it in place of
the judge's own text. What an agent does elsewhere (.venv is elsewhere) is between it and its user.
"""

import shutil
from collections.abc import Collection
from pathlib import Path

from autokernel import experiments, keeping, results, state
from autokernel.repository import Repository

KERNEL_BYTES = 1 << 20  # more is no kernel
OWN = "night.json"  # the loop's, which writes it while an agent works


class Watch:
    """The project as it was when this object was made. `busy` are targets that other GPUs work on at the same time."""

    def __init__(self, repository: Repository, kernel: Path, busy: Collection[str] = ()) -> None:
        self._repository, self._kernel, self._busy = repository, kernel, frozenset(busy)
        self._position = repository.position()
        self._results = results.content()
        self._files = {path: path.read_bytes() for path in self._watched()}
        self._bytecode = _bytecode()

    def offences(self, number: int) -> list[str]:
        """What experiment `number` changed, by name; all of it is back as it was, and what it was changed to is in its folder.

        A commit of the agent's own is undone, but is no offence: what is in the working tree counts.
        """
        refused = experiments.folder(number) / "refused"
        self._repository.put_back(self._position, f"refs/autokernel/experiment-{number}")
        for path in _bytecode() - self._bytecode:
            path[0].unlink(missing_ok=True)
        named = put_back(self._repository, self._kernel, refused)
        if why := _no_text(self._kernel):
            _save(self._kernel, refused / self._kernel.name)
            self._repository.restore([self._kernel.name])
            named.append(f"{self._kernel.name}, which {why}")
        named += self._state_offences(refused)
        return named

    def _state_offences(self, refused: Path) -> list[str]:
        named = []
        for path in sorted({*self._files, *self._watched()}):
            now = path.read_bytes() if path.is_file() else None
            if now == self._files.get(path):
                continue
            _save(path, refused / "workspace" / path.name)
            if path in self._files:
                path.write_bytes(self._files[path])
            else:
                path.unlink()
            named.append(str(path.relative_to(state.ROOT)))
        forged = results.take_back(self._results, self._busy)
        if forged is not None:
            refused.mkdir(parents=True, exist_ok=True)
            (refused / "results.tsv").write_bytes(forged)
            named.append("results.tsv")
        return named

    def _watched(self) -> list[Path]:
        others = {keeping.home(target) for target in self._busy}
        found = [*state.WORKSPACE.glob("*.json"), *state.WORKSPACE.glob("kernel_*.py")]
        return [path for path in found if path not in others and path.name != OWN]


def clean_up(repository: Repository, kernel: Path, number: int) -> None:
    """Put back what the agent of experiment `number`, which was killed with the loop, had changed besides kernel.py."""
    put_back(repository, kernel, experiments.folder(number) / "refused")


def put_back(repository: Repository, kernel: Path, refused: Path) -> list[str]:
    """Have everything but kernel.py as it is in HEAD; what was changed is named, and what it was changed to is in `refused`."""
    named: list[str] = []
    while found := [name for name in repository.changed() if name not in (kernel.name, *named)]:
        for name in found:
            _save(repository.root / name, refused / name)
        repository.restore(found)
        named += found  # what a changed .gitignore had hidden shows now
    return named


def _bytecode() -> set[tuple[Path, int]]:
    """The compiled files of the project's own modules, with when each was last changed in any way."""
    folders = [state.ROOT, *(state.ROOT / name for name in ("autokernel", "autokernel/judge", "autokernel/ops", "models"))]
    return {(path, path.stat().st_ctime_ns) for folder in folders for path in folder.glob("__pycache__/*.pyc")}


def _no_text(path: Path) -> str:
    """Why this cannot be a kernel file; "" if it may be one."""
    if path.is_symlink() or not path.is_file():
        return "is no regular file"
    if path.stat().st_size > KERNEL_BYTES:
        return f"is larger than {KERNEL_BYTES >> 20} MB"
    try:
        path.read_bytes().decode()
    except UnicodeDecodeError:
        return "is not UTF-8 text"
    return ""


def _save(source: Path, to: Path) -> None:
    if source.is_symlink() or source.is_file():
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, to, follow_symlinks=False)
    elif source.is_dir():
        shutil.move(source, to)
