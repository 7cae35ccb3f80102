"""What all tests share: the gpu and alone markers, and a copy of the project in which a stage can be run."""

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
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


@pytest.fixture(autouse=True)
def turn(request: pytest.FixtureRequest) -> Iterator[None]:
    """On a GPU: a test that measures times has it alone, among all processes of pytest; others share it.

    The gate is held by whoever waits for the GPU, so that those that share it do not keep the others out for ever.
    """
    if not torch.cuda.device_count() or "gpu" not in request.keywords:
        yield
        return
    name = Path(tempfile.gettempdir(), f"autokernel-tests-{os.getuid()}")
    with name.with_suffix(".gate").open("w") as gate, name.with_suffix(".gpu").open("w") as gpu:
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(gpu, fcntl.LOCK_EX if "alone" in request.keywords else fcntl.LOCK_SH)
        fcntl.flock(gate, fcntl.LOCK_UN)
        yield


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
