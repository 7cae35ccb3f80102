"""The scheduler decides by arithmetic: each case here is small enough to be worked out by hand."""

import json
import math
import random
from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autokernel import results, scheduler
from autokernel.state import ModelSource, Plan, Target

SOURCE = ModelSource(model="models/gpt2.py", class_name="GPT2", input_shape=(1, 32))


def target(name: str, time_us: float, roofline_us: float | None, **changes: Any) -> Target:
    values = {
        "name": name,
        "rank": 1,
        "operation": name.split("_")[1],
        "sites": ("blocks.0",),
        "count": 1,
        "shape": {"M": 16, "N": 32},
        "tensors": {},
        "dtype": "float16",
        "time_us": time_us,
        "share": time_us / 1000,
        "roofline_us": roofline_us,
        "saved_us": None if roofline_us is None else max(time_us - roofline_us, 0.0),
        "bound": "memory",
    }
    return Target(**{**values, **changes})


def plan(*targets: Target, total_us: float = 1000.0) -> Plan:
    return Plan(source=SOURCE, gpu="a GPU", total_us=total_us, targets=targets)


def experiments(*rows: tuple[Target, str, float | None], **changes: Any) -> pd.DataFrame:
    """Rows as results.read() gives them, of (target, verdict, speed-up over PyTorch)."""
    records = [
        {
            "target": judged.name,
            "kernel_type": judged.operation,
            "shape": json.dumps(judged.shape),
            "dtype": judged.dtype,
            "correctness": verdict,
            "speedup_vs_pytorch": math.nan if speedup is None else speedup,
            "reason": "" if verdict == "PASS" else f"a {verdict}",
            "experiment": number,
            "kernel_sha256": f"{number:064x}",
            **changes,
        }
        for number, (judged, verdict, speedup) in enumerate(rows, start=1)
    ]
    return pd.DataFrame.from_records(records, columns=list(results.COLUMNS))


NONE = experiments()


@pytest.mark.parametrize(
    ("share", "speedup", "expected"),
    [(0.5, 2, 4 / 3), (0.1, math.inf, 1 / 0.9), (1, 3, 3), (0, 1000, 1), (1, math.inf, math.inf), (0.5, 0.5, 2 / 3)],
)
def test_amdahl(share: float, speedup: float, expected: float) -> None:
    assert scheduler.amdahl(share, speedup) == pytest.approx(expected)


@given(st.floats(0, 1), st.floats(1, 1e6))
def test_amdahl_is_never_more_than_the_part_or_than_what_is_left_over(share: float, speedup: float) -> None:
    whole = scheduler.amdahl(share, speedup)
    assert 1 - 1e-9 <= whole <= speedup * (1 + 1e-9)
    assert whole * (1 - share) <= 1 + 1e-9


@pytest.mark.parametrize(("share", "speedup"), [(-0.1, 2), (1.1, 2), (0.5, 0), (0.5, -1), (math.nan, 2), (0.5, math.nan)])
def test_amdahl_refuses_what_is_no_share_or_no_speedup(share: float, speedup: float) -> None:
    with pytest.raises(ValueError, match="is not"):
        scheduler.amdahl(share, speedup)


def test_the_most_time_to_gain_wins_not_the_most_time() -> None:
    efficient, wasteful = target("kernel_matmul_1", 500, 450), target("kernel_softmax_2", 200, 20)
    ranking = scheduler.rank(plan(efficient, wasteful), NONE)
    assert [candidate.target.name for candidate in ranking] == ["kernel_softmax_2", "kernel_matmul_1"]
    assert [candidate.gain_us for candidate in ranking] == [180, 50]
    # 200 of 1000 us made 10 times as fast leaves 820
    assert ranking[0].whole_model == pytest.approx(1000 / 820)


def test_a_target_moves_down_as_its_kernel_gets_faster() -> None:
    first, second = target("kernel_matmul_1", 500, 100), target("kernel_softmax_2", 200, 20)
    assert scheduler.next_target(plan(first, second), NONE).candidate.target == first
    after = experiments((first, "PASS", 2.0), (first, "PASS", 4.0), (first, "PASS", 3.0))
    decision = scheduler.next_target(plan(first, second), after)
    assert decision.candidate.target == second
    assert "180.0 us" in decision.reason
    moved = next(c for c in scheduler.rank(plan(first, second), after) if c.target == first)
    assert (moved.best_speedup, moved.current_us, moved.gain_us, moved.experiments) == (4.0, 125.0, 25.0, 3)
    # the whole now takes 625 us, of which 125 could become 100
    assert moved.whole_model == pytest.approx(625 / 600)


