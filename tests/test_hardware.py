"""The table of GPUs, the names that drivers report, the roofline, and which ceilings a machine gets."""

import subprocess
import sys

import pytest
import torch

from autokernel import hardware, state
from autokernel.errors import InputError
from autokernel.hardware import GPUS, Limits

GIB = 2**30 / 1e9

# What `nvidia-smi --query-gpu=name,memory.total` (ROCm: `rocminfo`) prints, with the memory in MiB, and whose peaks apply.
REPORTED = [
    ("NVIDIA H100 80GB HBM3", 81559, "H100 SXM"),
    ("NVIDIA H100 PCIe", 81559, "H100 PCIe"),
    ("NVIDIA H100 NVL", 95830, "H100 NVL"),
    ("NVIDIA H200", 143771, "H200 SXM"),
    ("NVIDIA H200 NVL", 143771, "H200 NVL"),
    ("NVIDIA B200", 183359, "B200"),
    ("NVIDIA A100-SXM4-40GB", 40960, "A100 SXM 40 GB"),
    ("NVIDIA A100-SXM4-80GB", 81920, "A100 SXM 80 GB"),
    ("NVIDIA A100-PCIE-40GB", 40960, "A100 PCIe 40 GB"),
    ("NVIDIA A100 80GB PCIe", 81920, "A100 PCIe 80 GB"),
    ("NVIDIA L4", 23034, "L4"),
    ("NVIDIA L40", 46068, "L40"),
    ("NVIDIA L40S", 46068, "L40S"),
    ("NVIDIA A10", 23028, "A10"),
    ("NVIDIA GeForce RTX 3080", 10240, "RTX 3080 10 GB"),
    ("NVIDIA GeForce RTX 3080", 12288, "RTX 3080 12 GB"),
    ("NVIDIA GeForce RTX 3090", 24576, "RTX 3090"),
    ("NVIDIA GeForce RTX 4080", 16376, "RTX 4080"),
    ("NVIDIA GeForce RTX 4090", 24564, "RTX 4090"),
    ("NVIDIA GeForce RTX 5090", 32607, "RTX 5090"),
    ("AMD Instinct MI300X", 196592, "MI300X"),
    ("GeForce RTX 3090", 24268, "RTX 3090"),  # drivers before 470 leave out the vendor
]

UNKNOWN = [
    "NVIDIA A10G",
    "NVIDIA L400",
    "NVIDIA L20",
    "NVIDIA H20",
    "NVIDIA GH200 480GB",
    "NVIDIA A100-SXM4-80GB MIG 1g.10gb",
    "NVIDIA H100 80GB HBM3 MIG 3g.40gb",
    "NVIDIA GeForce RTX 3080 Ti",
    "NVIDIA GeForce RTX 3080 Laptop GPU",
    "NVIDIA GeForce RTX 4080 SUPER",
    "NVIDIA GeForce RTX 4090 D",
    "NVIDIA GeForce RTX 4090 Laptop GPU",
    "NVIDIA GeForce RTX 5090 D",
    "Tesla V100-SXM2-16GB",
    "AMD Instinct MI300A",
    "",
    "cpu",
]


@pytest.mark.parametrize(("driver_name", "mib", "name"), REPORTED, ids=[f"{row[0]}-{row[1]}" for row in REPORTED])
def test_a_driver_name_finds_its_gpu(driver_name: str, mib: int, name: str) -> None:
    found = hardware.find_gpu(driver_name, mib * 2**20 / 1e9)
    assert found is not None
    assert found.name == name


def test_every_gpu_of_the_table_has_a_reported_name() -> None:
    assert {gpu.name for gpu in GPUS} == {name for _, _, name in REPORTED}


@pytest.mark.parametrize("driver_name", UNKNOWN)
def test_other_names_are_unknown(driver_name: str) -> None:
    assert hardware.find_gpu(driver_name) is None


