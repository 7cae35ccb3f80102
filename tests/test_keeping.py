"""What decides whether a version is kept: rows, nothing else. And the same by hand, with keep-or-revert."""

import hashlib
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
from test_orchestrate import commit, here, make_plan, values  # noqa: F401  `here` is a fixture

import orchestrate
from autokernel import keeping, results
from autokernel.errors import InputError
from autokernel.experiments import Experiment, Outcome
from autokernel.results import Row, Status

KEPT, NEW = hashlib.sha256(b"kept").hexdigest(), hashlib.sha256(b"new").hexdigest()


def row(sha256: str = NEW, **changes: Any) -> Row:
    found = Row(
        experiment=3,
        kernel_type="matmul",
        correctness=Status.PASS,
        target="kernel_matmul_1",
        dtype="float16",
        shape={"M": 16, "N": 32, "K": 8, "bias": False, "transposed": True},
        speedup_vs_pytorch=2.0,
        speedup_low=1.9,
        speedup_high=2.1,
        kernel_sha256=sha256,
        harness_sha256="",
        gpu="a GPU",
        torch="2.11",
        triton="3.6",
    )
    return msgspec.structs.replace(found, **changes)


BESIDE = {"incumbent_sha256": KEPT, "speedup_vs_incumbent": 1.05, "incumbent_low": 1.02, "incumbent_high": 1.08}


@pytest.mark.parametrize(
    ("new", "kept", "keep", "reason"),
    [
        (row(correctness=Status.FAIL, reason="smoke: off"), row(KEPT), False, "FAIL: smoke: off"),
        (row(correctness=Status.SCREENED, reason="slow", **BESIDE), row(KEPT), False, "SCREENED: slow"),
        (row(), None, True, "the first version that passed"),
        (row(), row(KEPT, correctness=Status.CRASH), True, "the first version that passed"),
        (row(**BESIDE), row(KEPT), True, "1.050 times as fast as the kept version (1.020 to 1.080)"),
        (row(**{**BESIDE, "incumbent_low": 0.99}), row(KEPT), False, "not shown to be faster"),
        # timed in turn with some other version: what counts is over PyTorch
        (row(**{**BESIDE, "incumbent_sha256": "x"}), row(KEPT), False, "1.900 to 2.100 times as fast as PyTorch"),
        (row(speedup_low=2.2, speedup_high=2.4), row(KEPT), True, "2.200 to 2.400 times as fast as PyTorch"),
        (row(speedup_low=None), row(KEPT), False, "speed is unmeasured here"),
        (row(KEPT), row(KEPT), False, "it is the kept version"),
    ],
)
def test_what_is_kept(new: Row, kept: Row | None, keep: bool, reason: str) -> None:
    decision = keeping.decide(new, kept)
    assert decision.keep is keep
    assert reason in decision.reason


@pytest.fixture
def working(here: Path) -> Path:  # noqa: F811
    """A target being worked on in a repository: its kept version passed, and kernel.py is another."""
    make_plan(here, current="kernel_matmul_1")
    (here / ".gitignore").write_text("workspace/*\nresults.tsv\n")
    (here / "workspace" / "kernel_matmul_1.py").write_text("kept")
    (here / "kernel.py").write_text("kept")
    commit(here, "kernel.py", "kernels", ".gitignore")
    (here / "kernel.py").write_text("new")
    results.append(row(KEPT, experiment=1))
    return here


def log(here: Path) -> list[str]:  # noqa: F811
    return subprocess.run(
        ["git", "log", "--format=%s"], cwd=here, check=True, capture_output=True, text=True
    ).stdout.splitlines()


def record(here: Path, number: int) -> Experiment:  # noqa: F811
    path = here / "workspace" / "experiments" / str(number) / "experiment.json"
    return msgspec.json.decode(path.read_bytes(), type=Experiment)


def test_a_better_version_is_committed_with_a_message_of_its_own(working: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results.append(row(description="wider\ttiles", **BESIDE))
    assert orchestrate.main(["keep-or-revert"]) == 0
    said = values(capsys.readouterr().out)
    assert said["KEEP"] == "kernel_matmul_1"
    assert log(working)[0] == "kernel_matmul_1: wider tiles, 2.00x PyTorch"
    assert (working / "workspace" / "kernel_matmul_1.py").read_text() == "new"
    ended = record(working, 3)
    assert (ended.outcome, ended.agent, ended.commit) == (Outcome.KEPT, "by hand", said["commit"])
    assert "-kept" in (working / "workspace" / "experiments" / "3" / "change.diff").read_text()


def test_any_other_is_taken_back_and_stays_in_its_folder(working: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results.append(row(correctness=Status.FAIL, reason="smoke: off"))
    assert orchestrate.main(["keep-or-revert"]) == 1
    said = capsys.readouterr().out
    assert "REVERT: kernel_matmul_1\nreason: FAIL: smoke: off" in said
    assert (working / "kernel.py").read_text() == "kept"
    assert log(working) == ["start"]
    assert (working / "workspace" / "experiments" / "3" / "kernel.py").read_text() == "new"
    assert record(working, 3).outcome is Outcome.REVERTED


def test_it_accepts_no_version_that_was_not_judged(working: Path) -> None:
    results.append(row(hashlib.sha256(b"another").hexdigest(), **BESIDE))
    with pytest.raises(InputError, match=r"not judged for kernel_matmul_1: run `uv run bench\.py` first"):
        orchestrate.main(["keep-or-revert"])
    assert (working / "kernel.py").read_text() == "new"


def test_a_change_to_another_file_is_refused_and_named(working: Path) -> None:
    results.append(row(**BESIDE))
    (working / "kernels" / "softmax.py").write_text("mine")
    with pytest.raises(InputError, match=r"only kernel\.py may change, but so did kernels/softmax\.py"):
        orchestrate.main(["keep-or-revert"])
    assert log(working) == ["start"]


@pytest.mark.usefixtures("here")
def test_without_a_target_it_says_what_to_run(here: Path) -> None:  # noqa: F811
    make_plan(here)
    with pytest.raises(InputError, match=r"run `uv run orchestrate\.py next` first"):
        orchestrate.main(["keep-or-revert"])
