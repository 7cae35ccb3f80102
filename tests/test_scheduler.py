"""The scheduler decides by arithmetic: each case here is small enough to be worked out by hand."""

import json
import math
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
            **changes,
        }
        for judged, verdict, speedup in rows
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
