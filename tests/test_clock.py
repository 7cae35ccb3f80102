"""The clock: what it accepts, what it disputes, and how sure it is. The loops are simulated, so every figure is known."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from autokernel import hardware, ops
from autokernel.judge import cases, clock
from autokernel.judge.arena import Arena
from autokernel.judge.baseline import Baseline
from autokernel.judge.clock import Disputed, Stopwatch, interval_of_median, ratio_of_medians
from autokernel.ops import Arguments

AROUND_US = 300.0  # of a call: copies, flush, waiting
REQUEST_US = 150.0
LAUNCH_US = 30.0
KNOWN_US = 7.0


@dataclass
class Simulated:
    """A loop whose kernel takes `us`; `said` is what its events make of that, `wasted` what a batch of so many calls adds."""

    us: float
    said: Callable[[float], float] = lambda us: us
    wasted: Callable[[int], float] = lambda calls: 0.0
    noise: float = 0.02
    answer: Callable[[int, Tensor], Tensor] = lambda call, x: x.sum()
    fault: str = ""
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(1))
    batches: list[int] = field(default_factory=list)

    def timed(
        self,
        sets: Sequence[Arguments],
        repeats: int,
        flush_bytes: int,
        graph: bool = False,
        slots: int | None = None,
        recorded: bool = True,
    ) -> Any:
        self.batches.append(repeats)
        true = self.us * (1 + self.noise * self.random.random(repeats))
        if not flush_bytes and not graph:
            true += LAUNCH_US
        wall = REQUEST_US + 20 * self.random.random() + repeats * AROUND_US + true.sum() + self.wasted(repeats)
        kept: dict[int, Tensor] = {}
        for call in range(repeats):
            kept[call % (slots or repeats)] = self.answer(call, sets[call % len(sets)]["x"])
        return SimpleNamespace(
            times_us=tuple(map(self.said, true)),
            wall_s=wall / 1e6,
            peak_bytes=0,
            fault=self.fault if graph else "",
            answer=lambda slot: SimpleNamespace(value=kept[slot]),
        )


class Wrong(Exception):
    pass


def look(times: Any, answer: Any, baseline: Any, inputs: Arguments, full: bool) -> None:
    assert torch.equal(baseline.value, inputs["x"].sum())
    if abs(answer.value - baseline.value) > 0.1:
        raise Wrong("near")
    if full and not torch.equal(answer.value, inputs["x"].sum()):
        raise Wrong("in full")


def stopwatch(candidate: Simulated, baseline_us: float = 50.0, **options: Any) -> Stopwatch:
    def make(seed: int) -> Arguments:
        return {"x": torch.randn(8, generator=torch.Generator().manual_seed(seed))}

    return Stopwatch(candidate, Simulated(baseline_us), Simulated(KNOWN_US), make, look, **options)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "BUDGET_S", 0.0)
    monkeypatch.setattr(clock, "RESAMPLES", 300)


@pytest.mark.parametrize("us", [3.0, 20.0, 400.0, 5000.0])
def test_an_honest_kernel_is_measured(us: float) -> None:
    timing = stopwatch(Simulated(us), baseline_us=2 * us).measure()
    assert timing.latency.value == pytest.approx(1.01 * us, rel=0.01)
    assert timing.latency.low <= timing.latency.value <= timing.latency.high
    assert timing.clock_us == pytest.approx(us, rel=0.05, abs=4)
    assert timing.calls >= clock.LEAST_CALLS
    assert timing.baseline.us == pytest.approx(2.02 * us, rel=0.01)
    speedup = timing.baseline.speedup
    assert 1.9 < speedup.low < speedup.value < speedup.high < 2.1


@pytest.mark.parametrize(
    "candidate",
    [
        Simulated(60.0, said=lambda us: us / 2),
        Simulated(60.0, said=lambda us: 1.0),
        Simulated(60.0, wasted=lambda calls: 1000.0 * calls),
        Simulated(60.0, said=lambda us: us / 2, noise=0.3),
        # It wastes in short batches what the difference of the two would have told.
        Simulated(200.0, said=lambda us: us / 2, wasted=lambda calls: 1200.0 if calls == clock.SETS else 0.0),
    ],
    ids=["events halved", "events that see nothing", "work that events do not see", "noisy", "waste in short batches"],
)
def test_clocks_that_disagree_are_named(candidate: Simulated) -> None:
    with pytest.raises(Disputed, match=r"the judge's clock says .* and the events"):
        stopwatch(candidate).measure()


def test_a_disturbed_attempt_is_made_again() -> None:
    disturbed = iter([5000.0] * 12)
    candidate = Simulated(20.0, wasted=lambda calls: next(disturbed, 0.0) if calls > clock.SETS else 0.0)
    assert stopwatch(candidate).measure().latency.value == pytest.approx(20.2, rel=0.01)


@pytest.mark.parametrize("from_call", [0, 2, 5, 15])
def test_every_answer_of_a_timed_call_is_looked_at(from_call: int) -> None:
    idle = Simulated(20.0, answer=lambda call, x: x.sum() if call < from_call else torch.tensor(0.0))
    with pytest.raises(Wrong, match="near"):
        stopwatch(idle).measure()


def test_some_answers_are_compared_in_full() -> None:
    with pytest.raises(Wrong, match="in full"):
        stopwatch(Simulated(20.0, answer=lambda call, x: x.sum() + 0.01)).measure()


def test_idle_in_a_graph() -> None:
    class Idle(Simulated):
        def timed(self, *arguments: Any, graph: bool = False, **options: Any) -> Any:
            self.answer = (lambda call, x: torch.tensor(0.0)) if graph else (lambda call, x: x.sum())
            return super().timed(*arguments, graph=graph, **options)

    with pytest.raises(Wrong):
        stopwatch(Idle(20.0)).measure()


def test_launches_are_told_apart_from_kernels() -> None:
    timing = stopwatch(Simulated(20.0)).measure()
    assert timing.graph_us == pytest.approx(20.2, rel=0.02)
    assert timing.launch_us == pytest.approx(LAUNCH_US, abs=1)


def test_without_a_graph_the_reason_is_kept() -> None:
    timing = stopwatch(Simulated(20.0, fault="it cannot be captured")).measure()
    assert (timing.graph_us, timing.launch_us, timing.note) == (None, None, "it cannot be captured")


def test_long_calls_are_not_captured() -> None:
    timing = stopwatch(Simulated(5000.0)).measure()
    assert (timing.graph_us, timing.note) == (None, "")


def test_an_incumbent_is_timed_beside() -> None:
    timing = stopwatch(Simulated(20.0), incumbent=lambda: Simulated(30.0, random=np.random.default_rng(5))).measure()
    assert timing.incumbent is not None
    assert timing.incumbent.us == pytest.approx(30.3, rel=0.02)
    assert timing.incumbent.speedup.value == pytest.approx(1.5, rel=0.02)


def test_a_baseline_that_was_slowed_is_told() -> None:
    watch = stopwatch(Simulated(20.0), baseline_us=80.0)
    timing = watch.measure()
    assert watch.slowed(timing) == ""
    watch.baseline = Simulated(50.0)
    assert "something slowed it" in watch.slowed(timing)


def test_batches_are_short_and_long_in_an_order_that_is_drawn() -> None:
    orders = set()
    for _ in range(8):
        candidate = Simulated(5000.0)
        stopwatch(candidate).measure()
        orders.add(tuple(candidate.batches[1:11]))
        assert sorted(candidate.batches[1:11]) == [clock.SETS] * 5 + [clock.SETS * clock.LONG] * 5
    assert len(orders) > 1


def test_where_memory_is_short_the_last_answers_are_kept() -> None:
    assert stopwatch(Simulated(20.0), slots=3).measure().calls >= clock.LEAST_CALLS
    idle = Simulated(20.0, answer=lambda call, x: x.sum() if call < 3 else torch.tensor(0.0))
    with pytest.raises(Wrong):
        stopwatch(idle, slots=3).measure()


def test_one_set_of_inputs_is_enough_where_memory_is_short() -> None:
    timing = stopwatch(Simulated(400.0), sets=1).measure()
    assert timing.calls >= clock.LEAST_CALLS


def test_a_kernel_is_not_faster_than_itself() -> None:
    # A batch is slower or faster as a whole: calls alone would promise more than they know.
    faster = 0
    for seed in range(40):
        random = np.random.default_rng(seed)
        ours, theirs = (20 * (1 + 0.01 * random.random((10, 1)) + 0.002 * random.random((10, 3))) for _ in range(2))
        _, low, _ = ratio_of_medians(theirs.tolist(), ours.tolist())
        faster += low * (1 - clock.BETWEEN_RUNS) > 1
    assert faster <= 1


def test_ratio_of_medians() -> None:
    ratio, low, high = ratio_of_medians([2.0, 2.1, 1.9] * 10, [1.0, 1.05, 0.95] * 10)
    assert ratio == 2.0
    assert 1.9 < low <= 2.0 <= high < 2.1


@given(st.lists(st.floats(1, 1000), min_size=3, max_size=40))
def test_a_median_lies_in_its_interval(values: list[float]) -> None:
    found = interval_of_median(values)
    assert min(values) <= found.low <= found.value <= found.high <= max(values)


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("name", ops.names())
def test_pytorch_beside_itself_on_a_gpu(name: str) -> None:
    from triton.testing import do_bench

    device, operation = hardware.device(), ops.get(name)
    case = cases.timed_case(operation, None, torch.float16, device)
    inputs = case.arguments(operation, device, 0)
    answer = operation.reference(**inputs)
    mine, other = Arena(device), Arena(device)
    watch = Stopwatch(
        candidate=Baseline(operation.reference, operation, mine),
        baseline=Baseline(operation.reference, operation, other),
        known=Baseline(lambda **arguments: answer.clone(), operation, other),
        make=lambda seed: case.arguments(operation, device, seed),
        look=lambda times, ours, theirs, arguments, in_full: None,
    )
    timing = watch.measure()
    assert timing.baseline.speedup.low <= 1.01
    assert timing.baseline.speedup.high >= 0.99
    assert watch.slowed(timing) == ""
    assert timing.clock_us == pytest.approx(timing.latency.value, rel=0.1, abs=30)
    usual = 1e3 * do_bench(lambda: operation.reference(**inputs), return_mode="median")
    # do_bench gives the GPU no pause, so that it lowers its clock where tensor cores are busy.
    assert timing.latency.value == pytest.approx(usual, rel=0.2 if operation.uses_dot else 0.05, abs=2)
    mine.close()
    other.close()
