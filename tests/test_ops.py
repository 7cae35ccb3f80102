"""The operations: shapes there and back, work counted, arguments as the judge and real calls ask for them."""

import inspect
import json
import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from autokernel import ops
from autokernel.inputs import LAYOUTS, VALUES, InputMaker, Spec

CPU = torch.device("cpu")


def maker(dtype: torch.dtype = torch.float32, seed: int = 0, **options: Any) -> InputMaker:
    return InputMaker(dtype, CPU, torch.Generator().manual_seed(seed), **options)


ALL_SHAPES = [
    pytest.param(ops.get(name), shape, id=f"{name}-{kind}-{number}")
    for name in ops.names()
    for kind in ("sweep", "sweep_cpu", "edges")
    for number, shape in enumerate(getattr(ops.get(name), kind))
]


def order_free(shape: ops.Shape) -> dict[str, Any]:
    """The shape without `transposed` where a size is 0 or 1: then both orders in memory are one."""
    ambiguous = any(size in (0, 1) for size in shape.values() if type(size) is int)
    return {key: value for key, value in shape.items() if not (ambiguous and key == "transposed")}


def tensors(arguments: ops.Arguments) -> list[Tensor]:
    return [value for value in arguments.values() if isinstance(value, Tensor)]


@pytest.mark.parametrize(("operation", "shape"), ALL_SHAPES)
def test_shape_there_and_back_and_bytes(operation, shape):
    with FakeTensorMode():
        arguments = operation.inputs(shape, maker(torch.float16))
        result = operation.reference(**arguments)
        moved = sum(t.numel() * t.element_size() for t in [*tensors(arguments), result])
    assert list(arguments) == list(inspect.signature(operation.reference).parameters)
    assert order_free(operation.describe(arguments)) == order_free(shape)
    assert json.loads(json.dumps(shape)) == shape
    flops, size = operation.flops(shape), operation.bytes(shape, 2)
    assert type(flops) is int
    assert type(size) is int
    assert flops >= 0
    assert size == moved  # each input read once, each output written once


FIGURES = {  # by hand
    "softmax": ({"M": 3, "N": 4}, 60, 48),
    "layernorm": ({"M": 3, "N": 4, "weight": True, "bias": True, "eps": 1e-5}, 84, 64),
    "rmsnorm": ({"M": 3, "N": 4, "weight": True, "eps": 1e-6}, 48, 56),
    "cross_entropy": ({"M": 3, "V": 5, "ignore_index": -100, "reduction": "mean"}, 72, 56),
    "rotary_embedding": (
        {"B": 1, "H": 2, "S": 3, "D": 4, "W": 2, "interleaved": False, "batched": False}, 72, 120,
    ),
    "reduce": ({"outer": 2, "N": 3, "inner": 4, "dim": 1}, 24, 64),
    "matmul": ({"M": 2, "N": 3, "K": 4, "bias": True, "transposed": True}, 54, 58),
}  # fmt: skip


@pytest.mark.parametrize("name", FIGURES)
def test_work_by_hand(name):
    shape, flops, size = FIGURES[name]
    assert ops.get(name).flops(shape) == flops
    assert ops.get(name).bytes(shape, 2) == size


@pytest.mark.parametrize("name", ops.names())
def test_drawn_shapes(name):
    operation, rng = ops.get(name), random.Random(0)
    seen = set()
    with FakeTensorMode():
        for number in range(40):
            small = number % 2 == 0
            shape = operation.draw(rng, small)
            arguments = operation.inputs(shape, maker())
            assert order_free(operation.describe(arguments)) == order_free(shape)
            elements = sum(t.numel() for t in tensors(arguments))
            assert elements <= (200_000 if small else 2**30)
            seen.add(json.dumps(shape))
    assert len(seen) > 30


@pytest.mark.parametrize("name", ops.names())
def test_edges_are_odd_single_and_empty(name):
    sizes = {value for shape in ops.get(name).edges for value in shape.values() if type(value) is int}
    assert 0 in sizes
    assert 1 in sizes
    assert any(size > 2 and size % 2 for size in sizes)
    assert len(ops.get(name).sweep) >= 5
    assert len(ops.get(name).sweep_cpu) >= 2


