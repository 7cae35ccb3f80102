"""Which kernel spoils the model: the error that each makes in its place, and the model's error without each of them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autokernel import ops
from autokernel.capture import Capture
from autokernel.pieces import Pieces
from autokernel.substitute import Site, observed, substitute
from autokernel.verification import Choice, Inputs, cast, distance, full_precision, relative_error


@dataclass(frozen=True)
class SiteError:
    """The error that one kernel makes at one place.

    `isolated` is that of the kernel, `isolated_without` that of PyTorch's own operators, both on the inputs of the unmodified
    model and against the operation in higher precision; `accumulated` is the distance of the value from that of the
    unmodified model when all kernels are in.
    """

    site: str
    target: str
    isolated: float
    isolated_without: float
    accumulated: float


@dataclass(frozen=True)
class Diagnosis:
    """Where the error comes from."""

    sites: tuple[SiteError, ...]
    error: float  # with all kernels
    without: dict[str, float]  # target -> error without its kernel
    guilty: str | None  # the target whose kernel adds most to an error above the limit; None when no single one does


def diagnose(
    captured: Capture | Pieces, choice: Choice, batch: Inputs, exact: list[Tensor], dtype: torch.dtype, limit: float
) -> Diagnosis:
    """Follow the error through the sites for one input, then leave one kernel out at a time.

    `exact` holds the exact output tensors and `dtype` their precision; an error above `limit` is what a kernel is guilty of.
    SiteFault, which names the kernel, if one fails in its place.
    """
    args, kwargs = batch
    targets = choice.targets()
    substitution = substitute(captured, choice.kernels(), targets)
    plain: dict[Site, Tensor] = {}
    isolated: dict[Site, tuple[float, float]] = {}
    accumulated: dict[Site, float] = {}

    def probe(site: Site, output: Tensor, *inputs: Any) -> None:
        with full_precision():
            right = [_exactly(site, inputs, dtype)]
        isolated[site] = (relative_error([site(*inputs)], right), relative_error([output], right))
        plain[site] = output.cpu()

    def compare(site: Site, value: Tensor) -> None:
        accumulated[site] = relative_error([value], [plain.pop(site)])

    with torch.no_grad():
        observed(captured, {site.region: _with(probe, site) for site in substitution.sites})(*args, **kwargs)
        for site in substitution.sites:
            site.watch = _with(compare, site)
        error, _ = distance(substitution.module, batch, exact)
        without = {}
        for chosen in choice.chosen:
            name = chosen.target.name
            rest = substitute(captured, choice.kernels(without=name), targets)
            without[name], _ = distance(rest.module, batch, exact)
    sites = tuple(SiteError(s.name, s.target, *isolated[s], accumulated[s]) for s in substitution.sites)
    best = min(without, key=lambda name: without[name])
    return Diagnosis(sites, error, without, best if error > limit and without[best] < error else None)


def _with(function: Callable[..., None], site: Site) -> Callable[..., None]:
    return lambda *values: function(site, *values)


def _exactly(site: Site, inputs: tuple[Any, ...], dtype: torch.dtype) -> Tensor:
    region = site.region
    return region.finish(ops.get(region.operation).reference(**region.bind(*cast(inputs, dtype))))
