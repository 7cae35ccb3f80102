"""What the clock is given: loops, inputs, and how an answer of a timed call is looked at. Do not edit."""

from types import TracebackType

import torch
from torch import Tensor

from autokernel.judge.answers import Answer, Times, answer_bytes
from autokernel.judge.arena import Arena
from autokernel.judge.baseline import Baseline
from autokernel.judge.cases import Case
from autokernel.judge.clock import LONG, SETS, Disputed, Stopwatch, Timing, bytes_of
from autokernel.judge.gates import record_or_why, right_or_why
from autokernel.judge.isolated import Judge, Worker
from autokernel.judge.process import WorkerFault
from autokernel.kernels import KernelFile
from autokernel.ops import Arguments, Operation
from autokernel.results import Status

# Of an answer whose values are right, the difference to PyTorch's is some roundings; of one that is missing, old or of other
# inputs it is as large as the answer. In units of eps, relative, as root mean squares.
NEAR = 64.0
# Each set is there as inputs, in both arenas, and in what the arenas are compared with.
COPIES = 6
SHARE = 4  # of the GPU's memory, a quarter for inputs and an eighth for answers


class Bench:
    """Times one candidate on any number of cases. A context manager."""

    def __init__(
        self,
        session: Judge,
        worker: Worker,
        operation: Operation,
        allow_torch: bool,
        incumbent: KernelFile | None,
        brief: bool = False,
    ) -> None:
        self._session, self._worker, self._operation = session, worker, operation
        self._allow_torch, self._incumbent = allow_torch, incumbent
        self._brief = brief
        self._beside: Worker | None = None
        self._arena = Arena(session.device)
        self._done: list[tuple[Stopwatch, Timing]] = []

    def __enter__(self) -> "Bench":
        return self

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None) -> None:
        if self._beside is not None:
            self._beside.close()
        self._arena.close()

    def time(self, case: Case) -> Timing:
        """Time the candidate on this case; WorkerFault where it, or the clock, is at fault."""
        if self._beside is not None:
            self._beside.close()  # the candidate may need a larger arena, which nobody else may have open
            self._beside = None
        if self._session.device.type == "cuda":
            torch.cuda.empty_cache()
        operation, device = self._operation, self._session.device
        inputs = case.arguments(operation, device, 0)
        right = operation.reference(**inputs)
        sets, slots = room(bytes_of(inputs), answer_bytes(operation, inputs), device)
        stopwatch = Stopwatch(
            candidate=self._worker,
            baseline=Baseline(operation.reference, operation, self._arena),
            known=Baseline(lambda **arguments: right.clone(), operation, self._arena),
            make=lambda seed: case.arguments(operation, device, seed),
            look=lambda *what: self._look(case, *what),
            incumbent=self._start_incumbent if self._incumbent else None,
            sets=sets,
            slots=slots,
            brief=self._brief,
        )
        try:
            timing = stopwatch.measure()
        except Disputed as dispute:
            raise WorkerFault(Status.INVALID, f"{case}: {dispute}") from None
        self._done.append((stopwatch, timing))
        return timing

    def slowed(self) -> str:
        """Once the candidate's process is gone: why a baseline was slower beside it; "" if none was."""
        return next(filter(None, (stopwatch.slowed(timing) for stopwatch, timing in self._done)), "")

    def _start_incumbent(self) -> Worker:
        assert self._incumbent is not None
        try:
            self._beside = self._session.worker(self._incumbent)
        except WorkerFault as fault:
            raise WorkerFault(Status.INVALID, f"the incumbent {self._incumbent.path.name} is at fault: {fault}") from None
        return self._beside

    def _look(self, case: Case, times: Times, answer: Answer, baseline: Answer, inputs: Arguments, in_full: bool) -> None:
        assert baseline.value is not None
        status = Status.INVALID
        reason = record_or_why(() if self._allow_torch else times.operators, times.threads, times.tampered)
        if not reason and (in_full or answer.value is None or not near(answer.value, baseline.value)):
            status, reason = Status.FAIL, right_or_why(self._operation, answer, baseline.value, inputs)
        if reason:
            raise WorkerFault(status, f"a timed call of {case}: {reason}")


def near(answer: Tensor, baseline: Tensor) -> bool:
    """Whether an answer can be right at all, found at the cost of reading it once."""
    if answer.shape != baseline.shape or answer.dtype != baseline.dtype:
        return False
    if not answer.numel():
        return True
    wide = torch.float64 if answer.dtype == torch.float32 else torch.float32
    finite = torch.isfinite(baseline)
    difference = torch.where(finite, answer.to(wide) - baseline, 0)  # NaN where the answer has it and PyTorch's has not
    size = torch.linalg.vector_norm(torch.where(finite, baseline, 0), dtype=wide)
    return bool(torch.linalg.vector_norm(difference) <= NEAR * torch.finfo(answer.dtype).eps * size)


def room(of_inputs: int, of_answer: int, device: torch.device) -> tuple[int, int]:
    """(sets of inputs in a batch, answers kept of it) for which this GPU has the memory."""
    if device.type != "cuda":
        return SETS, SETS * LONG
    total = torch.cuda.get_device_properties(device).total_memory
    sets = total // SHARE // max(COPIES * of_inputs, 1) - 1
    slots = total // (2 * SHARE) // max(of_answer, 1)
    return max(1, min(SETS, sets)), max(1, min(SETS * LONG, slots))
