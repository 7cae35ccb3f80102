"""The five correctness gates: smoke, shape sweep, numerical stability, determinism, edge cases. Do not edit.

A kernel is called, in a process of its own, with fresh random arguments; when its answer is here, PyTorch computes it in the
same dtype (the baseline) and in float64 (the oracle). The first fault ends the judgement and is reported in one sentence.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from autokernel import golden, hardware
from autokernel.judge import cases
from autokernel.judge.answers import Answer, Judged, same_bits
from autokernel.judge.cases import Case
from autokernel.judge.compare import Comparison, compare, compare_exactly, says_something
from autokernel.judge.process import WorkerFault
from autokernel.judge.truth import baseline_of, nudged, oracle_of
from autokernel.kernels import KernelFile
from autokernel.ops import Arguments, Operation
from autokernel.results import Status
from autokernel.state import Target

GATES = ("smoke", "shape_sweep", "numerical_stability", "determinism", "edge_cases")
ROUNDS = 5  # of the same three inputs in turn, for determinism


class Refused(Exception):
    """The kernel is at fault: `status` and a clause that says what it did."""

    def __init__(self, status: Status, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass
class GateResult:
    """How a gate ended: `status` is None when it was not run."""

    name: str
    status: Status | None = None
    cases: int = 0
    void: int = 0  # cases that a wrong answer would pass too; run, but no evidence
    too_large: int = 0  # cases left out because this GPU cannot hold them
    worst: float = 0.0  # largest error / limit
    reason: str = ""

    def __str__(self) -> str:
        if self.status is None:
            return "not run"
        if self.status is not Status.PASS:
            return f"{self.status.value} ({self.reason})"
        extra = f", {self.void} without evidence" * bool(self.void) + f", {self.too_large} too large here" * bool(
            self.too_large
        )
        return f"{self.status.value} ({self.cases} cases, worst error {self.worst:.0%} of the limit{extra})"


@dataclass
class Gates:
    """Runs the gates for one kernel; `results` holds all five, run or not."""

    caller: Judged
    kernel: KernelFile
    targets: tuple[Target, ...]  # the plan's calls of this operation
    timed: Case
    device: torch.device
    seed: int
    progress: Callable[[str], None] = lambda message: None
    allow_torch: bool = False  # operators of torch may do the work
    results: dict[str, GateResult] = field(default_factory=lambda: {name: GateResult(name) for name in GATES})

    def run(self, names: Iterable[str] = GATES) -> GateResult:
        """Run these gates in order up to the first that is not passed; returns that one, or the last."""
        names = tuple(names)
        try:
            self.caller.precompile(self._to_compile())
        except WorkerFault as fault:
            result = self.results[names[0]]
            result.status, result.reason = fault.status, str(fault)
            return result
        for name in names:
            result = self.results[name]
            self.progress(f"{self.kernel.path.name}: {name}")
            try:
                getattr(self, f"_{name}")(result)
                result.status = Status.PASS
            except Refused as refused:
                result.status, result.reason = refused.status, str(refused)
                break
        return result

    def _to_compile(self) -> list[Case]:
        """The cases of the gates; a kernel that learns the drawn shapes from them learns what its calls will tell it anyway."""
        operation, device = self.kernel.operation, self.device
        tried = [
            self.timed,
            *cases.shape_sweep(operation, self.targets, device, self.seed),
            *cases.numerical_stability(operation, device),
        ]
        tried += cases.edge_cases(operation, device)
        return [case for case in tried if not self._too_large(case)]

    def _smoke(self, result: GateResult) -> None:
        operation = self.kernel.operation
        saved = golden.load(operation.name) or ()
        dtypes = cases.dtypes_checked(self.device)
        for case in saved:
            if hardware.dtype(case.dtype) in dtypes:
                arguments = {key: v.to(self.device) if isinstance(v, Tensor) else v for key, v in case.arguments.items()}
                name = str(Case("golden", case.shape, hardware.dtype(case.dtype)))
                self._judge(result, name, arguments, case.expected.to(self.device), exact=False)
        if not saved:  # prepare.py was not run on this machine: the same shapes, with an oracle made now
            self._judge_all(result, (Case("small", operation.sweep_cpu[0], dtype) for dtype in dtypes))

    def _shape_sweep(self, result: GateResult) -> None:
        self._judge_all(result, cases.shape_sweep(self.kernel.operation, self.targets, self.device, self.seed))

    def _numerical_stability(self, result: GateResult) -> None:
        self._judge_all(result, cases.numerical_stability(self.kernel.operation, self.device))

    def _edge_cases(self, result: GateResult) -> None:
        self._judge_all(result, cases.edge_cases(self.kernel.operation, self.device))

    def _determinism(self, result: GateResult) -> None:
        """Three inputs in turn, in the same tensors: each gets the same bits in every round, and right ones in the first.

        The third differs from the first in one element. The worker does other work in between, which moves allocations and
        leaves other values in shared memory.
        """
        operation = self.kernel.operation
        small = [Case("small", operation.sweep_cpu[0], dtype) for dtype in cases.dtypes_checked(self.device)]
        for case in (self.timed, *small):
            if case.dtype not in cases.dtypes_checked(self.device) or self._too_large(case):
                continue
            first, second = (case.arguments(operation, self.device, self.seed + number) for number in range(2))
            inputs = (first, second, touched(first))
            answers: list[Tensor] = []
            for number in range(ROUNDS * len(inputs)):
                arguments = inputs[number % len(inputs)]
                if number < len(inputs):
                    answers.append(self._judge(result, str(case), arguments, None, case.exact, reuse=number > 0))
                elif not same_bits(answers[number % len(inputs)], self._called(str(case), arguments, reuse=True)):
                    raise Refused(Status.FAIL, f"{case}: the same input gave two different answers")

    def _judge_all(self, result: GateResult, tried: Iterable[Case]) -> None:
        for number, case in enumerate(tried):
            if self._too_large(case):
                result.too_large += 1
                continue
            arguments = case.arguments(self.kernel.operation, self.device, self.seed + number)
            self._judge(result, str(case), arguments, None, case.exact)
        if result.cases == 0:
            raise Refused(Status.INVALID, "no case fits into this GPU's memory")

    def _judge(
        self,
        result: GateResult,
        name: str,
        arguments: Arguments,
        expected: Tensor | None,
        exact: bool,
        reuse: bool = False,
    ) -> Tensor:
        operation = self.kernel.operation
        answer = self._answer(name, arguments, reuse)
        baseline = baseline_of(operation, arguments)
        malformed = form_or_why(answer, baseline)
        if malformed:
            raise Refused(Status.FAIL, f"{name}: {malformed}")
        self._check_record(answer, name)
        assert answer.value is not None
        oracle = expected if expected is not None else oracle_of(operation, arguments)
        compared = _compared(operation, answer.value, baseline, oracle, arguments, exact)
        if not compared.right:
            raise Refused(Status.FAIL, f"{name}: {compared.reason}")
        result.cases += 1
        result.worst = max(result.worst, compared.worst)
        result.void += not exact and not says_something(baseline, oracle)
        return answer.value

    def _called(self, name: str, arguments: Arguments, reuse: bool) -> Tensor:
        """The answer to a call whose right answer is known already."""
        answer = self._answer(name, arguments, reuse)
        self._check_record(answer, name)
        if answer.value is None:
            raise Refused(Status.FAIL, f"{name}: kernel_fn returned something of another form than before")
        return answer.value

    def _answer(self, name: str, arguments: Arguments, reuse: bool) -> Answer:
        try:
            return self.caller.call(arguments, reuse)
        except WorkerFault as fault:
            raise Refused(fault.status, f"{name}: {fault}") from fault

    def _check_record(self, answer: Answer, name: str) -> None:
        forbidden = record_or_why(() if self.allow_torch else answer.operators, answer.threads, answer.tampered)
        if forbidden:
            raise Refused(Status.INVALID, f"{name}: {forbidden}")

    def _too_large(self, case: Case) -> bool:
        if self.device.type != "cuda":
            return False
        # arguments, their copies in the arena, baseline, answer, the float64 oracle and its comparison, all within 24 times the
        # half-precision call
        needed = 24 * self.kernel.operation.bytes(case.shape, 2)
        return needed > 0.8 * torch.cuda.get_device_properties(self.device).total_memory


def right_or_why(operation: Operation, answer: Answer, baseline: Tensor, arguments: Arguments) -> str:
    """Why an answer is not right, in form or in value, in one clause; "" if it is."""
    malformed = form_or_why(answer, baseline)
    if malformed:
        return malformed
    assert answer.value is not None
    return _compared(operation, answer.value, baseline, oracle_of(operation, arguments), arguments, exact=False).reason


def form_or_why(answer: Answer, baseline: Tensor) -> str:
    """Why an answer is not a plain tensor like the baseline, dense and in memory of its own; "" if it is."""
    if answer.type_name != "Tensor":
        return f"kernel_fn returned a {answer.type_name}, not a plain torch.Tensor"
    theirs = {
        "shape": tuple(baseline.shape),
        "dtype": str(baseline.dtype),
        "device": str(baseline.device),
        "layout": str(baseline.layout),
    }
    for quality, right in theirs.items():
        ours = getattr(answer, quality)
        if ours != right:
            return f"the answer has {quality} {ours}, PyTorch's has {right}"
    if answer.fault:
        return f"the answer {answer.fault}"
    if answer.shares_input:
        return f"the answer shares memory with the input {answer.shares_input}"
    if not _is_dense(answer):
        return f"the answer's strides {answer.stride} leave gaps or overlap"
    return "" if answer.value is not None else "the answer cannot be read"


def record_or_why(operators: Sequence[str], threads: int, tampered: str) -> str:
    """What others did for the kernel, or how the record of that was switched off, in one clause; "" if nothing."""
    if tampered:
        return f"kernel_fn {tampered}"
    if threads:
        return f"kernel_fn has {threads} thread{'s' * (threads > 1)}, whose work is in no record"
    if operators:
        shown = ", ".join(operators[:4]) + " and others" * (len(operators) > 4)
        return f"kernel_fn leaves its work to operators of torch that are not its own: {shown}"
    return ""


def _compared(
    operation: Operation, answer: Tensor, baseline: Tensor, oracle: Tensor, arguments: Arguments, exact: bool
) -> Comparison:
    if oracle.shape != baseline.shape:
        raise RuntimeError(f"the reference of {operation.name} gives two shapes: {oracle.shape}, {baseline.shape}")
    if exact:
        return compare_exactly(answer, oracle)
    return compare(answer, baseline, oracle, lambda: oracle_of(operation, nudged(operation, arguments)))


def touched(arguments: Arguments) -> Arguments:
    """The same arguments, of the same form, but for one element in the middle of the first floating-point tensor."""
    for key, value in arguments.items():
        if isinstance(value, Tensor) and value.is_floating_point() and value.numel():
            storage = value.untyped_storage().clone()
            other = torch.empty(0, dtype=value.dtype, device=value.device).set_(
                storage, value.storage_offset(), value.shape, value.stride()
            )
            place = other
            for size in other.shape:
                place = place[size // 2]
            place.copy_(torch.where(place > 0, place - 4, place + 4))
            return {**arguments, key: other}
    return arguments


def _is_dense(answer: Answer) -> bool:
    """Whether the elements fill a block of memory once each, in whatever order of dimensions."""
    expected = 1
    for size, stride in sorted(zip(answer.shape, answer.stride, strict=True), key=lambda pair: pair[1]):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True