def test_without_the_memory_the_first_of_a_name_is_taken() -> None:
    found = hardware.find_gpu("NVIDIA GeForce RTX 3080")
    assert found is not None
    assert found.name == "RTX 3080 10 GB"


def test_a_part_of_a_gpu_is_unknown() -> None:
    assert hardware.find_gpu("NVIDIA H200", 35 * GIB) is None


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_figures_are_dense_and_complete(gpu: hardware.Gpu) -> None:
    assert set(gpu.peak_tflops) == set(hardware.DTYPES)
    assert gpu.source
    # Tensor cores are 2 (GeForce, float32 accumulate; L40) to 16 (A100) and, on B200, 30 times as fast as float32.
    # A figure with sparsity would break this: twice that of GeForce is 4, twice that of A100 is 32.
    ratio = gpu.peak_tflops["float16"] / gpu.peak_tflops["float32"]
    if gpu.name.startswith("RTX") or gpu.name == "L40":
        assert ratio == pytest.approx(2, rel=0.01)
    elif gpu.name in ("L4", "L40S", "A10"):
        assert ratio == pytest.approx(4, rel=0.02)
    elif gpu.name.startswith("A100"):
        assert ratio == pytest.approx(16)
    else:
        assert {"H100": 14.5, "H200": 14.5, "B200": 30, "MI300X": 8}[gpu.name.split()[0]] == pytest.approx(ratio, rel=0.06)


H200 = Limits(4800, {"float16": 989.4, "float32": 66.9}, "datasheet")


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("dtype", hardware.DTYPES)
def test_at_the_ridge_both_limits_meet(gpu: hardware.Gpu, dtype: str) -> None:
    limits = Limits(gpu.bandwidth_gb_s, gpu.peak_tflops, "datasheet")
    bytes = 10**9
    flops = limits.ridge(dtype) * bytes
    assert limits.roofline_us(flops, 0, dtype) == pytest.approx(limits.roofline_us(0, bytes, dtype))
    assert limits.bound(1.01 * flops, bytes, dtype) == "compute"
    assert limits.bound(0.99 * flops, bytes, dtype) == "memory"


def test_roofline_by_hand() -> None:
    # 4096^3 in float16: 137.4 GFLOP at 989.4 TFLOP/s are 138.9 us; 100.7 MB at 4.8 TB/s would be 21 us
    assert H200.roofline_us(2 * 4096**3, 3 * 4096**2 * 2, "float16") == pytest.approx(138.91, abs=0.01)
    # a softmax of 4096 x 4096 moves 67.1 MB: 13.98 us
    assert H200.roofline_us(5 * 4096**2, 2 * 4096**2 * 2, "float16") == pytest.approx(13.98, abs=0.01)
    assert H200.ridge("float16") == pytest.approx(206.1, abs=0.1)


def test_rates_invert_times() -> None:
    flops, us = 2 * 4096**3, 138.91
    assert hardware.achieved_tflops(flops, us) == pytest.approx(989.4, rel=1e-3)
    assert hardware.achieved_gb_s(4.8e9, 1000) == pytest.approx(4800)
    assert hardware.percent(hardware.achieved_gb_s(2.4e9, 1000), 4800) == pytest.approx(50)


def test_a_missing_half_precision_takes_the_other_and_nothing_else() -> None:
    assert H200.peak("bfloat16") == H200.peak("float16")
    with pytest.raises(InputError, match="no peak is known for float64"):
        H200.peak("float64")
    with pytest.raises(InputError, match="float32"):
        Limits(4800, {"float16": 989.4}, "measured").peak("float32")


