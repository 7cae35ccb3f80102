"""A kernel in a process of its own, as the judge calls it. Do not edit.

`Judge` holds what outlives one kernel: the warm process and the arena. `Worker` is one candidate in one process: it takes
arguments and gives answers whose every property the judge has read for itself, or could have.
"""

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import filelock
import torch
from torch import Tensor

from autokernel.judge import arena as arenas
from autokernel.judge import protocol, sandbox
from autokernel.judge.answers import Answer, Times, answer_bytes, read, same_bits
from autokernel.judge.arena import ALIGNMENT, Arena, Image
from autokernel.judge.cases import Case
from autokernel.judge.compilers import Compiler
from autokernel.judge.process import (
    START_S,
    Budgets,
    CannotStart,
    Process,
    Warm,
    WorkerFault,
    attach,
    cache_of,
    forget_old_caches,
    load,
    new_token,
    shield_memory,
)
from autokernel.judge.protocol import KEPT_BYTES, Argument, Landing, Raised
from autokernel.kernels import KernelFile
from autokernel.ops import Arguments
from autokernel.results import Status

KEPT_SHARE = 4  # unused memory is given back above a quarter of the GPU's


class Worker:
    """One candidate in one process. Whatever it does wrong is raised as WorkerFault; then the process is gone, or useless."""

    _compiler: Compiler | None = None
    _to_compile = False
    compile_s = 0.0  # waited for compilers

    def __init__(self, judge: "Judge", kernel: KernelFile, budgets: Budgets, ahead: bool = False) -> None:
        self._judge, self._kernel, self._budgets = judge, kernel, budgets
        self._arena = judge.arena
        self._images: list[Image] = []
        self._arguments: tuple[Argument, ...] = ()
        self._end = 0  # of the arguments, in the arena
        self._answer_bytes = 0
        self._earlier: Answer | None = None
        self._seen: set[Any] = set()
        self._to_compile = self._arena.device.type == "cuda" and not cache_of(kernel.sha256).exists()
        if ahead and self._to_compile:
            self._compiler = Compiler(judge, kernel, budgets)
        self._process = judge.process(kernel.sha256, budgets.total_s)
        judge.workers.append(self)
        try:
            load(self._process, kernel, budgets)
        except BaseException:
            self.close()
            raise

    def call(self, arguments: Arguments, reuse: bool = False) -> Answer:
        """Call it once and wait. `reuse` hands it the same tensors as the call before, with other values in them."""
        if reuse and self._fits_the_last(arguments):
            tensors = [value for value in arguments.values() if isinstance(value, Tensor)]
            memory = self._arena.memory
            self._images = [arenas.rewrite(memory, image, value) for image, value in zip(self._images, tensors, strict=True)]
        else:
            reuse = False
            self._answer_bytes = answer_bytes(self._kernel.operation, arguments)
            self._make_room(arenas.room_for(arguments) + self._answer_bytes + KEPT_BYTES + 4 * ALIGNMENT)
            self._arguments, self._images, self._end = arenas.write(self._arena.memory, arguments)
        return self._call(reuse)

    def again(self) -> Answer:
        """The same call again, with the same tensors."""
        return self._call(reuse=True)

    def timed(
        self,
        sets: Sequence[Arguments],
        repeats: int,
        flush_bytes: int,
        graph: bool = False,
        slots: int | None = None,
        recorded: bool = True,
    ) -> Times:
        """Call it `repeats` times in one place, with the values of the sets in turn; the answer of each call in its slot.

        The sets have one form. `slots` defaults to one for each call. `graph` replays a CUDA graph of the call instead.
        """
        count = repeats if slots is None else slots
        each = answer_bytes(self._kernel.operation, sets[0])
        stride = _aligned(each)
        self._make_room((len(sets) + 1) * arenas.room_for(sets[0]) + count * stride + ALIGNMENT)
        memory = self._arena.memory
        arguments, images, end = arenas.write(memory, sets[0])
        places, staged = [], []
        for values in sets:
            placed, of_set, end = arenas.write(memory, values, end)
            places.append(tuple(a.tensor.place for a in placed if a.tensor is not None))
            staged.append(of_set)
        start = _aligned(end)
        memory.bytes(start, count * stride).fill_(arenas.FILLED)
        landings = tuple(Landing(place=start + slot * stride, capacity=each) for slot in range(count))
        self._images, self._arguments, self._earlier = [], (), None
        request = protocol.Time(
            token=new_token(),
            arguments=arguments,
            sets=tuple(places),
            repeats=repeats,
            flush_bytes=flush_bytes,
            graph=graph,
            recorded=recorded,
            slots=landings,
        )
        what = "a timed call" if not graph else "a timed call in a CUDA graph"
        reply, wall_s = self._ask(request, self._compile_s(arguments), what)
        if not isinstance(reply, protocol.Timed) or len(reply.times_us) > repeats:
            raise self._unexpected(reply)
        if reply.times_us:
            last = [
                Image(image.name, image.placed, image.start, values.expected)
                for image, values in zip(images, staged[(len(reply.times_us) - 1) % len(sets)], strict=True)
            ]
            self._refuse_changes([*last, *(image for of_set in staged for image in of_set)])
        return Times(
            reply.times_us,
            wall_s,
            reply.peak_bytes,
            reply.fault,
            reply.form,
            reply.operators,
            reply.threads,
            reply.tampered,
            memory,
            landings,
        )

    def precompile(self, cases: Sequence[Case]) -> None:
        """Compile what these cases need, side by side, into the cache that this worker shares; WorkerFault if that hangs.

        What else goes wrong there is left for the gates to find. Nothing to do where Triton interprets, or where the cache of
        this very file is there already.
        """
        if not self._to_compile:
            return
        compiler = self._compiler or Compiler(self._judge, self._kernel, self._budgets)
        self._compiler, self._to_compile = None, False
        began = time.perf_counter()
        compiler.compile(cases)
        compiler.close()
        self.compile_s += time.perf_counter() - began

    def close(self) -> None:
        """Kill the process and all that it started."""
        if self in self._judge.workers:
            self._judge.workers.remove(self)
        self._process.close()
        if self._compiler is not None:
            self._compiler.close()

    def _call(self, reuse: bool) -> Answer:
        memory = self._arena.memory
        landing = Landing(place=_aligned(self._end), capacity=self._answer_bytes)
        earlier, before = None, self._earlier
        if before is not None and before.value is not None:
            size = before.value.numel() * before.value.element_size()
            if size <= KEPT_BYTES:
                earlier = Landing(place=_aligned(landing.place + landing.capacity), capacity=size)
        last = earlier or landing
        memory.bytes(landing.place, last.place + last.capacity - landing.place).fill_(arenas.FILLED)
        request = protocol.Call(token=new_token(), arguments=self._arguments, landing=landing, earlier=earlier, reuse=reuse)
        self._earlier = None
        reply, _ = self._ask(request, self._compile_s(self._arguments), "the kernel")
        if not isinstance(reply, protocol.Answered):
            raise self._unexpected(reply)
        self._refuse_changes(self._images)
        answer = read(memory, reply.form, landing)
        if before is not None and earlier is not None and reply.earlier_landed:
            assert before.value is not None
            now = memory.values(earlier.place, before.shape, before.value.dtype)
            if not same_bits(now, before.value):
                reason = "an earlier answer changed when the kernel was called again: each answer needs memory of its own"
                raise WorkerFault(Status.FAIL, reason)
        answer = Answer(**{**vars(answer), "operators": reply.operators, "threads": reply.threads, "tampered": reply.tampered})
        self._earlier = answer
        return answer

    def _give_back(self) -> None:
        """Leave the GPU's memory to the worker, if PyTorch keeps much of it for this process."""
        device = self._arena.device
        if device.type == "cuda":
            total = torch.cuda.get_device_properties(device).total_memory
            if torch.cuda.memory_reserved(device) > total // KEPT_SHARE:
                torch.cuda.empty_cache()

    def _ask(self, request: protocol.Request, budget: float, what: str) -> tuple[protocol.Reply, float]:
        if self._arena.device.type == "cuda":
            torch.cuda.synchronize(self._arena.device)  # what the judge wrote must be there before the worker reads
        return self._process.ask(request, budget, what)

    def _compile_s(self, arguments: Sequence[Argument]) -> float:
        """The budget of a call: longer when something may have to be compiled for it."""
        key = _kind(arguments)
        if self._arena.device.type != "cuda" or key in self._seen:
            return self._budgets.run_s
        self._seen.add(key)
        return self._budgets.compile_s

    def _fits_the_last(self, arguments: Arguments) -> bool:
        names = [argument.name for argument in self._arguments]
        return names == list(arguments) and all(map(arenas.same_form, self._arguments, arguments.values()))

    def _make_room(self, size: int) -> None:
        self._give_back()
        if not self._arena.fits(size):
            self._judge.grow(size)

    def let_go(self) -> None:
        """Close the arena, which is about to be another; what lay there is lost."""
        self._images, self._arguments, self._earlier = [], (), None
        self._process.ask(protocol.Detach(token=new_token()), START_S, "the worker")

    def take_up(self) -> None:
        """Open the arena again."""
        attach(self._process, self._arena)

    def _refuse_changes(self, images: Sequence[Image]) -> None:
        clause = arenas.changed(self._arena.memory, images)
        if clause:
            raise WorkerFault(Status.FAIL, f"the kernel {clause}")

    def _unexpected(self, reply: protocol.Reply) -> WorkerFault:
        if isinstance(reply, Raised):  # not by the kernel's own call; but who knows what it did to the process
            return WorkerFault(Status.INVALID, f"the process around the kernel failed ({reply.type_name}: {reply.text})")
        return WorkerFault(Status.INVALID, "the worker answered with another message than was asked for")


