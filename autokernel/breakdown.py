"""The rows of a profile: equal calls together, each against the roofline of this GPU. Shares sum to 1."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, TypeVar

from torch import fx

from autokernel import ops
from autokernel.capture import Call, Capture, call_of, node_site
from autokernel.graph import Region
from autokernel.hardware import DTYPES, Limits, dtype
from autokernel.pieces import Pieces
from autokernel.profiling import Owned
from autokernel.state import KernelTime, ProfileRow, UnmatchedRow

OUTSIDE = "outside every operator"

Timed = TypeVar("Timed", KernelTime, ProfileRow, UnmatchedRow)


def of_graph(
    capture: Capture | Pieces, owned: Owned, limits: Limits | None
) -> tuple[tuple[ProfileRow, ...], tuple[UnmatchedRow, ...], float]:
    """(rows, unmatched rows, total in us) of a captured model, both by time, largest first. `limits` None: unmeasured."""
    total = _total(owned)
    names = capture.names
    calls = {region: call_of(region) for region in capture.regions}
    groups = _grouped(capture.regions, lambda region: calls[region].key)
    rows = [
        _row(
            calls[group[0]],
            tuple(names[region] for region in group),
            _kernels(owned, group),
            total,
            limits,
        )
        for group in groups
    ]
    outside = [owner for owner in owned if not isinstance(owner, Region)]
    unmatched = [
        UnmatchedRow(
            operator=_operator(group[0]),
            sites=tuple(dict.fromkeys(node_site(node) or "model" for node in group if isinstance(node, fx.Node))),
            count=len(group),
            **_time(_kernels(owned, group), total),
        )
        for group in _grouped(outside, _operator)
    ]
    return _by_time(rows), _by_time(row for row in unmatched if row.kernels), total


def of_operators(owned: Owned, calls: Mapping[Hashable, int]) -> tuple[tuple[UnmatchedRow, ...], float]:
    """(unmatched rows, total in us) of a model without a graph."""
    total = _total(owned)
    rows = [
        UnmatchedRow(
            operator=OUTSIDE if owner is None else str(owner),
            sites=(),
            count=calls.get(owner, 1),
            **_time(_by_time(kernels), total),
        )
        for owner, kernels in owned.items()
    ]
    return _by_time(rows), total


def _row(
    call: Call, sites: tuple[str, ...], kernels: tuple[KernelTime, ...], total: float, limits: Limits | None
) -> ProfileRow:
    operation = ops.get(call.operation)
    flops = operation.flops(call.shape)
    moved = operation.bytes(call.shape, dtype(call.dtype).itemsize)
    timing = _time(kernels, total)
    time_us = timing["time_us"]
    roofline_us = None
    if limits is not None and call.dtype in DTYPES:
        roofline_us = limits.roofline_us(flops, moved, call.dtype) * len(sites)
    return ProfileRow(
        operation=call.operation,
        sites=sites,
        count=len(sites),
        shape=call.shape,
        tensors=call.tensors,
        dtype=call.dtype,
        flops=flops,
        bytes=moved,
        bound="unmeasured" if limits is None or roofline_us is None else limits.bound(flops, moved, call.dtype),
        roofline_us=roofline_us,
        # The roofline reads everything from memory. Inside a model an input may still lie in the L2 cache, so a call can
        # be faster than its roofline: that is the cache, not a record, and it counts as 100%.
        pct_roofline=None if roofline_us is None or not time_us else min(100.0, 100 * roofline_us / time_us),
        saved_us=None if roofline_us is None else max(0.0, time_us - roofline_us),
        **timing,
    )


def _time(kernels: tuple[KernelTime, ...], total: float) -> dict[str, Any]:
    time_us = sum(kernel.time_us for kernel in kernels)
    return {"time_us": time_us, "share": time_us / total if total else 0.0, "kernels": kernels}


def _total(owned: Owned) -> float:
    return sum(kernel.time_us for kernels in owned.values() for kernel in kernels)


def _kernels(owned: Owned, owners: Iterable[Hashable]) -> tuple[KernelTime, ...]:
    """The kernels of these owners, one entry for each name, by time."""
    count: dict[str, int] = defaultdict(int)
    time_us: dict[str, float] = defaultdict(float)
    for owner in owners:
        for kernel in owned.get(owner, ()):
            count[kernel.name] += kernel.count
            time_us[kernel.name] += kernel.time_us
    return _by_time(KernelTime(name=name, count=count[name], time_us=time_us[name]) for name in count)


def _operator(owner: Hashable) -> str:
    return str(owner.target) if isinstance(owner, fx.Node) else OUTSIDE


def _grouped(items: Iterable[Any], key: Callable[[Any], Hashable]) -> list[list[Any]]:
    groups: dict[Hashable, list[Any]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


def _by_time(rows: Iterable[Timed]) -> tuple[Timed, ...]:
    return tuple(sorted(rows, key=lambda row: -row.time_us))
