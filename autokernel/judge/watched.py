"""A process that calls a kernel for a tool that watches it: compute-sanitizer or ncu. Do not edit.

`python -m autokernel.judge.watched FILE OPERATION FOLDER` reads cases from standard input, as JSON. Their inputs are made here,
and nobody compares the answers: the gates did that before.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import torch

from autokernel import hardware, kernels, ops
from autokernel.inputs import InputMaker, Spec
from autokernel.judge import sandbox
from autokernel.judge.cases import Case
from autokernel.state import ROOT

# What a tool and Python need of the environment; anything else stays here.
KEPT = ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES", "VIRTUAL_ENV")


class Unwatched(Exception):
    """The tool is not there, may not be used, or did not finish; the text says which, in one clause."""


class WatchedCase(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `cases.Case` says of the arguments. `specs`: shape, strides and dtype of a tensor, by name."""

    shape: dict[str, int | float | bool | str | None]
    dtype: str
    layout: str
    specs: dict[str, tuple[tuple[int, ...], tuple[int, ...], str]]


def watch(
    tool: Sequence[str],
    path: Path,
    operation: str,
    cases: Sequence[Case],
    folder: Path,
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
) -> str:
    """Run the tool's command line over this process and return what both printed; Unwatched if that is not to be had.

    `folder` is for the files of both; it is made, and everything is killed when the time is over.
    """
    program = shutil.which(tool[0])
    if program is None:
        raise Unwatched(f"{tool[0]} is not installed")
    folder.mkdir(parents=True, exist_ok=True)
    given = {key: os.environ[key] for key in KEPT if key in os.environ}
    given |= {"TMPDIR": str(folder), "TRITON_CACHE_DIR": str(folder / "triton"), "PYTHONPATH": str(ROOT), **(environment or {})}
    command = [program, *tool[1:], sys.executable, "-m", "autokernel.judge.watched", str(path), operation, str(folder)]
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=given,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        printed, _ = process.communicate(msgspec.json.encode([_described(case) for case in cases]), timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise Unwatched(f"{tool[0]} did not finish within {timeout_s:.0f} s") from None
    finally:
        _end(process)
    return printed.decode(errors="replace")


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):  # all of it has ended
        os.killpg(process.pid, signal.SIGKILL)  # what the kernel or the tool started is of this group
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    process.wait()


def _described(case: Case) -> WatchedCase:
    specs = {name: (spec.shape, spec.stride, hardware.dtype_name(spec.dtype)) for name, spec in case.specs.items()}
    return WatchedCase(dict(case.shape), hardware.dtype_name(case.dtype), case.layout, specs)


def main(path: str, operation_name: str, folder: str) -> None:
    """Call the kernel twice for each case; a profiler that waits for its range sees the second call."""
    cases = msgspec.json.decode(sys.stdin.buffer.read(), type=list[WatchedCase])
    operation, device = ops.get(operation_name), hardware.device()
    if device.type == "cuda":
        torch.zeros(1, device=device)  # the tool is at work before the file can do anything
    sandbox.enter([folder, "/tmp", "/dev/shm"], [], sandbox.LENIENT)
    kernel = kernels.load(Path(path))
    for number, case in enumerate(cases):
        specs = {name: Spec(shape, stride, hardware.dtype(dtype)) for name, (shape, stride, dtype) in case.specs.items()}
        generator = torch.Generator(device).manual_seed(number)
        maker = InputMaker(hardware.dtype(case.dtype), device, generator, layout=case.layout, specs=specs)
        arguments = operation.inputs(case.shape, maker)
        kernel.function(**arguments)
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
            kernel.function(**arguments)
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
