"""What verify.py is made of: the distance from the exact output, the rule, the exact copy, the clock."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from autokernel import verification, walltime
from autokernel.walltime import Speed


def test_relative_error():
    exact = [torch.tensor([3.0, 4.0])]
    assert verification.relative_error([torch.tensor([3.0, 4.5])], exact) == pytest.approx(0.1)
    assert verification.relative_error([torch.tensor([3.0, float("nan")])], exact) == float("inf")
    assert verification.relative_error([torch.tensor([3.0, float("inf")])], exact) == float("inf")
    assert verification.relative_error([torch.tensor([3.0])], exact) == float("inf")
    masked = [torch.tensor([3.0, float("-inf")])]
    assert verification.relative_error([torch.tensor([3.0, 1.0])], masked) == 0
    zeros = [torch.zeros(2)]
    assert verification.relative_error(zeros, zeros) == 0
    assert verification.relative_error([torch.ones(2)], zeros) == float("inf")
    # a wrong second output does not hide behind the first
    both = [torch.full((1000,), 10.0), torch.ones(2)]
    assert verification.relative_error([both[0], torch.zeros(2)], both) == 1


@pytest.mark.parametrize(
    ("error", "error_without", "correct"),
    [
        (1e-3, 1e-3, True),
        (1.25e-3, 1e-3, True),
        (1.3e-3, 1e-3, False),
        (1e-7, 0.0, True),
        (1e-5, 0.0, False),
        (float("inf"), 1e-3, False),
        (float("inf"), float("inf"), False),
    ],
)
def test_the_rule(error: float, error_without: float, correct: bool):
    accuracy = verification.Accuracy(error, error_without, None, None, 0)
    assert accuracy.correct is correct
    assert bool(accuracy.reason) is not correct


def test_agreement_counts_rows_with_the_same_largest_element():
    exact = [torch.tensor(1.0), torch.eye(4)]
    values = torch.eye(4)
    values[0] = values[1]
    assert verification.agreement([torch.tensor(1.0), values], exact) == 0.75
    assert verification.agreement([torch.tensor(1.0)], exact[:1]) is None


def test_the_exact_copy_has_the_same_weights_and_leaves_the_model():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False), nn.BatchNorm1d(5)).half().eval()
    model[1].weight = model[0].weight
    exact = verification.exact_copy(model, torch.float32, "cpu")
    assert exact[0].weight is exact[1].weight
    assert exact[0].weight.dtype == exact[2].running_mean.dtype == torch.float32
    assert exact[2].num_batches_tracked.dtype == torch.int64
    assert torch.equal(exact[0].weight, model[0].weight.float())
    assert {value.dtype for value in model.parameters()} == {torch.float16}
    ours = {value.data_ptr() for value in (*model.parameters(), *model.buffers())}
    assert ours.isdisjoint(value.data_ptr() for value in (*exact.parameters(), *exact.buffers()))


def test_full_precision_restores_what_was_set():
    torch.set_float32_matmul_precision("high")
    try:
        with verification.full_precision():
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")


class Clock:
    """A clock that each forward pass moves on by its own duration."""

    def __init__(self) -> None:
        self.now = 0.0
        self.order: list[str] = []

    def forward(self, name: str, durations: Sequence[float]) -> Callable[[int], None]:
        def call(repeat: int) -> None:
            self.order.append(name)
            self.now += durations[repeat % len(durations)]

        return call


@pytest.mark.parametrize(
    ("eager", "ours", "verdict"),
    [
        ([0.010, 0.011], [0.005, 0.0055], "faster"),
        ([0.005], [0.010], "slower"),
        ([0.010, 0.012, 0.011], [0.012, 0.010, 0.011], "no measurable difference"),
    ],
)
def test_the_two_are_timed_in_turn(eager: list[float], ours: list[float], verdict: str, monkeypatch: pytest.MonkeyPatch):
    clock = Clock()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(walltime.time, "perf_counter", lambda: clock.now)
    speed = walltime.time_both(clock.forward("eager", eager), clock.forward("ours", ours))
    assert clock.order == ["eager", "ours"] * (len(clock.order) // 2)
    assert walltime.LEAST_PAIRS + walltime.WARMUP <= len(clock.order) // 2 <= walltime.MOST_PAIRS + walltime.WARMUP
    assert speed.verdict == verdict
    assert speed.low <= speed.speedup <= speed.high
    assert speed.eager_ms == pytest.approx(1e3 * sorted(eager)[len(eager) // 2], rel=0.11)


def test_the_verdict_needs_an_interval_without_1():
    assert Speed(2.0, 1.0, speedup=2.0, low=0.99, high=3.0).verdict == "no measurable difference"
    assert Speed(2.0, 1.0, speedup=2.0, low=1.01, high=3.0).verdict == "faster"
    assert Speed(1.0, 2.0, speedup=0.5, low=0.4, high=0.99).verdict == "slower"


def test_a_model_that_no_cuda_graph_can_hold_is_not_timed_in_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def refuse(forward: Callable[[int], None]) -> Callable[[int], None]:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(walltime, "_graph_of", refuse)
    assert walltime.time_graphs(lambda repeat: None, lambda repeat: None) is None
    assert "no CUDA graph of this model: operation not permitted" in capsys.readouterr().err


def test_a_slow_model_is_timed_for_the_least_number_of_pairs(monkeypatch: pytest.MonkeyPatch):
    clock = Clock()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(walltime.time, "perf_counter", lambda: clock.now)
    walltime.time_both(clock.forward("eager", [30.0]), clock.forward("ours", [30.0]))
    assert len(clock.order) == 2 * (walltime.LEAST_PAIRS + walltime.WARMUP)


def test_tensor_dtype_is_kept_apart_by_cast():
    tokens, x = torch.arange(3), torch.ones(2, dtype=torch.float16)
    moved: tuple[Tensor, dict[str, Tensor]] = verification.cast((tokens, {"x": x}), torch.float32)
    assert moved[0] is tokens
    assert moved[1]["x"].dtype == torch.float32
