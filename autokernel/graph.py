"""Reading a captured graph: what an operation's `match` needs. Imports only torch.

A captured graph is the flat ATen graph of `torch.export`: `get_attr` nodes for weights, `call_function` nodes for ATen
operators, and at each node `meta["val"]` (a fake tensor with shape, strides and dtype) and `meta["nn_module_stack"]`.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

aten = torch.ops.aten

# Operators that neither compute nor move data: a pattern may look through them.
_NOTES = {aten._assert_tensor_metadata.default}
_IDENTITIES = {aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default}
_CASTS = {aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten._to_copy.default}
_VIEWS = {aten.view.default, aten.reshape.default, aten._unsafe_view.default}
_POINTWISE = {
    *(aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.add.Scalar, aten.mul.Scalar),
    *(aten.pow.Tensor_Scalar, aten.square.default, aten.neg.default, aten.exp.default, aten.tanh.default, aten.erf.default),
    *(aten.sigmoid.default, aten.relu.default, aten.silu.default, aten.gelu.default),
}


def _unchanged(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Region:
    """A part of a graph that computes one operation, and how to call a kernel in its place.

    The kernel is called as `finish(kernel_fn(**bind(*inputs)))`: `bind` and `finish` may only make views.
    """

    operation: str
    # The node whose value the kernel produces; the last of `nodes`.
    output: fx.Node
    # Every node that is needed for the output alone, in graph order. Views, casts and the arithmetic in between.
    nodes: tuple[fx.Node, ...]
    # The nodes outside that feed the region.
    inputs: tuple[fx.Node, ...]
    # Values of `inputs` -> arguments of kernel_fn, by name.
    bind: Callable[..., dict[str, Any]]
    # What kernel_fn returns -> the value of `output`.
    finish: Callable[[Any], Any] = _unchanged
    # Those of `nodes` whose module names the place; empty: all of them.
    named_by: tuple[fx.Node, ...] = ()


def calls(graph_module: fx.GraphModule, *targets: Any) -> Iterator[fx.Node]:
    """The nodes that call one of these ATen overloads, in graph order."""
    wanted = set(targets)
    for node in graph_module.graph.nodes:
        if node.op == "call_function" and node.target in wanted:
            yield node


def is_call(node: Any, *targets: Any) -> bool:
    """Whether `node` is a graph node that calls one of these ATen overloads."""
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


def value(node: Any) -> Any:
    """The fake tensor (or scalar) that the node produced during capture."""
    return node.meta.get("val")


def is_tensor(node: Any) -> bool:
    """Whether `node` is a graph node that produces one tensor."""
    return isinstance(node, fx.Node) and isinstance(value(node), torch.Tensor)


def argument(node: Any, position: int, name: str, default: Any = None) -> Any:
    """An argument of a call, whether it was given by position or by name."""
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(name, default)


def users(node: fx.Node) -> list[fx.Node]:
    """The nodes that use the value, notes for the compiler left out."""
    return [user for user in node.users if user.target not in _NOTES]


def through_casts(node: Any, path: list[fx.Node] | None = None) -> Any:
    """The node before any chain of casts and aliases; the nodes passed are appended to `path`."""
    while is_call(node, *_CASTS, *_IDENTITIES):
        if path is not None:
            path.append(node)
        node = node.args[0]
    return node


def closed(nodes: Iterable[fx.Node], output: fx.Node) -> tuple[fx.Node, ...] | None:
    """`nodes` in graph order, or None when a value inside is also used outside (the region cannot be replaced).

    Notes about the values inside are taken along.
    """
    inside = set(nodes) | {output}
    for node in list(inside):
        inside.update(user for user in node.users if user.target in _NOTES and node is not output)
    for node in inside:
        if node is not output and any(user not in inside for user in node.users):
            return None
    return tuple(node for node in output.graph.nodes if node in inside)


def with_residual(region: Region) -> Region | None:
    """The region and the addition to its value that follows, whose other addend is the argument `residual` (M, N).

    None where the value has another use, or the addend another form. Views in between leave the last dimension as it is.
    """
    node, path = region.output, []
    while not is_call(node, aten.add.Tensor):
        if len(users(node)) != 1:
            return None
        before, node = node, users(node)[0]
        path.append(node)
        if not is_call(node, aten.add.Tensor, *_VIEWS) or value(node).shape[-1:] != value(before).shape[-1:]:
            return None
    addends = [argument for argument in node.args if argument is not before]
    forms = {(value(n).shape, value(n).dtype) for n in (before, node, *addends) if is_tensor(n)}
    nodes = closed((*region.nodes, *path), node)
    if len(addends) != 1 or not is_tensor(addends[0]) or len(forms) > 1 or node.kwargs.get("alpha", 1) != 1 or nodes is None:
        return None
    shape = tuple(value(node).shape)

    def bind(*values: Any) -> dict[str, Any]:
        *rest, addend = values
        return {**region.bind(*rest), "residual": addend.reshape(-1, addend.shape[-1])}

    inputs: tuple[Any, ...] = (*region.inputs, addends[0])
    return Region(region.operation, node, nodes, inputs, bind, lambda result: result.view(shape), region.nodes)


def closed_part(nodes: Iterable[fx.Node], output: fx.Node) -> tuple[fx.Node, ...]:
    """`nodes` in graph order without those whose value is also used outside: they stay, and feed others too."""
    inside = set(nodes)
    while True:
        shared = {n for n in inside if n is not output and any(u not in inside for u in users(n))}
        if not shared:
            result = closed(inside, output)
            assert result is not None
            return result
        inside -= shared


def site(node: fx.Node) -> str:
    """Dotted path of the innermost module that the node was captured in, e.g. `layers.3.attention.wq`; "" for the model."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = next(reversed(list(stack.values())))[0]
    return path.removeprefix("L['self']").removeprefix(".")