@pytest.mark.parametrize("name", ops.names())
def test_arguments_differ_between_seeds_and_values(name):
    operation = ops.get(name)
    shape = operation.sweep_cpu[0]
    first = tensors(operation.inputs(shape, maker(seed=1)))
    again = tensors(operation.inputs(shape, maker(seed=1)))
    other = tensors(operation.inputs(shape, maker(seed=2)))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    for values in set(VALUES) - {"masked"}:
        arguments = operation.inputs(shape, maker(torch.float16, values=values))
        assert all(bool(torch.isfinite(t).all()) for t in tensors(arguments) if t.is_floating_point())


@pytest.mark.parametrize("name", [name for name in ops.names() if ops.get(name).masks])
def test_masks_leave_an_answer(name):
    operation = ops.get(name)
    for seed, shape in enumerate(operation.sweep_cpu):
        arguments = operation.inputs(shape, maker(values="masked", seed=seed))
        scores = tensors(arguments)[0]
        assert not torch.isneginf(scores).all(-1).any()
        assert torch.isneginf(scores[:, 0]).any()
        assert 0.3 < torch.isneginf(scores).double().mean() < 0.8
        assert torch.isfinite(operation.reference(**arguments)).all()


CLOSED_FORMS = {
    "cross_entropy": lambda s: math.log(s["V"]),
    "flash_attention": lambda s: 1.0,
    "layernorm": lambda s: float(s["bias"]),
    "matmul": lambda s: math.sqrt(s["K"]) + s["bias"],
    "reduce": lambda s: s["N"],
    "rmsnorm": lambda s: 1 / math.sqrt(1 + s["eps"]),
    "softmax": lambda s: 1 / s["N"],
}


@pytest.mark.parametrize("name", CLOSED_FORMS)
def test_the_answer_for_ones_is_known(name):
    operation = ops.get(name)
    shape = operation.sweep_cpu[0]
    answer = operation.reference(**operation.inputs(shape, maker(torch.float64, values="ones")))
    torch.testing.assert_close(answer, torch.full_like(answer, CLOSED_FORMS[name](shape)))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ops.names())
def test_strides_of_a_real_call_are_kept(name, layout):
    operation = ops.get(name)
    wanted = operation.inputs(operation.sweep_cpu[1], maker(torch.float16, layout=layout))
    specs = {k: Spec(tuple(t.shape), t.stride(), t.dtype) for k, t in wanted.items() if isinstance(t, Tensor)}
    made = operation.inputs(operation.describe(wanted), maker(torch.float32, specs=specs))
    for key, spec in specs.items():
        assert made[key].shape == spec.shape
        assert made[key].dtype == spec.dtype
        if spec.dtype.is_floating_point:
            assert made[key].stride() == spec.stride


def test_a_real_sum_may_have_any_number_of_dimensions():
    operation = ops.get("reduce")
    arguments = {"x": torch.zeros(2, 3, 4, 5).transpose(0, 1), "dim": 2}
    shape = operation.describe(arguments)
    assert shape == {"outer": 6, "N": 4, "inner": 5, "dim": 2}
    x = arguments["x"]
    made = operation.inputs(shape, maker(specs={"x": Spec(tuple(x.shape), x.stride(), x.dtype)}))
    assert made["x"].shape == (3, 2, 4, 5)
    assert made["x"].stride() == x.stride()
    assert operation.describe(made) == shape


def test_angles_are_angles_in_every_layout():
    operation = ops.get("rotary_embedding")
    shape = operation.sweep_cpu[0]
    S, W = shape["S"], shape["W"]
    repeated = {name: Spec((S, W), (0, 1), torch.float32) for name in ("cos", "sin")}
    makers = [maker(layout=layout, values=values) for layout in LAYOUTS for values in VALUES] + [maker(specs=repeated)]
    for make in makers:
        arguments = operation.inputs(shape, make)
        torch.testing.assert_close(arguments["cos"] ** 2 + arguments["sin"] ** 2, torch.ones(S, W))
    assert arguments["cos"].stride() == (0, 1)


def test_some_targets_are_ignored_and_one_never():
    operation = ops.get("cross_entropy")
    target = operation.inputs({"M": 4000, "V": 50, "ignore_index": 3, "reduction": "mean"}, maker())["target"]
    assert 0.02 < (target == 3).double().mean() < 0.05  # one in 64, and those drawn as class 3
    assert target[1] == 3
    for seed in range(40):
        shape = {"M": 1, "V": 2, "ignore_index": 1, "reduction": "mean"}
        assert operation.inputs(shape, maker(seed=seed))["target"].item() == 0
