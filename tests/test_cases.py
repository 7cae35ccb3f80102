"""What is tried: every case has its name, can be made, and says enough."""

import pytest
import torch

from autokernel import ops
from autokernel.judge import cases
from autokernel.judge.compare import SAMPLE, compare, says_something
from autokernel.judge.gates import oracle_of

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("name", ops.names())
def test_stability_has_its_named_cases(name: str) -> None:
    operation = ops.get(name)
    tried = list(cases.numerical_stability(operation, GPU))
    named = {"large values", "small values", "mixed scales", "constant rows", "known answer", "long reduction, mixed scales"}
    named |= {"integers"} if operation.exact_on_integers else set()
    named |= {"-inf mask", "long reduction, -inf mask"} if operation.masks else set()
    for dtype in cases.DTYPES:
        assert {case.name for case in tried if case.dtype == dtype} == named
    assert len(set(map(str, tried))) == len(tried)


@pytest.mark.parametrize("device", [CPU, GPU], ids=str)
@pytest.mark.parametrize("name", ops.names())
def test_the_long_reduction_is_long_and_small(name: str, device: torch.device) -> None:
    operation = ops.get(name)
    shape = cases.long_reduction(operation, device)
    assert operation.bytes(shape, 2) <= cases.LONG_BYTES[device.type]
    others = [size for other in operation.sweep_cpu for size in other.values() if type(size) is int]
    assert device == CPU or max(size for size in shape.values() if type(size) is int) >= max(others)


@pytest.mark.parametrize("name", ops.names())
def test_the_sweep_draws_new_shapes_in_every_run(name: str) -> None:
    drawn = [[case for case in cases.shape_sweep(ops.get(name), (), GPU, seed) if case.name == cases.DRAWN] for seed in (1, 2)]
    assert len(drawn[0]) == len(drawn[1]) == cases.RANDOM_SHAPES * len(cases.DTYPES)
    assert [case.shape for case in drawn[0]] != [case.shape for case in drawn[1]]


@pytest.mark.parametrize("name", [name for name in ops.names() if ops.get(name).masks])
def test_a_careless_running_maximum_fails_a_mask(name: str) -> None:
    operation = ops.get(name)
    case = next(case for case in cases.numerical_stability(operation, CPU) if case.name == "-inf mask")
    arguments = case.arguments(operation, CPU, 1)
    scores = next(iter(arguments.values())).double()
    # online over two halves, without a guard for a half that is masked as a whole
    top = scores[:, : scores.shape[1] // 8].amax(1)
    assert torch.isnan((top - top.maximum(top)).exp()).any()
    assert torch.isfinite(oracle_of(operation, arguments)).all()


def test_a_large_answer_is_asked_by_a_sample() -> None:
    generator = torch.Generator().manual_seed(0)
    large = torch.randn(4 * SAMPLE // 100, 100, dtype=torch.float64, generator=generator)
    assert says_something(large.float(), large)
    assert not says_something(torch.ones_like(large).float(), torch.ones_like(large))
    vector = torch.randn(3 * SAMPLE, dtype=torch.float64, generator=generator)
    assert says_something(vector.float(), vector)
    assert not compare(torch.zeros_like(vector).float(), vector.float(), vector).right