@pytest.mark.parametrize("verdict", ["FAIL", "CRASH", "TIMEOUT", "INVALID"])
def test_a_speed_counts_only_with_a_pass(verdict: str) -> None:
    one = target("kernel_matmul_1", 500, 100)
    (candidate,) = scheduler.rank(plan(one), experiments((one, verdict, 4.9)))
    assert (candidate.best_speedup, candidate.current_us, candidate.verdict) == (None, 500, verdict)
    assert candidate.fault == f"a {verdict}"
    (later,) = scheduler.rank(plan(one), experiments((one, verdict, 4.9), (one, "PASS", None)))
    assert (later.verdict, later.fault) == ("PASS", "")


def test_a_kernel_slower_than_pytorch_is_not_used() -> None:
    one = target("kernel_matmul_1", 500, 100)
    (candidate,) = scheduler.rank(plan(one), experiments((one, "PASS", 0.5)))
    assert (candidate.best_speedup, candidate.current_us, candidate.gain_us) == (0.5, 500, 400)


@pytest.mark.parametrize(
    "change",
    [
        {"target": "kernel_matmul_2"},
        {"shape": '{"M":17,"N":32}'},
        {"shape": "standard"},
        {"dtype": "float32"},
        {"kernel_type": "reduce"},
    ],
    ids=lambda change: "-".join(change),
)
def test_rows_of_another_call_do_not_count(change: dict[str, str]) -> None:
    one = target("kernel_matmul_1", 500, 100)
    (candidate,) = scheduler.rank(plan(one), experiments((one, "PASS", 4.0), **change))
    assert (candidate.experiments, candidate.verdict, candidate.best_speedup) == (0, "not benched", None)


def test_unmeasured_targets_go_by_time_and_the_untried_first() -> None:
    large, small = target("kernel_matmul_1", 500, None), target("kernel_softmax_2", 200, None)
    assert scheduler.next_target(plan(large, small), NONE).candidate.target == large
    tried = experiments((large, "PASS", None))
    decision = scheduler.next_target(plan(large, small), tried)
    assert decision.candidate.target == small
    assert "unmeasured" in decision.reason
    assert decision.candidate.gain_us is None
    all_tried = experiments((large, "PASS", None), (small, "FAIL", None))
    assert scheduler.next_target(plan(large, small), all_tried).candidate.target == large


def test_done_only_when_every_target_is_at_its_roofline() -> None:
    first, second = target("kernel_matmul_1", 500, 100), target("kernel_softmax_2", 100, 99)
    assert scheduler.next_target(plan(first, second), experiments((first, "PASS", 4.0))).candidate.target == first
    done = scheduler.next_target(plan(first, second), experiments((first, "PASS", 4.9)))
    assert done.candidate is None
    assert "all 2 targets" in done.reason


def test_a_plan_without_targets_is_done() -> None:
    assert scheduler.next_target(plan(), NONE).candidate is None
    assert scheduler.bound(plan()) is None


def test_bounds() -> None:
    first, second = target("kernel_matmul_1", 500, 100), target("kernel_softmax_2", 200, 20)
    both = plan(first, second)
    assert scheduler.bound(both) == pytest.approx(1000 / (1000 - 400 - 180))
    assert scheduler.with_best_kernels(both, scheduler.rank(both, NONE)) is None
    after = scheduler.rank(both, experiments((first, "PASS", 2.0), (second, "PASS", 0.5)))
    assert scheduler.with_best_kernels(both, after) == pytest.approx(1000 / 750)
    assert scheduler.bound(plan(first, target("kernel_softmax_2", 200, None))) is None


def kept_at(now: Target, *others: Target) -> Plan:
    return Plan(source=SOURCE, gpu="a GPU", total_us=1000.0, targets=(now, *others), current=now.name)


def test_the_target_in_hand_stays_while_it_yields_and_goes_when_it_does_not() -> None:
    first, second = target("kernel_matmul_1", 500, 100), target("kernel_softmax_2", 500, 100)
    yielding = experiments((first, "PASS", 1.2), (first, "PASS", 1.5))
    decision = scheduler.next_target(kept_at(first, second), yielding)
    assert (decision.kind, decision.candidate.target) == (scheduler.Kind.CONTINUE, first)
    flat = experiments(*[(first, "PASS", 1.0)] * 3)
    decision = scheduler.next_target(kept_at(first, second), flat)
    assert (decision.kind, decision.candidate.target) == (scheduler.Kind.NEXT, second)


def test_kernels_that_do_not_pass_are_no_plateau_until_there_are_five_in_a_row() -> None:
    first, second = target("kernel_matmul_1", 500, 100), target("kernel_softmax_2", 500, 100)
    for verdict in ("CRASH", "FAIL", "TIMEOUT", "INVALID"):
        four = scheduler.next_target(kept_at(first, second), experiments(*[(first, verdict, None)] * 4))
        assert four.candidate.target == first, verdict
        six = scheduler.next_target(kept_at(first, second), experiments(*[(first, verdict, None)] * 6))
        assert six.candidate.target == second, verdict


