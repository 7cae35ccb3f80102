"""What this machine is and how fast it could be: the only table of GPUs, the roofline, names and sizes.

Importing this module creates no CUDA context. `gpu_name`, `memory_bytes` and `l2_bytes` do on a GPU, so a process that
must still fork calls none of them. GB is 10^9 bytes and TFLOP/s 10^12 per second throughout. Imports no stage.
"""

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import torch

from autokernel import cli, state
from autokernel.errors import InputError

DTYPES = ("float16", "bfloat16", "float32")

Bound = Literal["compute", "memory"]


@dataclass(frozen=True)
class Gpu:
    """A GPU's dense peaks as its vendor states them, and the names by which the driver reports it.

    `peak_tflops` by dtype name: float16 and bfloat16 are tensor cores without sparsity, accumulating in float32;
    float32 is IEEE arithmetic, so without TF32. `memory_gb` is nominal; it tells apart cards that share a name.
    """

    name: str
    driver_names: tuple[str, ...]  # whole names, without the leading "NVIDIA "
    memory_gb: float
    peak_tflops: Mapping[str, float]
    bandwidth_gb_s: float
    source: str


def _peaks(half: float, single: float) -> dict[str, float]:
    # Every GPU of the table runs float16 and bfloat16 at one rate.
    return {"float16": half, "bfloat16": half, "float32": single}


_H100_PAPER = "NVIDIA H100 Tensor Core GPU Architecture whitepaper, performance comparison table"
_A100_SHEET = "NVIDIA A100 Tensor Core GPU datasheet (figures without sparsity)"
_GA102_PAPER = "NVIDIA Ampere GA102 GPU Architecture whitepaper (FP16 tensor with FP32 accumulate, without sparsity)"
_ADA_PAPER = "NVIDIA Ada GPU Architecture whitepaper, appendix A (FP16 tensor with FP32 accumulate, without sparsity)"

# Data sheets print tensor peaks with sparsity more often than not: those are halved here, and the source says so. GeForce
# cards run float16 at half rate when they accumulate in float32, as every kernel here does.
GPUS = (
    Gpu("H100 SXM", ("H100 80GB HBM3", "H100 SXM5 80GB"), 85.9, _peaks(989.4, 66.9), 3352, _H100_PAPER),
    Gpu("H100 PCIe", ("H100 PCIe",), 85.9, _peaks(756, 51.2), 2039, _H100_PAPER),
    Gpu(
        "H100 NVL",
        ("H100 NVL",),
        100.9,
        _peaks(835.5, 60),
        3938,
        "NVIDIA H100 NVL GPU product brief; H100 Tensor Core GPU datasheet (1671 TFLOPS FP16 with sparsity)",
    ),
    Gpu(
        "H200 SXM",
        ("H200",),
        150.8,
        _peaks(989.4, 66.9),
        4800,
        "NVIDIA H200 Tensor Core GPU datasheet (1979 TFLOPS FP16 with sparsity, 67 TFLOPS FP32)",
    ),
    Gpu(
        "H200 NVL",
        ("H200 NVL",),
        150.8,
        _peaks(835.5, 60),
        4800,
        "NVIDIA H200 Tensor Core GPU datasheet (1671 TFLOPS FP16 with sparsity)",
    ),
    Gpu(
        "B200",
        ("B200",),
        193.3,
        _peaks(2250, 75),
        8000,
        "NVIDIA HGX platform specifications (8 B200: 36 PFLOPS FP16 with sparsity, 600 TFLOPS FP32); "
        "NVIDIA DGX B200 datasheet (64 TB/s)",
    ),
    Gpu("A100 SXM 40 GB", ("A100-SXM4-40GB",), 42.9, _peaks(312, 19.5), 1555, _A100_SHEET),
    Gpu("A100 PCIe 40 GB", ("A100-PCIE-40GB",), 42.9, _peaks(312, 19.5), 1555, _A100_SHEET),
    Gpu("A100 SXM 80 GB", ("A100-SXM4-80GB",), 85.9, _peaks(312, 19.5), 2039, _A100_SHEET),
    Gpu("A100 PCIe 80 GB", ("A100 80GB PCIe",), 85.9, _peaks(312, 19.5), 1935, _A100_SHEET),
    Gpu(
        "L4",
        ("L4",),
        24.2,
        _peaks(121, 30.3),
        300,
        "NVIDIA L4 Tensor Core GPU datasheet (242 TFLOPS FP16 with sparsity)",
    ),
    Gpu("L40", ("L40",), 48.3, _peaks(181.05, 90.5), 864, "NVIDIA L40 GPU datasheet (figures without sparsity)"),
    Gpu("L40S", ("L40S",), 48.3, _peaks(362.05, 91.6), 864, "NVIDIA L40S GPU datasheet (figures without sparsity)"),
    Gpu("A10", ("A10",), 24.2, _peaks(125, 31.2), 600, "NVIDIA A10 Tensor Core GPU datasheet (figures without sparsity)"),
    Gpu("RTX 3080 10 GB", ("GeForce RTX 3080",), 10.7, _peaks(59.5, 29.8), 760.3, _GA102_PAPER),
    Gpu(
        "RTX 3080 12 GB",
        ("GeForce RTX 3080",),
        12.9,
        # 8960 CUDA cores (70 multiprocessors) at a boost clock of 1.71 GHz, two operations each; tensor cores twice that
        _peaks(61.3, 30.6),
        912.4,
        "NVIDIA GeForce RTX 3080 family specifications (8960 cores, 1.71 GHz, 384 bits at 19 Gbit/s)",
    ),
    Gpu("RTX 3090", ("GeForce RTX 3090",), 25.8, _peaks(71, 35.6), 936.2, _GA102_PAPER),
    Gpu("RTX 4080", ("GeForce RTX 4080",), 17.2, _peaks(97.5, 48.7), 716.8, _ADA_PAPER),
    Gpu("RTX 4090", ("GeForce RTX 4090",), 25.8, _peaks(165.2, 82.6), 1008, _ADA_PAPER),
    Gpu(
        "RTX 5090",
        ("GeForce RTX 5090",),
        34.2,
        _peaks(209.5, 104.8),
        1792,
        "NVIDIA RTX Blackwell GPU Architecture whitepaper, appendix A (FP16 tensor with FP32 accumulate, without sparsity)",
    ),
    Gpu(
        "MI300X",
        ("AMD Instinct MI300X", "AMD Instinct MI300X OAM", "AMD Instinct MI300X VF"),
        206.2,
        _peaks(1307.4, 163.4),
        5325,
        "AMD Instinct MI300X accelerator data sheet (figures without sparsity; 8192 bits at 5.2 Gbit/s)",
    ),
)

