"""The starter kernels: right against the reference in float64 for every shape, dtype and layout, and in their properties.

bfloat16 is checked on a GPU alone: Triton's interpreter truncates where a GPU rounds, and its tl.dot returns garbage.
"""

import inspect
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from autokernel import hardware, kernels, ops
from autokernel.inputs import LAYOUTS, InputMaker

DEVICE = hardware.device()
STARTERS = [name for name in ops.names() if kernels.starter(name).is_file()]
INTERPRETED = (torch.float16, torch.float32)
ON_GPU = (torch.float16, torch.bfloat16, torch.float32)
# of the largest value of the result: a few roundings of the dtype, and in float32 the order of a sum
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 1e-5}


def drawn(seed: int, *size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def make_arguments(name: str, shape: ops.Shape, dtype: torch.dtype, **options: Any) -> ops.Arguments:
    generator = torch.Generator(DEVICE).manual_seed(len(str(shape)))
    return ops.get(name).inputs(shape, InputMaker(dtype, DEVICE, generator, **options))


def widened(arguments: ops.Arguments, dtype: torch.dtype = torch.float64) -> ops.Arguments:
    return {k: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in arguments.items()}


def starter(name: str) -> Any:
    return kernels.load(kernels.starter(name)).function


def check(name: str, arguments: ops.Arguments, oracle: torch.dtype = torch.float64) -> None:
    """The starter's result is close to the reference, and its inputs are as they were."""
    before = {k: v.clone() for k, v in arguments.items() if isinstance(v, Tensor)}
    result = starter(name)(**arguments)
    expected = ops.get(name).reference(**widened(arguments, oracle))
    dtype = next(v.dtype for v in arguments.values() if isinstance(v, Tensor))
    assert result.shape == expected.shape
    assert result.dtype == dtype
    assert all(torch.equal(arguments[k], v) for k, v in before.items())
    if result.numel():
        difference = (result.to(oracle) - expected).abs().max()
        largest = expected.abs().max().clamp(min=1.0)
        assert difference <= TOLERANCE[dtype] * largest, f"off by {float(difference / largest):.1e} of the largest value"


CASES = [
    pytest.param(name, shape, id=f"{name}-{kind}-{number}")
    for name in STARTERS
    for kind in ("sweep_cpu", "edges")
    for number, shape in enumerate(getattr(ops.get(name), kind))
]


@pytest.mark.parametrize("dtype", INTERPRETED, ids=str)
@pytest.mark.parametrize(("name", "shape"), CASES)
def test_starter_is_right(name, shape, dtype):
    check(name, make_arguments(name, shape, dtype))


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "contiguous"])
@pytest.mark.parametrize("name", STARTERS)
def test_starter_takes_any_layout(name, layout):
    check(name, make_arguments(name, ops.get(name).sweep_cpu[0], torch.float32, layout=layout))


@pytest.mark.parametrize("name", STARTERS)
def test_starter_has_the_signature_of_the_reference(name):
    wanted = inspect.signature(ops.get(name).reference).parameters
    given = inspect.signature(starter(name)).parameters
    assert list(given) == list(wanted)
    assert [p.default for p in given.values()] == [p.default for p in wanted.values()]


@pytest.mark.parametrize("name", STARTERS)
def test_starter_gives_the_same_bits_again(name):
    arguments = make_arguments(name, ops.get(name).sweep_cpu[1], torch.float16)
    assert torch.equal(starter(name)(**arguments), starter(name)(**arguments))


@pytest.mark.parametrize("name", [name for name in STARTERS if ops.get(name).exact_on_integers])
def test_integers_are_exact(name):
    for shape in ops.get(name).sweep_cpu:
        arguments = make_arguments(name, shape, torch.float32, values="integers")
        assert torch.equal(starter(name)(**arguments).double(), ops.get(name).reference(**widened(arguments)))


@pytest.mark.parametrize("name", STARTERS)
def test_starter_refuses_float64(name):
    arguments = widened(make_arguments(name, ops.get(name).sweep_cpu[0], torch.float32))
    with pytest.raises(TypeError, match="float16"):
        starter(name)(**arguments)