def pointwise(
    output: Any, limit: int = 16
) -> tuple[fx.Node, tuple[fx.Node, ...], Callable[[torch.Tensor], torch.Tensor]] | None:
    """A function of one tensor, element by element: the node of that tensor, those that compute it, and the function.

    None when `output` is no such function, or one of more than `limit` nodes. Casts count as computing nothing.
    """
    inside: set[fx.Node] = set()
    sources: set[fx.Node] = set()
    stack = [output]
    while stack:
        node = stack.pop()
        if node in inside or node in sources:
            continue
        is_cast = through_casts(node) is not node
        if not is_tensor(node) or not value(node).is_floating_point() or not (is_cast or is_call(node, *_POINTWISE)):
            sources.add(node)
            continue
        inside.add(node)
        stack.extend(node.all_input_nodes)
        if len(inside) > limit:
            return None
    if len(sources) != 1 or not inside:
        return None
    (source,) = sources
    if not is_tensor(source) or any(value(node).shape != value(source).shape for node in inside):
        return None
    order = tuple(node for node in source.graph.nodes if node in inside)

    def function(x: torch.Tensor) -> torch.Tensor:
        results: dict[fx.Node, torch.Tensor] = {source: x}
        for node in order:
            before = through_casts(node)
            if before is not node:
                results[node] = results[node.args[0]]  # type: ignore[index]
                continue
            args: Any = map_aggregate(node.args, lambda item: results[item] if isinstance(item, fx.Node) else item)
            results[node] = node.target(*args, **node.kwargs)  # type: ignore[operator]
        return results[output]

    return source, order, function


def constant(node: Any, limit: int = 1 << 26) -> torch.Tensor | None:
    """The tensor that a node always has, computed on the CPU, or None when it depends on an input or a weight.

    This is how a mask that only says "causal" is told from one with content. Gives up above `limit` elements.
    """
    if not is_tensor(node):
        return None
    order: list[fx.Node] = []
    seen: set[fx.Node] = set()
    stack: list[tuple[fx.Node, bool]] = [(node, False)]
    while stack:
        current, ready = stack.pop()
        if ready:
            order.append(current)
            continue
        if current in seen:
            continue
        seen.add(current)
        if current.op != "call_function" or (is_tensor(current) and value(current).numel() > limit):
            return None
        stack.append((current, True))
        stack.extend((parent, False) for parent in current.all_input_nodes)
    results: dict[fx.Node, Any] = {}
    cpu = torch.device("cpu")

    def on_cpu(item: Any) -> Any:
        if isinstance(item, fx.Node):
            return results[item]
        return cpu if isinstance(item, torch.device) else item

    for current in order:
        if current.target in _NOTES:
            continue
        args: Any = map_aggregate(current.args, on_cpu)
        kwargs: Any = map_aggregate(current.kwargs, on_cpu)
        if "rand" in str(current.target):
            return None
        results[current] = current.target(*args, **kwargs)  # type: ignore[operator]
    return results[node]
