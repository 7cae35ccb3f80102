"""The clock: a kernel's time by two clocks, in turn with PyTorch's on the same inputs. Do not edit.

The worker takes the time of each call by CUDA events; the judge takes the time of whole batches by its own clock, which no
kernel file can reach. The baseline runs in the judge's process, by the very loop that the worker runs (`repeat`): nothing
that a kernel file replaces slows it down, and both are treated alike. For each call new values are copied in, lines that
persist in L2 are reset, FLUSH_BYTES are written to clear the cache; then event, call, event, and the answer is copied out.
All of it is queued ahead of the device, so that a batch takes the time of the device and not of Python, which differs between
processes by more than a small kernel takes; the batch ends when the device is idle.
"""

import math
import random
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from autokernel.ops import Arguments

if TYPE_CHECKING:
    from autokernel.judge.answers import Answer, Times

FLUSH_BYTES = 2 << 30  # many times every L2, and 0.4 ms or more to write: longer than a launch from Python
SETS = 4  # of inputs in a batch, all new; the first call of a batch is a warm-up
LONG = 4  # a long batch makes so many times the calls of a short one
LEAST_CALLS, MOST_CALLS = 27, 200  # that count in a median
BRIEF_CALLS = 15
BUDGET_S = 0.8  # of batches, once the least calls are made
CHECKED = 3  # answers compared in full among the least batches, at places that the judge draws; after that one in CHECK_EVERY
CHECK_EVERY = 8
RESAMPLES = 2000
# What one run cannot see in itself: two processes that run the same kernel have their memory in other places.
BETWEEN_RUNS = 0.005

AGREE_SHARE, AGREE_US = 0.05, 5.0
ROUND_TRIP_US = 1000.0  # more than a request takes besides its calls
ATTEMPTS = 3
SLOWED_SHARE, SLOWED_US = 0.15, 5.0

SMALL_US = 1000.0  # above it, a launch is no part of the story
GRAPH_CALLS = 28


class Loop(Protocol):
    """Something that calls a kernel, or the baseline, many times: an `isolated.Worker`."""

    def timed(
        self,
        sets: Sequence[Arguments],
        repeats: int,
        flush_bytes: int,
        graph: bool = False,
        slots: int | None = None,
        recorded: bool = True,
    ) -> "Times": ...


# Looks at the answer of one timed call, beside PyTorch's for the same inputs: in full, or only whether it can be right at all.
# Raises what is to be said of a wrong one.
Look = Callable[["Times", "Answer", "Answer", Arguments, bool], None]


