"""Which way to run the model is fastest: PyTorch's, or ours with the kernels that earn their place in it?

A kernel counts when the whole model is faster with it. So the choice is made in the model, by measurement, apart for a model
launched from Python, where each call of a kernel costs the time of its launch, and for one in a CUDA graph, where it does not.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import msgspec
import torch
from torch import nn

from autokernel import cli
from autokernel.state import Way
from autokernel.substitute import SiteFault
from autokernel.walltime import Forward, Speed, graph_of, measure, speed_of

EAGER, EAGER_GRAPH = "eager", "eager in a CUDA graph"
OURS, OURS_GRAPH = "ours", "ours in a CUDA graph"
# What a way of theirs is called, and the mode of torch.compile that it is.
COMPILED = {
    "torch.compile": "default",
    "torch.compile reduce-overhead": "reduce-overhead",
    "torch.compile max-autotune": "max-autotune",
}
CHOICES_S, CONTEST_S = 2.0, 30.0  # of timed calls: for each choice, and for the contest

# Names of targets -> the model with their kernels in it.
Build = Callable[[frozenset[str]], Callable[..., Any]]


@dataclass(frozen=True)
class Selection:
    """The targets whose kernels make the model faster, and why each other one is left out."""

    used: tuple[str, ...]
    dropped: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Contest:
    """Every way that was tried; the fastest of theirs, the fastest of ours, and how they compare (None: there is none)."""

    ways: tuple[Way, ...]
    theirs: str = ""
    ours: str = ""
    speed: Speed | None = None


def hold(model: nn.Module, targets: Sequence[str], build: Build, batches: Sequence[Any], modes: Sequence[str]) -> Contest:
    """Choose our kernels and time every way to run the model on a GPU; `modes` are those of torch.compile to try."""

    forward = partial(_forward, batches)
    ways: list[Way] = []
    running: dict[str, Forward] = {}

    def enter(way: Way, make: Callable[[], Forward]) -> None:
        cli.note(way.name)
        try:
            running[way.name] = make()
        except Exception as fault:  # a compiler, a capture and a model each fail in their own types
            way = msgspec.structs.replace(way, note=f"{type(fault).__name__}: {_first_line(fault)}")
            cli.note(f"{way.name}: {way.note}")
        ways.append(way)

    with torch.no_grad():
        enter(Way(name=EAGER, ours=False), partial(forward, model))
        enter(Way(name=EAGER_GRAPH, ours=False), partial(_replayed, forward, model))
        for name, mode in COMPILED.items():
            if mode in modes:
                enter(Way(name=name, ours=False), partial(_compiled, forward, model, mode))
        for name, plain, run in ((OURS, EAGER, forward), (OURS_GRAPH, EAGER_GRAPH, partial(_replayed, forward))):
            cli.note(f"{name}: which kernels make the model faster?")
            make = partial(_built, build, run)
            try:
                chosen = select(targets, make, running.get(plain) or running[EAGER])
            except (RuntimeError, SiteFault) as fault:  # it cannot be captured
                ways.append(Way(name=name, ours=True, note=_first_line(fault)))
                continue
            way = Way(name=name, ours=True, kernels=chosen.used, dropped=chosen.dropped)
            if chosen.used:
                enter(way, partial(make, frozenset(chosen.used)))
            else:
                ways.append(msgspec.structs.replace(way, note="no kernel makes the model faster"))
        cli.note("timing")
        times = measure(running, CONTEST_S)
    return result(ways, times)


def result(ways: Sequence[Way], times: Mapping[str, list[float]]) -> Contest:
    """The contest, from the milliseconds of the ways that could be run."""
    timed = tuple(msgspec.structs.replace(way, ms=median(times[way.name])) if way.name in times else way for way in ways)
    fastest: dict[bool, str] = {}
    for way in sorted((way for way in timed if way.ms is not None), key=lambda way: way.ms or 0.0, reverse=True):
        fastest[way.ours] = way.name
    theirs, ours = fastest.get(False, ""), fastest.get(True, "")
    speed = speed_of(times[theirs], times[ours]) if theirs and ours else None
    return Contest(timed, theirs, ours, speed)


def select(targets: Sequence[str], build: Callable[[frozenset[str]], Forward], plain: Forward) -> Selection:
    """The targets whose kernels make the model faster.

    From all of them, the one without which the model gains most is taken out, and so on while it gains measurably. What is
    left must be measurably faster than `plain`, the model without any, or nothing is used. All places of a target make
    the same call with the same shapes, so they are decided together.
    """
    used, dropped = list(targets), {}
    while len(used) > 1:
        everything = build(frozenset(used))
        trials = {}
        for name in used:
            times = measure({"without": build(frozenset(used) - {name}), "with": everything}, CHOICES_S)
            trials[name] = speed_of(times["without"], times["with"])
        worst = min(trials, key=lambda name: trials[name].speedup)
        if trials[worst].verdict != "slower":
            break
        used.remove(worst)
        dropped[worst] = _slower(trials[worst])
    if used:
        times = measure({"without": plain, "with": build(frozenset(used))}, CHOICES_S)
        speed = speed_of(times["without"], times["with"])
        if speed.verdict != "faster":
            dropped |= dict.fromkeys(used, _slower(speed))
            used = []
    return Selection(tuple(used), dropped)


def _slower(speed: Speed) -> str:
    how = "slower" if speed.verdict == "slower" else "no faster"
    return f"the model is {how} with it: {speed.ours_ms:.3f} ms, {speed.theirs_ms:.3f} ms without"


def _first_line(fault: Exception) -> str:
    return (str(fault).strip().splitlines() or [""])[0][:300]


def _forward(batches: Sequence[Any], module: Callable[..., Any]) -> Forward:
    def run(repeat: int) -> None:
        args, kwargs = batches[repeat % len(batches)]
        module(*args, **kwargs)

    return run


def _replayed(forward: Callable[[Callable[..., Any]], Forward], module: Callable[..., Any]) -> Forward:
    return graph_of(forward(module))


def _built(build: Build, run: Callable[[Callable[..., Any]], Forward], names: frozenset[str]) -> Forward:
    return run(build(names))


def _compiled(forward: Callable[[Callable[..., Any]], Forward], model: nn.Module, mode: str) -> Forward:
    run = forward(torch.compile(model, mode=mode, dynamic=False))

    def step(repeat: int) -> None:
        torch.compiler.cudagraph_mark_step_begin()
        run(repeat)

    step(0)  # compiles
    return step
