"""rmsnorm over the last dimension."""

import math
import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from autokernel import graph
from autokernel.graph import Region, aten
from autokernel.inputs import InputMaker
from autokernel.ops import Arguments, Operation, Shape

EPS = 1e-6


def _shape(M: int, N: int, weight: bool = True, eps: float = EPS) -> Shape:
    return {"M": M, "N": N, "weight": weight, "eps": eps}


def inputs(shape: Shape, make: InputMaker) -> Arguments:
    return {
        "x": make.tensor("x", shape["M"], shape["N"]),
        "weight": make.tensor("weight", shape["N"]) if shape["weight"] else None,
        "eps": shape["eps"],
    }


def describe(arguments: Arguments) -> Shape:
    x = arguments["x"]
    return _shape(math.prod(x.shape[:-1]), x.shape[-1], arguments.get("weight") is not None, arguments.get("eps", EPS))


def flops(shape: Shape) -> int:
    # for each element: square, add to the sum, scale; then the weight
    return (3 + shape["weight"]) * shape["M"] * shape["N"]


def byte_count(shape: Shape, itemsize: int) -> int:
    M, N = shape["M"], shape["N"]
    # read x and weight, write y
    return (2 * M * N + shape["weight"] * N) * itemsize


def draw(rng: random.Random, small: bool) -> Shape:
    M, N = (rng.randint(1, 64), rng.randint(1, 300)) if small else (rng.randint(1, 4096), rng.randint(1, 16384))
    return _shape(M, N, rng.random() < 0.8, rng.choice((1e-5, 1e-6, 1e-8)))


def match(graph_module: fx.GraphModule) -> Sequence[Region]:
    """The operator over exactly the last dimension, and its written-out form with or without casts to float32."""
    regions = [_from_operator(node) for node in graph.calls(graph_module, aten.rms_norm.default)]
    regions += [_from_scale(node) for node in graph.calls(graph_module, aten.rsqrt.default)]
    return [region for region in regions if region is not None]


def _region(nodes: tuple[fx.Node, ...], output: fx.Node, x: fx.Node, weight: fx.Node | None, eps: float) -> Region:
    def bind(x, weight=None):
        return {"x": x, "weight": weight, "eps": eps}

    return Region("rmsnorm", output, nodes, (x,) if weight is None else (x, weight), bind)


def _from_operator(node: fx.Node) -> Region | None:
    names = ("input", "normalized_shape", "weight", "eps")
    x, normalized, weight, eps = (graph.argument(node, i, name) for i, name in enumerate(names))
    value = graph.value(x)
    if tuple(normalized) != tuple(value.shape[-1:]) or value.dtype != graph.value(node).dtype:
        return None
    # PyTorch adds the epsilon of the dtype that it computes in, which is float32 for the halves too
    return _region((node,), node, x, weight, torch.finfo(torch.float32).eps if eps is None else eps)


def _from_scale(scale: fx.Node) -> Region | None:
    """x * rsqrt(mean(x^2) + eps) * weight, around its rsqrt; casts may stand before, after or around the weight."""
    shifted: Any = scale.args[0]
    if not graph.is_call(shifted, aten.add.Tensor, aten.add.Scalar) or not isinstance(shifted.args[1], float):
        return None
    mean, eps = shifted.args
    if not graph.is_call(mean, aten.mean.dim) or graph.argument(mean, 3, "dtype") is not None:
        return None
    square, dims, keep = mean.args[0], graph.argument(mean, 1, "dim"), graph.argument(mean, 2, "keepdim", False)
    squared = _squared(square)
    scaling = graph.users(scale)
    if squared is None or not keep or len(scaling) != 1 or not graph.is_call(scaling[0], aten.mul.Tensor):
        return None
    scaled = scaling[0]
    multiplied = _other(scaled, scale)
    if list(dims) not in ([-1], [graph.value(square).dim() - 1]) or multiplied is None:
        return None
    inside = {scale, shifted, mean, square, scaled}
    for x in _sources(multiplied):
        if x not in _sources(squared):
            continue
        casts = set(_path(multiplied, x)) | set(_path(squared, x))
        for output, weight, after in _endings(scaled, graph.value(x).shape[-1]):
            nodes = graph.closed(inside | casts | after, output)
            if nodes is not None and graph.value(output).dtype == graph.value(x).dtype:
                return _region(nodes, output, x, weight, eps)
    return None


def _squared(node: Any) -> Any:
    """The node whose square this is, or None."""
    if graph.is_call(node, aten.pow.Tensor_Scalar) and node.args[1] == 2:
        return node.args[0]
    if graph.is_call(node, aten.square.default) or (graph.is_call(node, aten.mul.Tensor) and node.args[0] is node.args[1]):
        return node.args[0]
    return None


def _other(product: fx.Node, factor: fx.Node) -> Any:
    """The other factor of a product of two tensors."""
    first, second = product.args[:2]
    other = second if first is factor else first
    return other if other is not factor and graph.is_tensor(other) else None


def _is_cast(node: Any) -> bool:
    return graph.is_call(node, aten.type_as.default) or graph.through_casts(node) is not node


def _sources(node: fx.Node) -> list[fx.Node]:
    """The node and those it was cast from, farthest first; no cast on the way loses precision."""
    sources = [node]
    while _is_cast(sources[0]):
        before: Any = sources[0].args[0]
        dtype = graph.value(sources[0]).dtype
        if torch.promote_types(graph.value(before).dtype, dtype) != dtype:
            break
        sources.insert(0, before)
    return sources


def _path(node: fx.Node, source: fx.Node) -> list[fx.Node]:
    """The casts from `source` to `node`, which is one of its own sources."""
    sources = _sources(node)
    return sources[sources.index(source) + 1 :]


def _endings(scaled: fx.Node, N: int) -> list[tuple[fx.Node, fx.Node | None, set[fx.Node]]]:
    """Where the norm may end, farthest first: (output, weight, nodes after `scaled` up to it).

    Each node on the way is used by the next alone: a cast, or once the product with a weight (N,).
    """
    endings: list[tuple[fx.Node, fx.Node | None, set[fx.Node]]] = [(scaled, None, set())]
    while True:
        current, weight, after = endings[0]
        following = graph.users(current)
        if len(following) != 1 or following[0].op != "call_function":
            return endings
        node = following[0]
        if graph.is_call(node, aten.mul.Tensor) and weight is None:
            weight = _other(node, current)
            if weight is None or tuple(graph.value(weight).shape) != (N,):
                return endings
        elif not (_is_cast(node) and node.args[0] is current):
            return endings
        endings.insert(0, (node, weight, after | {node}))


OPERATION = Operation(
    name="rmsnorm",
    inputs=inputs,
    describe=describe,
    flops=flops,
    bytes=byte_count,
    sweep=(
        _shape(8192, 4096),
        _shape(32, 64),
        _shape(512, 768),
        _shape(2048, 4096, eps=1e-5),
        _shape(16384, 8192),
        _shape(65536, 128),
        _shape(64, 65536),
    ),
    sweep_cpu=(_shape(32, 64), _shape(16, 768, eps=1e-5), _shape(2, 20000)),
    edges=(
        _shape(1, 1),
        _shape(1, 4099),
        _shape(257, 1, weight=False),
        _shape(7, 31, weight=False, eps=1e-3),
        _shape(13, 1021, eps=1e-5),
        _shape(127, 33),
        _shape(0, 16),
    ),
    draw=draw,
    match=match,
)