@dataclass(frozen=True)
class Estimate:
    """A median and its 95% bootstrap interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Rival:
    """What the kernel is compared with: its median in microseconds, and how many times faster the kernel is."""

    us: float
    speedup: Estimate


@dataclass(frozen=True)
class Timing:
    """One kernel's figures on one call; times in microseconds.

    `latency` is the median device time of an eager call with a cold L2: from the moment the cache has been flushed to the end
    of the last kernel that the call launched. The flush takes longer than a launch from Python, so launches are hidden behind
    it, as they are in a model that keeps the GPU busy; a call that needs longer than that on the host shows it. It is what
    `triton.testing.do_bench` measures. `graph_us` is the same for replays of the call in a CUDA graph, so without any work
    on the host; None where it cannot be captured or a call takes longer than SMALL_US. `launch_us` is what an eager call costs
    beyond such a replay where nothing hides it: the difference of the two on an idle GPU without a flush, or 0.
    """

    latency: Estimate
    clock_us: float  # the same by the judge's own clock
    baseline: Rival
    incumbent: Rival | None
    graph_us: float | None
    launch_us: float | None
    peak_vram_mb: float  # allocated at most during a call, its arguments included
    calls: int  # that the medians are of
    note: str = ""  # why a figure is missing


class Disputed(Exception):
    """The figures cannot be trusted; the text says why, in one clause."""


@dataclass
class Walls:
    """The judge's own clock: pairs of a short and a long batch, of the kernel and of a known call, in microseconds.

    The rule. A long batch less a short one, over the calls that it makes more, is the time of one call without what a request
    costs. The same of a known call, which makes the answer by copying it in the judge's process, less that call's own time k
    by events that no kernel file can reach, is what new values, flush and copying an answer out take; the difference p is the
    kernel's. (A call that made nothing would have its answer copied out of a cold cache.) The median of p over the rounds
    must agree with the median e of the events that is reported:

        |p - e| <= 5% of e + 5 us + 3 s

    where s is the standard error of that median, from the spread of the rounds (1.2533 * 1.4826 * MAD / sqrt(rounds)).
    Work that events do not see, on another stream, or in a thread, or after an event that was tampered with, is in p, since a
    request ends when the device is idle. A candidate could make p small by wasting time in short batches alone; so the long
    batch as a whole may not take more than e and that bound for each call, and ROUND_TRIP_US for the request.
    """

    short_calls: int
    long_calls: int
    short: list[float] = field(default_factory=list)
    long: list[float] = field(default_factory=list)
    known_short: list[float] = field(default_factory=list)
    known_long: list[float] = field(default_factory=list)
    known_us: list[float] = field(default_factory=list)  # k of every known call

    def per_call(self) -> list[float]:
        """p of each round."""
        more = self.long_calls - self.short_calls
        pairs = zip(self.long, self.short, self.known_long, self.known_short, strict=True)
        known_us = median(self.known_us)
        return [(long - short - (known_long - known_short)) / more + known_us for long, short, known_long, known_short in pairs]

    def dispute(self, events_us: float) -> str:
        """Why the two clocks do not agree, in one clause; "" when they do."""
        rounds = self.per_call()
        middle = median(rounds)
        spread = 1.4826 * median(abs(value - middle) for value in rounds)
        bound = AGREE_SHARE * events_us + AGREE_US + 3 * 1.2533 * spread / math.sqrt(len(rounds))
        if abs(middle - events_us) > bound:
            return (
                f"the judge's clock says {middle:.1f} us for a call and the events {events_us:.1f} us, "
                f"further apart than noise ({bound:.1f} us)"
            )
        whole = median(a - b for a, b in zip(self.long, self.known_long, strict=True)) + self.long_calls * median(self.known_us)
        if whole > self.long_calls * (events_us + bound) + ROUND_TRIP_US:
            return (
                f"the judge's clock says {whole:.0f} us for {self.long_calls} calls and the events {events_us:.1f} us "
                "for each, further apart than a request costs"
            )
        return ""


@dataclass
class Stopwatch:
    """Times a candidate against the baseline, and an incumbent if there is one.

    `make(seed)` gives new inputs. Every answer of every timed call is looked at, some that the judge draws in full. `known`
    is a loop of the judge's own process that makes the answer by copying it. `sets` and `slots` (answers kept of a batch, its
    last ones) are fewer where memory is short.
    """

    candidate: Loop
    baseline: Loop
    known: Loop
    make: Callable[[int], Arguments]
    look: Look
    incumbent: Callable[[], Loop] | None = None  # started once the candidate has room for its longest batch
    sets: int = SETS
    long: int = LONG
    slots: int = SETS * LONG
    brief: bool = False  # the fewest calls that tell anything, and no replays in a CUDA graph

    def __post_init__(self) -> None:
        self._random: random.Random = secrets.SystemRandom()
        self._beside: Loop | None = None

    def measure(self) -> Timing:
        """The figures; Disputed if in ATTEMPTS attempts the two clocks never agree, or whatever the checks raise."""
        self._warm_up()
        for _ in range(ATTEMPTS):
            timing, dispute = self._attempt()
            if not dispute:
                return timing
        raise Disputed(dispute)

    def slowed(self, timing: Timing) -> str:
        """Call it when the candidate's process is gone: why the baseline was slower beside it, "" if it was not."""
        beside, alone = timing.baseline.us, 0.0
        for _ in range(ATTEMPTS):  # the GPU's clock may have changed; one slow enough attempt acquits
            times: list[float] = []
            while len(times) < LEAST_CALLS:
                times += self.baseline.timed(self._new_sets(), self.sets, FLUSH_BYTES).times_us[self._first :]
            alone = max(alone, median(times))
            if beside <= (1 + SLOWED_SHARE) * alone + SLOWED_US:
                return ""
        return (
            f"PyTorch took {beside:.1f} us beside the kernel and {alone:.1f} us once its process had ended: something slowed it"
        )

    @property
    def _first(self) -> int:
        """The first call of a batch that counts: one before it warms up what a change of process has cooled down."""
        return min(1, self.sets - 1)

    def _new_sets(self) -> list[Arguments]:
        return [self.make(self._random.getrandbits(31)) for _ in range(self.sets)]

    def _warm_up(self) -> None:
        inputs = self._new_sets()
        calls = self.sets * self.long
        self.candidate.timed(inputs, calls, FLUSH_BYTES, slots=self._kept(calls))
        self.baseline.timed(inputs, self.sets, FLUSH_BYTES)
        self.known.timed(inputs, calls, FLUSH_BYTES, slots=self._kept(calls))
        if self.incumbent is not None and self._beside is None:
            self._beside = self.incumbent()
            self._beside.timed(inputs, self.sets, FLUSH_BYTES)

    def _kept(self, calls: int) -> int:
        return min(calls, self.slots)

    def _attempt(self) -> tuple[Timing, str]:
        walls = Walls(self.sets, self.long * self.sets)
        ours: list[Sequence[float]] = []
        theirs: list[Sequence[float]] = []
        old: list[Sequence[float]] = []
        peak = 0
        counted = self.sets - self._first
        least = math.ceil((BRIEF_CALLS if self.brief else LEAST_CALLS) / counted)
        drawn = set(self._random.sample(range(least), min(CHECKED, least)))
        began = time.perf_counter()
        budget_s = 0.0 if self.brief else BUDGET_S
        while len(ours) < least or (len(ours) * counted < MOST_CALLS and time.perf_counter() - began < budget_s):
            sizes = [walls.short_calls, walls.long_calls]
            self._random.shuffle(sizes)
            for calls in sizes:
                number = len(ours)
                full = number in drawn or (number >= least and self._random.randrange(CHECK_EVERY) == 0)
                inputs = self._new_sets()
                batch, baseline, incumbent = self._in_turn(inputs, calls, full, backwards=number % 4 > 1)
                ours.append(batch.times_us[self._first : self.sets])
                theirs.append(baseline.times_us[self._first : self.sets])
                if incumbent is not None:
                    old.append(incumbent.times_us[self._first : self.sets])
                peak = max(peak, batch.peak_bytes)
                known = self.known.timed(inputs, calls, FLUSH_BYTES, slots=self._kept(calls))
                is_long = calls == walls.long_calls
                (walls.long if is_long else walls.short).append(1e6 * batch.wall_s)
                (walls.known_long if is_long else walls.known_short).append(1e6 * known.wall_s)
                walls.known_us += known.times_us[self._first :]
        latency = interval_of_median(ours)
        dispute = walls.dispute(latency.value)
        graph_us, launch_us, note = (None, None, "") if dispute or self.brief else self._graph(latency.value)
        timing = Timing(
            latency=latency,
            clock_us=median(walls.per_call()),
            baseline=_rival(theirs, ours),
            incumbent=_rival(old, ours) if old else None,
            graph_us=graph_us,
            launch_us=launch_us,
            peak_vram_mb=(peak + bytes_of(inputs[0])) / 2**20,
            calls=len(ours) * counted,
            note=note,
        )
        return timing, dispute

    def _in_turn(
        self, inputs: list[Arguments], calls: int, full: bool, backwards: bool
    ) -> tuple["Times", "Times", "Times | None"]:
        """The candidate's batch, the baseline's and the incumbent's, forwards or backwards, so that none is always first.

        Answers are looked at before the next request to a worker: the two workers share the memory that they lie in.
        """
        old = self._beside.timed(inputs, self.sets, FLUSH_BYTES) if self._beside and backwards else None
        if backwards:
            theirs = self.baseline.timed(inputs, self.sets, FLUSH_BYTES)
            ours = self.candidate.timed(inputs, calls, FLUSH_BYTES, slots=self._kept(calls))
        else:
            ours = self.candidate.timed(inputs, calls, FLUSH_BYTES, slots=self._kept(calls))
            theirs = self.baseline.timed(inputs, self.sets, FLUSH_BYTES)
        self._look_at(ours, theirs, inputs, calls, full)
        if self._beside and not backwards:
            old = self._beside.timed(inputs, self.sets, FLUSH_BYTES)
        return ours, theirs, old

    def _look_at(self, ours: "Times", theirs: "Times", inputs: Sequence[Arguments], calls: int, full: bool) -> None:
        made = len(ours.times_us)  # fewer than were asked for, if the last answer was none
        slots = self._kept(calls)
        kept = range(max(0, made - slots), made)
        in_full = self._random.choice(kept) if full else None
        for call in kept:
            place = call % len(inputs)
            self.look(ours, ours.answer(call % slots), theirs.answer(place), inputs[place], call == in_full)
        if made < calls:
            raise Disputed(f"{made} calls were timed instead of {calls}")

    def _graph(self, latency_us: float) -> tuple[float | None, float | None, str]:
        """(graph_us, launch_us, why there are none)."""
        if latency_us > SMALL_US:
            return None, None, ""
        inputs = self._new_sets()
        replays = self.candidate.timed(inputs, GRAPH_CALLS, FLUSH_BYTES, graph=True, slots=self._kept(GRAPH_CALLS))
        if replays.fault:
            return None, None, replays.fault
        baseline = self.baseline.timed(inputs, self.sets, FLUSH_BYTES)
        self._look_at(replays, baseline, inputs, GRAPH_CALLS, True)
        eager, replayed = (
            median(self.candidate.timed(inputs, GRAPH_CALLS, 0, graph, slots=1, recorded=False).times_us[self._first :])
            for graph in (False, True)
        )
        return median(replays.times_us[self._first :]), max(0.0, eager - replayed), ""