# How far the memory that the driver reports may lie from the nominal one; a partition of a GPU lies further.
_MEMORY_TOLERANCE = 0.15


def find_gpu(driver_name: str, memory_gb: float | None = None) -> Gpu | None:
    """The GPU of the table with exactly this name; None if there is none, so Ti, SUPER, D and laptop parts are not guessed.

    `memory_gb` (10^9 bytes, as the driver reports) picks between cards that share a name, of which the first is taken
    without it; a card of that name with quite another memory (a partition of one) is unknown.
    """
    name = driver_name.strip().removeprefix("NVIDIA ")
    named = [gpu for gpu in GPUS if name in gpu.driver_names]
    if memory_gb is None or not named:
        return named[0] if named else None
    nearest = min(named, key=lambda gpu: abs(gpu.memory_gb - memory_gb))
    return nearest if abs(nearest.memory_gb - memory_gb) <= _MEMORY_TOLERANCE * nearest.memory_gb else None


@dataclass(frozen=True)
class Limits:
    """The ceilings that a roofline is drawn with: `origin` is "datasheet" or "measured" (by prepare.py)."""

    bandwidth_gb_s: float
    peak_tflops: Mapping[str, float]
    origin: Literal["datasheet", "measured"]

    def peak(self, dtype: str) -> float:
        """TFLOP/s for a dtype name. The two half precisions stand in for each other; InputError for any other gap."""
        stand_in = {"float16": "bfloat16", "bfloat16": "float16"}
        for name in (dtype, stand_in.get(dtype, dtype)):
            if name in self.peak_tflops:
                return self.peak_tflops[name]
        raise InputError(f"no peak is known for {dtype}: use one of {', '.join(self.peak_tflops) or 'none (run prepare.py)'}")

    def roofline_us(self, flops: float, bytes: float, dtype: str) -> float:
        """The least time, in microseconds, for that many floating-point operations and bytes moved."""
        return max(flops / (self.peak(dtype) * 1e6), bytes / (self.bandwidth_gb_s * 1e3))

    def bound(self, flops: float, bytes: float, dtype: str) -> Bound:
        """Which of the two sets that time."""
        return "compute" if flops / (self.peak(dtype) * 1e6) > bytes / (self.bandwidth_gb_s * 1e3) else "memory"

    def ridge(self, dtype: str) -> float:
        """FLOP per byte above which a call is bound by compute."""
        return self.peak(dtype) * 1e3 / self.bandwidth_gb_s


