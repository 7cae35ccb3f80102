"""rotary_embedding: pairs of the last dimension of x (B, H, S, D) turned by the angle of their position."""

import operator
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from autokernel import graph
from autokernel.graph import Region, aten
from autokernel.inputs import InputMaker
from autokernel.ops import Arguments, Operation, Shape

_RESHAPES = (aten.flatten.using_ints, aten.unflatten.int, aten.view.default, aten.reshape.default)


def _shape(
    B: int, H: int, S: int, D: int, W: int | None = None, interleaved: bool = False, batched: bool = False
) -> Shape:  # fmt: skip
    W = D // 2 if W is None else W
    return {"B": B, "H": H, "S": S, "D": D, "W": W, "interleaved": interleaved, "batched": batched}


def inputs(shape: Shape, make: InputMaker) -> Arguments:
    B, H, S, D, W = (shape[key] for key in "BHSDW")
    size = (B, S, W) if shape["batched"] else (S, W)
    cos, sin = make.tensor("cos", *size), make.tensor("sin", *size)
    _turn(cos, sin, make.generator)
    return {"x": make.tensor("x", B, H, S, D), "cos": cos, "sin": sin, "interleaved": shape["interleaved"]}


def _turn(cos: Tensor, sin: Tensor, generator: torch.Generator) -> None:
    # In place, so that the layout and dtype that the maker chose stay. A real call's cos may be an expanded view, whose
    # repeated elements take one write.
    angle = torch.rand(cos.shape, device=cos.device, generator=generator) * (2 * torch.pi)
    for tensor, values in ((cos, angle.cos()), (sin, angle.sin())):
        for dimension, step in enumerate(tensor.stride()):
            if step == 0:
                tensor, values = tensor.narrow(dimension, 0, 1), values.narrow(dimension, 0, 1)
        tensor.copy_(values)


def describe(arguments: Arguments) -> Shape:
    (B, H, S, D), cos = arguments["x"].shape, arguments["cos"]
    return _shape(B, H, S, D, cos.shape[-1], bool(arguments.get("interleaved", False)), cos.dim() == 3)


def flops(shape: Shape) -> int:
    B, H, S, D = (shape[key] for key in "BHSD")
    # two multiplications and one sum for each element
    return 3 * B * H * S * D


def byte_count(shape: Shape, itemsize: int) -> int:
    B, H, S, D, W = (shape[key] for key in "BHSDW")
    # read x, cos and sin, write y
    return (2 * B * H * S * D + 2 * (B if shape["batched"] else 1) * S * W) * itemsize


def draw(rng: random.Random, small: bool) -> Shape:
    if small:
        B, H, S, half = rng.randint(1, 3), rng.randint(1, 6), rng.randint(1, 40), rng.randint(1, 32)
    else:
        B, H, S, half = rng.randint(1, 4), rng.randint(1, 40), rng.randint(1, 4096), rng.randint(1, 128)
    W = rng.choice((half, 2 * half))
    return _shape(B, H, S, 2 * half, W, rng.random() < 0.5, rng.random() < 0.5)


def match(graph_module: fx.GraphModule) -> Sequence[Region]:
    """The forms of real arithmetic: x * cos + turned(x) * sin with one cos for each element, and pairs rotated apart.

    x is (B, H, S, D) or (B, S, H, D), as the dimensions that cos and sin are broadcast over tell.
    """
    found = [_whole(node) for node in graph.calls(graph_module, aten.add.Tensor)]
    joins = (aten.cat.default, aten.flatten.using_ints, aten.view.default, aten.reshape.default)
    found += [_apart(node) for node in graph.calls(graph_module, *joins)]
    regions = [_region(rotation) for rotation in found if rotation is not None]
    return [region for region in regions if region is not None]


@dataclass(frozen=True)
class _Rotation:
    output: fx.Node
    nodes: tuple[fx.Node, ...]
    x: fx.Node
    cos: fx.Node
    sin: fx.Node
    interleaved: bool


@dataclass(frozen=True)
class _Half:
    """One element of every pair of `source`: the even or odd elements when interleaved, else the lower or upper half."""

    source: fx.Node
    interleaved: bool
    second: bool
    nodes: tuple[fx.Node, ...] = field(compare=False)


def _whole(node: fx.Node) -> _Rotation | None:
    """x * cos + turned * sin, where turned joins (-second, first) halves of x."""
    for straight, across in _orders(_operands(node, aten.add.Tensor)):
        for turned, sin in _orders(_operands(across, aten.mul.Tensor)):
            x, interleaved, nodes = _turned(turned)
            for multiplied, cos in _orders(_operands(straight, aten.mul.Tensor)):
                if x is not None and multiplied is x:
                    return _Rotation(node, (*nodes, straight, across, node), x, cos, sin, interleaved)
    return None


