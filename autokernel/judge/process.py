"""The judge's handle on the warm process and on one worker: start, ask, kill. Do not edit.

A worker gets a budget for every request. One that does not answer, ends, or answers with anything but the message that is
expected is killed with all that it started, and the judgement ends with the reason.
"""

import contextlib
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from autokernel import golden
from autokernel.judge import early, protocol, sandbox
from autokernel.judge.arena import Arena
from autokernel.judge.protocol import BadMessage, Ended, Raised, Ready, Started
from autokernel.kernels import KernelFile
from autokernel.results import Status
from autokernel.state import WORKSPACE

START_S = 90.0  # for a process to be there and to have CUDA
REPORT_S = 60.0  # for a killed worker to be gone
CACHES = 64  # folders of compiled kernels that are kept, one for each kernel file
TRITON_CACHE = WORKSPACE / "cache" / "triton"


@dataclass(frozen=True)
class Budgets:
    """Seconds. `compile_s` is for the first call of a shape, dtype and layout on a GPU, `run_s` for any other call."""

    import_s: float = 60.0
    compile_s: float = 120.0
    run_s: float = 20.0
    total_s: float = 600.0


class WorkerFault(Exception):
    """The kernel is at fault: `status`, and a clause that says what it did."""

    def __init__(self, status: Status, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class CannotStart(RuntimeError):
    """A worker could not be started, before any kernel was in it."""


class Warm:
    """The warm process; starts at once, and is waited for when it is first needed."""

    def __init__(self, started: "tuple[socket.socket, subprocess.Popen[bytes]] | None" = None) -> None:
        self._socket, self._process = started or early.start()
        self._ready = False
        self._lock = threading.Lock()

    def spawn(self, request: protocol.Spawn, arena: int | None) -> tuple[socket.socket, socket.socket]:
        """Fork a keeper and a worker; returns this side of the worker's channel and of the keeper's."""
        with self._lock:
            if not self._ready:
                if not select.select([self._socket], [], [], START_S)[0] or not self._socket.recv(early.LIMIT):
                    raise CannotStart("the judge's warm process did not start: see its messages above")
                self._ready = True
        (channel, theirs), (control, keepers) = early.pair(), early.pair()
        with theirs, keepers:
            descriptors = [theirs.fileno(), keepers.fileno(), *([] if arena is None else [arena])]
            socket.send_fds(self._socket, [protocol.encode(request)], descriptors)
        return channel, control

    def close(self) -> None:
        """End the warm process, and with it every worker."""
        self._socket.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
            return
        self._process.kill()
        self._process.wait()


class Process:
    """One worker process, with folders of its own."""

    def __init__(self, warm: Warm, sha256: str, level: int, arena: int | None, arena_bytes: int, total_s: float) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="autokernel-worker-")).resolve()
        own, compiled = self.folder / "own", cache_of(sha256)
        for folder in (own / "tmp", own / "home", self.folder / "kernel", compiled):
            folder.mkdir(parents=True, exist_ok=True)
        os.utime(compiled)
        self.ended: Ended | None = None
        self._deadline = time.monotonic() + total_s
        self._total_s = total_s
        request = protocol.Spawn(
            environment={
                **early.environment(),
                "TRITON_CACHE_DIR": str(compiled),
                "CUDA_CACHE_PATH": str(own / "home"),
                "TORCHINDUCTOR_CACHE_DIR": str(own / "tmp"),
                "TMPDIR": str(own / "tmp"),
                "HOME": str(own / "home"),
                "PYTHONDONTWRITEBYTECODE": "1",
            },
            scratch=str(self.folder),
            folder=str(own),
            writable=(str(own), str(compiled)),
            hidden=(str(golden.path("any").parent),),
            level=level,
            arena_bytes=arena_bytes if arena is not None else 0,
        )
        self._channel, self._control = warm.spawn(request, arena)
        report = self._report(START_S)
        if not isinstance(report, Started):
            self.close()
            raise CannotStart("the judge's warm process could not fork a worker")
        self.pid = report.pid

    def ask(self, request: protocol.Request, budget: float, what: str) -> tuple[protocol.Reply, float]:
        """The reply to a request, and the seconds that it took; WorkerFault if none that counts comes within the budget."""
        token = request.token
        left = self._deadline - time.monotonic()
        limit = f"its budget of {budget:g} s" if budget <= left else f"the {self._total_s:g} s of a whole judgement"
        began = time.perf_counter()
        try:
            self._channel.send(protocol.encode(request))
        except OSError:
            raise self._died(what) from None
        ready, _, _ = select.select([self._channel, self._control], [], [], max(min(budget, left), 0))
        if not ready:
            self.close()
            raise WorkerFault(Status.TIMEOUT, f"{what} did not finish within {limit}")
        took, packet = time.perf_counter() - began, b""
        if self._channel in ready:
            with contextlib.suppress(ConnectionResetError):
                packet = self._channel.recv(early.LIMIT + 1)
        if not packet:
            raise self._died(what)
        try:
            reply = protocol.decode(protocol.to_parent, packet)
        except BadMessage as fault:
            self.close()
            raise WorkerFault(Status.INVALID, f"{what} put a message of its own on the judge's channel ({fault})") from None
        if not secrets.compare_digest(reply.token.encode(), token.encode()):
            self.close()
            raise WorkerFault(Status.INVALID, f"{what} put a message of its own on the judge's channel (a wrong token)")
        if isinstance(reply, Raised) and reply.by_kernel:
            raise WorkerFault(Status.CRASH, f"{what} raised {reply.type_name}: {reply.text}".rstrip(": "))
        return reply, took

    def close(self) -> None:
        """Kill the worker and all that it started; returns when they are gone."""
        if self.ended is None:
            with contextlib.suppress(OSError):
                self._control.shutdown(socket.SHUT_WR)
            deadline = time.monotonic() + REPORT_S
            while self.ended is None and (report := self._report(deadline - time.monotonic())) is not None:
                self.ended = report if isinstance(report, Ended) else None
            self._channel.close()
            self._control.close()
        if self.ended is None:
            self.ended = Ended(status=0, log="", left=0)

    def _died(self, what: str) -> WorkerFault:
        """The worker has closed its channel: how did it end?"""
        report = self._report(2.0)
        if isinstance(report, Ended):
            self.ended = report
            status = report.status
            self._channel.close()
            self._control.close()
            if os.WIFSIGNALED(status):
                name = signal.Signals(os.WTERMSIG(status)).name
                return WorkerFault(Status.CRASH, f"{what} died with {name}")
            code = os.waitstatus_to_exitcode(status)
            return WorkerFault(Status.CRASH, f"{what} ended its process with exit status {code}, before any answer")
        self.close()
        return WorkerFault(Status.INVALID, f"{what} closed the judge's channel, before any answer")

    def _report(self, seconds: float) -> Started | Ended | None:
        if not select.select([self._control], [], [], max(seconds, 0))[0]:
            return None
        with contextlib.suppress(OSError):
            packet = self._control.recv(early.LIMIT)
            if packet:
                return protocol.decode(protocol.from_keeper, packet)
        return None


