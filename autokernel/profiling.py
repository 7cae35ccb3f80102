"""Where the time of one forward pass goes: every kernel's time, owned exactly once.

A captured graph is run node by node, each inside a profiler range that carries its owner. On a GPU a kernel belongs to the
range during which it was launched; on a CPU an operator belongs to the range during which it started. So it does not matter
by whom a kernel was launched (ATen, cuBLAS, Triton), and an operator and its kernels are never both counted.
"""

import os
import statistics
import time
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils import _pytree as pytree

from autokernel.capture import Capture
from autokernel.pieces import Pieces
from autokernel.state import KernelTime

_LABEL = "autokernel range "
_COMPUTES = ("call_function", "call_method", "call_module")
# What the driver calls start with: CUDA's runtime and driver, and HIP's.
_DRIVER_CALLS = ("cuda", "cu", "hip")
# Time whose launch cannot be found is a fault of the profiler, not a property of the model.
_LARGEST_LOST_SHARE = 0.005

WARM_UPS = {"cuda": 3, "cpu": 1}
PASSES = {"cuda": 5, "cpu": 3}
WALL_CALLS = {"cuda": 10, "cpu": 3}


@dataclass(frozen=True)
class Span:
    """A stretch of the processor's time that belongs to one owner; spans do not overlap."""

    start: float
    end: float
    owner: Hashable
    passage: int  # which forward pass, from 0


@dataclass(frozen=True)
class Work:
    """One kernel on a GPU, or one operator on a CPU (without the operators inside it)."""

    name: str
    time_us: float
    at: float | None  # when it was launched, on the processor's clock; None: the launch was not recorded


Owned = dict[Hashable, tuple[KernelTime, ...]]


def run_graph(capture: Capture | Pieces, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device) -> Owned:
    """Time of one forward pass by owner: a `Region`, or a node outside every region; None for work outside every node."""
    owners: dict[fx.Node, Hashable] = {node: region for region in capture.regions for node in region.nodes}
    nodes: list[fx.Node] = []
    runners: dict[Capture, _Ranges] = {}
    for part in capture.parts:
        runners[part] = _Ranges(part.module, len(nodes))
        nodes += part.module.graph.nodes
    run = capture.runner({part: runner.call for part, runner in runners.items()})

    def forward(passage: int) -> None:
        for runner in runners.values():
            runner.passage = passage
        run(*args, **kwargs)

    events = _profiled(forward, device)
    spans = []
    for event in _ranges_in(events):
        passage, index = (int(part) for part in event.name.removeprefix(_LABEL).split())
        spans.append(Span(event.time_range.start, event.time_range.end, owners.get(nodes[index], nodes[index]), passage))
    passes = PASSES[device.type]
    expected = passes * sum(node.op in _COMPUTES for node in nodes)
    if len(spans) != expected:
        raise RuntimeError(f"the profiler recorded {len(spans)} of {expected} ranges: profile again")
    return attribute(_work_in(events, device), spans, passes)


class _Ranges(fx.Interpreter):
    """Runs each node that computes in a profiler range named after the forward pass and the node's number, from `first`."""

    def __init__(self, module: fx.GraphModule, first: int) -> None:
        super().__init__(module)
        self.passage = 0
        self._number = {node: first + place for place, node in enumerate(module.graph.nodes)}

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """The module's arguments; its results as a flat sequence."""
        # as the placeholders take them: export flattens (args, kwargs) in this order
        return self.run(*pytree.tree_leaves((args, kwargs)), enable_io_processing=False)

    def run_node(self, n: fx.Node) -> Any:
        if n.op not in _COMPUTES:
            return super().run_node(n)
        with record_function(f"{_LABEL}{self.passage} {self._number[n]}"):
            return super().run_node(n)


def run_operators(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device
) -> tuple[Owned, dict[Hashable, int]]:
    """The same for a model without a graph, and how often each owner is called in one pass.

    The owner is the name of the outermost operator, None outside of all.
    """

    def forward(passage: int) -> None:
        with record_function(f"{_LABEL}{passage}"):
            model(*args, **kwargs)

    events = _profiled(forward, device)
    passes = sorted(event.time_range.start for event in _ranges_in(events))
    if len(passes) != PASSES[device.type]:
        raise RuntimeError(f"the profiler recorded {len(passes)} of {PASSES[device.type]} ranges: profile again")
    spans = []
    end = 0.0
    for event in sorted((e for e in events if _is_operator(e)), key=lambda e: (e.time_range.start, -e.time_range.end)):
        if event.time_range.start >= end:  # not inside the one before
            end = event.time_range.end
            spans.append(Span(event.time_range.start, end, event.name, bisect_right(passes, event.time_range.start) - 1))
    calls = Counter(span.owner for span in spans)
    return attribute(_work_in(events, device), spans, len(passes)), {
        owner: max(1, round(count / len(passes))) for owner, count in calls.items()
    }


