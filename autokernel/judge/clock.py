"""The clock: kernel and PyTorch baseline in turn, the L2 cache flushed before every call. Do not edit."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch

from autokernel.ops import Arguments

WARMUP = 5
LEAST_REPEATS, MOST_REPEATS = 30, 200
BUDGET_S = 1.0  # of timed calls, kernel and baseline together, once the least repeats are done
FLUSH_BYTES = 1 << 30  # many times every L2, and 0.2 ms or more to write: longer than a launch from Python
INPUT_SETS = 3  # used in turn, so that no two calls in a row see the same values
RESAMPLES = 2000


@dataclass(frozen=True)
class Timing:
    """Medians in microseconds, the baseline's over the kernel's, and its 95% bootstrap interval."""

    kernel_us: float
    baseline_us: float
    speedup: float
    low: float
    high: float
    peak_vram_mb: float  # allocated at most during a call of the kernel, its arguments included


def measure(
    kernel: Callable[..., Any], baseline: Callable[..., Any], arguments: Callable[[int], Arguments], device: torch.device
) -> Timing:
    """Time the two in turn (A B A B ...) on a GPU, with events; `arguments(seed)` makes a set of inputs.

    Each figure is the median over at least LEAST_REPEATS calls. The flush before each call writes many times the L2, so
    that the Python launch is hidden behind it and the events enclose the kernels alone.
    """
    inputs = [arguments(seed) for seed in range(INPUT_SETS)]
    functions = {"kernel": kernel, "baseline": baseline}
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)
    for _ in range(WARMUP):
        for function in functions.values():
            function(**inputs[0])
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    without = torch.cuda.memory_allocated(device) - _bytes_of(inputs[0])
    kernel(**inputs[0])
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - without
    times = _time(functions, inputs, flush)
    speedup, low, high = ratio_of_medians(times["baseline"], times["kernel"])
    return Timing(median(times["kernel"]), median(times["baseline"]), speedup, low, high, peak / 2**20)


def _time(functions: Mapping[str, Callable[..., Any]], inputs: list[Arguments], flush: torch.Tensor) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in functions}
    spent_us = 0.0
    for repeat in range(MOST_REPEATS):
        if repeat >= LEAST_REPEATS and spent_us > BUDGET_S * 1e6:
            break
        for name, function in functions.items():
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            flush.fill_(repeat & 1)
            start.record()
            function(**inputs[repeat % len(inputs)])
            stop.record()
            stop.synchronize()
            times[name].append(1e3 * start.elapsed_time(stop))
            spent_us += times[name][-1]
    return times


def ratio_of_medians(numerator: Sequence[float], denominator: Sequence[float]) -> tuple[float, float, float]:
    """Ratio of the medians and its 95% bootstrap interval (low, high).

    The two lists were measured side by side, so a resample draws pairs: what slowed both down slows both down in it too.
    """
    pairs = np.array([numerator, denominator])
    drawn = np.random.default_rng(0).integers(0, pairs.shape[1], (RESAMPLES, pairs.shape[1]))
    medians = np.median(pairs[:, drawn], axis=2)
    low, high = np.percentile(medians[0] / medians[1], (2.5, 97.5))
    return median(numerator) / median(denominator), float(low), float(high)


def _bytes_of(arguments: Arguments) -> int:
    return sum(v.untyped_storage().nbytes() for v in arguments.values() if isinstance(v, torch.Tensor))