def test_a_target_that_was_left_is_visited_again() -> None:
    first, second = target("kernel_matmul_1", 500, 100), target("kernel_softmax_2", 500, 100)
    rows = [*[(first, "PASS", 1.0)] * 3, *[(second, "PASS", 1.0)] * 8]
    decision = scheduler.next_target(kept_at(second, first), experiments(*rows))
    assert (decision.kind, decision.candidate.target) == (scheduler.Kind.REVISIT, first)


def test_budgets_and_other_gpus_leave_targets_out() -> None:
    first, second = target("kernel_matmul_1", 500, 100), target("kernel_softmax_2", 400, 100)
    both = plan(first, second)
    spent = {first.name: 60.0}
    assert scheduler.next_target(both, NONE, spent_s=spent, per_kernel_s=60).candidate.target == second
    assert scheduler.next_target(both, NONE, spent_s=spent, per_kernel_s=61).candidate.target == first
    assert scheduler.next_target(both, NONE, exhausted={first.name}).candidate.target == second
    assert scheduler.next_target(both, NONE, busy={first.name}).candidate.target == second
    waiting = scheduler.next_target(both, NONE, exhausted={first.name}, busy={second.name})
    assert waiting.kind is scheduler.Kind.WAIT
    done = scheduler.next_target(both, NONE, spent_s=spent, per_kernel_s=60, exhausted={second.name})
    assert done.kind is scheduler.Kind.DONE
    assert done.reason == "of the targets, 1 are out of ideas, 1 are out of their time"


def test_unmeasured_targets_take_turns() -> None:
    first, second = target("kernel_matmul_1", 500, None), target("kernel_softmax_2", 200, None)
    some = experiments(*[(first, "PASS", None)] * (scheduler.TURN - 1))
    assert scheduler.next_target(kept_at(first, second), some).kind is scheduler.Kind.CONTINUE
    many = experiments(*[(first, "PASS", None)] * scheduler.TURN)
    assert scheduler.next_target(kept_at(first, second), many).candidate.target == second


class Simulated:
    """A kernel whose k-th experiment closes, with a chance, a part of the distance to the best that it can reach."""

    def __init__(self, to: Target, floor_us: float, chance: float, part: float, seed: int) -> None:
        self.target, self.floor_us, self.chance, self.part = to, floor_us, chance, part
        self.current_us = to.time_us
        self.experiments = 0
        self._random = random.Random(f"{seed} {to.name}")  # the same luck in whatever order

    @property
    def expected_us(self) -> float:
        return self.chance * self.part * (self.current_us - self.floor_us)

    def experiment(self) -> tuple[Target, str, float | None]:
        self.experiments += 1
        luck = self._random.random()
        if luck > 0.9:
            return (self.target, "CRASH", None)
        if luck > self.chance:
            return (self.target, "PASS", 0.9 * self.target.time_us / self.current_us)
        self.current_us -= self.part * (self.current_us - self.floor_us)
        return (self.target, "PASS", self.target.time_us / self.current_us)


def simulated(seed: int) -> list[Simulated]:
    return [
        Simulated(target("kernel_matmul_1", 400, 300), 320, 0.3, 0.2, seed),  # soon as fast as it gets
        Simulated(target("kernel_softmax_2", 300, 30), 40, 0.15, 0.15, seed),  # slow and steady
        Simulated(target("kernel_reduce_3", 150, 15), 140, 0.3, 0.3, seed),  # looks promising, and is not
        Simulated(target("kernel_layernorm_4", 100, 20), 25, 0.5, 0.3, seed),
        Simulated(target("kernel_rmsnorm_5", 50, 10), 20, 0.1, 0.5, seed),  # small and rarely lucky
    ]


@pytest.mark.parametrize("seed", range(6))
def test_a_simulated_night_gains_nearly_what_foresight_would_and_starves_nobody(seed: int) -> None:
    foreseen = simulated(seed)
    for _ in range(300):
        max(foreseen, key=lambda kernel: kernel.expected_us).experiment()
    night = simulated(seed)
    by_name = {kernel.target.name: kernel for kernel in night}
    rows: list[tuple[Target, str, float | None]] = []
    current = None
    moves = 0
    for _ in range(300):
        of = Plan(source=SOURCE, gpu="a GPU", total_us=1100.0, targets=tuple(k.target for k in night), current=current)
        decision = scheduler.next_target(of, experiments(*rows))
        assert decision.candidate is not None
        moves += decision.candidate.target.name != current
        current = decision.candidate.target.name
        rows.append(by_name[current].experiment())

    def gained(kernels: list[Simulated]) -> float:
        return sum(kernel.target.time_us - kernel.current_us for kernel in kernels)

    assert gained(night) >= 0.9 * gained(foreseen)
    assert min(kernel.experiments for kernel in night) >= 10
    assert moves <= 100