def attribute(work: Iterable[Work], spans: Iterable[Span], passes: int) -> Owned:
    """Give each piece of work to the span that it was launched in, or to None; the median over the passes, by kernel name.

    RuntimeError when the launches of more than 0.5% of the time are unknown.
    """
    ordered = sorted(spans, key=lambda span: span.start)
    starts = [span.start for span in ordered]
    # owner -> kernel name -> time in each pass
    times: dict[Hashable, dict[str, list[float]]] = defaultdict(lambda: defaultdict(lambda: [0.0] * passes))
    counts: dict[tuple[Hashable, str], int] = defaultdict(int)
    total = lost = 0.0
    for piece in work:
        total += piece.time_us
        lost += piece.time_us if piece.at is None else 0
        before = -1 if piece.at is None else bisect_right(starts, piece.at) - 1
        if before >= 0 and piece.at is not None and piece.at <= ordered[before].end:
            span = ordered[before]
            times[span.owner][piece.name][span.passage] += piece.time_us
            counts[span.owner, piece.name] += 1
        else:  # of no known pass: an equal part of each
            by_pass = times[None][piece.name]
            by_pass[:] = [earlier + piece.time_us / passes for earlier in by_pass]
            counts[None, piece.name] += 1
    if lost > _LARGEST_LOST_SHARE * total:
        raise RuntimeError(f"the profiler did not record the launch of {lost / total:.1%} of the time: profile again")
    return {
        owner: tuple(
            KernelTime(name=name, count=max(1, round(counts[owner, name] / passes)), time_us=statistics.median(by_pass))
            for name, by_pass in by_name.items()
        )
        for owner, by_name in times.items()
    }


def wall_us(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device) -> float:
    """Median time of one forward pass of the model as it is, in microseconds, from call to synchronised result."""
    times = []
    with torch.no_grad():
        for _ in range(WALL_CALLS[device.type]):
            _synchronize(device)
            start = time.perf_counter()
            model(*args, **kwargs)
            _synchronize(device)
            times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def _profiled(forward: Callable[[int], None], device: torch.device) -> Sequence[Any]:
    """The events of `PASSES` calls, after `WARM_UPS` calls outside the profiler."""
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    else:  # where there is no GPU, the profiler's own log says so in lines that read like errors
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with torch.no_grad():
        for _ in range(WARM_UPS[device.type]):
            forward(0)
        _synchronize(device)
        with profile(activities=activities) as profiler:
            for passage in range(PASSES[device.type]):
                forward(passage)
            _synchronize(device)
    events = profiler.events()
    assert events is not None
    return events


def _work_in(events: Sequence[Any], device: torch.device) -> list[Work]:
    if device.type == "cpu":
        return [Work(e.name, e.self_cpu_time_total, e.time_range.start) for e in events if _is_operator(e)]
    # A kernel and the driver call that launched it share a correlation id. Operators have ids of their own, which can
    # be the same numbers.
    launches = {e.id: e.time_range.start for e in events if _is_driver_call(e)}
    # Copies and fills count as kernels. Ranges are drawn on the GPU's timeline too: they are no work.
    kernels = [
        Work(e.name, e.time_range.elapsed_us(), launches.get(e.id))
        for e in events
        if e.device_type == DeviceType.CUDA and not e.is_user_annotation and not e.name.startswith(_LABEL)
    ]
    if not kernels:
        raise RuntimeError("the profiler recorded no kernel: another profiler may hold the GPU, or its driver forbids tracing")
    return kernels


def _ranges_in(events: Sequence[Any]) -> list[Any]:
    return [event for event in events if event.name.startswith(_LABEL) and event.device_type == DeviceType.CPU]


def _is_driver_call(event: Any) -> bool:
    on_cpu = event.device_type == DeviceType.CPU and not event.is_user_annotation
    return on_cpu and event.name.startswith(_DRIVER_CALLS) and "::" not in event.name


def _is_operator(event: Any) -> bool:
    """Whether it is an operator of PyTorch's dispatcher (`aten::linear`), not a range, a driver call or the profiler's."""
    return event.device_type == DeviceType.CPU and "::" in event.name and not event.is_user_annotation


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
