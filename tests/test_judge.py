"""The judge passes what is right and refuses what is not, in every operation."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import reference
from autokernel import ops
from autokernel.judge import cases
from autokernel.judge.arena import Arena
from autokernel.judge.baseline import Baseline
from autokernel.judge.compare import compare, compare_exactly, says_something
from autokernel.judge.gates import GATES, GateResult, Gates, oracle_of
from autokernel.judge.process import WorkerFault
from autokernel.kernels import KernelFile
from autokernel.results import Status

CPU = torch.device("cpu")
Run = Callable[..., GateResult]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Runs the gates over a function of this process, which is called as a worker calls a candidate."""
    arena = Arena(CPU)

    def run_gates(name: str, function: Callable[..., Any], gates: Sequence[str] = GATES) -> GateResult:
        return gates_of(name, function, arena).run(gates)

    yield run_gates
    arena.close()


def gates_of(name: str, function: Callable[..., Any], arena: Arena) -> Gates:
    operation = ops.get(name)
    timed = cases.timed_case(operation, None, torch.float32, CPU)
    kernel = KernelFile(Path(f"{name}.py"), operation, "0" * 64, b"")
    return Gates(Baseline(function, operation, arena), kernel, (), timed, CPU, 1)


def through(name: str, change: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """The reference, its answer changed."""
    return lambda **arguments: change(ops.get(name).reference(**arguments).contiguous())


@pytest.mark.parametrize("name", ops.names())
def test_the_reference_itself_passes_every_gate(name: str) -> None:
    gates = gates_of(name, lambda **arguments: ops.get(name).reference(**arguments).contiguous(), Arena(CPU))
    assert gates.run().reason == ""
    assert [gates.results[gate].status for gate in GATES] == [Status.PASS] * 5
    assert all(gates.results[gate].cases > 0 for gate in GATES)


@pytest.mark.parametrize("name", ops.names())
def test_a_more_accurate_kernel_passes(run: Run, name: str) -> None:
    def in_float64(**arguments: Any) -> Tensor:
        first = next(v for v in arguments.values() if isinstance(v, Tensor) and v.is_floating_point())
        return oracle_of(ops.get(name), arguments).to(first.dtype).contiguous()

    assert run(name, in_float64).reason == ""


@pytest.mark.parametrize("name", ops.names())
def test_half_precision_inside_float32_is_refused(run: Run, name: str) -> None:
    def in_half(**arguments: Any) -> Tensor:
        halved = {k: v.half() if isinstance(v, Tensor) and v.dtype == torch.float32 else v for k, v in arguments.items()}
        answer = ops.get(name).reference(**halved)
        return answer.to(next(v for v in arguments.values() if isinstance(v, Tensor)).dtype).contiguous()

    result = run(name, in_half)
    assert result.status is Status.FAIL
    assert "float32" in result.reason


@pytest.mark.parametrize("name", ops.names())
def test_a_relative_error_of_a_thousandth_is_refused_in_float32(run: Run, name: str) -> None:
    result = run(name, through(name, lambda y: y * 1.001 if y.dtype == torch.float32 else y))
    assert result.status is Status.FAIL
    assert "relative error" in result.reason or "exact" in result.reason


@pytest.mark.parametrize("name", ops.names())
@pytest.mark.parametrize("answer", ["zeros", "constant", "last element dropped", "nan"])
def test_wrong_answers_are_refused(run: Run, name: str, answer: str) -> None:
    def change(y: Tensor) -> Tensor:
        if y.numel() == 0:
            return y
        y = y.clone()
        if answer == "zeros":
            return torch.zeros_like(y)
        if answer == "constant":
            return torch.full_like(y, y.float().mean().item())
        y.view(-1)[-1] = float("nan") if answer == "nan" else 0
        return y

    assert run(name, through(name, change)).status is Status.FAIL


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda y: y.double(), "dtype torch.float64"),
        (lambda y: y[None], "shape"),
        (lambda y: y.float().numpy(), "not a plain torch.Tensor"),
        (lambda y: torch.nn.Parameter(y), "Parameter, not a plain torch.Tensor"),
        (lambda y: y.new_empty(*y.shape, 2)[..., 0].copy_(y), "strides"),
        (lambda y: y.to_sparse(), "layout"),
    ],
)
def test_the_form_of_an_answer(run: Run, change: Callable[[Tensor], Any], reason: str) -> None:
    result = run("softmax", through("softmax", change))
    assert result.status is Status.FAIL
    assert reason in result.reason


def test_writing_into_an_input_is_refused(run: Run) -> None:
    def zeroes_its_input(x: Tensor) -> Tensor:
        x.zero_()
        return torch.softmax(x, -1)

    result = run("softmax", zeroes_its_input)
    assert (result.status, "wrote into its input x" in result.reason) == (Status.FAIL, True)


