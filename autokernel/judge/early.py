"""Start the judge's warm process, and the GPU. Do not edit. Nothing but the standard library is imported here.

So `bench.py` can run this file before it imports torch, which takes seconds: the warm process imports it meanwhile, and the
driver makes its context.
"""

import atexit
import contextlib
import ctypes
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

LIMIT = 128 * 1024  # bytes of one packet; the longest is a list of times

# What a worker sees of the environment: what compilers, drivers and libraries need, nothing else.
KEPT = "PATH LANG LC_ALL TZ LD_LIBRARY_PATH LIBRARY_PATH CPATH C_INCLUDE_PATH CC CXX VIRTUAL_ENV OMP_NUM_THREADS".split()
KEPT_PREFIXES = ("CUDA_", "NVIDIA_", "TRITON_", "PYTORCH_")


def pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of a channel that keeps packets apart."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * LIMIT)
    return ends


def environment(also: Sequence[str] = ()) -> dict[str, str]:
    """The variables that workers see, and `also`."""
    return {key: value for key, value in os.environ.items() if key in (*KEPT, *also) or key.startswith(KEPT_PREFIXES)}


def start() -> "tuple[socket.socket, subprocess.Popen[bytes]]":
    """The channel to a new warm process, and the process; it ends with this one at the latest."""
    ours, theirs = pair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "autokernel.judge.warm", str(theirs.fileno())],
            cwd=Path(__file__).resolve().parents[2],
            env={**environment(("PYTHONPATH",)), "PYTHONDONTWRITEBYTECODE": "1"},  # workers are given less
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
        )
    atexit.register(process.kill)  # nothing happens if it has ended
    threading.Thread(target=_wake_gpu, daemon=True).start()
    return ours, process


def _wake_gpu() -> None:
    """Have this process's context on the first GPU, which torch will find and use; nothing where there is no driver."""
    with contextlib.suppress(OSError):
        cuda, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
        if cuda.cuInit(0) == 0:
            cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
