"""orchestrate.py with state files made by hand, and the whole pipeline once."""

import hashlib
import io
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from conftest import Stage
from rich.console import Console
from test_report import MACHINE, PROFILED, SITES, SOURCE, VERIFIED

import orchestrate
from autokernel import cli, kernels, results, state
from autokernel.errors import InputError
from autokernel.results import Row, Status
from autokernel.state import Plan, Target

MATMUL = {"M": 16, "N": 32, "K": 8, "bias": False, "transposed": True}
SOFTMAX = {"M": 16, "N": 32}


def target(name: str, shape: dict[str, Any], time_us: float, roofline_us: float | None) -> Target:
    return Target(
        name=name,
        rank=int(name[-1]),
        operation=name.split("_")[1],
        sites=SITES,
        count=3,
        shape=shape,
        tensors={},
        dtype="float16",
        time_us=time_us,
        share=time_us / 1000,
        roofline_us=roofline_us,
        saved_us=None if roofline_us is None else time_us - roofline_us,
        bound="memory",
    )


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a workspace and two starters, which the stage takes for its own while a test runs."""
    monkeypatch.setattr(state, "ROOT", tmp_path)
    monkeypatch.setattr(state, "WORKSPACE", tmp_path / "workspace")
    monkeypatch.setattr(kernels, "KERNEL", tmp_path / "kernel.py")
    monkeypatch.setattr(kernels, "STARTERS", tmp_path / "kernels")
    for folder in ("workspace", "kernels"):
        (tmp_path / folder).mkdir()
    for operation in ("matmul", "softmax"):
        (tmp_path / "kernels" / f"{operation}.py").write_text(f'KERNEL_TYPE = "{operation}"\n')
    return tmp_path


@pytest.fixture
def run(here: Path, capsys: pytest.CaptureFixture[str]) -> Callable[[str], str]:
    """Run a command that must succeed; its standard output."""

    def run(command: str) -> str:
        assert orchestrate.main([command]) == 0
        return capsys.readouterr().out

    return run


def make_plan(here: Path, current: str | None = None, rooflines: tuple[float | None, float | None] = (100, 20)) -> Plan:
    targets = (target("kernel_matmul_1", MATMUL, 500, rooflines[0]), target("kernel_softmax_2", SOFTMAX, 200, rooflines[1]))
    plan = Plan(source=SOURCE, gpu="a GPU", total_us=1000, targets=targets, current=current)
    put(here, plan)
    for one in targets:
        starter = (here / "kernels" / f"{one.operation}.py").read_text()
        (here / "workspace" / f"{one.name}.py").write_text(f"# for {one.name}\n{starter}")
    return plan


def put(here: Path, content: state.State) -> None:
    (here / "workspace" / type(content).FILE).write_bytes(msgspec.json.encode(content))


def plan_of(here: Path) -> Plan:
    return msgspec.json.decode((here / "workspace" / "plan.json").read_bytes(), type=Plan)


def add_result(one: Target, status: Status, speedup: float | None, kernel: str = "") -> None:
    row = Row(
        kernel_type=one.operation,
        correctness=status,
        speedup_vs_pytorch=speedup,
        target=one.name,
        dtype=one.dtype,
        shape=one.shape,
        kernel_sha256=hashlib.sha256(kernel.encode()).hexdigest(),
        harness_sha256="",
        gpu="a GPU",
        torch="2.11",
        triton="3.6",
    )
    results.append(row)


def values(output: str) -> dict[str, str]:
    return dict(re.findall(r"^(\w+): (.*)$", output, flags=re.MULTILINE))


def commit(here: Path, *paths: str) -> None:
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    for command in (["init", "-q"], ["add", *paths], ["commit", "-q", "-m", "start"]):
        subprocess.run([*git, *command], cwd=here, check=True, capture_output=True)


def saved(here: Path) -> list[str]:
    return sorted(path.name for path in (here / "workspace" / "saved").glob("*"))


def test_next_puts_the_most_promising_kernel_into_place(here: Path, run: Callable[[str], str]) -> None:
    make_plan(here)
    (here / "kernel.py").write_text((here / "kernels" / "softmax.py").read_text())
    said = values(run("next"))
    assert said["NEXT"] == "kernel_matmul_1"
    assert "400.0 us" in said["reason"]
    assert (said["share"], said["time_us"], said["saved_us"]) == ("0.5000", "500.0", "400.0")
    assert said["shape"] == "M=16 N=32 K=8 bias=False transposed=True"
    assert (here / "kernel.py").read_text().startswith("# for kernel_matmul_1\n")
    assert plan_of(here).current == "kernel_matmul_1"
    assert saved(here) == []  # a starter is nothing to lose


def test_next_again_leaves_the_work_on_the_same_target_alone(here: Path, run: Callable[[str], str]) -> None:
    plan = make_plan(here, current="kernel_matmul_1")
    edited = 'KERNEL_TYPE = "matmul"\n# half done\n'
    (here / "kernel.py").write_text(edited)
    add_result(plan.targets[0], Status.FAIL, None, edited)
    said = run("next")
    assert values(said)["CONTINUE"] == "kernel_matmul_1"
    assert (here / "kernel.py").read_text() == edited


@pytest.mark.parametrize("committed", [False, True], ids=["edited", "committed"])
def test_next_saves_what_is_nowhere_else(here: Path, run: Callable[[str], str], committed: bool) -> None:
    make_plan(here, current="kernel_softmax_2")
    edited = 'KERNEL_TYPE = "softmax"\n# my best idea\n'
    (here / "kernel.py").write_text(edited)
    if committed:
        commit(here, "kernel.py")
    said = run("next")
    name = f"kernel_softmax_2_{hashlib.sha256(edited.encode()).hexdigest()[:8]}.py"
    assert values(said)["NEXT"] == "kernel_matmul_1"
    if committed:  # git has it
        assert saved(here) == []
        assert "saved" not in values(said)
    else:
        assert saved(here) == [name]
        assert (here / "workspace" / "saved" / name).read_text() == edited
        assert name in values(said)["saved"]


def test_next_brings_a_kernel_that_passed_home_before_it_moves_on(here: Path, run: Callable[[str], str]) -> None:
    plan = make_plan(here, current="kernel_matmul_1")
    edited = 'KERNEL_TYPE = "matmul"\n# four times as fast\n'
    (here / "kernel.py").write_text(edited)
    commit(here, "kernel.py")
    add_result(plan.targets[0], Status.PASS, 4.0, edited)
    said = run("next")
    assert values(said)["NEXT"] == "kernel_softmax_2"
    assert "kept" in values(said)
    assert (here / "workspace" / "kernel_matmul_1.py").read_text() == edited
    assert len(saved(here)) == 1  # what lay there before
    assert (here / "kernel.py").read_text().startswith("# for kernel_softmax_2\n")


def test_a_slower_pass_does_not_replace_a_faster_one(here: Path, run: Callable[[str], str]) -> None:
    plan = make_plan(here, current="kernel_matmul_1")
    faster = 'KERNEL_TYPE = "matmul"\n# fast\n'
    (here / "workspace" / "kernel_matmul_1.py").write_text(faster)
    slower = 'KERNEL_TYPE = "matmul"\n# slow\n'
    (here / "kernel.py").write_text(slower)
    add_result(plan.targets[0], Status.PASS, 4.0, faster)
    add_result(plan.targets[0], Status.PASS, 2.0, slower)
    said = run("next")
    assert values(said)["NEXT"] == "kernel_softmax_2"
    assert (here / "workspace" / "kernel_matmul_1.py").read_text() == faster
    assert [(here / "workspace" / "saved" / name).read_text() for name in saved(here)] == [slower]


def test_next_is_done_when_all_are_at_the_roofline(here: Path, run: Callable[[str], str]) -> None:
    make_plan(here, rooflines=(490, 199))
    (here / "kernel.py").write_text("untouched")
    said = run("next")
    assert "all 2 targets" in values(said)["DONE"]
    assert (here / "kernel.py").read_text() == "untouched"


def test_status(here: Path, run: Callable[[str], str]) -> None:
    plan = make_plan(here, current="kernel_matmul_1")
    add_result(plan.targets[0], Status.PASS, 2.0)
    add_result(plan.targets[0], Status.CRASH, None)
    output = run("status")
    said = values(output)
    assert (said["current"], said["targets_passed"], said["experiments"]) == ("kernel_matmul_1", "1", "2")
    assert (said["verification"], said["speedup_end_to_end"]) == ("not verified yet", "unmeasured")
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in output.splitlines() if "kernel_" in line]
    table = {row[0]: row for row in rows if len(row) > 1}
    # softmax has 180 us to gain, matmul 250 - 100
    assert list(table) == ["kernel_softmax_2", "kernel_matmul_1"]
    assert table["kernel_matmul_1"][3:] == ["50.0%", "PASS", "2.00x", "2", "250.0", "150.0"]
    assert table["kernel_softmax_2"][3:] == ["20.0%", "not benched", "unmeasured", "0", "200.0", "180.0"]


def test_status_can_be_watched(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(here, current="kernel_matmul_1")
    shown = io.StringIO()
    monkeypatch.setattr(cli, "console", Console(file=shown, force_terminal=True, width=200))
    waits = iter([lambda: add_result(plan.targets[0], Status.PASS, 2.0)])

    def wait(seconds: float) -> None:
        change = next(waits, None)
        if change is None:
            raise KeyboardInterrupt
        change()

    monkeypatch.setattr(orchestrate.time, "sleep", wait)
    with pytest.raises(KeyboardInterrupt):
        orchestrate.main(["status", "--watch"])
    first, second = (shown.getvalue().split("targets_passed: ")[number][0] for number in (1, -1))
    assert (first, second) == ("0", "1")


def test_report_says_what_is_missing(here: Path, run: Callable[[str], str]) -> None:
    said = run("report")
    for missing in ("not measured yet: run `uv run prepare.py`", "Not profiled yet", "No targets yet", "Not verified yet"):
        assert missing in said
    assert (here / "workspace" / "report.md").read_text() in said


def test_report(here: Path, run: Callable[[str], str]) -> None:
    plan = make_plan(here)
    put(here, PROFILED)
    put(here, VERIFIED)
    add_result(plan.targets[0], Status.PASS, 2.0)
    said = run("report")
    # 1000 us of which 580 can be saved; with a matmul twice as fast, 250
    for fact in ("124.0 M parameters", "2.38x (estimate)", "1.33x (estimate)", "1.25x (1.20 to 1.30)"):
        assert fact in said
    assert (here / "workspace" / "report.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("command", ["next", "status"])
@pytest.mark.usefixtures("here")
def test_without_a_plan_one_sentence_says_what_to_run(command: str) -> None:
    with pytest.raises(InputError, match=r"workspace/plan\.json is missing: run `uv run extract\.py` first"):
        orchestrate.main([command])


@pytest.mark.parametrize(
    ("name", "command"), [("plan.json", "next"), ("profile.json", "report"), ("verification.json", "status")]
)
def test_a_damaged_file_is_named(here: Path, name: str, command: str) -> None:
    make_plan(here)
    (here / "workspace" / name).write_text('{"gpu": 3')
    with pytest.raises(InputError, match=rf"workspace/{name} is damaged \(.*\): run `uv run .*` to make it again"):
        orchestrate.main([command])


def test_next_without_the_kernel_file(here: Path) -> None:
    make_plan(here)
    (here / "workspace" / "kernel_matmul_1.py").unlink()
    with pytest.raises(InputError, match=r"workspace/kernel_matmul_1\.py is missing"):
        orchestrate.main(["next"])
    assert plan_of(here).current is None


@pytest.mark.parametrize("arguments", [(), ("sideways",), ("next", "--model", "x")], ids=" ".join)
def test_a_wrong_command_line(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        orchestrate.main(arguments)
    assert exit_.value.code == 2
    assert "error: " in capsys.readouterr().err


STAGE = """import sys
print("said: by {name}")
print("progress of {name}", file=sys.stderr)
{body}
"""


def make_stages(here: Path, **bodies: str) -> None:
    """Stand-ins for the stages: each does what its `body` says, and nothing otherwise."""
    for name in ("prepare", "profile", "extract", "bench", "verify"):
        (here / f"{name}.py").write_text(STAGE.format(name=name, body=bodies.get(name, "")))


# A judge: the verdict of each target by its operation, and with `row` a row for it.
JUDGE = """
for name in sys.argv[2:]:
    verdict = {verdicts}[name.split("_")[1]]
    print(f"target: {{name}}\\ncorrectness: {{verdict}}\\nreason: none")
    if {row}:
        print("experiment: 1\\n")