def _rival(theirs: Sequence[Sequence[float]], ours: Sequence[Sequence[float]]) -> Rival:
    ratio, low, high = ratio_of_medians(theirs, ours)
    return Rival(
        median(value for batch in theirs for value in batch),
        Estimate(ratio, low * (1 - BETWEEN_RUNS), high * (1 + BETWEEN_RUNS)),
    )


Measured = Sequence[float] | Sequence[Sequence[float]]


def ratio_of_medians(numerator: Measured, denominator: Measured) -> tuple[float, float, float]:
    """Ratio of the medians and its 95% bootstrap interval (low, high); both flat, or both by batch.

    The two lists were measured side by side, so a resample draws the same calls, or the same batches, of both: what slowed
    both down slows both down in it too, and what slowed a whole batch down is drawn as a whole.
    """
    pair = np.array([_by_batch(numerator), _by_batch(denominator)])
    medians = np.median(_resampled(pair), axis=2)
    low, high = np.percentile(medians[0] / medians[1], (2.5, 97.5))
    middle = np.median(pair.reshape(2, -1), axis=1)
    return float(middle[0] / middle[1]), float(low), float(high)


def interval_of_median(values: Measured) -> Estimate:
    """The median and its 95% bootstrap interval."""
    batches = _by_batch(values)
    low, high = np.percentile(np.median(_resampled(batches[None])[0], axis=1), (2.5, 97.5))
    return Estimate(float(np.median(batches)), float(low), float(high))


def _by_batch(values: Measured) -> npt.NDArray[np.float64]:
    array = np.asarray(values, dtype=np.float64)
    return array.reshape(len(array), -1)


def _resampled(batches: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """(lists, batches, calls) -> (lists, RESAMPLES, batches * calls), batches drawn with replacement, alike in each list."""
    count = batches.shape[1]
    drawn = np.random.default_rng(0).integers(0, count, (RESAMPLES, count))
    return batches[:, drawn].reshape(len(batches), RESAMPLES, -1)


def bytes_of(arguments: Arguments) -> int:
    """Bytes of the storages of the arguments."""
    return sum(storages(arguments))


def storages(arguments: Arguments) -> Iterable[int]:
    return (value.untyped_storage().nbytes() for value in arguments.values() if isinstance(value, Tensor))