# What a row, a chunk or a part of its own size runs: lengths past those that one program holds.
LONG = [
    ("softmax", {"M": 130, "N": 33000}),
    ("softmax", {"M": 2, "N": 33001}),
    ("layernorm", {"M": 2, "N": 16400, "weight": True, "bias": True, "eps": 1e-5}),
    ("rmsnorm", {"M": 2, "N": 16400, "weight": True, "eps": 1e-6}),
    ("cross_entropy", {"M": 3, "V": 12289, "ignore_index": -100, "reduction": "mean"}),
    ("reduce", {"outer": 1, "N": 40001, "inner": 1, "dim": -1}),
    ("reduce", {"outer": 2, "N": 1001, "inner": 5, "dim": 1}),
]


@pytest.mark.parametrize(("name", "shape"), LONG, ids=[f"{name}-{number}" for number, (name, _) in enumerate(LONG)])
def test_long_rows(name, shape):
    check(name, make_arguments(name, shape, torch.float32))


def test_layernorm_far_from_zero_keeps_its_digits():
    # E[x^2] - mean^2 would lose them all
    for N in (1000, 20000):
        x = 1000 + drawn(N, 2, N)
        expected = ops.get("layernorm").reference(x.double())
        torch.testing.assert_close(starter("layernorm")(x).double(), expected, rtol=0, atol=2e-3)


