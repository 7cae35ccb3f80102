"""fused_mlp: act(x w_gate) * (x w_up + b_up) w_down + b_down + residual, or the same without the gate."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

import reference
from autokernel import graph
from autokernel.graph import Region, aten
from autokernel.inputs import InputMaker
from autokernel.ops import Arguments, Operation, Shape

_VIEWS = {aten.view.default, aten.reshape.default, aten._unsafe_view.default}
_COPIES = {aten.alias.default, aten.detach.default, aten.clone.default, aten.contiguous.default}


def _shape(
    M: int, K: int, H: int, N: int | None = None, activation: str = "silu", gated: bool = False, bias: bool = False
) -> Shape:
    return {
        "M": M,
        "K": K,
        "H": H,
        "N": K if N is None else N,
        "gated": gated,
        "b_up": bias,
        "b_down": bias,
        "activation": activation,
    }


def inputs(shape: Shape, make: InputMaker) -> Arguments:
    M, K, H, N = shape["M"], shape["K"], shape["H"], shape["N"]
    into, out_of = max(K, 1) ** -0.5, max(H, 1) ** -0.5
    return {
        "x": make.tensor("x", M, K),
        # scaled as a trained layer's weights are, so that every product is of order one
        "w_up": make.tensor("w_up", K, H, scale=into, transposed=True),
        "w_down": make.tensor("w_down", H, N, scale=out_of, transposed=True),
        "w_gate": make.tensor("w_gate", K, H, scale=into, transposed=True) if shape["gated"] else None,
        "b_up": make.tensor("b_up", H) if shape["b_up"] else None,
        "b_down": make.tensor("b_down", N) if shape["b_down"] else None,
        "activation": shape["activation"],
        "residual": make.tensor("residual", M, N) if shape.get("residual") else None,
    }


def describe(arguments: Arguments) -> Shape:
    (M, K), (H, N) = arguments["x"].shape, arguments["w_down"].shape
    given = {name: arguments.get(name) is not None for name in ("w_gate", "b_up", "b_down")}
    shape = _shape(M, K, H, N, arguments.get("activation", "silu"), given["w_gate"])
    shape = {**shape, "b_up": given["b_up"], "b_down": given["b_down"]}
    # an option that is named where it is asked for
    return shape if arguments.get("residual") is None else {**shape, "residual": True}


def flops(shape: Shape) -> int:
    M, K, H, N = shape["M"], shape["K"], shape["H"], shape["N"]
    # one multiply and one add per element of each product
    products = 2 * M * K * H * (1 + shape["gated"]) + 2 * M * H * N
    # the activation counts as one for each hidden element, as do the gate's multiply and all adds
    added = shape["b_down"] + shape.get("residual", False)
    return products + M * H * (1 + shape["gated"] + shape["b_up"]) + M * N * added


def byte_count(shape: Shape, itemsize: int) -> int:
    M, K, H, N = shape["M"], shape["K"], shape["H"], shape["N"]
    # read x, the weights, the biases and the residual, write the output; the hidden values need not leave the chip
    weights = K * H * (1 + shape["gated"]) + H * N + H * shape["b_up"] + N * shape["b_down"]
    return (M * K + weights + M * N * (1 + shape.get("residual", False))) * itemsize


def draw(rng: random.Random, small: bool) -> Shape:
    top = 72 if small else 2048
    M, K, H, N = (rng.randint(1, top) for _ in range(4))
    activation = rng.choice(("silu", "gelu", "gelu_tanh", "relu2"))
    shape = _shape(M, K, H, N, activation, rng.random() < 0.5)
    return {**shape, "b_up": rng.random() < 0.5, "b_down": rng.random() < 0.5}


@dataclass(frozen=True)
class _Projection:
    """A node that multiplies the last dimension of `x` by a weight, (K, N) or, `transposed`, (N, K)."""

    node: fx.Node
    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    transposed: bool


def match(graph_module: fx.GraphModule) -> Sequence[Region]:
    """A projection of an activated projection, with or without a gate, and with or without an added residual.

    Nothing in between is used elsewhere.
    """
    regions = []
    for node in graph_module.graph.nodes:
        down = _projection(node)
        if down is None:
            continue
        path = [node]
        hidden = _through(down.x, path)
        region = _gated(down, hidden, path) or _plain(down, hidden, path)
        if region is not None:
            regions.append(region)
    return [*regions, *filter(None, map(graph.with_residual, regions))]


def _plain(down: _Projection, hidden: Any, path: list[fx.Node]) -> Region | None:
    nodes = list(path)
    activated = _activation(hidden, nodes)
    if activated is None:
        return None
    activation, before = activated
    up = _projection(_through(before, nodes))
    return None if up is None else _region(down, up, None, activation, [*nodes, up.node])


def _gated(down: _Projection, hidden: Any, path: list[fx.Node]) -> Region | None:
    if not graph.is_call(hidden, aten.mul.Tensor) or not all(graph.is_tensor(factor) for factor in hidden.args):
        return None
    if graph.value(hidden.args[0]).shape != graph.value(hidden.args[1]).shape:
        return None
    for left, right in (hidden.args, reversed(hidden.args)):
        nodes = [*path, hidden]
        activated = _activation(_through(left, nodes), nodes)
        if activated is None:
            continue
        activation, before = activated
        gate, up = _projection(_through(before, nodes)), _projection(_through(right, nodes))
        if gate is None or up is None or gate.bias is not None or gate.x is not up.x:
            continue
        return _region(down, up, gate, activation, [*nodes, gate.node, up.node])
    return None


def _region(
    down: _Projection, up: _Projection, gate: _Projection | None, activation: str, inside: list[fx.Node]
) -> Region | None:
    nodes = graph.closed(inside, down.node)
    by_name = {
        "x": up.x,
        "w_up": up.weight,
        "w_down": down.weight,
        "w_gate": None if gate is None else gate.weight,
        "b_up": up.bias,
        "b_down": down.bias,
    }
    given = {name: node for name, node in by_name.items() if node is not None}
    one_dtype = len({graph.value(node).dtype for node in given.values()}) == 1
    if nodes is None or not one_dtype or any(node in nodes for node in given.values()):
        return None
    turned = {"w_up": up.transposed, "w_down": down.transposed, "w_gate": gate is not None and gate.transposed}
    output_shape = tuple(graph.value(down.node).shape)

    def bind(*values):
        arguments: dict[str, Any] = dict.fromkeys(by_name)
        for name, value in zip(given, values, strict=True):
            arguments[name] = value.t() if turned.get(name) else value
        arguments["x"] = arguments["x"].reshape(-1, arguments["x"].shape[-1])
        return {**arguments, "activation": activation}

    return Region(
        operation="fused_mlp",
        output=down.node,
        nodes=nodes,
        inputs=tuple(given.values()),
        bind=bind,
        finish=lambda y: y.view(output_shape),
    )


def _projection(node: Any) -> _Projection | None:
    if graph.is_call(node, aten.linear.default):
        x, weight, bias = (graph.argument(node, i, name) for i, name in enumerate(("input", "weight", "bias")))
        return _Projection(node, x, weight, bias, transposed=True)
    if graph.is_call(node, aten.mm.default, aten.matmul.default):
        x, weight = graph.argument(node, 0, "self"), graph.argument(node, 1, "other")
        if graph.value(weight).dim() == 2 and graph.value(x).dim() >= 2:
            return _Projection(node, x, weight, None, transposed=False)
    if graph.is_call(node, aten.addmm.default):
        bias, x, weight = (graph.argument(node, i, name) for i, name in enumerate(("self", "mat1", "mat2")))
        plain = graph.argument(node, 3, "beta", 1) == 1 and graph.argument(node, 4, "alpha", 1) == 1
        if plain and tuple(graph.value(bias).shape) == (graph.value(weight).shape[1],):
            return _Projection(node, x, weight, bias, transposed=False)
    return None


def _activation(node: Any, path: list[fx.Node]) -> tuple[str, Any] | None:
    """Name and argument of the activation that `node` computes, written out or not; its nodes are appended to `path`."""
    found = graph.pointwise(node)
    if found is None:
        return None
    source, nodes, function = found
    points = torch.linspace(-8, 8, 1001, dtype=torch.float64)
    values = function(points)
    for name, activation in reference.ACTIVATIONS.items():
        # far below what tells one activation from another, and above what the digits of a written constant leave out
        if torch.allclose(values, activation(points), rtol=1e-6, atol=1e-7):
            path.extend(nodes)
            return name, source
    return None


def _through(node: Any, path: list[fx.Node]) -> Any:
    """The node before any copies, dropouts that drop nothing, and views that keep the last dimension."""
    while graph.is_call(node, *_COPIES) or _drops_nothing(node) or _keeps_rows(node):
        path.append(node)
        node = node.args[0]
    return node


def _drops_nothing(node: Any) -> bool:
    if not graph.is_call(node, aten.dropout.default):
        return False
    return not graph.argument(node, 2, "train") or graph.argument(node, 1, "p") == 0


def _keeps_rows(node: Any) -> bool:
    if not graph.is_call(node, *_VIEWS):
        return False
    before, after = graph.value(node.args[0]).shape, graph.value(node).shape
    return len(before) > 0 and len(after) > 0 and before[-1] == after[-1] and math.prod(before) == math.prod(after)


OPERATION = Operation(
    name="fused_mlp",
    inputs=inputs,
    describe=describe,
    flops=flops,
    bytes=byte_count,
    sweep=(
        _shape(2048, 4096, 11008, gated=True),  # LLaMA 7B
        _shape(32, 64, 128, gated=True),
        _shape(512, 768, 2048, gated=True),
        _shape(512, 768, 3072, gated=True),  # LLaMA compact
        _shape(1024, 768, 3072, activation="gelu_tanh", bias=True),  # GPT-2
        _shape(4096, 768, 3072, activation="gelu", bias=True),  # BERT
        _shape(1024, 1024, 4096, activation="relu2"),
        _shape(4096, 4096, 14336, gated=True),
    ),
    sweep_cpu=(
        _shape(32, 48, 64, gated=True),
        _shape(64, 64, 96, activation="gelu_tanh", bias=True),
        _shape(16, 64, 128, activation="gelu", bias=True),
        _shape(48, 32, 64, activation="relu2"),
    ),
    edges=(
        _shape(1, 1, 1, gated=True),
        _shape(1, 64, 96, activation="gelu", bias=True),
        _shape(67, 31, 129, 33, gated=True),
        _shape(33, 1, 17, 1, activation="relu2", bias=True),
        _shape(5, 37, 1, 64, activation="gelu_tanh", gated=True, bias=True),
        _shape(0, 32, 64, gated=True),
        _shape(7, 0, 16, 8, activation="gelu", bias=True),
    ),
    draw=draw,
    match=match,
    rounds_inside=True,
    uses_dot=True,
)
