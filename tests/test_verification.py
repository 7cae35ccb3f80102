"""What verify.py is made of: the distance from the exact output, the rule, the exact copy, the clock."""

import pytest
import torch
from torch import Tensor, nn

from autokernel import verification


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


def test_tensor_dtype_is_kept_apart_by_cast():
    tokens, x = torch.arange(3), torch.ones(2, dtype=torch.float16)
    moved: tuple[Tensor, dict[str, Tensor]] = verification.cast((tokens, {"x": x}), torch.float32)
    assert moved[0] is tokens
    assert moved[1]["x"].dtype == torch.float32
