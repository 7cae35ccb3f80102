"""Compiling in forks: every kernel once, side by side, and nothing of it in this process."""

import time
from pathlib import Path

import pytest
from triton.runtime.jit import JITFunction

from autokernel.judge import forks


def test_each_kernel_is_compiled_once_in_a_fork_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(function: Path, key: str, *rest: str) -> str:
        time.sleep(0.2)
        with (function / key).open("a") as file:
            file.write(" ".join(rest))
        if key == "wrong":
            raise ValueError("no such instruction")
        return "compiled"

    monkeypatch.setattr(forks, "_compile", slow)
    monkeypatch.setattr(JITFunction, "_do_compile", slow)
    began = time.monotonic()
    with forks.compiling(4):
        for key in ("a", "wrong", "b", "a", "c"):
            assert JITFunction._do_compile(tmp_path, key, "fp16", key) is None
        assert time.monotonic() - began < 0.2
    assert sorted((path.name, path.read_text()) for path in tmp_path.iterdir()) == [
        (key, f"fp16 {key}") for key in ("a", "b", "c", "wrong")
    ]
    assert JITFunction._do_compile is slow


def test_no_more_forks_at_once_than_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(function: Path, key: str) -> None:
        (function / f"{key} {time.monotonic()}").touch()
        time.sleep(0.1)

    monkeypatch.setattr(forks, "_compile", slow)
    monkeypatch.setattr(JITFunction, "_do_compile", slow)
    with forks.compiling(2):
        for key in "abcd":
            JITFunction._do_compile(tmp_path, key)
    starts = sorted(float(path.name.split()[1]) for path in tmp_path.iterdir())
    assert len(starts) == 4
    assert starts[2] - starts[0] >= 0.1
