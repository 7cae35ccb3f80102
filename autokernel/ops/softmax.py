"""softmax over the last dimension."""

import math
import random
from collections.abc import Sequence

from torch import fx

from autokernel import graph
from autokernel.graph import Region, aten
from autokernel.inputs import InputMaker
from autokernel.ops import Arguments, Operation, Shape


def _shape(M: int, N: int) -> Shape:
    return {"M": M, "N": N}


def inputs(shape: Shape, make: InputMaker) -> Arguments:
    return {"x": make.tensor("x", shape["M"], shape["N"])}


def describe(arguments: Arguments) -> Shape:
    x = arguments["x"]
    return _shape(math.prod(x.shape[:-1]), x.shape[-1])


def flops(shape: Shape) -> int:
    # maximum, subtract, exp, add to the sum, divide: five for each element
    return 5 * shape["M"] * shape["N"]


def byte_count(shape: Shape, itemsize: int) -> int:
    # read x, write y
    return 2 * shape["M"] * shape["N"] * itemsize


def draw(rng: random.Random, small: bool) -> Shape:
    return _shape(rng.randint(1, 64), rng.randint(1, 300)) if small else _shape(rng.randint(1, 4096), rng.randint(1, 16384))


def match(graph_module: fx.GraphModule) -> Sequence[Region]:
    """A softmax over the last dimension that keeps the dtype of its input."""
    regions = []
    for node in graph.calls(graph_module, aten.softmax.int, aten._softmax.default):
        x, dim = graph.argument(node, 0, "self"), graph.argument(node, 1, "dim")
        same_dtype = graph.value(x).dtype == graph.value(node).dtype
        if same_dtype and dim in (-1, graph.value(x).dim() - 1):
            regions.append(Region("softmax", node, (node,), (x,), bind=lambda x: {"x": x}))
    return regions


OPERATION = Operation(
    name="softmax",
    inputs=inputs,
    describe=describe,
    flops=flops,
    bytes=byte_count,
    sweep=(
        _shape(4096, 4096),
        _shape(32, 64),
        _shape(32768, 1024),
        _shape(8192, 8192),
        _shape(4096, 50257),
        _shape(16, 131072),
    ),
    sweep_cpu=(_shape(32, 64), _shape(16, 1000), _shape(3, 5000)),
    edges=(_shape(1, 1), _shape(1, 4099), _shape(257, 1), _shape(7, 31), _shape(13, 1021), _shape(0, 16)),
    draw=draw,
    match=match,
    masks=True,
)
