"""Where the time goes: every piece of it owned once, rows with true sites, shares that sum to one."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import DeviceType

from autokernel import breakdown, hardware, profiling, state
from autokernel.capture import Capture, capture
from autokernel.errors import InputError
from autokernel.graph import Region
from autokernel.hardware import Limits
from autokernel.profiling import Span, Work, attribute
from models import gpt2

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")
TINY = ("--model", "models/gpt2.py", "--class-name", "GPT2", "--input-shape", "1,32", "--model-args", "tiny")


def stage_module() -> ModuleType:
    """profile.py as a module: `import profile` gives the standard library's."""
    specification = importlib.util.spec_from_file_location("profile_stage", ROOT / "profile.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.fixture
def workspace(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(state, "ROOT", tmp_path)
    monkeypatch.setattr(state, "WORKSPACE", tmp_path / "workspace")
    return tmp_path / "workspace"


@pytest.fixture(scope="module")
def tiny_gpt2() -> tuple[nn.Module, tuple[Tensor], Capture]:
    torch.manual_seed(0)
    model = gpt2.GPT2(**gpt2.TINY).eval()
    args = (torch.randint(0, 503, (1, 32)),)
    return model, args, capture(model, args, {})


# Attribution -----------------------------------------------------------------------------------------------------------


def total(owned: profiling.Owned) -> float:
    return sum(kernel.time_us for kernels in owned.values() for kernel in kernels)


def test_a_kernel_belongs_to_the_range_that_launched_it_however_late_it_runs():
    spans = [Span(0, 10, "a", 0), Span(20, 30, "b", 0)]
    owned = attribute([Work("k", 5, 10), Work("k", 7, 21), Work("k", 1, 29), Work("m", 2, 0)], spans, 1)
    assert {owner: {kernel.name: (kernel.count, kernel.time_us) for kernel in owned[owner]} for owner in owned} == {
        "a": {"k": (1, 5), "m": (1, 2)},
        "b": {"k": (2, 8)},
    }


def test_work_outside_every_range_is_kept_as_nobodys():
    spans = [Span(10, 20, "a", 0)]
    owned = attribute([Work("early", 1, 5), Work("late", 2, 25), Work("mine", 4, 15)], spans, 1)
    assert {kernel.name for kernel in owned[None]} == {"early", "late"}
    assert total(owned) == 7


def test_the_median_pass_counts():
    spans = [Span(10 * i, 10 * i + 5, "a", i) for i in range(3)]
    (kernel,) = attribute([Work("k", time, 10 * i + 1) for i, time in enumerate((3, 100, 4))], spans, 3)["a"]
    assert (kernel.count, kernel.time_us) == (1, 4)


@pytest.mark.parametrize(("lost_us", "fails"), [(0.4, False), (0.6, True)])
def test_time_whose_launch_is_unknown_is_a_fault(lost_us, fails):
    work = [Work("k", 100 - lost_us, 1), Work("lost", lost_us, None)]
    if fails:
        with pytest.raises(RuntimeError, match=r"0\.6%"):
            attribute(work, [Span(0, 2, "a", 0)], 1)
    else:
        assert total(attribute(work, [Span(0, 2, "a", 0)], 1)) == pytest.approx(100)


class Event:
    """As much of a profiler's event as is read."""

    def __init__(self, name: str, start: float, end: float, number: int = 0, gpu: bool = False, annotation: bool = False):
        self.name, self.id, self.is_user_annotation = name, number, annotation
        self.device_type = DeviceType.CUDA if gpu else DeviceType.CPU
        self.time_range = type("Interval", (), {"start": start, "end": end, "elapsed_us": lambda self: end - start})()


def test_on_a_gpu_kernels_count_once_and_annotations_never():
    events = [
        Event("autokernel range 0 0", 0, 10, annotation=True),
        Event("aten::mm", 1, 9, number=7),  # an operator's own id, which is also that of a launch
        Event("cudaLaunchKernel", 4, 5, number=7),
        Event("autokernel range 0 0", 100, 130, gpu=True, annotation=True),
        Event("nvjet_hsh_128x256", 100, 120, number=7, gpu=True),
        Event("cuLaunchKernelEx", 6, 7, number=8),
        Event("_triton_kernel", 120, 125, number=8, gpu=True),
        Event("cudaMemcpyAsync", 8, 9, number=9),
        Event("Memcpy DtoD (Device -> Device)", 125, 126, number=9, gpu=True),
    ]
    work = profiling._work_in(events, torch.device("cuda"))
    assert [(piece.name, piece.time_us, piece.at) for piece in work] == [
        ("nvjet_hsh_128x256", 20, 4),
        ("_triton_kernel", 5, 6),
        ("Memcpy DtoD (Device -> Device)", 1, 8),
    ]


def test_a_gpu_profile_without_kernels_is_a_fault():
    with pytest.raises(RuntimeError, match="no kernel"):
        profiling._work_in([Event("aten::mm", 1, 9)], torch.device("cuda"))


def test_operators_of_a_graph_are_owned_by_regions_and_nodes(tiny_gpt2):
    _, args, captured = tiny_gpt2
    owned = profiling.run_graph(captured, args, {}, CPU)
    assert set(captured.regions) <= set(owned)
    assert None not in owned
    in_regions = {node for region in captured.regions for node in region.nodes}
    assert not in_regions.intersection(owned)
    (embedding,) = (owner for owner in owned if not isinstance(owner, Region) and "embedding" in str(owner.target))
    assert "aten::embedding" in {kernel.name for kernel in owned[embedding]}


def test_operators_without_a_graph(tiny_gpt2):
    model, args, _ = tiny_gpt2
    owned, calls = profiling.run_operators(model, args, {}, CPU)
    assert calls["aten::layer_norm"] == 5
    assert "aten::addmm" not in owned  # inside aten::linear, whose row has it
    assert "aten::addmm" in {kernel.name for kernel in owned["aten::linear"]}
    rows, total_us = breakdown.of_operators(owned, calls)
    assert sum(row.share for row in rows) == pytest.approx(1, abs=1e-6)
    assert total_us == pytest.approx(sum(row.time_us for row in rows))


# Rows ------------------------------------------------------------------------------------------------------------------


def test_rows_group_equal_calls(tiny_gpt2):
    _, args, captured = tiny_gpt2
    owned = profiling.run_graph(captured, args, {}, CPU)
    rows, unmatched, total_us = breakdown.of_graph(captured, owned, None)
    assert sum(row.share for row in (*rows, *unmatched)) == pytest.approx(1, abs=1e-6)
    assert sum(row.time_us for row in (*rows, *unmatched)) == pytest.approx(total_us)
    assert sum(row.count for row in rows) == len(captured.regions)
    for row in (*rows, *unmatched):
        assert sum(kernel.time_us for kernel in row.kernels) == pytest.approx(row.time_us)
    assert [row.time_us for row in rows] == sorted((row.time_us for row in rows), reverse=True)
    for row in rows:
        assert row.count == len(row.sites) == len(set(row.sites))
        assert (row.bound, row.roofline_us, row.pct_roofline, row.saved_us) == ("unmeasured", None, None, None)
        assert row.flops > 0
        assert row.bytes > 0
    by_sites = {row.sites: row for row in rows}
    output = by_sites["lm_head",]
    assert {name: output.shape[name] for name in "MNK"} == {"M": 32, "N": 503, "K": 64}
    assert by_sites["h.0.attn.c_attn", "h.1.attn.c_attn"].operation == "matmul"
    norms = next(row for row in rows if row.operation == "layernorm")
    assert norms.sites == ("h.0.ln_1", "h.0.ln_2", "h.1.ln_1", "h.1.ln_2", "ln_f")
    (embedding,) = (row for row in unmatched if row.operator == "aten.embedding.default")
    assert embedding.sites == ("wte",)


@pytest.mark.parametrize(("bandwidth", "capped"), [(1e-6, True), (1e9, False)])
def test_rows_against_a_roofline(tiny_gpt2, bandwidth, capped):
    _, args, captured = tiny_gpt2
    owned = profiling.run_graph(captured, args, {}, CPU)
    limits = Limits(bandwidth, {"float32": 1e9}, "measured")
    rows, _, _ = breakdown.of_graph(captured, owned, limits)
    for row in rows:
        assert row.roofline_us == pytest.approx(row.count * limits.roofline_us(row.flops, row.bytes, "float32"))
        assert row.bound == limits.bound(row.flops, row.bytes, "float32")
        assert 0 < row.pct_roofline <= 100
        assert row.saved_us == max(0, row.time_us - row.roofline_us)
        assert (row.pct_roofline == 100) == capped
        assert (row.saved_us == 0) == capped


# The stage -------------------------------------------------------------------------------------------------------------


def test_the_stage_as_its_user_runs_it(stage, project):
    result = stage("profile.py", *TINY, "--device", "cpu", "--dtype", "float32")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    values = dict(line.split(": ", 1) for line in lines if ": " in line and not line.startswith("|"))
    wanted = "model parameters gpu dtype total_us wall_us regions matched_share unmatched_share profile"
    assert [key for key in values if key in wanted.split()] == wanted.split()
    assert values["model"] == "GPT2"
    assert values["gpu"] == "cpu"
    assert float(values["matched_share"]) + float(values["unmatched_share"]) == pytest.approx(1, abs=2e-4)
    assert "cpu time us" in result.stdout
    assert "unmeasured" in result.stdout
    assert "lm_head" in result.stdout
    assert not [line for line in lines if line and not line.startswith("|") and ": " not in line]
    assert (project / values["profile"]).is_file()
    assert "ERROR" not in result.stderr


BRANCHING = """
import torch
from torch import nn

class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)

    @torch.compiler.disable  # so that there are no pieces either
    def forward(self, x):
        y = self.layer(x)
        return y.relu() if y.sum() > 0 else y.sigmoid()
"""


def test_a_model_that_cannot_be_captured_is_profiled_by_operator(workspace, tmp_path, capfd):
    (tmp_path / "branching.py").write_text(BRANCHING)
    arguments = f"--model {tmp_path}/branching.py --class-name Branching --input-shape 4,16 --device cpu --dtype float32"
    status = stage_module().main(arguments.split())
    assert status == 0
    out = capfd.readouterr().out
    assert "not_captured_because: " in out
    assert "data-dependent" in out
    assert "left_out: extract.py and verify.py" in out
    profile = state.load(state.Profile)
    assert not profile.captured
    assert "data-dependent" in profile.not_captured_because
    assert profile.rows == ()
    assert {"aten::linear", "aten::sum"} <= {row.operator for row in profile.unmatched}
    assert sum(row.share for row in profile.unmatched) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--model", "models/gpt2.py", "--class-name", "GPT2", "--input-shape", "1,4096", "--model-args", "tiny"),  # too long
        ("--model", "models/gpt2.py", "--class-name", "GPT2", "--input-shape", "32", "--model-args", "tiny"),  # no batch
        ("--model", "models/none.py", "--class-name", "GPT2", "--input-shape", "1,32"),
        ("--model", "models/gpt2.py", "--class-name", "None", "--input-shape", "1,32"),
    ],
    ids=["length", "dimensions", "file", "class"],
)
def test_bad_input_is_one_sentence_and_no_profile(workspace, monkeypatch, arguments):
    monkeypatch.chdir(ROOT)
    with pytest.raises(InputError) as fault:
        stage_module().main([*arguments, "--device", "cpu", "--dtype", "float32"])
    assert len(str(fault.value).splitlines()) == 1
    assert not (workspace / "profile.json").exists()


