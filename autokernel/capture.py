"""A model as a flat ATen graph, and the regions of that graph that compute a known operation.

Every stage that looks inside a model starts here, so that what is profiled, extracted and replaced is the same region.
"""

import inspect
import json
import re
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from autokernel import graph, ops
from autokernel.graph import Region
from autokernel.hardware import dtype_name
from autokernel.state import TensorSpec

# What a starter kernel can be asked to read. Anything else (float64, complex, bool) stays with PyTorch.
_FLOATING = (torch.float16, torch.bfloat16, torch.float32)
_READABLE = (*_FLOATING, torch.int64)

_LONGEST_REASON = 300
_NUMBER = r"(?:(?<=\.)|^)\d+(?=\.|$|#)"  # a part of a dotted path that is a number


class NotCapturable(Exception):
    """The model cannot be turned into a graph; `reason` says why in one line."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class Refusal:
    """A match that was not kept although nothing larger covers it, and why."""

    region: Region
    reason: str


@dataclass(frozen=True, eq=False)
class Capture:
    """The graph of a model and the operations found in it.

    `module` takes the model's own arguments and gives its outputs, with the model's own weights (no copy). It holds for
    inputs of the captured shapes.
    """

    module: fx.GraphModule
    # Disjoint, in the order of their outputs in the graph; each can be replaced by one call at the place of its output.
    regions: tuple[Region, ...]
    refused: tuple[Refusal, ...] = ()
    reason: ClassVar[str] = ""  # why it is not one graph

    @property
    def parts(self) -> "tuple[Capture, ...]":
        """The graphs that the model consists of: this one."""
        return (self,)

    @property
    def names(self) -> dict[Region, str]:
        """A name for each region, as of `site_names`."""
        return site_names(self.regions)

    def runner(self, modules: "Mapping[Capture, Callable[..., Any]]") -> Callable[..., Any]:
        """The model with something in place of its graph."""
        return modules[self]


@dataclass(frozen=True)
class Call:
    """What a region asks of a kernel: two calls with equal `key` can share one kernel, tuned on one set of strides."""

    operation: str
    shape: dict[str, Any]
    tensors: dict[str, TensorSpec]  # by argument name, in the order of the signature
    dtype: str  # of the first tensor

    @property
    def key(self) -> tuple[Any, ...]:
        """Hashable, equal for equal calls."""
        return (self.operation, self.dtype, json.dumps(self.shape, sort_keys=True), tuple(self.tensors.items()))


def capture(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Capture:
    """Export the model for these inputs and find the operations in its graph; NotCapturable if it cannot be exported."""
    try:
        with torch.no_grad():
            exported = torch.export.export(model, tuple(args), dict(kwargs), strict=False)
            # The check of the inputs would be one more node that computes nothing.
            module = exported.module(check_guards=False)
    except Exception as fault:  # export runs the model's own code and reports in many types: each means "not capturable"
        raise NotCapturable(first_line(fault)) from fault
    assert isinstance(module, fx.GraphModule)
    regions, refused = select(module, (region for name in ops.names() for region in ops.get(name).match(module)))
    return Capture(module, regions, refused)


def select(module: fx.GraphModule, candidates: Iterable[Region]) -> tuple[tuple[Region, ...], tuple[Refusal, ...]]:
    """Disjoint, replaceable regions: the one with more computing nodes wins an overlap, then the earlier one."""
    order = {node: position for position, node in enumerate(module.graph.nodes)}
    mutations = [node for node in order if _mutates(node)]
    candidates = sorted(candidates, key=lambda region: (-_work(region), order[region.output]))
    kept: list[Region] = []
    refused: list[Refusal] = []
    taken: set[fx.Node] = set()  # in a kept region
    hidden: set[fx.Node] = set()  # the same without the outputs: gone once the regions are replaced
    needed: set[fx.Node] = set()  # read by a kept region
    for region in candidates:
        inner = set(region.nodes) - {region.output}
        if taken.intersection(region.nodes) or hidden.intersection(region.inputs) or needed & inner:
            continue
        reason = _why_not(region, order, mutations)
        if reason is not None:
            refused.append(Refusal(region, reason))
            continue
        kept.append(region)
        taken.update(region.nodes)
        hidden |= inner
        needed.update(region.inputs)
    kept.sort(key=lambda region: order[region.output])
    return tuple(kept), tuple(refused)


def call_of(region: Region) -> Call:
    """The call that a kernel gets in place of this region, from the shapes seen during capture; no data is touched."""
    operation = ops.get(region.operation)
    arguments = _arguments(region)
    tensors = {name: _spec(tensor) for name, tensor in arguments.items() if isinstance(tensor, Tensor)}
    return Call(
        operation=region.operation,
        shape=dict(operation.describe(arguments)),
        tensors=tensors,
        dtype=next(iter(tensors.values())).dtype,
    )


def site_names(regions: Iterable[Region]) -> dict[Region, str]:
    """A name for each region: the innermost module that holds all of it, e.g. `layers.3.attention.wq`.

    The second time that an operation occurs in a module `#2` is appended, and so on. "model" is the model itself.
    """
    return numbered(
        {
            region: common_path([node_site(n) for n in region.named_by or region.nodes if n.op == "call_function"])
            for region in regions
        }
    )


def numbered(paths: Mapping[Region, str]) -> dict[Region, str]:
    """The names of `site_names` from the paths of the modules."""
    names: dict[Region, str] = {}
    seen: dict[tuple[str, str], int] = defaultdict(int)
    for region, path in paths.items():
        seen[region.operation, path] += 1
        repeat = seen[region.operation, path]
        names[region] = (path or "model") + (f"#{repeat}" if repeat > 1 else "")
    return names


def node_site(node: fx.Node) -> str:
    """Dotted path of the module that a node was captured in; "" for the model itself."""
    return re.sub(r"@\d+", "", graph.site(node))  # a module called again is captured under its name and `@1`


def shortened(sites: Sequence[str], most: int = 4) -> str:
    """The sites in one line: `layers.0..11.attention.wq`; after `most` such names only how many sites are left."""
    groups: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for site in sites:
        numbers = tuple(re.findall(_NUMBER, site))
        groups.setdefault(tuple(re.split(_NUMBER, site)), []).append(numbers)
    names = []  # with how many sites each stands for
    for text, found in groups.items():
        columns = [list(dict.fromkeys(column)) for column in zip(*found, strict=True)]
        if sum(len(column) > 1 for column in columns) <= 1:
            names.append((_filled(text, [_runs(column) for column in columns]), len(found)))
        else:
            names += [(_filled(text, numbers), 1) for numbers in found]
    left = sum(count for _, count in names[most:])
    return ", ".join(name for name, _ in names[:most]) + (f" and {left} more" if left else "")


def _filled(text: Sequence[str], numbers: Sequence[str]) -> str:
    return "".join(part + number for part, number in zip(text, [*numbers, ""], strict=True))


def _runs(numbers: Sequence[str]) -> str:
    """`0..3,7` for 0, 1, 2, 3, 7."""
    runs: list[list[int]] = []
    for number in map(int, numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in runs)


def common_path(paths: Sequence[str]) -> str:
    """The innermost module that holds all of these; "" for the model itself."""
    split = [path.split(".") for path in paths]
    shared = []
    for parts in zip(*split, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)


def _arguments(region: Region) -> dict[str, Any]:
    """The kernel's arguments as fake tensors, in the order of the signature, left-out ones at their default."""
    values = [graph.value(node) for node in region.inputs]
    mode = next(value.fake_mode for value in values if isinstance(value, FakeTensor))
    with mode, torch.no_grad():
        arguments = region.bind(*values)
    bound = inspect.signature(ops.get(region.operation).reference).bind(**arguments)
    bound.apply_defaults()
    return dict(bound.arguments)


