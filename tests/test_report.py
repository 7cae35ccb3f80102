"""The report says what was measured, what was not, and nothing else."""

from pathlib import Path

import msgspec
import pytest

from autokernel import hardware, report, scheduler
from autokernel.scheduler import Candidate
from autokernel.state import (
    Ceilings,
    Machine,
    ModelSource,
    Plan,
    Profile,
    ProfileRow,
    Replacement,
    Target,
    UnmatchedRow,
    Verification,
    Versions,
    Way,
)

SOURCE = ModelSource(model="models/gpt2.py", class_name="GPT2", input_shape=(1, 32), device="cpu")
VERSIONS = Versions(python="3.12", torch="2.11", triton="3.6", cuda="", driver="")
SITES = ("blocks.0.one", "blocks.1.one", "blocks.2.one")
SHAPE = {"M": 16, "N": 32, "K": 8}
MACHINE = Machine(
    device=hardware.device().type,
    name="a machine",
    compute_capability=None,
    memory_gb=25,
    l2_bytes=0,
    versions=VERSIONS,
    ceilings=None,
    baselines=(),
)
PROFILED = Profile(
    source=SOURCE,
    parameters=124_000_000,
    gpu="a GPU",
    versions=VERSIONS,
    clock="gpu kernels",
    captured=True,
    not_captured_because="",
    total_us=1000,
    wall_us=5000,
    rows=(
        ProfileRow(
            operation="matmul",
            sites=SITES,
            count=3,
            shape=SHAPE,
            tensors={},
            dtype="float16",
            time_us=500,
            share=0.5,
            flops=1,
            bytes=1,
            bound="memory",
            roofline_us=100,
            pct_roofline=20,
            saved_us=400,
            kernels=(),
        ),
    ),
    unmatched=(UnmatchedRow(operator="aten.embedding.default", sites=("wte",), count=1, time_us=500, share=0.5, kernels=()),),
)
VERIFIED = Verification(
    source=SOURCE,
    gpu="a GPU",
    versions=VERSIONS,
    correct=True,
    reason="",
    error=1e-3,
    error_without=9e-4,
    error_limit=2e-3,
    exact_dtype="float32",
    replacements=(Replacement(target="kernel_matmul_1", kernel_sha256="0", verdict="PASS", sites=SITES, calls=(1, 1, 1)),),
    left_out={"kernel_softmax_2": "its last verdict is FAIL"},
    sites_found=4,
    sites_replaced=3,
    ways=(
        Way(name="eager", ours=False, ms=5.0),
        Way(name="torch.compile", ours=False, note="RuntimeError: no compiler"),
        Way(name="ours", ours=True, ms=4.0, kernels=("kernel_matmul_1",), dropped={"kernel_reduce_3": "the model is slower"}),
    ),
    theirs="eager",
    ours="ours",
    speedup=1.25,
    speedup_low=1.2,
    speedup_high=1.3,
)
TARGET = Target(
    name="kernel_matmul_1",
    rank=1,
    operation="matmul",
    sites=SITES,
    count=3,
    shape=SHAPE,
    tensors={},
    dtype="float16",
    time_us=500,
    share=0.5,
    roofline_us=100,
    saved_us=400,
    bound="memory",
)
PLAN = Plan(source=SOURCE, gpu="a GPU", total_us=1000, targets=(TARGET,))
MEASURED = Candidate(TARGET, 2, "PASS", "its sum was wrong", 2.0, 250, 150, 1.25)
UNMEASURED = Candidate(msgspec.structs.replace(TARGET, roofline_us=None), 1, "PASS", "", None, 500, None, None)


def cells(text: str, first: str) -> list[str]:
    """The cells of the table row that begins with this cell."""
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line.startswith("|")]
    (row,) = [row for row in rows if row[0] == first]
    return row


def test_a_table_is_rectangular_and_escapes_what_would_break_it() -> None:
    lines = report.table(("a", "long header"), [("x|y", 1), ("", 22)]).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[2].replace("\\|", "").count("|") == 3
    assert set(lines[1]) == {"|", "-"}


@pytest.mark.parametrize(("value", "expected"), [(None, "unmeasured"), (0.0, "0.0 us"), (1234.56, "1234.6 us")])
def test_a_figure_is_measured_or_the_word(value: float | None, expected: str) -> None:
    assert report.figure(value, ".1f", " us") == expected


def test_nothing_at_all_is_four_lines_that_say_what_to_run() -> None:
    text = report.markdown(None, None, None, [], None)
    for kind in (Machine, Profile, Plan, Verification):
        assert text.count(f"run `{kind.MADE_BY}`") == 1
    assert "|" not in text


