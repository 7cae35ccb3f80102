"""Compile a kernel for many cases side by side, so that the gates find it in Triton's cache. Do not edit.

Each shape, dtype and stride pattern may need a compilation of its own, of seconds each; they depend on nothing else. The
processes started here share Triton's cache on disk with the one that judges, and nothing that they compute is looked at: a
kernel that fails in one of them fails in the gates too, where the reason is reported.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from autokernel import hardware, kernels
from autokernel.errors import InputError
from autokernel.judge import cases
from autokernel.ops import Operation
from autokernel.state import ROOT, Plan, load_if_there

PROCESSES = 14
TIMEOUT_S = 120.0


def compile_side_by_side(path: Path, seed: int) -> None:
    """Compile the kernel in `path` for the cases that `seed` draws, in several processes, on a GPU; returns when all ended."""
    parts = max(1, min(PROCESSES, (os.cpu_count() or 1) - 1))
    command = [sys.executable, "-m", __name__, str(path), str(seed), str(parts)]
    started = [
        subprocess.Popen(
            [*command, str(part)],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        for part in range(parts)
    ]
    try:
        for process in started:
            process.wait(TIMEOUT_S)
    except subprocess.TimeoutExpired:
        pass  # a kernel that hangs here is met again in the gates
    finally:
        for process in started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def main(argv: Sequence[str]) -> None:
    path, seed, parts, part = Path(argv[0]), int(argv[1]), int(argv[2]), int(argv[3])
    kernel = kernels.load(path)
    device = hardware.device()
    for case in _cases(kernel.operation, device, seed)[part::parts]:
        try:
            kernel.function(**case.arguments(kernel.operation, device, seed))
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        except Exception as fault:  # met again in the gates, with its case
            print(f"{case}: {fault}", file=sys.stderr)


def _cases(operation: Operation, device: torch.device, seed: int) -> list[cases.Case]:
    plan = load_if_there(Plan)
    targets = tuple(target for target in plan.targets if target.operation == operation.name) if plan else ()
    tried = [
        *cases.shape_sweep(operation, targets, device, seed),
        *cases.numerical_stability(operation, device),
        *cases.edge_cases(operation, device),
    ]
    # Several processes hold their arguments at once; what is too large for that is compiled in the gates.
    room = hardware.memory_bytes(device) / (8 * PROCESSES)
    return [case for case in tried if operation.bytes(case.shape, case.dtype.itemsize) < room]


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except InputError as fault:
        sys.exit(f"error: {fault}")
