"""Every command of program.md is run, in its order, as an agent would, and what it prints is what the page says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

PROGRAM = (ROOT / "program.md").read_text(encoding="utf-8")


def blocks() -> list[list[tuple[str, str]]]:
    """The console blocks: in each, commands with the output that the page shows."""
    found = []
    for indent, text in re.findall(r"^( *)```console\n(.*?)^ *```$", PROGRAM, flags=re.MULTILINE | re.DOTALL):
        lines = "".join(line.removeprefix(indent) for line in text.splitlines(keepends=True))
        commands = re.split(r"^\$ ", lines, flags=re.MULTILINE)[1:]
        found.append([(command.split("\n", 1)[0], command.split("\n", 1)[1]) for command in commands])
    return found


def pattern(expected: str) -> str:
    """`...` stands for anything: alone for any lines, inside of a line for any text."""
    lines = [
        r"(?:.*\n)*" if line == "..." else re.escape(line).replace(r"\.\.\.", ".*") + r"\n" for line in expected.splitlines()
    ]
    return "".join(lines)


def test_a_pattern_leaves_nothing_out() -> None:
    assert re.fullmatch(pattern("a: ...\n...\nc: 1\n"), "a: 5\nb\nc: 1\n")
    assert not re.fullmatch(pattern("a: ...\nc: 1\n"), "a: 5\nb\nc: 1\n")


@pytest.mark.timeout(600)
def test_every_command_of_the_program_does_what_it_says(project: Path) -> None:
    (project / ".gitignore").write_text("workspace/*\nresults.tsv\nrun.log\n__pycache__/\n")
    identity = ("git config user.name a", "git config user.email a@b", "git config commit.gpgsign false")
    for command in ("git init -q -b main", *identity, "git add -A", "git commit -qm project"):
        subprocess.run(command.split(), cwd=project, check=True)
    commands = [command for block in blocks() for command in block]
    assert len(commands) >= 8
    for command, expected in commands:
        if "bench.py" in command:  # the edit
            kernel = project / "kernel.py"
            kernel.write_text(kernel.read_text() + "# wider tiles\n")
        line = re.sub(r"^uv run", sys.executable, command)
        done = subprocess.run(line, shell=True, cwd=project, capture_output=True, text=True, timeout=400)
        assert re.fullmatch(pattern(expected), done.stdout), f"{command}\n{done.stdout}\n{done.stderr}"
        assert done.returncode == (1 if "REVERT" in expected else 0), f"{command}\n{done.stderr}"
    status = subprocess.run(["git", "status", "--porcelain"], cwd=project, capture_output=True, text=True, check=True)
    assert status.stdout == ""


def test_it_is_short_and_the_other_guides_point_to_it() -> None:
    assert len(PROGRAM.splitlines()) <= 150
    for name in ("AGENTS.md", "CLAUDE.md"):
        assert "program.md" in (ROOT / name).read_text(encoding="utf-8")