def test_everything() -> None:
    text = report.markdown(MACHINE, PROFILED, PLAN, [MEASURED], VERIFIED)
    assert cells(text, "matmul")[1:] == [
        *("M=16 N=32 K=8", "float16", "3", "blocks.0.one, blocks.1.one and 1 more"),
        *("500.0", "50.0%", "memory", "20.0", "400.0"),
    ]
    assert cells(text, "unmatched")[1] == "aten.embedding.default"
    assert cells(text, "kernel_softmax_2") == ["kernel_softmax_2", "its last verdict is FAIL"]
    for fact in (
        "Its ceilings are unmeasured: no GPU",
        "GPT2 of models/gpt2.py, input 1x32, float16, cpu; 124.0 M parameters",
        "kernel_matmul_1: its last experiment did not pass: its sum was wrong",
        "Verification: PASS",
        "against float32: 0.001 with the kernels, 0.0009 without, limit 0.002",
        "Sites replaced: 3 of 4",
        "Speed-up end to end, the fastest way with kernels over the fastest without: 1.25x (1.20 to 1.30)",
    ):
        assert fact in text
    assert cells(text, "eager") == ["eager", "5.000", "", ""]
    assert cells(text, "torch.compile") == ["torch.compile", "unmeasured", "", "RuntimeError: no compiler"]
    assert [line for line in text.splitlines() if "kernel_reduce_3" in line and "the model is slower" in line]


def test_no_kernel_that_makes_the_model_faster_is_said() -> None:
    none = msgspec.structs.replace(VERIFIED, ours="", speedup=None, speedup_low=None, speedup_high=None)
    assert "over the fastest without: none (no kernel makes the model faster)." in report.markdown(None, None, None, [], none)


def test_an_estimate_is_called_one() -> None:
    text = report.markdown(None, None, PLAN, [MEASURED], None)
    # 1000 us of which 400 can be saved, 250 so far
    assert "reached its roofline: 1.67x (estimate)." in text
    assert "isolated figures at their word: 1.33x (estimate)." in text
    assert scheduler.bound(PLAN) == pytest.approx(1000 / 600)


def test_without_a_gpu_no_speed_is_shown() -> None:
    unmeasured = {"ways": (), "theirs": "", "ours": "", "speedup": None, "speedup_low": None, "speedup_high": None}
    plan = msgspec.structs.replace(PLAN, targets=(msgspec.structs.replace(TARGET, roofline_us=None, saved_us=None),))
    verified = msgspec.structs.replace(VERIFIED, replacements=(), **unmeasured)
    text = report.markdown(MACHINE, None, plan, [UNMEASURED], verified)
    assert "over the fastest without: unmeasured." in text
    assert cells(text, "kernel_matmul_1")[3:] == ["50.0%", "PASS", "unmeasured", "1", "500.0", "unmeasured"]
    assert "estimate" not in text
    assert "1.25" not in text


def test_the_ceilings_of_a_gpu() -> None:
    ceilings = Ceilings(copy_gb_s=4271, read_gb_s=4311, matmul_tflops={"float16": 700})
    versions = msgspec.structs.replace(VERSIONS, cuda="13.0", driver="580.1")
    text = report.markdown(msgspec.structs.replace(MACHINE, ceilings=ceilings, versions=versions), None, None, [], None)
    assert "copy 4271 GB/s; matrix products float16 700 TFLOP/s" in text
    assert "CUDA 13.0, driver 580.1" in text


def test_a_failed_verification_is_not_hidden() -> None:
    text = report.markdown(None, None, None, [], msgspec.structs.replace(VERIFIED, correct=False))
    assert "Verification: FAIL" in text


def test_state_of_another_model_is_named() -> None:
    other = msgspec.structs.replace(PLAN, source=msgspec.structs.replace(SOURCE, class_name="BertModel"))
    text = report.markdown(None, PROFILED, other, [MEASURED], VERIFIED)
    assert "The plan is of another model (BertModel" in text
    assert "This is of another model (GPT2" in text
    assert "another model" not in report.markdown(None, PROFILED, PLAN, [MEASURED], VERIFIED)


def test_a_model_that_could_not_be_captured() -> None:
    profile = msgspec.structs.replace(PROFILED, captured=False, not_captured_because="it branches on data", rows=())
    assert "it branches on data" in report.markdown(None, profile, None, [], None)


@pytest.mark.parametrize("candidates", [[], [UNMEASURED], [MEASURED]], ids=["none", "unmeasured", "measured"])
def test_the_picture(tmp_path: Path, candidates: list[Candidate]) -> None:
    path = tmp_path / "new" / "report.png"
    report.plot(path, PROFILED, candidates)
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG")
    width = int.from_bytes(content[16:20], "big")
    assert (width > 1000) == (candidates == [MEASURED])  # a second panel only for measured speeds
