"""Kernels in the place of regions: a copy of a captured graph that calls them, counts the calls, and can be put back.

The model itself is never touched: the copy shares its parameters and buffers, and only the copy's graph is edited.
"""

import itertools
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from autokernel import graph
from autokernel.capture import Capture
from autokernel.errors import InputError
from autokernel.graph import Region, aten
from autokernel.pieces import Pieces

# They fail, or read other elements, when a tensor's strides are not those seen during capture.
_STRIDE_BOUND = {
    aten.view.default,
    aten.view.dtype,
    aten._unsafe_view.default,
    aten.as_strided.default,
    aten.unflatten.int,
    aten.view_as_complex.default,
    aten.view_as_real.default,
}
# Copies, whose result has the strides of their argument unless a memory format is named.
_COPIES = {aten.clone.default, aten._to_copy.default}


class SiteFault(InputError):
    """A kernel cannot stand where it was put, or was not called there; `site` is the place."""

    def __init__(self, site: "Site", what: str) -> None:
        super().__init__(f"{site.target} at {site.name} {what}")
        self.site = site


class Site:
    """One place in the graph where a kernel stands for a region: the function that the graph calls there.

    Each call takes the values of `region.inputs` and gives the value of `region.output`, with the shape, dtype and device
    seen during capture; SiteFault when the inputs are others, the kernel raises, or its result is something else.
    """

    def __init__(self, region: Region, kernel: Callable[..., Any], name: str, target: str) -> None:
        self.region = region
        self.kernel = kernel
        self.name = name  # where: the dotted path of the module
        self.target = target  # what was put there: the name of the target, or of the operation
        self.calls = 0
        # Results that were copied because later nodes need the captured strides. Each costs a pass over the result.
        self.copies = 0
        # Called with each value that leaves the site; for a diagnosis.
        self.watch: Callable[[Tensor], None] | None = None
        # The same as an operator of torch, for a compiler that traces the graph; None where nobody has registered one.
        self.operator: Callable[..., Tensor] | None = None
        # What the graph's generated code calls this function.
        self.__name__ = re.sub(r"\W+", "_", f"{target}_at_{name}")
        self._inputs = [
            (position, graph.value(node).shape, graph.value(node).dtype)
            for position, node in enumerate(region.inputs)
            if graph.is_tensor(node) and node.op != "get_attr"  # weights are the captured ones
        ]
        expected = graph.value(region.output)
        self._shape, self._dtype, self._device = expected.shape, expected.dtype, expected.device
        # Shape, strides, dtype and device of the value during capture.
        self.form = (tuple(expected.shape), tuple(expected.stride()), expected.dtype, expected.device)
        self._stride = expected.stride() if expected.numel() and needs_strides(region.output) else None

    def __call__(self, *inputs: Any) -> Tensor:
        """Values of `region.inputs` -> value of `region.output`."""
        if self.operator is not None and torch.compiler.is_compiling():
            return self.operator(*inputs)
        for position, shape, dtype in self._inputs:
            value = inputs[position]
            if value.shape != shape or value.dtype != dtype:
                what = f"gets {_form(value)} where {_form_of(shape, dtype)} was captured"
                raise SiteFault(self, f"{what}: call the model with inputs of the captured shape and dtype")
        self.calls += 1
        try:
            result = self.region.finish(self.kernel(**self.region.bind(*inputs)))
        except torch.OutOfMemoryError:  # says nothing about the kernel
            raise
        except Exception as fault:  # whatever a kernel raises is the kernel's fault
            first = (str(fault).strip().splitlines() or [""])[0]
            raise SiteFault(self, f"raised {type(fault).__name__} ({first[:300]}): correct the kernel") from fault
        self._check(result)
        if self._stride is not None and _strides_differ(result, self._stride):
            result = torch.empty_strided(self._shape, self._stride, dtype=self._dtype, device=self._device).copy_(result)
            self.copies += 1
        if self.watch is not None:
            self.watch(result)
        return result

    def _check(self, result: Any) -> None:
        if not isinstance(result, Tensor):
            raise SiteFault(self, f"returned a {type(result).__name__}, no tensor: correct the kernel")
        if result.shape != self._shape or result.dtype != self._dtype or result.device.type != self._device.type:
            found = f"{_form(result)} on {result.device.type}"
            expected = f"{_form_of(self._shape, self._dtype)} on {self._device.type}"
            raise SiteFault(self, f"gives {found} where the model needs {expected}: correct the kernel")

    def __repr__(self) -> str:
        return f"<{self.target} at {self.name}, {self.calls} calls>"


