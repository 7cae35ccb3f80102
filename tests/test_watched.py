"""The tools that watch a kernel: what is made of their words, and what happens where there are none."""

import os
import stat
import time
from pathlib import Path

import pytest
import torch

from autokernel import kernels, ops
from autokernel.judge import ncu, sanitize
from autokernel.judge.cases import Case
from autokernel.judge.watched import Unwatched, watch

CPU = torch.device("cpu")
CASE = Case("small", ops.get("softmax").sweep_cpu[0], torch.float16, layout="padded")
NCU = """==PROF== Connected to process 7
"ID","Kernel Name","gpu__time_duration.sum","gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed","sm__inst_executed_pipe_tensor_op_hmma.avg.pct_of_peak_sustained_active","sm__warps_active.avg.pct_of_peak_sustained_active","smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio","smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio","smsp__average_warps_issue_stalled_selected_per_issue_active.ratio"
"","","ns","%","%","%","inst","inst","inst"
"0","short","1,000","10","0","20","1","2","9"
"1","long","21,000","81.5","3.25","48.1","6","2","9"
"""  # noqa: E501  a line is a line


def tool(folder: Path, name: str, script: str) -> None:
    """A program of this name that is found first."""
    file = folder / name
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


def test_figures_are_those_of_the_longest_kernel() -> None:
    counters = ncu.parse(NCU)
    assert counters.kernel == "long"
    assert counters.figures == {
        "ncu_dram_pct": "81.5",
        "ncu_tensor_pct": "3.2",
        "ncu_occupancy_pct": "48.1",
        "ncu_top_stall": "long_scoreboard (75% of stalls)",
    }
    assert tuple(counters.figures) == ncu.KEYS


@pytest.mark.parametrize(
    ("text", "note"),
    [("", "no kernel"), ("==ERROR== The application returned an error code (1).", "error code"), (NCU[:400], "no kernel")],
)
def test_no_figures_have_a_reason(text: str, note: str) -> None:
    counters = ncu.parse(text)
    assert counters.figures == {}
    assert note in counters.note


@pytest.mark.parametrize(
    ("name", "printed", "found"),
    [
        ("memcheck", "========= ERROR SUMMARY: 0 errors\n", (0, "")),
        (
            "memcheck",
            "========= Invalid __global__ write of size 2 bytes\n=========     at rows+0x1\n========= ERROR SUMMARY: 1 error\n",
            (1, "Invalid __global__ write of size 2 bytes"),
        ),
        ("racecheck", "========= RACECHECK SUMMARY: 2 hazards displayed (0 errors, 2 warnings)\n", (0, "")),
        ("racecheck", "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)\n", (1, "")),
        ("memcheck", "Segmentation fault\n", (None, "")),
        ("memcheck", "========= ERROR SUMMARY: 0 errors\n========= ERROR SUMMARY: 3 errors\n", (3, "")),
    ],
)
def test_a_summary_is_read(name: str, printed: str, found: tuple[int | None, str]) -> None:
    assert sanitize.summary(name, printed) == found


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="the stand-in for the tool calls the kernel without it")
@pytest.mark.parametrize(("errors", "at_fault"), [(0, False), (3, True)])
def test_the_kernel_is_called_under_the_tool(tools: Path, errors: int, at_fault: bool) -> None:
    summaries = (
        f'echo "========= ERROR SUMMARY: {errors} errors"\necho "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors)"'
    )
    tool(tools, "compute-sanitizer", f'while [ "$1" != "-m" ]; do last="$1"; shift; done\n"$last" "$@" || exit 9\n{summaries}')
    found, fault = sanitize.sanitize(kernels.starter("softmax"), ops.get("softmax"), CPU)
    assert fault is at_fault
    assert f"memcheck: {errors} errors" in found


def test_a_tool_that_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found, at_fault = sanitize.sanitize(kernels.starter("softmax"), ops.get("softmax"), CPU)
    assert (found, at_fault) == ("unmeasured (compute-sanitizer is not installed)", False)
    assert ncu.measure(kernels.starter("softmax"), "softmax", CASE).note == "ncu is not installed"


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_tool_that_hangs_is_killed(tools: Path, tmp_path: Path) -> None:
    tool(tools, "hangs", f"sleep 61.5 & echo $! > {tmp_path}/child; wait")
    with pytest.raises(Unwatched, match="hangs did not finish within 1 s"):
        watch(["hangs"], kernels.starter("softmax"), "softmax", [CASE], tmp_path / "own", 1.0)
    child = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 10  # a killed process is gone once it is next scheduled
    while lives(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not lives(child)


def test_counters_that_may_not_be_read(tools: Path) -> None:
    tool(tools, "ncu", "cat > /dev/null; echo '==ERROR== ERR_NVGPUCTRPERM - The user does not have permission'")
    assert "ERR_NVGPUCTRPERM" in ncu.measure(kernels.starter("softmax"), "softmax", CASE).note