@dataclass
class Judge:
    """Holds the warm process and the arena; judges one kernel after another. A context manager."""

    device: torch.device
    budgets: Budgets = field(default_factory=Budgets)
    level: int = sandbox.STRICT
    isolation: str = ""  # how the last worker was confined, for people to read
    workers: list[Worker] = field(default_factory=list)  # that are open
    started: Any = None  # of `early.start`, if the warm process was started early

    def __post_init__(self) -> None:
        self.warm = Warm(self.started)
        try:
            forget_old_caches()
            self.arena = Arena(self.device)
            self._memory_note = shield_memory()
        except BaseException:
            self.warm.close()
            raise

    def __enter__(self) -> "Judge":
        return self

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the warm process and give the arena back."""
        for worker in tuple(self.workers):
            worker.close()
        self.warm.close()
        self.arena.close()

    def worker(self, kernel: KernelFile, ahead: bool = False) -> Worker:
        """A fresh process with this candidate in it; WorkerFault if it cannot be imported.

        `ahead`: it will be asked to compile before it is called, in a process that starts beside it.
        """
        return Worker(self, kernel, self.budgets, ahead)

    @contextlib.contextmanager
    def turn(self, progress: Callable[[str], None]) -> Iterator[None]:
        """Have the GPU among all judges of this user: figures taken side by side would be of no use."""
        if self.device.type != "cuda":
            yield
            return
        name = f"autokernel-{os.getuid()}-{torch.cuda.get_device_properties(self.device).uuid}.lock"
        lock = filelock.FileLock(Path(tempfile.gettempdir(), name))
        with contextlib.suppress(filelock.Timeout):
            lock.acquire(timeout=0)
        if not lock.is_locked:
            progress("waiting for the GPU: another judge is at work on it")
            lock.acquire()
        try:
            yield
        finally:
            lock.release()

    def grow(self, size: int) -> None:
        """Another arena of at least `size` bytes, for all workers that are open."""
        for worker in self.workers:
            worker.let_go()
        self.arena.grow(size)
        for worker in self.workers:
            worker.take_up()

    def process(self, sha256: str, total_s: float) -> Process:
        """A fresh worker process with the arena open and no candidate yet."""
        while True:
            arena, level = self.arena, self.level
            process = Process(self.warm, sha256, level, arena.descriptor, arena.memory.size, total_s)
            try:
                note = attach(process, arena)
            except (CannotStart, WorkerFault) as fault:
                process.close()
                if level == sandbox.OPEN:
                    raise CannotStart(f"a worker cannot be started: {fault}") from fault
                self.level = max(self.level, level + 1)  # CUDA needs something that was denied
                continue
            self.isolation = ", ".join(filter(None, (note, self._memory_note)))
            return process


def _aligned(place: int) -> int:
    return -(-place // ALIGNMENT) * ALIGNMENT


def _kind(arguments: Sequence[Argument]) -> tuple[Any, ...]:
    """Equal for calls for which the same code serves."""
    return tuple(
        (a.name, a.value)
        if a.tensor is None
        else (a.name, a.tensor.dtype, a.tensor.shape, a.tensor.stride, a.tensor.offset % 16)
        for a in arguments
    )
