"""cross_entropy of logits (M, V) against class numbers (M,)."""

import random
from collections.abc import Sequence

import torch
from torch import fx

from autokernel import graph
from autokernel.graph import Region, aten
from autokernel.inputs import InputMaker
from autokernel.ops import Arguments, Operation, Shape

IGNORE_INDEX = -100
REDUCTIONS = ("none", "mean", "sum")  # in the order of their numbers in ATen


def _shape(M: int, V: int, ignore_index: int = IGNORE_INDEX, reduction: str = "mean") -> Shape:
    return {"M": M, "V": V, "ignore_index": ignore_index, "reduction": reduction}


def inputs(shape: Shape, make: InputMaker) -> Arguments:
    M, V = shape["M"], shape["V"]
    logits = make.tensor("logits", M, V)
    target = make.integers("target", 0, V, M)
    # The second row and about one in 64 do not count: a kernel need not read their logits, so they must be too few to show
    # in its bandwidth. The first row does, so that the mean is a number.
    ignored = torch.rand(target.shape, device=target.device, generator=make.generator) < 1 / 64
    ignored[:1], ignored[1:2] = False, True
    target = torch.where(ignored, shape["ignore_index"], target)
    if V > 1:  # the first row counts even where the class drawn for it is the one to ignore
        other = (shape["ignore_index"] + 1) % V
        target[:1] = torch.where(target[:1] == shape["ignore_index"], other, target[:1])
    if make.values == "masked":  # a class that is right cannot be one that is ruled out
        logits.scatter_(1, target.clamp(0, V - 1)[:, None], 0.0)
    return {"logits": logits, "target": target, "ignore_index": shape["ignore_index"], "reduction": shape["reduction"]}


def describe(arguments: Arguments) -> Shape:
    M, V = arguments["logits"].shape
    return _shape(M, V, arguments.get("ignore_index", IGNORE_INDEX), arguments.get("reduction", "mean"))


def flops(shape: Shape) -> int:
    M, V = shape["M"], shape["V"]
    # for each logit: maximum, subtract, exp, add to the sum; for each row: log, and two sums; a reduction adds the rows
    return 4 * M * V + 3 * M + (0 if shape["reduction"] == "none" else M)


def byte_count(shape: Shape, itemsize: int) -> int:
    M, V = shape["M"], shape["V"]
    # read the logits and the 8-byte targets, write one loss, or one for each row
    return M * V * itemsize + M * 8 + (M if shape["reduction"] == "none" else 1) * itemsize


def draw(rng: random.Random, small: bool) -> Shape:
    M, V = (rng.randint(1, 32), rng.randint(2, 300)) if small else (rng.randint(1, 4096), rng.randint(2, 65536))
    return _shape(M, V, rng.choice((IGNORE_INDEX, -1, 0)), rng.choice(REDUCTIONS))


def match(graph_module: fx.GraphModule) -> Sequence[Region]:
    """A cross entropy of two-dimensional logits against class numbers, without class weights or label smoothing."""
    regions = []
    for node in graph.calls(graph_module, aten.cross_entropy_loss.default):
        logits, target, weight = (graph.argument(node, i, name) for i, name in enumerate(("self", "target", "weight")))
        plain = weight is None and graph.argument(node, 5, "label_smoothing", 0.0) == 0
        by_class = graph.value(logits).dim() == 2 and graph.value(target).dtype == torch.int64
        if plain and by_class:
            reduction = REDUCTIONS[graph.argument(node, 3, "reduction", 1)]
            regions.append(_region(node, logits, target, graph.argument(node, 4, "ignore_index", IGNORE_INDEX), reduction))
    return regions


def _region(node: fx.Node, logits: fx.Node, target: fx.Node, ignore_index: int, reduction: str) -> Region:
    def bind(logits, target):
        return {"logits": logits, "target": target, "ignore_index": ignore_index, "reduction": reduction}

    return Region("cross_entropy", node, (node,), (logits, target), bind)


OPERATION = Operation(
    name="cross_entropy",
    inputs=inputs,
    describe=describe,
    flops=flops,
    bytes=byte_count,
    sweep=(
        _shape(4096, 32000),
        _shape(32, 64),
        _shape(512, 32000, reduction="none"),
        _shape(1024, 50257),
        _shape(4096, 50257, reduction="sum"),
        _shape(4096, 128256),
    ),
    sweep_cpu=(_shape(16, 64), _shape(8, 1000, reduction="none"), _shape(3, 9000, reduction="sum")),
    edges=(
        _shape(1, 1),
        _shape(1, 4099),
        _shape(67, 2, ignore_index=1),
        _shape(7, 31, reduction="sum"),
        _shape(13, 1021, ignore_index=7, reduction="none"),
        _shape(31, 257, ignore_index=-1),
        _shape(0, 16, reduction="sum"),
        _shape(0, 16, reduction="none"),
    ),
    draw=draw,
    match=match,
    masks=True,
)