class FakeMachine:
    """Makes `hardware` believe in a GPU of a given name, with machine.json in a folder of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, memory_gb: float) -> None:
        hardware._note_once.cache_clear()
        monkeypatch.setattr(hardware, "device", lambda: torch.device("cuda"))
        monkeypatch.setattr(hardware, "gpu_name", lambda: name)
        monkeypatch.setattr(hardware, "memory_bytes", lambda device: int(memory_gb * 1e9))

    def measured(self, name: str) -> None:
        ceilings = state.Ceilings(copy_gb_s=700.0, read_gb_s=720.0, matmul_tflops={"float16": 80.0, "float32": 20.0})
        versions = state.Versions(python="3", torch="2", triton="3", cuda="13", driver="580")
        machine = state.Machine(
            device="cuda",
            name=name,
            compute_capability=(8, 9),
            memory_gb=16.0,
            l2_bytes=1,
            versions=versions,
            ceilings=ceilings,
            baselines=(),
        )
        state.save(machine)


@pytest.fixture(autouse=True)
def workspace(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "WORKSPACE", tmp_path)


def test_a_known_gpu_has_the_limits_of_its_datasheet(monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    FakeMachine(monkeypatch, "NVIDIA H200", 150.1).measured("NVIDIA H200")
    limits = hardware.limits()
    assert limits is not None
    assert (limits.origin, limits.bandwidth_gb_s, limits.peak("float16")) == ("datasheet", 4800, 989.4)
    assert capfd.readouterr().err == ""


def test_an_unknown_gpu_has_measured_limits_and_says_so_once(monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    name = "NVIDIA GeForce RTX 4080 SUPER"
    FakeMachine(monkeypatch, name, 17.0).measured(name)
    limits = hardware.limits()
    assert limits is not None
    assert hardware.limits() == limits
    assert (limits.origin, limits.bandwidth_gb_s, limits.peak("bfloat16")) == ("measured", 720.0, 80.0)
    assert " ".join(capfd.readouterr().err.split()).count("the ceilings that prepare.py measured") == 1


@pytest.mark.parametrize("measured_on", [None, "NVIDIA H200"])
def test_an_unknown_gpu_without_its_own_measurement_has_none(measured_on, monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    machine = FakeMachine(monkeypatch, "NVIDIA GeForce RTX 4080 SUPER", 17.0)
    if measured_on:
        machine.measured(measured_on)
    assert hardware.limits() is None
    assert "uv run prepare.py" in " ".join(capfd.readouterr().err.split())


def test_a_cpu_has_no_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "device", lambda: torch.device("cpu"))
    assert hardware.limits() is None


@pytest.mark.parametrize("name", [*hardware.DTYPES, "int64"])
def test_dtype_names_go_both_ways(name: str) -> None:
    assert hardware.dtype_name(hardware.dtype(name)) == name


@pytest.mark.parametrize("name", ["float17", "nn", ""])
def test_no_such_dtype(name: str) -> None:
    with pytest.raises(InputError, match="there is no dtype"):
        hardware.dtype(name)


def test_versions_are_plain_text_and_say_what_is_installed() -> None:
    import triton

    versions = hardware.versions()
    assert type(versions.torch) is str
    assert versions.torch == torch.__version__
    assert versions.triton == triton.__version__
    assert bool(versions.cuda) == bool(versions.driver) == bool(torch.cuda.device_count())


@pytest.mark.gpu
def test_importing_leaves_cuda_alone() -> None:
    code = "import autokernel.hardware as h, torch; h.device(); h.versions(); print(torch.cuda.is_initialized())"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "False"


def test_memory_and_cache_of_this_machine() -> None:
    device = hardware.device()
    assert hardware.memory_bytes(device) > 2**28
    assert (hardware.l2_bytes(device) > 0) == (device.type == "cuda")
    assert hardware.cpu_name()


@pytest.mark.gpu
def test_this_gpu_has_limits_or_is_unknown() -> None:
    name = hardware.gpu_name()
    gpu = hardware.find_gpu(name, hardware.memory_bytes(hardware.device()) / 1e9)
    limits = hardware.limits()
    assert (limits is None) == (gpu is None)
    assert hardware.versions().driver[0].isdigit()
