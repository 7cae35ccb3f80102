"""layernorm over the last dimension."""

import math
import random
from collections.abc import Sequence

from torch import fx

from autokernel import graph
from autokernel.graph import Region, aten
from autokernel.inputs import InputMaker
from autokernel.ops import Arguments, Operation, Shape

EPS = 1e-5


def _shape(M: int, N: int, weight: bool = True, bias: bool = True, eps: float = EPS) -> Shape:
    return {"M": M, "N": N, "weight": weight, "bias": bias, "eps": eps}


def inputs(shape: Shape, make: InputMaker) -> Arguments:
    N = shape["N"]
    return {
        "x": make.tensor("x", shape["M"], N),
        "weight": make.tensor("weight", N) if shape["weight"] else None,
        "bias": make.tensor("bias", N) if shape["bias"] else None,
        "eps": shape["eps"],
    }


def describe(arguments: Arguments) -> Shape:
    x = arguments["x"]
    weight, bias = (arguments.get(name) is not None for name in ("weight", "bias"))
    return _shape(math.prod(x.shape[:-1]), x.shape[-1], weight, bias, arguments.get("eps", EPS))


def flops(shape: Shape) -> int:
    M, N = shape["M"], shape["N"]
    # for each element: add to the mean, subtract it, square, add to the variance, scale; then the weight and the bias
    return (5 + shape["weight"] + shape["bias"]) * M * N


def byte_count(shape: Shape, itemsize: int) -> int:
    M, N = shape["M"], shape["N"]
    # read x, weight and bias, write y
    return (2 * M * N + (shape["weight"] + shape["bias"]) * N) * itemsize


def draw(rng: random.Random, small: bool) -> Shape:
    M, N = (rng.randint(1, 64), rng.randint(1, 300)) if small else (rng.randint(1, 4096), rng.randint(1, 16384))
    return _shape(M, N, rng.random() < 0.8, rng.random() < 0.8, rng.choice((1e-5, 1e-6, 1e-12)))


def match(graph_module: fx.GraphModule) -> Sequence[Region]:
    """A layer norm over exactly the last dimension that keeps the dtype of its input."""
    regions = []
    for node in graph.calls(graph_module, aten.layer_norm.default):
        names = ("input", "normalized_shape", "weight", "bias")
        x, normalized, weight, bias = (graph.argument(node, i, name) for i, name in enumerate(names))
        over_last = tuple(normalized) == tuple(graph.value(x).shape[-1:])
        if over_last and graph.value(x).dtype == graph.value(node).dtype:
            regions.append(_region(node, x, weight, bias, graph.argument(node, 4, "eps", EPS)))
    return regions


def _region(node: fx.Node, x: fx.Node, weight: fx.Node | None, bias: fx.Node | None, eps: float) -> Region:
    given = {name: tensor for name, tensor in (("x", x), ("weight", weight), ("bias", bias)) if tensor is not None}

    def bind(*values):
        return {"weight": None, "bias": None, **dict(zip(given, values, strict=True)), "eps": eps}

    return Region("layernorm", node, (node,), tuple(given.values()), bind)


OPERATION = Operation(
    name="layernorm",
    inputs=inputs,
    describe=describe,
    flops=flops,
    bytes=byte_count,
    sweep=(
        _shape(8192, 4096),
        _shape(32, 64),
        _shape(1024, 768),
        _shape(4096, 768, eps=1e-12),
        _shape(8192, 1024),
        _shape(2048, 4096, bias=False),
        _shape(16384, 8192),
        _shape(64, 65536),
    ),
    sweep_cpu=(_shape(32, 64), _shape(16, 768, eps=1e-12), _shape(2, 20000)),
    edges=(
        _shape(1, 1),
        _shape(1, 4099),
        _shape(257, 1, bias=False),
        _shape(7, 31, weight=False, bias=False),
        _shape(13, 1021, weight=False, eps=1e-3),
        _shape(127, 33, eps=1e-12),
        _shape(0, 16),
    ),
    draw=draw,
    match=match,
)