def _spec(tensor: Tensor) -> TensorSpec:
    return TensorSpec(
        shape=tuple(int(size) for size in tensor.shape),
        stride=tuple(int(step) for step in tensor.stride()),
        dtype=dtype_name(tensor.dtype),
    )


def _why_not(region: Region, order: Mapping[fx.Node, int], mutations: Sequence[fx.Node]) -> str | None:
    """Why one call at the place of the output cannot stand for the region; None if it can."""
    inside = set(region.nodes)
    place = order[region.output]
    if region.output not in inside or inside.intersection(region.inputs):
        return "its inputs are part of it"
    for node in region.nodes:
        if node is not region.output and any(user not in inside for user in graph.users(node)):
            return f"{node.name} inside it is also used outside"
    # An input that is computed after the output could only come from the output itself: a cycle.
    late = [node.name for node in (*region.inputs, *region.nodes) if order[node] > place and graph.is_tensor(node)]
    if late:
        return f"{late[0]} is computed after its output"
    start = min(order[node] for node in region.nodes)
    if any(start < order[node] < place and node not in inside for node in mutations):
        return "a tensor is written in place while it runs"
    return _why_no_kernel(region)


def _why_no_kernel(region: Region) -> str | None:
    """Why a kernel could not be called with plain tensors and give what the region gives; None if it could."""
    try:
        arguments = _arguments(region)
        tensors = [argument for argument in arguments.values() if isinstance(argument, Tensor)]
        if not tensors or tensors[0].dtype not in _FLOATING:
            return f"no kernel computes in {tensors[0].dtype if tensors else 'no dtype'}"
        for tensor in tensors:
            if tensor.dtype not in _READABLE or tensor.layout is not torch.strided:
                return f"no kernel reads {tensor.layout} {tensor.dtype}"
        mode = next(tensor.fake_mode for tensor in tensors if isinstance(tensor, FakeTensor))
        with mode, torch.no_grad():
            result = region.finish(ops.get(region.operation).reference(**arguments))
    except (RuntimeError, TypeError, ValueError, StopIteration) as fault:
        return f"the operation refuses its arguments ({first_line(fault)})"
    expected = graph.value(region.output)
    if result.shape != expected.shape or result.dtype != expected.dtype:
        return (
            f"the operation gives {tuple(result.shape)} {result.dtype} where the model has "
            f"{tuple(expected.shape)} {expected.dtype}"
        )
    return None


def _work(region: Region) -> int:
    """How many nodes of the region compute something: views and casts do not."""
    return sum(1 for node in region.nodes if node.op == "call_function" and not _only_looks(node))


def _only_looks(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.returns:  # Python's getitem, or a note for the compiler
        return True
    return graph.through_casts(node) is not node or all(result.alias_info is not None for result in schema.returns)


def _mutates(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def first_line(fault: BaseException) -> str:
    """What it is and the first line of what it says."""
    text = " ".join((str(fault).strip() or type(fault).__name__).splitlines()[0].split())
    return textwrap.shorten(f"{type(fault).__name__}: {text}", _LONGEST_REASON, placeholder=" ...")
