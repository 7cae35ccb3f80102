"""bench.py as its user sees it: the lines it prints, its exit status, its row."""

import msgspec
import pytest
import torch
from conftest import Stage

from autokernel import ops

KEYS = "kernel_type correctness reason smoke shape_sweep numerical_stability determinism edge_cases".split()
FIGURES = (
    "latency_us latency_interval clock_us graph_us launch_us pytorch_us throughput_tflops bandwidth_gb_s pct_peak_compute "
    "pct_peak_bandwidth bottleneck speedup_vs_pytorch speedup_interval timed_calls peak_vram_mb"
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


TORCH = """
import torch
KERNEL_TYPE = "softmax"
def kernel_fn(x):
    return torch.softmax(x, -1)
"""


def lines_of(text: str) -> dict[str, str]:
    return dict(line.split(": ", 1) for line in text.splitlines() if ": " in line)


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="on a GPU the figures are measured; see the gpu test")
def test_a_starter_on_a_cpu(stage: Stage, project) -> None:
    done = stage("bench.py", "--kernel", "softmax", "--tag", "night\t1", "--description", "as it is")
    lines = lines_of(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {*KEYS, *FIGURES} <= set(lines)
    assert lines["correctness"] == "PASS"
    assert all(lines[key] == "unmeasured" for key in FIGURES)
    assert "separate process" in lines["isolation"]
    assert 0 < float(lines["seconds"]) < 200
    assert "bfloat16" in lines["not_checked"]
    header, row = (project / "results.tsv").read_text().splitlines()
    assert header.split("\t")[: len(HEADER)] == HEADER
    values = dict(zip(header.split("\t"), row.split("\t"), strict=True))
    assert (values["experiment"], values["tag"], values["correctness"]) == ("1", "night\\t1", "PASS")
    assert values["kernel_sha256"] == lines["kernel_sha256"]
    assert (values["allow_torch"], values["isolation"]) == ("no", lines["isolation"])
    assert float(values["seconds"]) == pytest.approx(float(lines["seconds"]), abs=0.1)
    assert msgspec.json.decode(values["shape"]) == ops.get("softmax").sweep_cpu[0]


def test_a_wrong_kernel_fails_with_the_same_lines_and_a_row(stage: Stage, project) -> None:
    (project / "kernel.py").write_text(WRONG)
    done = stage("bench.py")
    lines = lines_of(done.stdout)
    assert done.returncode == 1
    assert {*KEYS, *FIGURES} <= set(lines)
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
        ("KERNEL_TYPE = str(1)\ndef kernel_fn(x): ...\n", "plain text"),
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
    lines = lines_of(done.stdout)
    assert lines["correctness"] == "CRASH"
    assert sentence in lines["reason"]
    assert {*KEYS, *FIGURES} <= set(lines)


def test_a_file_that_raises_while_it_is_imported(stage: Stage, project) -> None:
    (project / "kernel.py").write_text("import nothing_of_this_name\n" + WRONG)
    done = stage("bench.py")
    lines = lines_of(done.stdout)
    assert (done.returncode, lines["correctness"]) == (1, "CRASH"), done.stderr
    assert "ModuleNotFoundError" in lines["reason"]
    assert {*KEYS, *FIGURES} <= set(lines)
    assert "Traceback" not in done.stderr


def test_torch_may_do_the_work_only_where_it_is_allowed(stage: Stage, project) -> None:
    (project / "kernel.py").write_text(TORCH)
    lines = lines_of(stage("bench.py").stdout)
    assert lines["correctness"] in ("INVALID", "FAIL")
    assert "aten" in lines["reason"]
    done = stage("bench.py", "--allow-torch")
    lines = lines_of(done.stdout)
    assert (done.returncode, lines["correctness"], lines["allow_torch"]) == (0, "PASS", "yes"), done.stdout
    header, first, second = (line.split("\t") for line in (project / "results.tsv").read_text().splitlines())
    assert [row[header.index("allow_torch")] for row in (first, second)] == ["no", "yes"]


def test_tools_that_were_not_reached_have_their_lines_too(stage: Stage, project) -> None:
    (project / "kernel.py").write_text(WRONG)
    lines = lines_of(stage("bench.py", "--sanitize", "--ncu").stdout)
    assert (lines["correctness"], lines["sanitizer"], lines["ncu"]) == ("FAIL", "not run", "not run")


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="on a GPU the tools may be there")
def test_tools_that_are_not_there_are_named(stage: Stage, project) -> None:
    done = stage("bench.py", "--kernel", "rmsnorm", "--sanitize", "--ncu")
    lines = lines_of(done.stdout)
    assert (done.returncode, lines["sanitizer"]) == (0, "unmeasured (there is no GPU)"), done.stderr
    assert lines["ncu"] == "there is no GPU"
    assert lines["ncu_top_stall"] == "unmeasured"


@pytest.mark.parametrize(
    ("arguments", "plan", "sentence"),
    [
        (("--target", "kernel_matmul_1"), None, "plan.json is missing: run `uv run extract.py` first"),
        (("--target", "kernel_matmul_1"), '{"source": ', "plan.json is damaged"),
        (("--kernel", "convolution"), None, "there is no operation 'convolution'"),
        (
            ("--kernel", "softmax", "--incumbent", "kernels/reduce.py"),
            None,
            "reduce.py is a kernel for reduce, not for softmax",
        ),
        (("--all", "--incumbent", "kernels/reduce.py"), None, "--incumbent compares one kernel"),
        (("--target", "a", "b", "--incumbent", "kernels/reduce.py"), None, "--incumbent compares one kernel"),
    ],
)
def test_bad_input(stage: Stage, project, arguments, plan, sentence: str) -> None:
    if plan is not None:
        (project / "workspace" / "plan.json").write_text(plan)
    done = stage("bench.py", *arguments)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert sentence in done.stderr.splitlines()[-1]


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("name", ops.names())
def test_a_starter_on_a_gpu(stage: Stage, name: str) -> None:
    done = stage("bench.py", "--kernel", name)
    lines = lines_of(done.stdout)
    assert (done.returncode, lines["correctness"], lines["not_checked"]) == (0, "PASS", "nothing"), done.stdout
    assert 0 < float(lines["pct_peak_bandwidth"]) <= 100
    assert float(lines["speedup_vs_pytorch"]) > 0
    low, high = map(float, lines["latency_interval"].split(" to "))
    assert low <= float(lines["latency_us"]) <= high
    assert float(lines["clock_us"]) == pytest.approx(float(lines["latency_us"]), rel=0.1, abs=6)
    assert int(lines["timed_calls"]) >= 27


@pytest.mark.gpu
@pytest.mark.alone
def test_a_kernel_is_no_faster_than_itself(stage: Stage) -> None:
    done = stage("bench.py", "--kernel", "softmax", "--incumbent", "kernels/softmax.py")
    lines = lines_of(done.stdout)
    assert done.returncode == 0, done.stdout
    low, high = map(float, lines["speedup_vs_incumbent_interval"].split(" to "))
    assert low <= 1 <= high