sys.exit({status})
"""


def judge(matmul: str, softmax: str, status: int, row: bool = True) -> str:
    return JUDGE.format(verdicts={"matmul": matmul, "softmax": softmax}, status=status, row=row)


def run_with(here: Path, **bodies: str) -> int:
    make_plan(here)
    make_stages(here, **bodies)
    return orchestrate.main(["run"])


def test_run_goes_on_after_a_kernel_that_failed_and_says_so(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_with(here, bench=judge("FAIL", "PASS", status=1)) == 1
    captured = capsys.readouterr()
    said = values(captured.out)
    assert (said["kernel_matmul_1"], said["kernel_softmax_2"]) == ("FAIL", "PASS")
    assert said["verification"] == "CRASH"  # this one wrote no verification.json
    assert "progress of verify" in captured.err
    assert "said: by bench" in (here / "workspace" / "logs" / "bench.log").read_text()


@pytest.mark.parametrize("name", ["prepare", "profile", "extract"])
def test_run_ends_at_a_stage_that_crashed(here: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert run_with(here, **{name: "raise ValueError"}) == 1
    assert values(capsys.readouterr().out)[name].startswith("CRASH")
    assert not (here / "workspace" / "logs" / "bench.log").exists()


@pytest.mark.parametrize("died", [judge("PASS", "PASS", 1), judge("FAIL", "PASS", 0), judge("PASS", "PASS", 0, row=False)])
def test_a_pass_of_a_judge_that_died_is_a_crash(here: Path, capsys: pytest.CaptureFixture[str], died: str) -> None:
    assert run_with(here, bench=died) == 1
    assert values(capsys.readouterr().out)["kernel_softmax_2"] == "CRASH"


def test_run_forgets_what_an_earlier_run_verified(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(here, VERIFIED)
    assert run_with(here, bench=judge("PASS", "PASS", status=0)) == 1
    assert values(capsys.readouterr().out)["verification"] == "CRASH"


def test_run_stops_with_the_sentence_of_the_stage_that_refused(project: Path, stage: Stage) -> None:
    put(project, MACHINE)
    done = stage("orchestrate.py", "run", "--model", "models/none.py", "--class-name", "X", "--input-shape", "1,8")
    assert done.returncode == 2
    assert len(re.findall(r"^error: .*models/none\.py", done.stderr, flags=re.MULTILINE)) == 1


SMALL_MODEL = """
import torch
from torch import nn

