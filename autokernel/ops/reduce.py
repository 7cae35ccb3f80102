"""reduce: the sum over one dimension."""

import math
import random
from collections.abc import Sequence

import torch
from torch import fx

from autokernel import graph
from autokernel.graph import Region, aten
from autokernel.inputs import InputMaker
from autokernel.ops import Arguments, Operation, Shape


def _shape(outer: int, N: int, inner: int = 1, dim: int | None = None) -> Shape:
    # x is (outer, N) or (outer, N, inner) unless a real call says otherwise: `dim` is the dimension as that call names it
    dim = (-1 if inner == 1 else 1) if dim is None else dim
    return {"outer": outer, "N": N, "inner": inner, "dim": dim}


def inputs(shape: Shape, make: InputMaker) -> Arguments:
    size = (shape["outer"], shape["N"]) if shape["inner"] == 1 else (shape["outer"], shape["N"], shape["inner"])
    return {"x": make.tensor("x", *size), "dim": shape["dim"]}


def describe(arguments: Arguments) -> Shape:
    x, dim = arguments["x"], arguments.get("dim", -1)
    position = dim % x.dim()
    return _shape(math.prod(x.shape[:position]), x.shape[position], math.prod(x.shape[position + 1 :]), dim)


def flops(shape: Shape) -> int:
    # one sum for each element
    return shape["outer"] * shape["N"] * shape["inner"]


def byte_count(shape: Shape, itemsize: int) -> int:
    outputs = shape["outer"] * shape["inner"]
    # read x, write the sums
    return (outputs * shape["N"] + outputs) * itemsize


def draw(rng: random.Random, small: bool) -> Shape:
    inner = rng.choice((1, rng.randint(2, 40 if small else 512)))
    top = max((16384 if small else 1 << 24) // inner, 1)
    N = rng.randint(1, min(top, 2000 if small else 65536))
    return _shape(rng.randint(1, max(top // N, 1)), N, inner)


def match(graph_module: fx.GraphModule) -> Sequence[Region]:
    """A sum of floating-point numbers over exactly one dimension that keeps the dtype."""
    regions = []
    for node in graph.calls(graph_module, aten.sum.dim_IntList):
        x, dims = graph.argument(node, 0, "self"), graph.argument(node, 1, "dim")
        value = graph.value(x)
        floating = value.dtype in (torch.float16, torch.bfloat16, torch.float32)
        if floating and value.dtype == graph.value(node).dtype and value.dim() and dims is not None and len(dims) == 1:
            regions.append(_region(node, x, dims[0], keep=graph.argument(node, 2, "keepdim", False)))
    return regions


def _region(node: fx.Node, x: fx.Node, dim: int, keep: bool) -> Region:
    position = dim % graph.value(x).dim()
    return Region(
        operation="reduce",
        output=node,
        nodes=(node,),
        inputs=(x,),
        bind=lambda x: {"x": x, "dim": dim},
        finish=(lambda y: y.unsqueeze(position)) if keep else (lambda y: y),
    )


OPERATION = Operation(
    name="reduce",
    inputs=inputs,
    describe=describe,
    flops=flops,
    bytes=byte_count,
    sweep=(
        _shape(8192, 8192),
        _shape(32, 64),
        _shape(1024, 32768),
        _shape(32768, 8192),
        _shape(4, 1 << 22),
        _shape(65536, 64),
        _shape(1, 8192, 4096),
        _shape(32, 2048, 768),
    ),
    sweep_cpu=(_shape(32, 64), _shape(3, 20000), _shape(4, 33, 100), _shape(1, 700, 48)),
    edges=(
        _shape(1, 1),
        _shape(1, 4099),
        _shape(257, 1),
        _shape(13, 1021),
        _shape(1, 1, 7),
        _shape(7, 31, 3),
        _shape(3, 1, 129),
        _shape(0, 16),
        _shape(5, 0),
        _shape(3, 0, 4),
        _shape(2, 8, 0),
    ),
    draw=draw,
    match=match,
    exact_on_integers=True,
)
