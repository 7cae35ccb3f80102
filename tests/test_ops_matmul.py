"""matmul in a captured graph: linear layers and products of matrices are found, what only looks like one is left alone."""

from collections.abc import Callable

import pytest
import torch
from regions import find
from torch import Tensor, nn


class Apply(nn.Module):
    """`function(x, weight, bias)` with weight (8, 6) and bias (6,) as parameters."""

    def __init__(self, function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(8, 6), requires_grad=False)
        self.bias = nn.Parameter(torch.randn(6), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight, self.bias)


def shape(M: int, bias: bool = False, transposed: bool = False) -> dict[str, int | bool]:
    return {"M": M, "N": 6, "K": 8, "bias": bias, "transposed": transposed}


@pytest.mark.parametrize("size", [(8,), (5, 8), (2, 5, 8), (2, 3, 5, 8)], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_linear_layer(size: tuple[int, ...], bias: bool) -> None:
    rows = torch.Size(size[:-1]).numel()
    assert find("matmul", nn.Linear(8, 6, bias=bias), torch.randn(size)) == [shape(rows, bias, transposed=True)]


def test_linear_layer_over_rows_that_are_not_contiguous() -> None:
    assert find("matmul", nn.Linear(8, 6), torch.randn(5, 16)[:, :8]) == [shape(5, True, transposed=True)]


FOUND = {
    "mm": (lambda x, w, b: torch.mm(x, w), shape(5)),
    "matmul": (lambda x, w, b: x @ w, shape(5)),
    "addmm": (lambda x, w, b: torch.addmm(b, x, w), shape(5, bias=True)),
    "addmm in place of a linear layer": (lambda x, w, b: torch.addmm(b, x.view(-1, 8), w).view(5, 6), shape(5, bias=True)),
}


@pytest.mark.parametrize("name", FOUND)
def test_product(name: str) -> None:
    function, expected = FOUND[name]
    assert find("matmul", Apply(function), torch.randn(5, 8)) == [expected]


def test_product_over_more_dimensions() -> None:
    assert find("matmul", Apply(lambda x, w, b: x @ w), torch.randn(2, 5, 8)) == [shape(10)]


LEFT_ALONE = {
    "addmm that scales the bias": lambda x, w, b: torch.addmm(b, x, w, beta=2),
    "addmm that scales the product": lambda x, w, b: torch.addmm(b, x, w, alpha=0.5),
    "addmm of a matrix": lambda x, w, b: torch.addmm(b.expand(5, 6), x, w),
    "addmm of one number for all columns": lambda x, w, b: torch.addmm(b[:1], x, w),
    "matrix times vector": lambda x, w, b: x @ w[:, 0],
    "vector times matrix": lambda x, w, b: x[0] @ w,
    "batches of matrices": lambda x, w, b: x.expand(3, 5, 8) @ w.expand(3, 8, 6),
    "elementwise product": lambda x, w, b: x * w[:5, :1],
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_left_alone(name: str) -> None:
    assert find("matmul", Apply(LEFT_ALONE[name]), torch.randn(5, 8)) == []


def with_residual(M: int, **changes: bool) -> dict[str, int | bool]:
    return {**shape(M, **changes), "residual": True}


# x is (5, 8) and the other argument (5, 6); what is found is the product alone, and then with the residual
ADDED = {
    "after": lambda x, w, b, r: x @ w + r,
    "before": lambda x, w, b, r: r + x @ w,
    "twice": lambda x, w, b, r: r + (x @ w + r),
    "after views": lambda x, w, b, r: (x @ w).view(1, 5, 6).reshape(5, 6) + r,
    "of another product": lambda x, w, b, r: x @ w + r.sigmoid(),
}
NOT_ADDED = {
    "scaled": lambda x, w, b, r: torch.add(x @ w, r, alpha=2),
    "broadcast": lambda x, w, b, r: x @ w + r[:1],
    "a number": lambda x, w, b, r: x @ w + 2.0,
    "of another dtype": lambda x, w, b, r: x @ w + r.double(),
    "to itself": lambda x, w, b, r: (lambda y: y + y)(x @ w),
    "subtracted": lambda x, w, b, r: r - x @ w,
    "also used otherwise": lambda x, w, b, r: (lambda y: (y + r) * y)(x @ w),
    "after a view of other rows": lambda x, w, b, r: (x @ w).view(3, 10) + r.view(3, 10),
}


class Adds(Apply):
    def forward(self, x: Tensor, r: Tensor) -> Tensor:  # type: ignore[override]
        return self.function(x, self.weight, self.bias, r)  # type: ignore[call-arg]


@pytest.mark.parametrize("name", ADDED)
def test_a_residual_is_part_of_the_product(name: str) -> None:
    assert find("matmul", Adds(ADDED[name]), torch.randn(5, 8), torch.randn(5, 6)) == [shape(5), with_residual(5)]


@pytest.mark.parametrize("name", NOT_ADDED)
def test_what_is_added_otherwise_is_not(name: str) -> None:
    assert find("matmul", Adds(NOT_ADDED[name]), torch.randn(5, 8), torch.randn(5, 6)) == [shape(5)]


def test_a_residual_after_a_linear_layer_with_more_dimensions() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.layer(x)

    found = find("matmul", Layer(), torch.randn(2, 5, 8))
    plain = {"M": 10, "N": 8, "K": 8, "bias": True, "transposed": True}
    assert found == [plain, {**plain, "residual": True}]