class Small(nn.Module):
    vocab_size = 40

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(40, 24)
        self.norm = nn.LayerNorm(24)

    def forward(self, ids):
        return self.norm(self.norm(self.embedding(ids)))
"""


@pytest.mark.timeout(600)  # five stages, each of which imports PyTorch
def test_run_from_a_model_to_a_report(project: Path, stage: Stage) -> None:
    (project / "small.py").write_text(SMALL_MODEL)
    kernel = 'KERNEL_TYPE = "softmax"\n# not part of this\n'
    (project / "kernel.py").write_text(kernel)
    model = ("--model", "small.py", "--class-name", "Small", "--input-shape", "2,8", "--dtype", "float32", "--device", "cpu")
    done = stage("orchestrate.py", "run", *model, timeout=500)
    said = values(done.stdout)
    assert done.returncode == 0, done.stderr
    assert said["kernel_layernorm_1"] == "PASS"
    assert (said["verification"], said["speedup_end_to_end"]) == ("PASS", "unmeasured")
    assert "Sites replaced: 2 of 2" in done.stdout
    assert len((project / "results.tsv").read_text().splitlines()) == 2
    for name in ("machine.json", "profile.json", "plan.json", "verification.json", "report.md", "report.png"):
        assert (project / "workspace" / name).is_file()
    assert (project / "kernel.py").read_text() == kernel
    after = stage("orchestrate.py", "status")
    assert "PASS" in next(line for line in after.stdout.splitlines() if line.startswith("| kernel_layernorm_1"))