def attach(process: Process, arena: Arena) -> str:
    """Have a worker open the arena; returns how it is confined."""
    device = arena.device
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    request = protocol.Attach(token=new_token(), device=str(device), size=arena.memory.size, handle=arena.handle)
    reply, _ = process.ask(request, START_S, "the worker")
    if not isinstance(reply, Ready):
        text = f"{reply.type_name}: {reply.text}" if isinstance(reply, Raised) else "it sent another message"
        raise CannotStart(f"it cannot open the memory that it shares with the judge ({text})")
    return reply.note


def load(process: Process, kernel: KernelFile, budgets: Budgets) -> None:
    """Have a worker import the candidate: from a copy of the text that was hashed, which it cannot change."""
    copy = process.folder / "kernel" / kernel.path.name
    copy.write_bytes(kernel.text)
    module = f"autokernel_kernel_{kernel.path.stem}_{kernel.sha256[:12]}"
    request = protocol.Load(token=new_token(), path=str(copy), module=module, operation=kernel.operation.name)
    reply, _ = process.ask(request, budgets.import_s, f"the import of {kernel.path.name}")
    if isinstance(reply, protocol.Misfit):
        raise WorkerFault(Status.INVALID, reply.text)
    if not isinstance(reply, Ready):
        raise WorkerFault(Status.INVALID, "the worker answered with another message than was asked for")


def cache_of(sha256: str) -> Path:
    """Where Triton keeps what it compiles for the kernel file with this hash: no other file may put anything there."""
    return TRITON_CACHE / sha256[:32]


def forget_old_caches() -> None:
    """Remove the compiled kernels of files that were not judged for longest."""

    def age(folder: Path) -> float:
        try:
            return folder.stat().st_mtime
        except FileNotFoundError:  # another judge forgot it first
            return 0.0

    if TRITON_CACHE.is_dir():
        for folder in sorted(TRITON_CACHE.iterdir(), key=age)[:-CACHES]:
            shutil.rmtree(folder, ignore_errors=True)


def shield_memory() -> str:
    """Where Landlock does not keep a worker from this process's memory, do what else can be done; says what remains."""
    if sandbox.landlock_version():
        return ""
    if os.geteuid() == 0:
        return "the judge's memory is closed by capabilities alone"
    sandbox.hide_memory()
    return "the judge's memory is closed to other processes"


def new_token() -> str:
    """What the reply to a request must repeat: a packet that was written before the request was known does not."""
    return secrets.token_hex(16)
