"""bench.py as its user sees it: the lines it prints, its exit status, its row."""

import msgspec
import pytest
import torch
from conftest import Stage

from autokernel import ops

KEYS = (
    "kernel_type correctness smoke shape_sweep numerical_stability determinism edge_cases latency_us throughput_tflops "
    "bandwidth_gb_s pct_peak_compute pct_peak_bandwidth bottleneck speedup_vs_pytorch peak_vram_mb"
).split()
HEADER = (
    "experiment tag kernel_type throughput_tflops latency_us pct_peak speedup_vs_pytorch correctness peak_vram_mb description"
).split()
WRONG = """
import torch
KERNEL_TYPE = "softmax"
def kernel_fn(x):
    return torch.zeros_like(x)
"""


def lines_of(text: str) -> dict[str, str]:
    return dict(line.split(": ", 1) for line in text.splitlines() if ": " in line)


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="on a GPU the figures are measured; see the gpu test")
def test_a_starter_on_a_cpu(stage: Stage, project) -> None:
    done = stage("bench.py", "--kernel", "softmax", "--tag", "night\t1", "--description", "as it is")
    lines = lines_of(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(KEYS) <= set(lines)
    assert lines["correctness"] == "PASS"
    assert all(lines[key] == "unmeasured" for key in KEYS[7:])
    assert "bfloat16" in lines["not_checked"]
    header, row = (project / "results.tsv").read_text().splitlines()
    assert header.split("\t")[: len(HEADER)] == HEADER
    values = dict(zip(header.split("\t"), row.split("\t"), strict=True))
    assert (values["experiment"], values["tag"], values["correctness"]) == ("1", "night\\t1", "PASS")
    assert values["kernel_sha256"] == lines["kernel_sha256"]
    assert msgspec.json.decode(values["shape"]) == ops.get("softmax").sweep_cpu[0]


def test_a_wrong_kernel_fails_with_the_same_lines_and_a_row(stage: Stage, project) -> None:
    (project / "kernel.py").write_text(WRONG)
    done = stage("bench.py")
    lines = lines_of(done.stdout)
    assert done.returncode == 1
    assert set(KEYS) <= set(lines)
    assert lines["correctness"] == "FAIL"
    assert lines["edge_cases"] == "not run"
    assert "smoke: " in lines["reason"]
    assert "float" in lines["reason"]
    assert "FAIL" in (project / "results.tsv").read_text().splitlines()[1].split("\t")


def test_a_quick_run_never_passes_and_writes_no_row(stage: Stage, project) -> None:
    done = stage("bench.py", "--kernel", "reduce", "--quick")
    lines = lines_of(done.stdout)
    assert (done.returncode, lines["correctness"], lines["edge_cases"]) == (1, "unfinished", "not run"), done.stderr
    assert not (project / "results.tsv").exists()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("def kernel_fn(x:\n", "syntax error in line 1"),
        ("import nothing_of_this_name\n", "ModuleNotFoundError"),
        ('KERNEL_TYPE = "softmax"\n', "defines no function kernel_fn"),
        ('KERNEL_TYPE = "convolution"\ndef kernel_fn(x): ...\n', "'convolution', which is no operation"),
        ("def kernel_fn(x): ...\n", "KERNEL_TYPE to None"),
    ],
)
def test_a_file_that_is_no_kernel(stage: Stage, project, text: str, sentence: str) -> None:
    (project / "kernel.py").write_text(text)
    done = stage("bench.py")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: kernel.py")
    assert sentence in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert lines_of(done.stdout)["correctness"] == "CRASH"


@pytest.mark.parametrize(
    ("arguments", "plan", "sentence"),
    [
        (("--target", "kernel_matmul_1"), None, "plan.json is missing: run `uv run extract.py` first"),
        (("--target", "kernel_matmul_1"), '{"source": ', "plan.json is damaged"),
        (("--kernel", "convolution"), None, "there is no operation 'convolution'"),
    ],
)
def test_bad_input(stage: Stage, project, arguments, plan, sentence: str) -> None:
    if plan is not None:
        (project / "workspace" / "plan.json").write_text(plan)
    done = stage("bench.py", *arguments)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert sentence in done.stderr.splitlines()[-1]


@pytest.mark.gpu
def test_a_starter_on_a_gpu(stage: Stage) -> None:
    done = stage("bench.py", "--kernel", "softmax")
    lines = lines_of(done.stdout)
    assert (done.returncode, lines["correctness"], lines["not_checked"]) == (0, "PASS", "nothing"), done.stdout
    assert 0 < float(lines["pct_peak_bandwidth"]) <= 100
    assert float(lines["speedup_vs_pytorch"]) > 0