# On a GPU --------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("captured", [True, False], ids=["graph", "operators"])
def test_owned_time_is_all_the_time_that_the_profiler_saw(monkeypatch, captured):
    monkeypatch.setitem(profiling.PASSES, "cuda", 1)  # then the median is the time itself
    device = torch.device("cuda")
    model = gpt2.GPT2(**gpt2.TINY).eval().to(device, torch.float16)
    args = (torch.randint(0, 503, (2, 64), device=device),)
    seen = []
    profiled = profiling._profiled

    def keep(forward, on):
        seen.append(profiled(forward, on))
        return seen[-1]

    monkeypatch.setattr(profiling, "_profiled", keep)
    if captured:
        found = capture(model, args, {})
        owned = profiling.run_graph(found, args, {}, device)
        assert set(found.regions) <= set(owned)
        rows, unmatched, _ = breakdown.of_graph(found, owned, hardware.limits())
        assert sum(row.share for row in (*rows, *unmatched)) == pytest.approx(1, abs=1e-6)
        assert all(row.bound in ("compute", "memory") and 0 < row.pct_roofline <= 100 for row in rows)
    else:
        owned, _ = profiling.run_operators(model, args, {}, device)
    # as torch's own table adds up: `Self CUDA time total`
    (events,) = seen
    averages = events.key_averages()
    everything = sum(
        e.self_device_time_total for e in averages if e.device_type == DeviceType.CUDA and not e.is_user_annotation
    )
    assert total(owned) == pytest.approx(everything, rel=0.005)
    assert None not in owned
