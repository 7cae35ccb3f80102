"""matmul: a (M, K) @ b (K, N) + bias (N,) + residual (M, N)."""

import random
from collections.abc import Sequence

from torch import fx

from autokernel import graph
from autokernel.graph import Region, aten
from autokernel.inputs import InputMaker
from autokernel.ops import Arguments, Operation, Shape


def _shape(M: int, N: int, K: int, bias: bool = False, transposed: bool = True, residual: bool = False) -> Shape:
    shape = {"M": M, "N": N, "K": K, "bias": bias, "transposed": transposed}
    return {**shape, "residual": True} if residual else shape  # an option that is named where it is asked for


def inputs(shape: Shape, make: InputMaker) -> Arguments:
    M, N, K = shape["M"], shape["N"], shape["K"]
    return {
        "a": make.tensor("a", M, K),
        # scaled as a trained layer's weights are, so that the outputs are of order one
        "b": make.tensor("b", K, N, scale=max(K, 1) ** -0.5, transposed=shape["transposed"]),
        "bias": make.tensor("bias", N) if shape["bias"] else None,
        "residual": make.tensor("residual", M, N) if shape.get("residual") else None,
    }


def describe(arguments: Arguments) -> Shape:
    a, b = arguments["a"], arguments["b"]
    (M, K), N = a.shape, b.shape[1]
    transposed = b.stride(0) == 1 and b.stride(1) != 1
    given = [arguments.get(name) is not None for name in ("bias", "residual")]
    return _shape(M, N, K, given[0], transposed, given[1])


def flops(shape: Shape) -> int:
    M, N, K = shape["M"], shape["N"], shape["K"]
    # one multiply and one add per product, one add per output for the bias and one for the residual
    return 2 * M * N * K + M * N * (shape["bias"] + shape.get("residual", False))


def byte_count(shape: Shape, itemsize: int) -> int:
    M, N, K = shape["M"], shape["N"], shape["K"]
    # read a, b, bias and residual, write the product
    return (M * K + K * N + M * N * (1 + shape.get("residual", False)) + N * shape["bias"]) * itemsize


def draw(rng: random.Random, small: bool) -> Shape:
    top = 96 if small else 4096
    M, N, K = (rng.randint(1, top) for _ in range(3))
    return _shape(M, N, K, rng.random() < 0.5, rng.random() < 0.5)


def match(graph_module: fx.GraphModule) -> Sequence[Region]:
    """Linear layers, and products of two matrices with or without an added bias; each also with an added residual."""
    regions = []
    for node in graph.calls(graph_module, aten.linear.default):
        x, weight, bias = (graph.argument(node, i, name) for i, name in enumerate(("input", "weight", "bias")))
        regions.append(_linear(node, x, weight, bias, weight_is_transposed=True))
    for node in graph.calls(graph_module, aten.mm.default, aten.matmul.default):
        x, weight = graph.argument(node, 0, "self"), graph.argument(node, 1, "other")
        if graph.value(weight).dim() == 2 and graph.value(x).dim() >= 2:
            regions.append(_linear(node, x, weight, None, weight_is_transposed=False))
    for node in graph.calls(graph_module, aten.addmm.default):
        bias, x, weight = (graph.argument(node, i, name) for i, name in enumerate(("self", "mat1", "mat2")))
        plain = graph.argument(node, 3, "beta", 1) == 1 and graph.argument(node, 4, "alpha", 1) == 1
        if plain and graph.value(bias).dim() == 1 and graph.value(bias).shape[0] == graph.value(weight).shape[1]:
            regions.append(_linear(node, x, weight, bias, weight_is_transposed=False))
    return [*regions, *filter(None, map(graph.with_residual, regions))]


def _linear(node: fx.Node, x: fx.Node, weight: fx.Node, bias: fx.Node | None, weight_is_transposed: bool) -> Region:
    output_shape = tuple(graph.value(node).shape)

    def bind(x, weight, bias=None):
        b = weight.t() if weight_is_transposed else weight
        return {"a": x.reshape(-1, x.shape[-1]), "b": b, "bias": bias}

    return Region(
        operation="matmul",
        output=node,
        nodes=(node,),
        inputs=(x, weight) if bias is None else (x, weight, bias),
        bind=bind,
        finish=lambda product: product.view(output_shape),
    )


OPERATION = Operation(
    name="matmul",
    inputs=inputs,
    describe=describe,
    flops=flops,
    bytes=byte_count,
    sweep=(
        _shape(4096, 4096, 4096),
        _shape(64, 64, 64),
        _shape(512, 768, 768, bias=True),
        _shape(1024, 3072, 768, bias=True, transposed=False),
        _shape(1024, 768, 3072),
        _shape(2048, 2048, 2048, transposed=False),
        _shape(1024, 50257, 768),
        _shape(16, 4096, 4096),
        _shape(2048, 11008, 4096),
    ),
    sweep_cpu=(_shape(64, 64, 64), _shape(128, 96, 64, bias=True), _shape(48, 160, 96, transposed=False)),
    edges=(
        _shape(1, 1, 1),
        _shape(1, 128, 64, bias=True),
        _shape(128, 1, 64),
        _shape(64, 128, 1, bias=True),
        _shape(127, 67, 31, transposed=False),
        _shape(33, 257, 129, bias=True),
        _shape(0, 64, 32),
        _shape(32, 64, 0, bias=True),
    ),
    draw=draw,
    match=match,
    exact_on_integers=True,
    uses_dot=True,
)
