"""What the documents tell a user to type exists, and the README's tree is the tree."""

import ast
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = sorted(path for path in ROOT.glob("*.py") if path.name not in ("reference.py", "kernel.py"))
README = (ROOT / "README.md").read_text(encoding="utf-8")
PYTEST = ("pytest",)
COMMANDS_OF_ORCHESTRATE = ("next", "keep-or-revert", "status", "report", "run")


def documents() -> dict[str, str]:
    """The documents, and the docstrings of the stages and models, by file name."""
    texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "program.md", "AGENTS.md", "CLAUDE.md")}
    for path in (*SCRIPTS, *sorted((ROOT / "models").glob("*.py"))):
        texts[str(path.relative_to(ROOT))] = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return texts


def commands_in(text: str) -> list[list[str]]:
    """The words after `uv run` of each command: up to a comment, a redirection, the end of the code or of the line."""
    found = re.findall(r"uv run ((?:\"[^\"\n]*\"|[^`\n#>|;\"])+)", text)
    # a docstring explains a command in the same line, after some blanks
    return [shlex.split(re.split(r"\s{2,}", command.strip())[0]) for command in found]


def script_and_arguments(words: list[str]) -> tuple[str, list[str]]:
    """`--extra models profile.py --model x` as profile.py and its arguments."""
    while words and words[0] == "--extra":
        words = words[2:]
    return words[0].rstrip(",.:"), words[1:]


COMMANDS = sorted({(name, *words) for name, text in documents().items() for words in commands_in(text)})


@cache
def help_of(*command: str) -> str:
    done = subprocess.run([sys.executable, *command, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_reader_of_commands() -> None:
    text = 'x `uv run bench.py --description "a > b" > run.log` y\n    uv run --extra models profile.py --dtype half   w # --no'
    commands = commands_in(text)
    assert commands == [["bench.py", "--description", "a > b"], ["--extra", "models", "profile.py", "--dtype", "half"]]
    assert script_and_arguments(commands[1]) == ("profile.py", ["--dtype", "half"])


def test_the_readme_shows_every_stage() -> None:
    assert {script_and_arguments(words)[0] for words in commands_in(README)} == {*(s.name for s in SCRIPTS), *PYTEST}


@pytest.mark.parametrize("script", [*(script.name for script in SCRIPTS), *PYTEST])
def test_every_command_that_is_shown_can_be_typed(script: str) -> None:
    shown = [(name, *script_and_arguments(list(words))) for name, *words in COMMANDS]
    assert {known for _, known, _ in shown} <= {*(path.name for path in SCRIPTS), *PYTEST}
    for document, name, arguments in shown:
        if name != script or script in PYTEST:
            continue
        flags = [word for word in arguments if word.startswith("--")]
        command = [script]
        if script == "orchestrate.py" and arguments:
            assert arguments[0] in COMMANDS_OF_ORCHESTRATE, f"{document}: {name} {arguments[0]}"
            command += arguments[:1]
        text = help_of(*command) if flags else ""
        missing = [flag for flag in flags if not re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", text)]
        assert not missing, f"{document}: {name} {' '.join(arguments)}"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_the_help_of_a_stage_is_its_docstring(script: Path) -> None:
    docstring = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8")))
    assert docstring is not None
    assert docstring in help_of(script.name)
    if script.name == "orchestrate.py":
        assert all(f"orchestrate.py {command} " in docstring for command in COMMANDS_OF_ORCHESTRATE)
    assert "uv run " + script.name in docstring


def tree() -> dict[str, str]:
    """The README's tree: path -> description; a folder's path ends with a slash."""
    blocks = re.findall(r"^```(.*?)\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
    (block,) = [code for language, code in blocks if not language]
    entries: dict[str, str] = {}
    folder = ""
    for line in block.splitlines():
        found = re.fullmatch(r"(  )?(\S+)\s{2,}(.+)|(\S+/)", line)
        assert found is not None, line
        indented, name, description = bool(found[1]), found[2] or found[4], found[3] or ""
        folder = folder if indented else (name if name.endswith("/") else "")
        entries[(folder if indented else "") + name] = description
    return entries


def test_the_tree_is_what_is_there() -> None:
    shown = set(tree())
    folders = {name for name in shown if name.endswith("/")}
    opened = {folder for folder in folders if any(name != folder and name.startswith(folder) for name in shown)}
    there = {path.name for path in (*ROOT.glob("*.py"), *ROOT.glob("*.md")) if path.name != "README.md"}
    there |= {
        f"{folder}{path.name}" for folder in opened for path in (ROOT / folder).glob("*.py") if path.name != "__init__.py"
    }
    assert {name for name in shown if not name.endswith("/")} == there
    assert [name for name in folders if not (ROOT / name).is_dir()] in ([], ["workspace/"])  # made at run time
    inside = {f"autokernel/{path.parent.name}/" for path in (ROOT / "autokernel").glob("*/__init__.py")}
    assert inside <= folders


def test_the_tree_is_brief() -> None:
    lengths = {name: len(description.split()) for name, description in tree().items() if description}
    assert {name: length for name, length in lengths.items() if not 3 <= length <= 6} == {}