def _turned(node: Any) -> tuple[fx.Node | None, bool, tuple[fx.Node, ...]]:
    """x, whether its pairs are interleaved, and the nodes, of a join of (-second, first); (None, ...) for anything else."""
    nothing = None, False, ()
    first, second, interleaved, nodes = _join(node)
    if not graph.is_call(first, aten.neg.default):
        return nothing
    b, a = _half(first.args[0]), _half(second)
    if a is None or b is None or not b.second or a != replace(b, second=False) or a.interleaved != interleaved:
        return nothing
    return a.source, interleaved, (*a.nodes, *b.nodes, first, *nodes)


def _apart(node: fx.Node) -> _Rotation | None:
    """A join of (a * cos - b * sin, b * cos + a * sin), where a and b are the halves of x."""
    first, second, interleaved, nodes = _join(node)
    difference, total = _operands(first, aten.sub.Tensor), _operands(second, aten.add.Tensor)
    if not difference or not total:
        return None
    (a, cos), (b, sin) = (_product(term) for term in difference)
    if a is None or b is None or a.second or b != replace(a, second=True) or a.interleaved != interleaved:
        return None
    crossed = False
    for one, other in _orders(total):
        (p, p_angle), (q, q_angle) = _product(one), _product(other)
        crossed |= p == b and q == a and _same(p_angle, cos) and _same(q_angle, sin)
    if not crossed:
        return None
    halves = [half.nodes for half, _ in (_product(term) for term in (*difference, *total)) if half is not None]
    inside = (*(n for half in halves for n in half), *difference, *total, first, second, *nodes)
    return _Rotation(node, inside, a.source, cos, sin, interleaved)


def _operands(node: Any, target: Any) -> tuple[fx.Node, ...]:
    """The two tensors that `target` adds, subtracts or multiplies; () if the node is something else or scales one."""
    plain = graph.is_call(node, target) and graph.argument(node, 2, "alpha", 1) == 1
    return tuple(node.args[:2]) if plain and all(graph.is_tensor(operand) for operand in node.args[:2]) else ()


def _orders(pair: tuple[fx.Node, ...]) -> list[tuple[fx.Node, ...]]:
    return [pair, pair[::-1]] if pair else []


def _product(node: Any) -> tuple[_Half | None, Any]:
    """(half, angle) of half * angle in either order; (None, None) for anything else."""
    for operand, angle in _orders(_operands(node, aten.mul.Tensor)):
        half = _half(operand)
        if half is not None:
            return half, angle
    return None, None


def _same(a: Any, b: Any) -> bool:
    """Whether two nodes have one value: the same node, or the same view of the same."""
    if a is b or not (isinstance(a, fx.Node) and isinstance(b, fx.Node)):
        return a is b or (type(a) is type(b) and a == b)
    same_call = a.op == b.op == "call_function" and a.target is b.target and a.kwargs == b.kwargs
    views = graph.is_call(a, aten.unsqueeze.default, aten.slice.Tensor, aten.view.default, aten.reshape.default)
    return same_call and views and len(a.args) == len(b.args) and all(_same(p, q) for p, q in zip(a.args, b.args, strict=True))


def _is_last(dim: Any, node: Any) -> bool:
    return dim in (-1, graph.value(node).dim() - 1)


def _join(node: Any) -> tuple[Any, Any, bool, tuple[fx.Node, ...]]:
    """(first, second, interleaved, nodes) of two halves put together; first and second are None for anything else."""
    nothing = None, None, False, ()
    joined: tuple[fx.Node, ...]
    if graph.is_call(node, aten.cat.default):
        parts, joined, interleaved = node.args[0], (node,), False
        whole = len(parts) == 2 and _is_last(graph.argument(node, 1, "dim", 0), node)
    elif graph.is_call(node, *_RESHAPES) and graph.is_call(node.args[0], aten.stack.default):
        stack = node.args[0]
        parts, joined, interleaved = stack.args[0], (stack, node), True
        whole = len(parts) == 2 and _is_last(graph.argument(stack, 1, "dim", 0), stack)
    else:
        return nothing
    if not whole:
        return nothing
    shape = graph.value(parts[0]).shape
    if graph.value(parts[1]).shape != shape or tuple(graph.value(node).shape) != (*shape[:-1], 2 * shape[-1]):
        return nothing
    return parts[0], parts[1], interleaved, joined


