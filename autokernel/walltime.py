"""Is the model faster? Wall time of a whole forward pass, the two models in turn, eager and in CUDA graphs."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from autokernel import cli
from autokernel.judge.clock import ratio_of_medians
from autokernel.substitute import SiteFault

WARMUP = 3
LEAST_PAIRS, MOST_PAIRS = 20, 200
BUDGET_S = 20.0  # of timed calls, once the least pairs are done


@dataclass(frozen=True)
class Speed:
    """Medians in milliseconds of one forward pass, and eager over ours with its 95% bootstrap interval."""

    eager_ms: float
    ours_ms: float
    speedup: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """In words; faster or slower only when the interval excludes 1."""
        if self.low > 1:
            return "faster"
        return "slower" if self.high < 1 else "no measurable difference"


def time_both(eager: Callable[[int], Any], ours: Callable[[int], Any]) -> Speed:
    """Wall time of the two in turn (A B A B ...) on a GPU, synchronised before and after each call.

    Each gets the number of the repeat, to choose its inputs. At least LEAST_PAIRS pairs after WARMUP, then until BUDGET_S.
    """
    forwards = (eager, ours)
    for repeat in range(WARMUP):
        for forward in forwards:
            forward(repeat)
    times: tuple[list[float], list[float]] = ([], [])
    spent = 0.0
    for repeat in range(MOST_PAIRS):
        if repeat >= LEAST_PAIRS and spent > BUDGET_S:
            break
        for forward, measured in zip(forwards, times, strict=True):
            torch.cuda.synchronize()
            start = time.perf_counter()
            forward(repeat)
            torch.cuda.synchronize()
            measured.append(1e3 * (time.perf_counter() - start))
            spent += measured[-1] / 1e3
    speedup, low, high = ratio_of_medians(*times)
    return Speed(median(times[0]), median(times[1]), speedup, low, high)


def time_graphs(eager: Callable[[int], Any], ours: Callable[[int], Any]) -> Speed | None:
    """The same with each forward pass in a CUDA graph, which takes away the launches; None if one cannot be captured."""
    try:
        replays = [_graph_of(forward) for forward in (eager, ours)]
    except (RuntimeError, SiteFault) as fault:  # a kernel or the model itself waits for the GPU, or memory runs out
        cli.note(f"no CUDA graph of this model: {(str(fault).splitlines() or [''])[0]}")
        return None
    return time_both(*replays)


def _graph_of(forward: Callable[[int], Any]) -> Callable[[int], Any]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # capture needs a warm-up on a stream that is not the default one
        for _ in range(WARMUP):
            forward(0)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward(0)
    return lambda _repeat: graph.replay()
