"""How long does a whole forward pass take? Wall time of several ways to run it, in turn, and in CUDA graphs."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from autokernel.judge.clock import ratio_of_medians

WARMUP = 3
LEAST_ROUNDS, MOST_ROUNDS = 20, 200

# A forward pass; it gets the number of the repeat, to choose its inputs.
Forward = Callable[[int], Any]


@dataclass(frozen=True)
class Speed:
    """Medians in milliseconds of one forward pass, and theirs over ours with its 95% bootstrap interval."""

    theirs_ms: float
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


def measure(forwards: Mapping[str, Forward], budget_s: float) -> dict[str, list[float]]:
    """Milliseconds of each, called in turn (A B C A B C ...) and synchronised before and after each call.

    At least LEAST_ROUNDS rounds after WARMUP, then until `budget_s` seconds of timed calls.
    """
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    for repeat in range(WARMUP):
        for forward in forwards.values():
            forward(repeat)
    times: dict[str, list[float]] = {name: [] for name in forwards}
    spent = 0.0
    for repeat in range(MOST_ROUNDS):
        if repeat >= LEAST_ROUNDS and spent > budget_s:
            break
        for name, forward in forwards.items():
            wait()
            start = time.perf_counter()
            forward(repeat)
            wait()
            times[name].append(1e3 * (time.perf_counter() - start))
            spent += times[name][-1] / 1e3
    return times


def speed_of(theirs: list[float], ours: list[float]) -> Speed:
    """Two of what `measure` returns, compared."""
    speedup, low, high = ratio_of_medians(theirs, ours)
    return Speed(median(theirs), median(ours), speedup, low, high)


def graph_of(forward: Forward) -> Forward:
    """Replays of the forward pass as one CUDA graph, which takes away the launches; always with the inputs of repeat 0.

    RuntimeError, or what the forward pass raises, if it cannot be captured: it waits for the GPU, or memory runs out.
    """
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