def _half(node: Any) -> _Half | None:
    """Which half of which tensor a node takes: a slice, or an element of a chunk, split, unbind or select."""
    if graph.is_call(node, aten.slice.Tensor):
        source, start, end = node.args[0], graph.argument(node, 2, "start") or 0, graph.argument(node, 3, "end")
        D, step = graph.value(source).shape[-1], graph.argument(node, 4, "step", 1)
        start, end = start % D if start < 0 else start, D if end is None else min(end if end >= 0 else end + D, D)
        taken, half = (start, end, step), D // 2
        choices = {(0, half, 1): (False, False), (half, D, 1): (False, True), (0, D, 2): (True, False), (1, D, 2): (True, True)}
        if D % 2 or not _is_last(graph.argument(node, 1, "dim", 0), source) or taken not in choices:
            return None
        return _Half(source, *choices[taken], (node,))
    if graph.is_call(node, aten.select.int):
        return _of_pairs(node.args[0], node.args[1], node.args[2] % 2, (node,))
    if not graph.is_call(node, operator.getitem):
        return None
    whole, index = node.args
    if graph.is_call(whole, aten.unbind.int):
        return _of_pairs(whole.args[0], graph.argument(whole, 1, "dim", 0), index, (node, whole))
    if graph.is_call(whole, aten.chunk.default, aten.split.Tensor, aten.split_with_sizes.default, aten.split.sizes):
        source = whole.args[0]
        equal = 2 * graph.value(node).shape[-1] == graph.value(source).shape[-1] and len(graph.value(whole)) == 2
        if equal and _is_last(graph.argument(whole, 2, "dim", 0), source):
            return _Half(source, False, bool(index), (node, whole))
    return None


def _of_pairs(view: Any, dim: int, index: int, nodes: tuple[fx.Node, ...]) -> _Half | None:
    """An element of a reshape to (..., D / 2, 2), whose pairs are interleaved, or to (..., 2, D / 2)."""
    if not graph.is_call(view, *_RESHAPES):
        return None
    source, seen = view.args[0], tuple(graph.value(view).shape)
    dim %= len(seen)
    if dim < len(seen) - 2 or seen[dim] != 2 or seen[:-2] != tuple(graph.value(source).shape[:-1]):
        return None
    return _Half(source, dim == len(seen) - 1, bool(index), (*nodes, view))


def _region(rotation: _Rotation) -> Region | None:
    """The region, if cos and sin are the same for all heads and nothing inside is used outside."""
    x, cos, sin = (graph.value(node) for node in (rotation.x, rotation.cos, rotation.sin))
    nodes = graph.closed(rotation.nodes, rotation.output)
    if nodes is None or x.dim() != 4 or cos.dim() > 4 or cos.shape != sin.shape or cos.dtype != sin.dtype:
        return None
    batch, second, third, width = (1,) * (4 - cos.dim()) + tuple(cos.shape)
    if width not in (x.shape[3], x.shape[3] // 2) or batch not in (1, x.shape[0]):
        return None
    if (second, third) == (1, x.shape[2]):
        heads_first = True
    elif (second, third) == (x.shape[1], 1):
        heads_first = False
    else:
        return None

    def angles(t: Tensor) -> Tensor:
        # (S, W) or (B, S, W): the dimension of the heads, and that of the batch where all share the angles, go
        t = t[(None,) * (4 - t.dim())].select(1 if heads_first else 2, 0)
        return t[0] if batch == 1 else t

    def bind(x, cos, sin):
        x = x if heads_first else x.transpose(1, 2)
        return {"x": x, "cos": angles(cos), "sin": angles(sin), "interleaved": rotation.interleaved}

    def finish(y):
        return y if heads_first else y.transpose(1, 2)

    inputs = (rotation.x, rotation.cos, rotation.sin)
    return Region("rotary_embedding", rotation.output, nodes, inputs, bind, finish)


OPERATION = Operation(
    name="rotary_embedding",
    inputs=inputs,
    describe=describe,
    flops=flops,
    bytes=byte_count,
    sweep=(
        _shape(4, 32, 4096, 128),
        _shape(1, 2, 16, 32),
        _shape(1, 12, 512, 64),
        _shape(2, 32, 1024, 128),
        _shape(1, 32, 2048, 128, W=128, batched=True),
        _shape(1, 32, 2048, 128, interleaved=True),
        _shape(2, 16, 4096, 64, W=64, interleaved=True),
        _shape(4, 8, 4096, 256, W=256),
    ),
    sweep_cpu=(
        _shape(1, 2, 16, 32),
        _shape(2, 3, 24, 64, W=64, batched=True),
        _shape(1, 5, 17, 16, interleaved=True),
    ),
    edges=(
        _shape(1, 1, 1, 2),
        _shape(1, 1, 1, 2, W=2, interleaved=True),
        _shape(2, 3, 1, 64, W=64),
        _shape(1, 1, 31, 80, interleaved=True, batched=True),
        _shape(2, 7, 13, 6, W=6),
        _shape(3, 5, 29, 10, W=10, interleaved=True, batched=True),
        _shape(2, 4, 0, 64),
    ),
    draw=draw,
    match=match,
)
