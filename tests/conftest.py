"""What all tests share: the gpu marker, and a copy of the project in which a stage can be run without touching this one."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import autokernel  # noqa: F401  before Triton, so that its interpreter is chosen without a GPU

ROOT = Path(__file__).resolve().parent.parent
PROJECT = ("autokernel", "kernels", "models", "*.py", "program.md", "pyproject.toml")

torch.set_num_threads(1)  # pytest-xdist already fills the cores


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.device_count():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU, and this machine has none"))


Stage = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of the project in a folder of its own, with an empty workspace."""
    folder = tmp_path / "project"
    folder.mkdir()
    for pattern in PROJECT:
        for path in ROOT.glob(pattern):
            if path.is_dir():
                shutil.copytree(path, folder / path.name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(path, folder / path.name)
    (folder / "workspace").mkdir()
    return folder


@pytest.fixture
def stage(project: Path) -> Stage:
    """Run a stage as its user would: `stage("bench.py", "--quick")` in the copy of the project."""

    def run(*arguments: str, timeout: float = 240) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, *arguments]
        return subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, timeout=timeout)

    return run
