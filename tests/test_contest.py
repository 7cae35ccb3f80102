"""The contest of ways to run a model, and the choice of kernels in it, with a clock that the test moves."""

from collections.abc import Callable, Collection, Sequence
from statistics import median
from typing import Any

import pytest
import torch

from autokernel import contest, walltime
from autokernel.contest import EAGER, EAGER_GRAPH, OURS, OURS_GRAPH, Contest, hold, select
from autokernel.state import Way
from autokernel.walltime import Speed, measure, speed_of

LAUNCH = 0.001  # seconds that a kernel's launch takes, which a CUDA graph takes away
COMPILED = 0.6  # of what an eager forward pass takes
# Seconds that the model gains in a graph with each kernel: `slow` may be twice as fast in isolation, but not in this model.
GAINS = {"good": 0.004, "small": 0.0005, "slow": -0.002}


class Clock:
    """Time that each forward pass moves on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.order: list[str] = []
        monkeypatch.setattr(walltime.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def forward(self, name: str, durations: Sequence[float]) -> Callable[[int], None]:
        def call(repeat: int) -> None:
            self.order.append(name)
            self.now += durations[repeat % len(durations)]

        return call


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.mark.parametrize(
    ("theirs", "ours", "verdict"),
    [
        ([0.010, 0.011], [0.005, 0.0055], "faster"),
        ([0.005], [0.010], "slower"),
        ([0.010, 0.012, 0.011], [0.012, 0.010, 0.011], "no measurable difference"),
    ],
)
def test_all_are_timed_in_turn(clock: Clock, theirs: list[float], ours: list[float], verdict: str) -> None:
    times = measure({"theirs": clock.forward("theirs", theirs), "ours": clock.forward("ours", ours)}, budget_s=1.0)
    rounds = len(clock.order) // 2
    assert clock.order == ["theirs", "ours"] * rounds
    assert walltime.LEAST_ROUNDS + walltime.WARMUP <= rounds <= walltime.MOST_ROUNDS + walltime.WARMUP
    speed = speed_of(times["theirs"], times["ours"])
    assert speed.verdict == verdict
    assert speed.low <= speed.speedup <= speed.high
    assert speed.theirs_ms == median(times["theirs"])


def test_a_slow_model_is_timed_for_the_least_number_of_rounds(clock: Clock) -> None:
    measure({"theirs": clock.forward("theirs", [30.0]), "ours": clock.forward("ours", [30.0])}, budget_s=1.0)
    assert len(clock.order) == 2 * (walltime.LEAST_ROUNDS + walltime.WARMUP)


def test_the_verdict_needs_an_interval_without_1() -> None:
    assert Speed(2.0, 1.0, speedup=2.0, low=0.99, high=3.0).verdict == "no measurable difference"
    assert Speed(2.0, 1.0, speedup=2.0, low=1.01, high=3.0).verdict == "faster"
    assert Speed(1.0, 2.0, speedup=0.5, low=0.4, high=0.99).verdict == "slower"


class Model:
    """Stands for a model, and for copies of it with kernels in them: a call only takes time."""

    def __init__(self, clock: Clock, base: float = 0.020) -> None:
        self.clock, self.base, self.in_graph = clock, base, False

    def with_kernels(self, names: Collection[str]) -> Callable[..., None]:
        def module(*_: Any) -> None:
            launches = 0 if self.in_graph else LAUNCH * len(names)
            self.clock.now += self.base + launches - sum(GAINS[name] for name in names)

        return module

    def __call__(self, *arguments: Any) -> None:
        self.with_kernels(())(*arguments)


@pytest.fixture
def model(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Model:
    one = Model(clock)

    def graph_of(forward: Callable[[int], Any]) -> Callable[[int], Any]:
        def replay(repeat: int) -> None:
            one.in_graph = True
            forward(repeat)
            one.in_graph = False

        return replay

    def compiled(module: Any, mode: str, dynamic: bool) -> Callable[..., None]:
        assert not dynamic
        if mode == "max-autotune":
            raise RuntimeError("no compiler\nand more")

        def call(*_: Any) -> None:
            clock.now += COMPILED * one.base

        return call

    monkeypatch.setattr(contest, "graph_of", graph_of)
    monkeypatch.setattr(torch, "compile", compiled)
    return one


BATCH = ((), {})


def ways(held: Contest) -> dict[str, Way]:
    return {way.name: way for way in held.ways}


def test_a_kernel_is_used_where_the_model_is_faster_with_it(model: Model) -> None:
    held = hold(model, list(GAINS), model.with_kernels, [BATCH], ("default",))
    found = ways(held)
    assert list(found) == [EAGER, EAGER_GRAPH, "torch.compile", OURS, OURS_GRAPH]
    assert found[OURS].kernels == ("good",)  # the launch of `small` costs more than it gains
    assert found[OURS_GRAPH].kernels == ("good", "small")
    assert set(found[OURS].dropped) == {"small", "slow"}
    # 20 - 4 - 0.5 ms, and 2 more with `slow`
    assert found[OURS_GRAPH].dropped == {"slow": "the model is slower with it: 17.500 ms, 15.500 ms without"}
    assert found[EAGER].ms == pytest.approx(20)
    assert found[OURS].ms == pytest.approx(17)
    assert (held.theirs, held.ours) == ("torch.compile", OURS_GRAPH)
    assert held.speed is not None
    assert held.speed.speedup == pytest.approx(12 / 15.5)
    assert held.speed.verdict == "slower"  # a compiled model is still ahead


def test_no_kernel_that_helps_means_that_none_is_used(model: Model) -> None:
    held = hold(model, ["slow"], model.with_kernels, [BATCH], ())
    found = ways(held)
    assert (held.theirs, held.ours, held.speed) == (EAGER_GRAPH, "", None)
    for name in (OURS, OURS_GRAPH):
        assert (found[name].kernels, found[name].ms, found[name].note) == ((), None, "no kernel makes the model faster")
        assert found[name].dropped["slow"].startswith("the model is slower with it: ")


def test_what_makes_no_measurable_difference_is_not_used_alone(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(GAINS, "small", LAUNCH)
    forward = contest._forward
    chosen = select(["small"], lambda names: forward([BATCH], model.with_kernels(names)), forward([BATCH], model))
    assert chosen.used == ()
    assert chosen.dropped["small"].startswith("the model is no faster with it: ")


def test_a_way_that_cannot_be_run_is_noted_and_the_others_go_on(
    model: Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(forward: Callable[[int], Any]) -> Callable[[int], Any]:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(contest, "graph_of", refuse)
    held = hold(model, ["good"], model.with_kernels, [BATCH], ("default", "max-autotune"))
    found = ways(held)
    assert found["torch.compile max-autotune"].note == "RuntimeError: no compiler"
    assert found[EAGER_GRAPH].note == "RuntimeError: operation not permitted when stream is capturing"
    assert found[OURS_GRAPH].note == "operation not permitted when stream is capturing"
    assert {name for name, way in found.items() if way.ms is None} == {"torch.compile max-autotune", EAGER_GRAPH, OURS_GRAPH}
    assert (held.theirs, held.ours) == ("torch.compile", OURS)
    assert "eager in a CUDA graph: RuntimeError: operation not permitted" in capsys.readouterr().err
