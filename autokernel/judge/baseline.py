"""The loop of a worker in the judge's own process: for PyTorch's reference, and for nothing at all. Do not edit.

It is the very code that a worker runs, so that the baseline is timed as a candidate is, by a process that no kernel file is in.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from autokernel.judge import protocol, worker
from autokernel.judge.answers import Times
from autokernel.judge.arena import Arena
from autokernel.judge.isolated import Worker
from autokernel.judge.process import Budgets, WorkerFault
from autokernel.kernels import KernelFile
from autokernel.ops import Arguments, Operation
from autokernel.results import Status


class Trusted:
    """Stands for the record of operators, where no kernel file is: PyTorch may do all of the work."""

    listening = False
    operators: tuple[str, ...] = ()
    tampered = ""

    def begin(self) -> None: ...

    def end(self) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *fault: object) -> None: ...

    def threads(self) -> int:
        return 0


class Here:
    """Stands for a process: what it is asked is done at once, in this one."""

    def __init__(self, function: Callable[..., Any], arena: Arena) -> None:
        recorder: Any = Trusted()
        self.worker = worker.Worker(None, recorder, "", arena.device, arena.memory)
        self.worker.candidate = worker.Candidate(function, recorder, arena.device)

    def ask(self, request: protocol.Request, budget: float, what: str) -> tuple[protocol.Reply, float]:
        began = time.perf_counter()
        reply = self.worker.handle(request)
        if isinstance(reply, protocol.Raised) and reply.by_kernel:
            raise WorkerFault(Status.CRASH, f"{what} raised {reply.type_name}: {reply.text}".rstrip(": "))
        return reply, time.perf_counter() - began

    def close(self) -> None: ...


class Baseline(Worker):
    """Calls and times a function of this process as a worker does a candidate."""

    def __init__(self, function: Callable[..., Any], operation: Operation, arena: Arena) -> None:
        self._arena, self._budgets = arena, Budgets()
        self._kernel, self._seen = KernelFile(Path("reference.py"), operation, "", b""), set()
        self._images, self._arguments, self._earlier = [], (), None
        self._process: Any = Here(function, arena)

    def timed(
        self,
        sets: Sequence[Arguments],
        repeats: int,
        flush_bytes: int,
        graph: bool = False,
        slots: int | None = None,
        recorded: bool = False,
    ) -> Times:
        return super().timed(sets, repeats, flush_bytes, graph, slots, recorded)

    def close(self) -> None: ...

    def _make_room(self, size: int) -> None:
        if not self._arena.fits(size):
            self._arena.grow(size)
        self._process.worker.memory = self._arena.memory