class Substitution:
    """A model with kernels in it.

    `module` takes the model's arguments and shares its weights; `sites` are the places, in graph order.
    """

    def __init__(self, captured: Capture | Pieces, modules: dict[Capture, fx.GraphModule], sites: tuple[Site, ...]) -> None:
        module = captured.runner(modules)
        assert isinstance(module, nn.Module)
        self.captured = captured
        self.module = module
        self.sites = sites
        self._modules = modules

    def reset_counts(self) -> None:
        """Set the calls and copies of every site to 0."""
        for site in self.sites:
            site.calls = site.copies = 0

    def check_called(self, forwards: int = 1) -> None:
        """SiteFault unless every site was called once in each of the forward passes since the counts were reset."""
        for site in self.sites:
            if site.calls == 0:
                raise SiteFault(site, "was put into the model but never called: it does not take part in the output")
            if site.calls != forwards:
                raise SiteFault(site, f"was called {site.calls} times in {forwards} forward passes, not once in each")

    def restore(self) -> None:
        """Take the kernels out again: `module` computes what was captured, node by node."""
        for part, module in self._modules.items():
            module.graph, _ = _copy(part.module.graph)


def substitute(
    captured: Capture | Pieces,
    kernels: Mapping[Region, Callable[..., Any]],
    targets: Mapping[Region, str] | None = None,
) -> Substitution:
    """A copy of what was captured in which each region of `kernels` is one call of its kernel.

    `targets` names what is put there, for messages and code; by default the operation. Nodes that nothing needs any more, such
    as a mask, go too. ValueError for regions of another capture or ones that overlap.
    """
    unknown = set(kernels) - set(captured.regions)
    if unknown:
        raise ValueError(f"{len(unknown)} regions are not of this capture, such as that of {next(iter(unknown)).output}")
    names, sites = captured.names, []
    modules = {}
    for part in captured.parts:
        chosen = [region for region in part.regions if region in kernels]
        found = [
            Site(region, kernels[region], names[region], targets[region] if targets is not None else region.operation)
            for region in chosen
        ]
        modules[part] = _with_sites(part, found)
        sites += found
    return Substitution(captured, modules, tuple(sites))


def _with_sites(captured: Capture, sites: Iterable[Site]) -> fx.GraphModule:
    """A copy of the graph that calls the sites."""
    new_graph, copies = _copy(captured.module.graph)
    # Built before the edit, so that it holds every weight and buffer that `restore` needs.
    module = fx.GraphModule(captured.module, new_graph)
    replaced: set[fx.Node] = set()  # nodes of the captured graph
    stale: set[fx.Node] = set()  # their copies
    for site in sites:
        region = site.region
        if not replaced.isdisjoint(region.nodes):
            raise ValueError(f"the region of {region.output} overlaps another one")
        replaced.update(region.nodes)
        stale.update(copies[node] for node in region.nodes)
        old = copies[region.output]
        call = _call_site(new_graph, site, old, [copies[node] for node in region.inputs])
        old.replace_all_uses_with(call)
        copies[region.output] = call  # an input of a later region may be the value of this one
    _erase_unneeded(new_graph, stale)
    new_graph.lint()
    module.recompile()
    return module


