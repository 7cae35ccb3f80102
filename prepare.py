"""Set up once: check this machine, measure its ceilings, compute golden cases, time PyTorch's own operations.

    uv run prepare.py

Writes workspace/machine.json and workspace/golden/<operation>.pt. Without a GPU whatever is timed is `unmeasured`.
"""

import os
import shutil
import statistics
import textwrap
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from autokernel import cli, golden, hardware, ops, state
from autokernel.errors import InputError
from autokernel.inputs import InputMaker

GIB = 2**30
COPY_BYTES = 2 * GIB + GIB // 2  # far larger than any L2 cache
HALF_SIZE, SINGLE_SIZE = 8192, 4096  # sides of the square matrix products
WARM_UP_S = 0.3  # of work before the first timing, so that the clocks have risen
REPEATS = 20
FLUSH_BYTES = 256 * 2**20  # at least; twice the L2 cache where that is larger
BASELINE_DTYPE = "float16"


def check_torch(device: torch.device) -> None:
    """InputError if torch sees the GPU but cannot use it; a warning if it sees none and a driver is there."""
    if device.type == "cpu":
        _warn_of_unusable_gpu()
    try:
        torch.ones(1, device=device).item()
    except RuntimeError as fault:  # CUDA's errors, out of memory included
        raise InputError(
            f"torch cannot use this GPU ({textwrap.shorten(str(fault), 200)}): see with `nvidia-smi` whether it is free, and "
            f"whether its driver supports CUDA {torch.version.cuda}"
        ) from fault


