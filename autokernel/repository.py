"""The git repository that kernel.py lies in: commits of that one file, and what an agent changed besides. Imports no stage.

Nothing here resets a working tree, runs a hook, signs or asks: what is put back was saved somewhere first.
"""

import os
import subprocess
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from autokernel import cli
from autokernel.errors import InputError

# Variables that would make git look elsewhere, as when a stage is run from a hook.
_ELSEWHERE = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_COMMON_DIR")
_FALLBACK = ("-c", "user.name=AutoKernel", "-c", "user.email=autokernel@localhost")
STALE_LOCK_S = 10.0  # git holds its index for a moment; a lock this old was left by a process that was killed


@dataclass(frozen=True)
class Position:
    """The commit that HEAD is at, and the branch that it is on; "" when it is on none."""

    head: str
    branch: str


class Repository:
    """The working tree at `root`, which may be a part of a larger repository."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._prefix = self.git("rev-parse", "--show-prefix").strip()

    @classmethod
    def at(cls, root: Path) -> "Repository | None":
        """None outside of a repository, in one without a commit, or without git."""
        try:
            repository = cls(root)
            repository.position()
        except (FileNotFoundError, InputError):
            return None
        return repository

    def git(self, *arguments: str, given: str | None = None) -> str:
        """Standard output of one git command in `root`; InputError with its complaint if it fails."""
        environment = {name: value for name, value in os.environ.items() if name not in _ELSEWHERE}
        done = subprocess.run(
            ["git", "-c", "core.hooksPath=/dev/null", *arguments],
            cwd=self.root,
            env={**environment, "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"},
            input=given,
            stdin=subprocess.DEVNULL if given is None else None,
            capture_output=True,
            encoding="utf-8",
            errors="surrogateescape",
            check=False,
        )
        if done.returncode:
            complaint = " ".join(done.stderr.split()) or f"exit status {done.returncode}"
            raise InputError(f"git {arguments[0]} failed ({complaint}): correct it, and run the command again")
        return done.stdout

    def position(self) -> Position:
        """Where HEAD is."""
        try:
            branch = self.git("symbolic-ref", "-q", "HEAD").strip()
        except InputError:
            branch = ""
        return Position(self.git("rev-parse", "--verify", "-q", "HEAD").strip(), branch)

    def committed(self, path: Path) -> bytes | None:
        """The file's text in HEAD; None if it is not there."""
        try:
            text = self.git("show", f"HEAD:./{self._relative(path)}")
        except InputError:
            return None
        return text.encode("utf-8", "surrogateescape")

    def commit(self, path: Path, message: str) -> str:
        """Commit this file alone, whatever else is staged; the new commit, or HEAD's if the file is there as it is."""
        name = self._relative(path)
        self._free_index()
        self.git("add", "--", name)
        if not self.git("diff", "--cached", "--name-only", "--", name):
            return self.position().head
        try:
            self.git("var", "GIT_AUTHOR_IDENT")
            identity: tuple[str, ...] = ()
        except InputError:
            identity = _FALLBACK
        self.git(*identity, "commit", "-q", "--no-verify", "--no-gpg-sign", "-F", "-", "--", name, given=message)
        return self.position().head

    def changed(self) -> list[str]:
        """Paths below `root` that differ from HEAD or are new; ignored ones are not among them."""
        listed = self.git("status", "--porcelain", "-z", "--untracked-files=all", "--no-renames", "--", ".")
        return [entry[3:].removeprefix(self._prefix) for entry in listed.split("\0") if entry]

    def put_back(self, before: Position, ref: str) -> bool:
        """Have HEAD where it was, and the index as HEAD; where it was moved to is kept as `ref`. Whether it was moved.

        The working tree stays as it is.
        """
        self._free_index()
        now = self.position()
        if now != before:
            self.git("update-ref", ref, now.head)
            if before.branch:
                self.git("symbolic-ref", "HEAD", before.branch)
                self.git("update-ref", before.branch, before.head)
            else:
                self.git("update-ref", "--no-deref", "HEAD", before.head)
        self.git("reset", "-q")
        return now != before

    def restore(self, paths: Iterable[str]) -> None:
        """Have these paths as they are in HEAD; a new one is removed."""
        for name in paths:
            path = self.root / name
            if path.is_symlink() or path.is_file():
                path.unlink()
            if self.git("ls-tree", "--name-only", "HEAD", "--", name):
                self.git("checkout", "-q", "HEAD", "--", name)

    def _relative(self, path: Path) -> str:
        return str(path.relative_to(self.root))

    def _free_index(self) -> None:
        """Remove a lock that a killed git left; wait for one that is younger."""
        lock = self.root / self.git("rev-parse", "--git-path", "index.lock").strip()
        while True:
            try:
                age = time.time() - lock.stat().st_mtime
            except FileNotFoundError:
                return
            if age > STALE_LOCK_S:
                cli.note(f"warning: removed {lock}, which a git that was killed left behind {age:.0f} s ago")
                lock.unlink(missing_ok=True)
                return
            time.sleep(0.2)