def test_an_answer_in_the_memory_of_an_input_is_refused(run: Run) -> None:
    result = run("layernorm", lambda x, weight=None, bias=None, eps=1e-5: x)
    assert (result.status, "shares memory with the input x" in result.reason) == (Status.FAIL, True)


def test_a_layout_that_pytorch_refuses_is_still_judged(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def particular(x: Tensor) -> Tensor:
        if not x.is_contiguous():
            raise RuntimeError("x is not correctly aligned")
        return torch.softmax(x, -1)

    monkeypatch.setattr(reference, "softmax", particular)
    assert run("softmax", lambda x: torch.softmax(x, -1).contiguous()).reason == ""
    assert "nan" in run("softmax", lambda x: torch.softmax(x, -1).contiguous() * (1 if x.is_contiguous() else torch.nan)).reason


def test_an_exception_is_a_crash_that_names_the_case(run: Run) -> None:
    def raises(x: Tensor) -> Tensor:
        raise MemoryError("too hard")

    result = run("softmax", raises)
    assert result.status is Status.CRASH
    assert "MemoryError: too hard" in result.reason


def test_two_answers_to_one_input_are_refused(run: Run) -> None:
    calls = iter(range(1 << 30))

    def unsteady(x: Tensor) -> Tensor:
        y = torch.softmax(x, -1)
        return y * (1 + torch.finfo(y.dtype).eps * (next(calls) % 2))

    result = run("softmax", unsteady, ("determinism",))
    assert (result.status, "two different answers" in result.reason) == (Status.FAIL, True)


def test_gates_after_a_fault_are_not_run() -> None:
    gates = gates_of("softmax", through("softmax", torch.zeros_like), Arena(CPU))
    gates.run()
    assert gates.results["smoke"].status is Status.FAIL
    assert [str(gates.results[gate]) for gate in GATES[1:]] == ["not run"] * 4


def test_a_kernel_that_hangs_while_it_is_compiled_is_reported_at_the_first_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    gates = gates_of("softmax", through("softmax", lambda y: y), Arena(CPU))

    def hangs(self: Baseline, tried: Sequence[cases.Case]) -> None:
        raise WorkerFault(Status.TIMEOUT, "no answer within 25 s")

    monkeypatch.setattr(Baseline, "precompile", hangs)
    assert gates.run().status is Status.TIMEOUT
    assert gates.results["smoke"].reason == "no answer within 25 s"
    assert [str(gates.results[gate]) for gate in GATES[1:]] == ["not run"] * 4


def test_float16_accumulation_is_refused_in_a_long_product() -> None:
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(8, 2048, generator=generator).half()
    b = (torch.randn(2048, 8, generator=generator) * 2048**-0.5).half()
    oracle, baseline = a.double() @ b.double(), (a.float() @ b.float()).half()
    total = torch.zeros(8, 8).half()
    for k in range(2048):
        total += a[:, k : k + 1] * b[k : k + 1]
    assert compare(baseline, baseline, oracle).right
    assert not compare(total, baseline, oracle).right


def test_specials_must_stand_where_they_belong() -> None:
    oracle = torch.tensor([1.0, float("inf"), float("nan"), -2.0], dtype=torch.float64)
    right = oracle.float()
    assert compare(right, right, oracle).right
    for wrong in ([1, 2, float("nan"), -2], [1, float("inf"), 0, -2], [float("nan"), float("inf"), float("nan"), -2]):
        assert not compare(torch.tensor(wrong, dtype=torch.float32), right, oracle).right


def test_a_small_row_is_judged_by_its_own_size() -> None:
    oracle = torch.randn(4, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    oracle[1] *= 1e-6
    baseline, answer = oracle.float(), oracle.float()
    answer[1] *= 1.01
    assert not compare(answer, baseline, oracle).right


@given(st.integers(1, 50), st.integers(1, 50), st.integers(0, 2**31 - 1))
def test_rounding_once_is_always_right_and_zeros_never(rows: int, columns: int, seed: int) -> None:
    oracle = torch.randn(rows, columns, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    for dtype in cases.DTYPES:
        rounded = oracle.to(dtype)
        assert compare(rounded, rounded, oracle).right
        assert not compare(torch.zeros_like(rounded), rounded, oracle).right


def test_cases_that_prove_nothing_are_told() -> None:
    ones = torch.ones(5, 1, dtype=torch.float64)
    assert not says_something(ones.float(), ones)
    varied = torch.randn(5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert says_something(varied.float(), varied)


def test_exact_comparison() -> None:
    oracle = torch.tensor([3.0, 2049.0], dtype=torch.float64)
    assert compare_exactly(oracle.half(), oracle).right
    off = compare_exactly(torch.tensor([4.0, 2048.0]).half(), oracle)
    assert (off.right, "3 is exact" in off.reason) == (False, True)