@pytest.mark.parametrize("N", [40, 33000])
def test_softmax_of_infinities(N):
    x = torch.zeros(4, N, device=DEVICE)
    x[0, 1:] = -torch.inf  # all but one masked
    x[1, : N // 2] = -torch.inf
    x[2] = -torch.inf  # all masked: NaN, as in PyTorch
    x[3, 3] = torch.nan
    torch.testing.assert_close(starter("softmax")(x), x.softmax(-1), equal_nan=True)


def test_cross_entropy_of_rows_that_do_not_count():
    logits = drawn(0, 3, 10)
    logits[1, 4:] = -torch.inf
    for target in ([-100, -100, -100], [-100, 2, -100], [1, 7, -100]):
        for reduction in ("mean", "sum", "none"):
            arguments = {"logits": logits, "target": torch.tensor(target, device=DEVICE), "reduction": reduction}
            expected = ops.get("cross_entropy").reference(**arguments)
            torch.testing.assert_close(starter("cross_entropy")(**arguments), expected, equal_nan=True)


def test_cross_entropy_never_reads_a_class_that_does_not_exist():
    target = torch.tensor([2**40, -7, 1], device=DEVICE)
    losses = starter("cross_entropy")(torch.zeros(3, 4, device=DEVICE), target, reduction="none")
    assert losses.isnan().tolist() == [True, True, False]


@pytest.mark.parametrize("name", ["layernorm", "rmsnorm"])
def test_norms_take_weights_of_another_dtype(name):
    x, weight = drawn(0, 3, 50), torch.linspace(-2, 2, 50, device=DEVICE)
    result = starter(name)(x.half(), weight)
    assert result.dtype == torch.float16
    expected = ops.get(name).reference(x.half().double(), weight.double())
    torch.testing.assert_close(result.double(), expected, rtol=2e-3, atol=2e-3)


def test_dimensions_beyond_two():
    x = drawn(0, 2, 3, 4, 50)
    for name in ("softmax", "layernorm", "rmsnorm"):
        for seen in (x, x[0, 0, 0], x.transpose(0, 2), x.transpose(1, 3), x[:, :, ::2]):
            check(name, {"x": seen})
    for dim in range(-4, 4):
        check("reduce", {"x": x.transpose(0, 2), "dim": dim})


def test_rotary_embedding_keeps_the_layout_of_its_input():
    x = drawn(0, 2, 5, 3, 8).transpose(1, 2)
    angles = drawn(1, 5, 4)
    result = starter("rotary_embedding")(x, angles.cos(), angles.sin())
    assert result.stride() == x.stride()


REFUSALS = [
    ("softmax", {"x": torch.zeros(())}, "at least one dimension"),
    ("layernorm", {"x": torch.zeros(2, 3), "bias": torch.zeros(4)}, "bias of shape"),
    ("rmsnorm", {"x": torch.zeros(2, 3), "weight": torch.zeros(2, 3)}, "weight of shape"),
    ("cross_entropy", {"logits": torch.zeros(2, 3), "target": torch.zeros(3, dtype=torch.int64)}, "target"),
    ("cross_entropy", {"logits": torch.zeros(2, 3), "target": torch.zeros(2).long(), "reduction": "max"}, "reduction"),
    ("rotary_embedding", {"x": torch.zeros(1, 1, 2, 3), "cos": torch.zeros(2, 3), "sin": torch.zeros(2, 3)}, "even D"),
    ("rotary_embedding", {"x": torch.zeros(1, 1, 2, 8), "cos": torch.zeros(2, 3), "sin": torch.zeros(2, 3)}, "cos and sin"),
    ("reduce", {"x": torch.zeros(2, 3), "dim": 2}, "dim that x has"),
]


@pytest.mark.parametrize(("name", "arguments", "sentence"), REFUSALS)
def test_what_does_not_fit_is_refused(name, arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        starter(name)(**arguments)


# Properties.

few = settings(max_examples=12, deadline=None, derandomize=True)
seeds = st.integers(0, 2**31 - 1)


@few
@given(seeds, st.integers(1, 20), st.integers(1, 300), st.floats(-50, 50))
def test_softmax_sums_to_one_and_ignores_a_shift(seed, M, N, shift):
    x = drawn(seed, M, N)
    y = starter("softmax")(x)
    torch.testing.assert_close(y.sum(-1), torch.ones_like(y[:, 0]))
    torch.testing.assert_close(starter("softmax")(x + shift), y, rtol=1e-4, atol=1e-6)


@few
@given(seeds, st.integers(1, 20), st.integers(2, 300))
def test_layernorm_is_centred_and_of_unit_variance(seed, M, N):
    y = starter("layernorm")(drawn(seed, M, N) * 3 + 1, eps=0.0).double()
    torch.testing.assert_close(y.mean(-1), torch.zeros_like(y[:, 0]), rtol=0, atol=1e-4)
    torch.testing.assert_close(y.var(-1, correction=0), torch.ones_like(y[:, 0]), rtol=1e-3, atol=0)


@few
@given(seeds, st.integers(1, 20), st.integers(1, 300), st.floats(0.01, 100))
def test_rmsnorm_ignores_a_scale(seed, M, N, scale):
    x, w = drawn(seed, M, N) + 0.1, drawn(seed + 1, N)
    rmsnorm = starter("rmsnorm")
    torch.testing.assert_close(rmsnorm(x * scale, w, eps=0.0), rmsnorm(x, w, eps=0.0), rtol=1e-4, atol=1e-5)


@few
@given(seeds, st.integers(1, 12), st.integers(2, 300))
def test_cross_entropy_of_equal_logits_is_log_of_their_number(seed, M, V):
    target = torch.randint(0, V, (M,), generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    loss = starter("cross_entropy")(drawn(seed, M, 1).expand(M, V), target)
    torch.testing.assert_close(loss, torch.full_like(loss, V).log(), rtol=1e-5, atol=1e-5)


@few
@given(seeds, st.integers(1, 4), st.integers(1, 9), st.integers(1, 20), st.booleans(), st.booleans())
def test_rotary_embedding_keeps_lengths_and_turns_back(seed, H, S, half, interleaved, heads_last):
    x = drawn(seed, 2, S, H, 2 * half).transpose(1, 2) if heads_last else drawn(seed, 2, H, S, 2 * half)
    angle = drawn(seed + 1, S, half) * 3
    rotate = starter("rotary_embedding")
    y = rotate(x, angle.cos(), angle.sin(), interleaved)
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close(rotate(y, angle.cos(), -angle.sin(), interleaved), x, rtol=1e-4, atol=1e-5)


@few
@given(seeds, st.lists(st.integers(1, 12), min_size=1, max_size=4), st.data())
def test_sums_over_each_dimension_agree(seed, size, data):
    x = drawn(seed, *size)
    dim = data.draw(st.integers(-len(size), len(size) - 1))
    y = starter("reduce")(x, dim)
    torch.testing.assert_close(y, x.sum(dim), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(y.sum(), x.sum(), rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ON_GPU, ids=str)
@pytest.mark.parametrize("kind", ["sweep", "edges"])
@pytest.mark.parametrize("name", STARTERS)
def test_starter_is_right_on_a_gpu(name, kind, dtype):
    for shape in getattr(ops.get(name), kind):
        arguments = make_arguments(name, shape, dtype)
        elements = sum(v.numel() for v in arguments.values() if isinstance(v, Tensor))
        # float64 where it fits in memory beside the rest: float32, with TF32 off as it is by default, elsewhere
        check(name, arguments, torch.float64 if elements <= 2**28 else torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ON_GPU, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", STARTERS)
def test_starter_takes_any_layout_on_a_gpu(name, layout, dtype):
    for shape in ops.get(name).sweep_cpu:
        check(name, make_arguments(name, shape, dtype, layout=layout))


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "shape"), LONG, ids=[f"{name}-{number}" for number, (name, _) in enumerate(LONG)])
def test_long_rows_on_a_gpu(name, shape):
    for dtype in ON_GPU:
        check(name, make_arguments(name, shape, dtype))


@pytest.mark.parametrize("by_columns", [True, False], ids=["transposed", "plain"])
@pytest.mark.parametrize("size", [(96, 200, 64), (130, 264, 136), (257, 37, 72), (128, 512, 128)], ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", ""])
def test_a_product_by_the_copy_engine(size, by_columns, bias, monkeypatch):
    """The way that matmul takes from Hopper on, run by the interpreter where there is no such GPU."""
    M, N, K = size
    function = starter("matmul")
    scope = function.__globals__
    monkeypatch.setitem(scope, "USE_TMA", True)
    monkeypatch.setitem(scope, "ENOUGH_HALF", 0.0)
    if DEVICE.type == "cpu":
        monkeypatch.setitem(scope, "_has_tma", lambda device: True)
    weight = drawn(1, N, K).half()
    a, b = drawn(2, M, K).half(), weight.T if by_columns else weight.T.contiguous()
    assert (scope["_choose_tile_tma"](a, b) is None) == (N % 8 != 0 and not by_columns)  # its rows are not aligned
    added = drawn(3, N).half() if bias else None
    residual = drawn(4, M, N).half()
    expected = a.double() @ b.double() + (0 if added is None else added.double())
    assert torch.allclose(function(a, b, added).double(), expected, rtol=1e-3, atol=2e-2)
    assert torch.allclose(function(a, b, added, residual).double(), expected + residual, rtol=1e-3, atol=2e-2)


@pytest.mark.parametrize("strided", [False, True], ids=["", "strided"])
@pytest.mark.parametrize("dtype", INTERPRETED, ids=str)
@pytest.mark.parametrize("size", [(33, 70, 40), (3, 17, 2100), (0, 8, 8)], ids=["", "parts", "empty"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", ""])
def test_a_residual_is_added_to_a_product(size, bias, dtype, strided):
    M, N, K = size
    residual = drawn(4, N, M).T if strided else drawn(4, M, N)
    shape = {"M": M, "N": N, "K": K, "bias": bias, "transposed": True, "residual": True}
    arguments = {**make_arguments("matmul", shape, dtype), "residual": residual.to(dtype)}
    assert ops.get("matmul").describe(arguments) == shape
    check("matmul", arguments)


@pytest.mark.parametrize("dtype", INTERPRETED, ids=str)
@pytest.mark.parametrize("H", [48, 2100], ids=["", "parts"])
def test_a_residual_is_added_to_a_feed_forward_block(H, dtype):
    shape = {**ops.get("fused_mlp").sweep_cpu[1], "M": 3, "H": H, "residual": True}
    arguments = make_arguments("fused_mlp", shape, dtype)
    assert ops.get("fused_mlp").describe(arguments) == shape
    check("fused_mlp", arguments)


@pytest.mark.parametrize("name", ["matmul", "fused_mlp"])
def test_a_residual_that_does_not_fit_is_refused(name):
    shape = {**ops.get(name).sweep_cpu[0], "residual": True}
    arguments = make_arguments(name, shape, torch.float16)
    with pytest.raises(ValueError, match="residual must be"):
        starter(name)(**{**arguments, "residual": arguments["residual"][1:]})
    with pytest.raises(TypeError, match="must share one dtype"):
        starter(name)(**{**arguments, "residual": arguments["residual"].float()})