def _warn_of_unusable_gpu() -> None:
    """A driver too old for this torch looks like no GPU at all: say so, unless the GPUs are hidden on purpose."""
    hidden = any(os.environ.get(name) == "" for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"))
    if not hidden and (os.path.exists("/dev/nvidia0") or shutil.which("nvidia-smi")):
        cli.note(
            "warning: there is an NVIDIA driver here, but torch finds no GPU: compare `nvidia-smi` with torch.version.cuda"
        )


def check_triton(device: torch.device) -> str:
    """Run a tiny kernel: "compiled" or "interpreter" tells how; InputError if it cannot run or its result is wrong."""
    try:
        from autokernel import smoke
    except ImportError as fault:
        raise InputError(
            f"Triton cannot be imported ({fault}): run `uv sync` on Linux, or install the Triton that this torch needs"
        ) from None
    x = torch.arange(1000, dtype=torch.float32, device=device)
    try:
        doubled = smoke.double(x)
    except Exception as fault:  # a compiler, a linker, a driver: whatever fails, Triton does not work here
        raise InputError(
            f"Triton cannot run a kernel on this machine ({type(fault).__name__}: {textwrap.shorten(str(fault), 300)}): "
            "check that a C compiler is installed and that the GPU driver is as new as torch's CUDA"
        ) from fault
    if not torch.equal(doubled, 2 * x):
        raise InputError("Triton ran a kernel and its result is wrong: reinstall torch and triton with `uv sync --reinstall`")
    return "interpreter" if smoke.is_interpreted() else "compiled"


def median_us(call: Callable[[], Any], before: Callable[[], Any] | None = None) -> float:
    """Median device time of a call in microseconds, after warm-up; `before` runs ahead of each call, untimed."""
    warm_until = time.perf_counter() + WARM_UP_S
    while time.perf_counter() < warm_until:
        call()
        torch.cuda.synchronize()
    pairs = []
    for _ in range(REPEATS):
        if before is not None:
            before()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(1e3 * start.elapsed_time(end) for start, end in pairs)


def measure_ceilings(device: torch.device) -> state.Ceilings:
    """What the GPU reaches: copying and summing large buffers, and square matrix products in each dtype it has."""
    copy_gb_s, read_gb_s = _measure_bandwidth(device)
    matmul = {dtype: _measure_matmul(device, dtype) for dtype in hardware.DTYPES if _has(dtype)}
    torch.cuda.empty_cache()
    return state.Ceilings(copy_gb_s=copy_gb_s, read_gb_s=read_gb_s, matmul_tflops=matmul)


def _measure_bandwidth(device: torch.device) -> tuple[float, float]:
    free, _ = torch.cuda.mem_get_info(device)
    if free < 2 * COPY_BYTES + GIB:
        raise InputError(
            f"only {free / 1e9:.1f} GB of the GPU's memory are free and measuring needs {(2 * COPY_BYTES + GIB) / 1e9:.1f} GB: "
            "end the programs that use it (see `nvidia-smi`)"
        )
    source = torch.ones(COPY_BYTES // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    # a copy reads and writes every byte, a sum reads it
    copy = hardware.achieved_gb_s(2 * COPY_BYTES, median_us(lambda: target.copy_(source)))
    read = hardware.achieved_gb_s(COPY_BYTES, median_us(lambda: source.sum()))
    return copy, read


def _measure_matmul(device: torch.device, dtype: str) -> float:
    size = SINGLE_SIZE if dtype == "float32" else HALF_SIZE
    # Random values: products of zeros draw less power, and so run at higher clocks than any real one.
    a, b = (torch.randn(size, size, device=device).to(hardware.dtype(dtype)) for _ in range(2))
    out = torch.empty_like(a)
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")  # float32 means IEEE float32: no TF32
    try:
        us = median_us(lambda: torch.mm(a, b, out=out))
    finally:
        torch.set_float32_matmul_precision(precision)
    return hardware.achieved_tflops(2 * size**3, us)


def _has(dtype: str) -> bool:
    # Older GPUs emulate bfloat16, which is no ceiling.
    return dtype != "bfloat16" or torch.cuda.is_bf16_supported(including_emulation=False)


def measure_baseline(name: str, device: torch.device) -> state.Baseline | None:
    """PyTorch eager on the operation's first shape, L2 flushed before each call; None if it does not fit into memory."""
    operation = ops.get(name)
    shape = dict(operation.sweep[0])
    generator = torch.Generator(device=device).manual_seed(0)
    try:
        arguments = operation.inputs(shape, InputMaker(hardware.dtype(BASELINE_DTYPE), device, generator))
        flush = torch.empty(max(FLUSH_BYTES, 2 * hardware.l2_bytes(device)), dtype=torch.int8, device=device)
        us = median_us(lambda: operation.reference(**arguments), before=flush.zero_)
    except torch.OutOfMemoryError:
        cli.note(f"warning: {name} of shape {shape} does not fit into this GPU's memory: no baseline")
        return None
    return state.Baseline(operation=name, shape=shape, dtype=BASELINE_DTYPE, latency_us=us)


def report_ceilings(ceilings: state.Ceilings | None, gpu: hardware.Gpu | None) -> None:
    """What was measured, beside the data sheet where the GPU is in the table; above 100% the measurement is at fault."""
    if ceilings is None:
        for key in ("copy_gb_s", "read_gb_s", *(f"matmul_tflops_{dtype}" for dtype in hardware.DTYPES)):
            cli.say(key, "unmeasured")
        return
    bandwidth = gpu.bandwidth_gb_s if gpu else None
    figures = [("copy_gb_s", ceilings.copy_gb_s, bandwidth), ("read_gb_s", ceilings.read_gb_s, bandwidth)]
    for dtype, tflops in ceilings.matmul_tflops.items():
        figures.append((f"matmul_tflops_{dtype}", tflops, gpu.peak_tflops[dtype] if gpu else None))
    for key, value, peak in figures:
        cli.say(key, f"{value:.1f}")
        if peak is None:
            continue
        share = hardware.percent(value, peak)
        if share > 100:
            cli.note(f"warning: {key} is above the data sheet's {peak:g}, so one of the two is wrong: run prepare.py again")
        else:
            cli.say(f"{key}_pct_of_datasheet", f"{share:.1f}")


def main(argv: Sequence[str] | None = None) -> int:
    cli.parser(__doc__).parse_args(argv)
    device = hardware.device()
    has_gpu = device.type == "cuda"
    check_torch(device)
    mode = check_triton(device)
    if has_gpu and mode == "interpreter":
        cli.note("warning: TRITON_INTERPRET is set, so kernels run in Triton's interpreter although there is a GPU: unset it")

    versions = hardware.versions()
    name = hardware.gpu_name() if has_gpu else hardware.cpu_name()
    memory_gb = hardware.memory_bytes(device) / 1e9
    capability = torch.cuda.get_device_capability(device) if has_gpu else None
    gpu = hardware.find_gpu(name, memory_gb) if has_gpu else None
    cli.say("device", device.type)
    cli.say("name", name)
    cli.say("compute_capability", ".".join(map(str, capability)) if capability else "none")
    cli.say("memory_gb", f"{memory_gb:.1f}")
    cli.say("l2_mb", f"{hardware.l2_bytes(device) / 1e6:.1f}" if has_gpu else "none")
    for key in versions.__struct_fields__:
        cli.say(key, getattr(versions, key) or "none")
    cli.say("triton_mode", mode)
    cli.say("datasheet", f"{gpu.name}: {gpu.source}" if gpu else "none")

    if has_gpu:
        cli.note("measuring copies, sums and matrix products")
    ceilings = measure_ceilings(device) if has_gpu else None
    report_ceilings(ceilings, gpu)

    baselines = []
    for operation in ops.names():
        cases = golden.write(operation)
        cli.say(f"golden_{operation}", f"{len(cases)} cases")
        baseline = measure_baseline(operation, device) if has_gpu else None
        cli.say(f"baseline_{operation}_us", f"{baseline.latency_us:.1f}" if baseline else "unmeasured")
        if baseline:
            baselines.append(baseline)

    machine = state.Machine(
        device=device.type,
        name=name,
        compute_capability=capability,
        memory_gb=memory_gb,
        l2_bytes=hardware.l2_bytes(device),
        versions=versions,
        ceilings=ceilings,
        baselines=tuple(baselines),
    )
    cli.say("machine", state.save(machine).relative_to(state.ROOT))
    return cli.OK


if __name__ == "__main__":
    cli.run_stage(main)
