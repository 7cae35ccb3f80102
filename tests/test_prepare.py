"""prepare.py as its user runs it, the golden cases that it leaves, and its measurements on a GPU."""

import subprocess
from pathlib import Path

import pytest
import torch

import prepare
from autokernel import golden, hardware, ops, smoke, state
from autokernel.errors import InputError
from tests.conftest import Stage

TIMED = ("copy_gb_s", "read_gb_s", *(f"matmul_tflops_{dtype}" for dtype in hardware.DTYPES))


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(state, "WORKSPACE", tmp_path)
    return tmp_path


def lines_of(finished: subprocess.CompletedProcess[str]) -> dict[str, str]:
    return dict(line.split(": ", 1) for line in finished.stdout.splitlines())


def test_prepare_checks_measures_and_writes(stage: Stage, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finished = stage("prepare.py")
    assert finished.returncode == 0, finished.stderr
    lines = lines_of(finished)
    assert lines["device"] == hardware.device().type
    assert lines["torch"] == torch.__version__
    assert lines["machine"] == "workspace/machine.json"
    assert {lines[f"golden_{name}"] for name in ops.names()} == {"4 cases"}

    monkeypatch.setattr(state, "WORKSPACE", project / "workspace")
    machine = state.load(state.Machine)
    assert machine.memory_gb > 0
    if machine.device == "cpu":
        assert lines["triton_mode"] == "interpreter"
        assert {lines[key] for key in TIMED} == {"unmeasured"}
        assert {lines[f"baseline_{name}_us"] for name in ops.names()} == {"unmeasured"}
        assert machine.ceilings is None
        assert machine.baselines == ()
    else:
        assert lines["triton_mode"] == "compiled"
        assert {baseline.operation for baseline in machine.baselines} <= set(ops.names())
    assert all(golden.load(name) for name in ops.names())


def test_triton_that_cannot_be_imported_is_one_sentence(stage: Stage, project: Path) -> None:
    (project / "triton.py").write_text("raise ImportError('no Triton for this platform')\n")
    finished = stage("prepare.py")
    assert finished.returncode == 2
    assert finished.stdout == ""
    assert "error: Triton cannot be imported (no Triton for this platform): run `uv sync`" in finished.stderr
    assert "Traceback" not in finished.stderr


def test_triton_that_computes_nonsense_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smoke, "double", lambda x: x)
    with pytest.raises(InputError, match="its result is wrong"):
        prepare.check_triton(torch.device("cpu"))


def test_triton_that_fails_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no C compiler\n" * 1000)

    monkeypatch.setattr(smoke, "double", fail)
    with pytest.raises(InputError, match=r"cannot run a kernel.*no C compiler") as caught:
        prepare.check_triton(torch.device("cpu"))
    assert len(str(caught.value)) < 1000


def test_help_is_the_docstring(capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        prepare.main(["--help"])
    assert ended.value.code == 0
    assert prepare.__doc__.strip() in capsys.readouterr().out


@pytest.mark.parametrize("name", ops.names())
def test_golden_cases_hold_the_exact_answer(name: str, workspace: Path) -> None:
    written = golden.write(name)
    cases = golden.load(name)
    assert cases is not None
    expected = [(dict(shape), dtype) for shape in ops.get(name).sweep_cpu[:2] for dtype in golden.DTYPES]
    assert [(case.shape, case.dtype) for case in cases] == expected
    for case, original in zip(cases, written, strict=True):
        assert case.expected.dtype == torch.float64
        assert list(case.arguments) == list(original.arguments)
        for key, value in original.arguments.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(case.arguments[key], value)
                assert case.arguments[key].stride() == value.stride()
            else:
                assert case.arguments[key] == value
        # The same call in the case's own dtype agrees to that dtype's precision, and in general not to the last bit.
        ours = ops.get(name).reference(**case.arguments).double()
        error = (ours - case.expected).norm() / case.expected.norm()
        assert error < 20 * torch.finfo(hardware.dtype(case.dtype)).eps


@pytest.mark.parametrize("name", ops.names()[:1])
def test_golden_cases_are_the_same_on_each_run(name: str, workspace: Path) -> None:
    first = [case.expected for case in golden.write(name)]
    assert all(torch.equal(a, case.expected) for a, case in zip(first, golden.write(name), strict=True))
    assert [path.name for path in golden.path(name).parent.iterdir()] == [f"{name}.pt"]


def test_no_golden_cases_before_prepare(workspace: Path) -> None:
    assert golden.load("softmax") is None


@pytest.mark.parametrize("damage", [b"", b"not a file of tensors", None, [{"shape": {}}], [3], 3], ids=repr)
def test_damaged_golden_cases_are_a_sentence(damage: object, workspace: Path) -> None:
    golden.write("softmax")
    file = golden.path("softmax")
    if isinstance(damage, bytes):
        file.write_bytes(damage)
    elif damage is None:
        file.write_bytes(file.read_bytes()[:-500])
    else:
        torch.save(damage, file)
    with pytest.raises(InputError, match=r"softmax.pt is damaged: run `uv run prepare.py`"):
        golden.load("softmax")


def test_reported_shares_stay_at_or_below_100(capfd) -> None:
    gpu = hardware.find_gpu("NVIDIA H200")
    ceilings = state.Ceilings(copy_gb_s=4271.0, read_gb_s=9600.0, matmul_tflops={"float16": 700.0, "float32": 50.0})
    prepare.report_ceilings(ceilings, gpu)
    printed = capfd.readouterr()
    assert "copy_gb_s_pct_of_datasheet: 89.0" in printed.out
    assert "read_gb_s: 9600.0" in printed.out
    assert "read_gb_s_pct_of_datasheet" not in printed.out
    assert "read_gb_s is above the data sheet" in " ".join(printed.err.split())


@pytest.mark.gpu
def test_ceilings_are_plausible() -> None:
    device = hardware.device()
    ceilings = prepare.measure_ceilings(device)
    gpu = hardware.find_gpu(hardware.gpu_name(), hardware.memory_bytes(device) / 1e9)
    if gpu is None:
        pytest.skip("this GPU is not in the table, so there is nothing to compare with")
    for value in (ceilings.copy_gb_s, ceilings.read_gb_s):
        assert 60 < hardware.percent(value, gpu.bandwidth_gb_s) <= 100
    for dtype, value in ceilings.matmul_tflops.items():
        assert 40 < hardware.percent(value, gpu.peak_tflops[dtype]) <= 100


@pytest.mark.gpu
@pytest.mark.parametrize("name", ops.names())
def test_a_baseline_is_no_faster_than_the_roofline(name: str) -> None:
    limits = hardware.limits()
    baseline = prepare.measure_baseline(name, hardware.device())
    assert baseline is not None
    assert baseline.latency_us > 0
    if limits is not None:
        operation = ops.get(name)
        least = limits.roofline_us(operation.flops(baseline.shape), operation.bytes(baseline.shape, 2), baseline.dtype)
        assert baseline.latency_us >= least