def observed(captured: Capture | Pieces, probes: Mapping[Region, Callable[..., None]]) -> Callable[..., Any]:
    """The model with a call of `probe(output, *inputs)` after each region; it computes the same."""
    numbers = itertools.count()
    modules = {}
    for part in captured.parts:
        new_graph, copies = _copy(part.module.graph)
        modules[part] = fx.GraphModule(part.module, new_graph)
        for region in part.regions:
            if region not in probes:
                continue

            def call(*values: Any, probe: Callable[..., None] = probes[region]) -> None:
                probe(*values)

            call.__name__ = f"probe_{next(numbers)}"
            values = [copies[node] for node in (region.output, *region.inputs)]
            with new_graph.inserting_after(_last(new_graph, values)):
                new_graph.call_function(call, tuple(values))
        modules[part].recompile()
    return captured.runner(modules)


def needs_strides(node: fx.Node) -> bool:
    """Whether a later node would fail, or read other elements, if the value had other strides than during capture.

    Follows views and elementwise operators, whose results inherit the strides, up to operators that take any (a product,
    `reshape`, `contiguous`).
    """
    seen: set[fx.Node] = set()
    pending = list(node.users)
    while pending:
        user = pending.pop()
        if user in seen:
            continue
        seen.add(user)
        if user.target in _STRIDE_BOUND:
            return True
        if _keeps_strides(user):
            pending.extend(user.users)
    return False


def _keeps_strides(node: fx.Node) -> bool:
    if node.target in _COPIES:
        return node.kwargs.get("memory_format") in (None, torch.preserve_format)
    pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
    return pointwise or node.target is operator.getitem or _is_view(node)


def _is_view(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    if schema is None or node.target in (aten.contiguous.default, aten.reshape.default):
        return False
    return bool(schema.returns) and all(result.alias_info is not None for result in schema.returns)


def _strides_differ(result: Tensor, stride: tuple[int, ...]) -> bool:
    # The step along a dimension of size 1 is never taken.
    steps = zip(result.shape, result.stride(), stride, strict=True)
    return any(size > 1 and ours != captured for size, ours, captured in steps)


def _copy(source: fx.Graph) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """A copy of a graph with its signature (the pytrees that go in and out), and old node -> new node."""
    new_graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    output = new_graph.graph_copy(source, copies)
    new_graph.output(output)
    new_graph.set_codegen(source._codegen)  # holds the signature alone, and is never written
    return new_graph, copies


def _last(in_graph: fx.Graph, nodes: Iterable[fx.Node]) -> fx.Node:
    wanted = set(nodes)
    return next(node for node in reversed(in_graph.nodes) if node in wanted)


def _call_site(new_graph: fx.Graph, site: Site, old: fx.Node, inputs: list[fx.Node]) -> fx.Node:
    """A call of `site` right after `old`, which it replaces, or after the last of the inputs."""
    with new_graph.inserting_after(_last(new_graph, (old, *inputs))):
        call = new_graph.create_node("call_function", site, tuple(inputs), {}, name=site.__name__)
    call.meta = {key: old.meta[key] for key in ("val", "nn_module_stack", "stack_trace") if key in old.meta}
    return call


def _erase_unneeded(new_graph: fx.Graph, suspects: set[fx.Node]) -> None:
    """Erase those of the suspects, and of what only they needed, that have no effect besides a value nobody uses."""
    for node in reversed(new_graph.nodes):
        if node not in suspects or graph.users(node) or not _is_pure(node):
            continue
        for remark in list(node.users):  # of the compiler, about the value
            new_graph.erase_node(remark)
        suspects.update(node.all_input_nodes)
        new_graph.erase_node(node)


def _is_pure(node: fx.Node) -> bool:
    if node.op == "get_attr" or node.target is operator.getitem:
        return True
    schema = getattr(node.target, "_schema", None)
    return node.op == "call_function" and schema is not None and not schema.is_mutable


def _form(value: Any) -> str:
    return _form_of(value.shape, value.dtype) if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _form_of(shape: Iterable[int], dtype: torch.dtype) -> str:
    return f"({', '.join(str(int(size)) for size in shape)}) {str(dtype).removeprefix('torch.')}"
