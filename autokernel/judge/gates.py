"""The five correctness gates: smoke, shape sweep, numerical stability, determinism, edge cases. Do not edit.

A kernel is called with fresh random arguments before anything else computes their answer; then PyTorch computes it in the
same dtype (the baseline) and in float64 (the oracle). The first fault ends the judgement and is reported in one sentence.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from autokernel import golden, hardware
from autokernel.judge import cases
from autokernel.judge.cases import Case
from autokernel.judge.compare import compare, compare_exactly, says_something
from autokernel.kernels import Kernel
from autokernel.ops import Arguments, Operation
from autokernel.results import Status
from autokernel.state import Target

GATES = ("smoke", "shape_sweep", "numerical_stability", "determinism", "edge_cases")
COMPACT = torch.contiguous_format
REPEATS = 5  # of the same call, for determinism


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

    kernel: Kernel
    targets: tuple[Target, ...]  # the plan's calls of this operation
    timed: Case
    device: torch.device
    seed: int
    progress: Callable[[str], None] = lambda message: None
    results: dict[str, GateResult] = field(default_factory=lambda: {name: GateResult(name) for name in GATES})

    def run(self, names: Iterable[str] = GATES) -> GateResult:
        """Run these gates in order up to the first that is not passed; returns that one, or the last."""
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
        operation = self.kernel.operation
        small = [Case("small", operation.sweep_cpu[0], dtype) for dtype in cases.dtypes_checked(self.device)]
        for case in (self.timed, *small):
            if case.dtype not in cases.dtypes_checked(self.device) or self._too_large(case):
                continue
            arguments = case.arguments(operation, self.device, self.seed)
            first = call(self.kernel, arguments, str(case))
            for _ in range(REPEATS - 1):
                # other work in between: it moves allocations and leaves other values in shared memory
                torch.randn(257, 263, device=self.device).softmax(-1)
                again = call(self.kernel, arguments, str(case))
                if not _same_bits(first, again):
                    raise Refused(Status.FAIL, f"{case}: the same input gave two different answers")
            result.cases += 1

    def _judge_all(self, result: GateResult, tried: Iterable[Case]) -> None:
        for number, case in enumerate(tried):
            if self._too_large(case):
                result.too_large += 1
                continue
            arguments = case.arguments(self.kernel.operation, self.device, self.seed + number)
            self._judge(result, str(case), arguments, None, case.exact)
        if result.cases == 0:
            raise Refused(Status.INVALID, "no case fits into this GPU's memory")

    def _judge(self, result: GateResult, name: str, arguments: Arguments, expected: Tensor | None, exact: bool) -> None:
        answer = call(self.kernel, arguments, name)
        operation = self.kernel.operation
        baseline = baseline_of(operation, arguments)
        _check_form(answer, baseline, arguments, name)
        oracle = expected if expected is not None else oracle_of(operation, arguments)
        if oracle.shape != baseline.shape:
            raise RuntimeError(f"the reference of {operation.name} gives two shapes: {oracle.shape}, {baseline.shape}")
        if exact:
            compared = compare_exactly(answer, oracle)
        else:
            compared = compare(answer, baseline, oracle, lambda: oracle_of(operation, _nudged(operation, arguments)))
        if not compared.right:
            raise Refused(Status.FAIL, f"{name}: {compared.reason}")
        result.cases += 1
        result.worst = max(result.worst, compared.worst)
        result.void += not exact and not says_something(baseline, oracle)

    def _too_large(self, case: Case) -> bool:
        if self.device.type != "cuda":
            return False
        # arguments, a private copy, the baseline, the float64 oracle and its comparison: about 16 times the half-precision call
        needed = 16 * self.kernel.operation.bytes(case.shape, 2)
        return needed > 0.8 * torch.cuda.get_device_properties(self.device).total_memory


def call(kernel: Kernel, arguments: Arguments, name: str) -> Tensor:
    """Call the kernel once and wait for it; Refused if it raises or writes into its inputs."""
    before = {key: value.clone() for key, value in arguments.items() if isinstance(value, Tensor)}
    try:
        answer = kernel.function(**arguments)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except Exception as fault:  # whatever the kernel raises is the kernel's fault
        lines = str(fault).strip().splitlines() or [""]
        raise Refused(Status.CRASH, f"{name}: {type(fault).__name__}: {lines[0][:300]}") from fault
    for key, copy in before.items():
        if not _same_bits(arguments[key], copy):
            raise Refused(Status.FAIL, f"{name}: the kernel wrote into its input {key}")
    return answer


def baseline_of(operation: Operation, arguments: Arguments) -> Tensor:
    """PyTorch's answer in the kernel's dtype, from contiguous copies where PyTorch refuses the layout of the arguments.

    SDPA's memory-efficient backend, for one, wants strides and addresses that are multiples of 16 bytes.
    """
    try:
        return operation.reference(**arguments)
    except RuntimeError:
        return operation.reference(
            **{k: v.clone(memory_format=COMPACT) if isinstance(v, Tensor) else v for k, v in arguments.items()}
        )


def oracle_of(operation: Operation, arguments: Arguments) -> Tensor:
    """The exact answer in float64, or float32 (no TF32) where float64 does not fit the GPU; from contiguous copies."""
    try:
        return operation.reference(**_cast(arguments, torch.float64))
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return operation.reference(**_cast(arguments, torch.float32))


def _check_form(answer: Any, baseline: Tensor, arguments: Arguments, name: str) -> None:
    def refuse(what: str) -> None:
        raise Refused(Status.FAIL, f"{name}: {what}")

    if type(answer) is not Tensor:
        refuse(f"kernel_fn returned a {type(answer).__name__}, not a plain torch.Tensor")
    for quality in ("shape", "dtype", "device", "layout"):
        ours, theirs = getattr(answer, quality), getattr(baseline, quality)
        if ours != theirs:
            shown = [tuple(value) if quality == "shape" else value for value in (ours, theirs)]
            refuse(f"the answer has {quality} {shown[0]}, PyTorch's has {shown[1]}")
    if not _is_dense(answer):
        refuse(f"the answer's strides {answer.stride()} leave gaps or overlap")
    for key, value in arguments.items():
        if isinstance(value, Tensor) and value.numel() and answer.numel() and _share_memory(answer, value):
            refuse(f"the answer shares memory with the input {key}")


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill a block of memory once each, in whatever order of dimensions."""
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: pair[1]):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _share_memory(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.contiguous().view(integers), b.contiguous().view(integers))


def _cast(arguments: Arguments, dtype: torch.dtype) -> Arguments:
    return {
        key: value.to(dtype, copy=True, memory_format=COMPACT)
        if isinstance(value, Tensor) and value.is_floating_point()
        else value
        for key, value in arguments.items()
    }


def _nudged(operation: Operation, arguments: Arguments) -> Arguments:
    """The arguments in float64, each row and each value moved by one rounding up or down.

    That of float32, in which kernels compute; the values by one of their dtype, where the operation rounds inside.
    """

    def nudge(x: Tensor) -> Tensor:
        generator = torch.Generator(x.device).manual_seed(0)

        def moves(shape: torch.Size, dtype: torch.dtype) -> Tensor:
            signs = torch.randint(0, 2, shape, device=x.device, generator=generator) * 2 - 1
            return torch.finfo(dtype).eps * signs.double()

        values = moves(x.shape, x.dtype if operation.rounds_inside else torch.float32)
        return x.double() * (1 + values + moves(x.shape[:-1], torch.float32)[..., None])

    return {key: nudge(v) if isinstance(v, Tensor) and v.is_floating_point() else v for key, v in arguments.items()}