def limits() -> Limits | None:
    """The ceilings of this machine's GPU: from the table if it is there, else as measured by prepare.py.

    None on a CPU, and, with a line on standard error that says what to run, for an unknown GPU that was not measured.
    """
    if device().type == "cpu":
        return None
    name = gpu_name()
    gpu = find_gpu(name, memory_bytes(device()) / 1e9)
    if gpu is not None:
        return Limits(gpu.bandwidth_gb_s, gpu.peak_tflops, "datasheet")
    machine = state.load_if_there(state.Machine)
    if machine is None or machine.ceilings is None or machine.name != name:
        _note_once(f"{name} is not in the table of GPUs: no rooflines until `uv run prepare.py` has measured its ceilings")
        return None
    _note_once(f"{name} is not in the table of GPUs: rooflines use the ceilings that prepare.py measured")
    return measured_limits(machine.ceilings)


def measured_limits(ceilings: state.Ceilings) -> Limits:
    """Limits from what prepare.py measured: the faster of copying and reading is the bandwidth."""
    return Limits(max(ceilings.copy_gb_s, ceilings.read_gb_s), ceilings.matmul_tflops, "measured")


@cache
def _note_once(message: str) -> None:
    cli.note(f"warning: {message}")


def achieved_tflops(flops: float, us: float) -> float:
    """TFLOP/s of that many operations in `us` microseconds."""
    return flops / us / 1e6


def achieved_gb_s(bytes: float, us: float) -> float:
    """GB/s of that many bytes in `us` microseconds."""
    return bytes / us / 1e3


def percent(value: float, ceiling: float) -> float:
    """100 * value / ceiling, not clipped: above 100 the measurement or the ceiling is at fault, and the caller must say so."""
    return 100 * value / ceiling


def device() -> torch.device:
    """The GPU if there is one, else the CPU. Creates no CUDA context."""
    return torch.device("cuda" if torch.cuda.device_count() else "cpu")


def gpu_name() -> str:
    """The GPU's name as its driver reports it, "cpu" without one."""
    return torch.cuda.get_device_name() if device().type == "cuda" else "cpu"


def cpu_name() -> str:
    """The processor's name, or its architecture where the system does not tell."""
    information = Path("/proc/cpuinfo")
    if information.exists():
        found = re.search(r"^model name\s*:\s*(.+)$", information.read_text(errors="replace"), re.MULTILINE)
        if found:
            return found.group(1).strip()
    return platform.processor() or platform.machine()


def memory_bytes(device: torch.device) -> int:
    """Memory of the GPU, or of the machine (its container's limit, if lower) for a CPU: in total, not what is free."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.exists() else "max"
    return min(total, int(text)) if text.isdigit() else total


def l2_bytes(device: torch.device) -> int:
    """Size of the GPU's L2 cache; 0 for a CPU, whose caches nothing here flushes."""
    return torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0


def versions() -> state.Versions:
    """Versions of what a figure is measured with; "missing" for Triton where it is not installed."""
    has_gpu = device().type == "cuda"
    runtime = torch.version.cuda or f"hip {torch.version.hip}"
    return state.Versions(
        python=platform.python_version(),
        torch=str(torch.__version__),  # a subclass of str, which no encoder knows
        triton=_triton_version(),
        cuda=runtime if has_gpu else "",
        driver=_driver_version() if has_gpu else "",
    )


def _triton_version() -> str:
    # From the metadata, so that a stage which only names the version need not import Triton.
    for distribution in ("triton", "pytorch-triton-rocm"):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "missing"


@cache
def _driver_version() -> str:
    # The kernel module tells at once; a container may hide it, and then the driver's own tool does.
    for module in (Path("/proc/driver/nvidia/version"), Path("/sys/module/amdgpu/version")):
        found = re.search(r"\d+\.\d+(\.\d+)?", module.read_text()) if module.exists() else None
        if found:
            return found.group()
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "unknown"
    query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, timeout=60)
    return answer.stdout.split("\n")[0].strip() or "unknown"


def dtype(name: str) -> torch.dtype:
    """torch.float16 for "float16"; InputError if torch has no dtype of that name."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise InputError(f"there is no dtype {name!r}: use one of {', '.join(DTYPES)}")
    return found


def dtype_name(dtype: torch.dtype) -> str:
    """ "float16" for torch.float16."""
    return str(dtype).removeprefix("torch.")
