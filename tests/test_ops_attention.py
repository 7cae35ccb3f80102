"""flash_attention and fused_mlp in a captured graph: each form is found, and what only looks like one is left alone."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from regions import find
from torch import Tensor, nn

from autokernel import ops

ATTENTION = F.scaled_dot_product_attention
Q, K, V = (torch.randn(2, 4, 10, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
FEW_K, FEW_V = K[:, :2], V[:, :2]
LOWEST = torch.finfo(torch.float32).min


class Apply(nn.Module):
    """A function of the inputs as a module that can be exported."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(*inputs)


def attention(causal: bool, **others: Any) -> dict[str, Any]:
    return {"B": 2, "H": 4, "Hkv": 4, "Sq": 10, "Sk": 10, "D": 8, "causal": causal, "scale": None, **others}


def lower(rows: int, columns: int, diagonal: int = 0) -> Tensor:
    return torch.ones(rows, columns, dtype=torch.bool).tril(diagonal)


def additive(seen: Tensor, low: float) -> Tensor:
    return torch.zeros(seen.shape).masked_fill(~seen, low)


def repeat(x: Tensor, times: int) -> Tensor:
    """Hugging Face's repeat_kv."""
    B, H, S, D = x.shape
    return x[:, :, None, :, :].expand(B, H, times, S, D).reshape(B, H * times, S, D)


def repeat_other_way(x: Tensor, times: int) -> Tensor:
    """Heads 0 1 0 1, not 0 0 1 1."""
    B, H, S, D = x.shape
    return x[:, None].expand(B, times, H, S, D).reshape(B, H * times, S, D)


def through_projections(x: Tensor) -> Tensor:
    q, k, v = x.view(2, 10, 3, 4, 8).unbind(2)
    y = ATTENTION(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
    return y.transpose(1, 2).reshape(2, 10, 32)


def shared_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = lower(10, 10)
    return ATTENTION(ATTENTION(q, k, v, attn_mask=mask), k, v, attn_mask=mask)


def keys_used_again(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    k = repeat(k, 2)
    return ATTENTION(q, k, repeat(v, 2)), k + 1


GROUPED = {"Hkv": 2}
ATTENTION_FOUND: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], list[dict[str, Any]]]] = {
    "full": (ATTENTION, (Q, K, V), [attention(False)]),
    "causal": (lambda q, k, v: ATTENTION(q, k, v, is_causal=True), (Q, K, V), [attention(True)]),
    "scale": (lambda q, k, v: ATTENTION(q, k, v, scale=0.3), (Q, K, V), [attention(False, scale=0.3)]),
    "float16": (ATTENTION, (Q.half(), K.half(), V.half()), [attention(False)]),
    "fewer queries": (lambda q, k, v: ATTENTION(q[:, :, :3], k, v), (Q, K, V), [attention(False, Sq=3)]),
    "fused projection": (through_projections, (torch.randn(2, 10, 96),), [attention(True)]),
    "mask of all": (lambda q, k, v: ATTENTION(q, k, v, attn_mask=torch.ones(10, 10).bool()), (Q, K, V), [attention(False)]),
    "mask of zeros": (lambda q, k, v: ATTENTION(q, k, v, attn_mask=torch.zeros(1, 10)), (Q, K, V), [attention(False)]),
    "causal bool mask": (lambda q, k, v: ATTENTION(q, k, v, attn_mask=lower(10, 10)), (Q, K, V), [attention(True)]),
    "causal mask for each head": (
        lambda q, k, v: ATTENTION(q, k, v, attn_mask=lower(10, 10).expand(2, 4, 10, 10)),
        (Q, K, V),
        [attention(True)],
    ),
    "causal mask of minus infinity": (
        lambda q, k, v: ATTENTION(q, k, v, attn_mask=additive(lower(10, 10), float("-inf"))),
        (Q, K, V),
        [attention(True)],
    ),
    "causal mask of the lowest number": (
        lambda q, k, v: ATTENTION(q, k, v, attn_mask=additive(lower(10, 10), LOWEST)[None, None]),
        (Q, K, V),
        [attention(True)],
    ),
    "causal mask from positions": (
        lambda q, k, v: ATTENTION(q, k, v, attn_mask=torch.arange(10)[:, None] >= torch.arange(10)[None, :]),
        (Q, K, V),
        [attention(True)],
    ),
    "lower right mask": (
        lambda q, k, v: ATTENTION(q[:, :, :3], k, v, attn_mask=lower(3, 10, 7)),
        (Q, K, V),
        [attention(True, Sq=3)],
    ),
    "last query sees all": (
        lambda q, k, v: ATTENTION(q[:, :, :1], k, v, attn_mask=lower(1, 10, 9)),
        (Q, K, V),
        [attention(False, Sq=1)],
    ),
    "mask shared by two": (shared_mask, (Q, K, V), [attention(True)] * 2),
    "grouped heads": (lambda q, k, v: ATTENTION(q, k, v, enable_gqa=True), (Q, FEW_K, FEW_V), [attention(False, **GROUPED)]),
    "repeated by expand": (
        lambda q, k, v: ATTENTION(q, repeat(k, 2), repeat(v, 2), is_causal=True),
        (Q, FEW_K, FEW_V),
        [attention(True, **GROUPED)],
    ),
    "repeated by repeat_interleave": (
        lambda q, k, v: ATTENTION(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, dim=-3)),
        (Q, FEW_K, FEW_V),
        [attention(False, **GROUPED)],
    ),
    "repeated and used again": (keys_used_again, (Q, FEW_K, FEW_V), [attention(False, **GROUPED)]),
    "repeated in another order": (
        lambda q, k, v: ATTENTION(q, repeat_other_way(k, 2), repeat_other_way(v, 2)),
        (Q, FEW_K, FEW_V),
        [attention(False)],
    ),
    "repeated keys, full values": (lambda q, k, v: ATTENTION(q, repeat(k, 2), v), (Q, FEW_K, V), [attention(False)]),
}


@pytest.mark.parametrize("name", ATTENTION_FOUND)
def test_attention(name: str) -> None:
    function, inputs, expected = ATTENTION_FOUND[name]
    assert find("flash_attention", Apply(function), *inputs) == expected


ATTENTION_LEFT_ALONE: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "mask from an input": (lambda q, k, v, m: ATTENTION(q, k, v, attn_mask=m), (Q, K, V, lower(10, 10))),
    "mask with one hole": (lambda q, k, v: ATTENTION(q, k, v, attn_mask=torch.arange(10)[None] != 3), (Q, K, V)),
    "mask for one head only": (
        lambda q, k, v: ATTENTION(q, k, v, attn_mask=(torch.arange(4) > 0)[:, None, None] | lower(10, 10)),
        (Q, K, V),
    ),
    "window": (lambda q, k, v: ATTENTION(q, k, v, attn_mask=lower(10, 10) & ~lower(10, 10, -4)), (Q, K, V)),
    "slopes": (lambda q, k, v: ATTENTION(q, k, v, attn_mask=torch.arange(10.0)[None] * -0.1), (Q, K, V)),
    "mild mask": (lambda q, k, v: ATTENTION(q, k, v, attn_mask=additive(lower(10, 10), -10.0)), (Q, K, V)),
    "upper left flag": (lambda q, k, v: ATTENTION(q[:, :, :3], k, v, is_causal=True), (Q, K, V)),
    "upper left mask": (lambda q, k, v: ATTENTION(q[:, :, :3], k, v, attn_mask=lower(3, 10)), (Q, K, V)),
    "values of another width": (lambda q, k, v: ATTENTION(q, k, v[..., :6]), (Q, K, V)),
    "wide heads": (lambda q, k, v: ATTENTION(*(x.repeat(1, 1, 1, 33) for x in (q, k, v))), (Q, K, V)),
    "keys without a batch": (lambda q, k, v: ATTENTION(q, k[:1], v[:1]), (Q, K, V)),
    "three dimensions": (lambda q, k, v: ATTENTION(q[0], k[0], v[0]), (Q, K, V)),
}


@pytest.mark.parametrize("name", ATTENTION_LEFT_ALONE)
def test_attention_left_alone(name: str) -> None:
    function, inputs = ATTENTION_LEFT_ALONE[name]
    assert find("flash_attention", Apply(function), *inputs) == []


def test_attention_with_dropout_is_left_alone() -> None:
    module = Apply(lambda q, k, v: ATTENTION(q, k, v, dropout_p=0.5))
    captured = torch.export.export(module, (Q, K, V), strict=False).module()
    assert ops.get("flash_attention").match(captured) == []


def test_causal_attention_counts_the_pairs_that_are_seen() -> None:
    operation = ops.get("flash_attention")
    for Sq, Sk in ((1, 1), (7, 7), (3, 10), (1, 6)):
        pairs = int(lower(Sq, Sk, Sk - Sq).sum())
        assert operation.flops(attention(True, Sq=Sq, Sk=Sk)) == 4 * 2 * 4 * 8 * pairs


class MLP(nn.Module):
    """`combine(gate, up)` of two projections of x, projected down; `hidden` sees what goes into the last projection."""

    def __init__(
        self,
        combine: Callable[[Tensor, Tensor], Tensor],
        biases: tuple[bool, bool, bool] = (False, False, False),
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.combine = combine
        self.gate, self.up = nn.Linear(6, 16, bias=biases[0]), nn.Linear(6, 16, bias=biases[1])
        self.down, self.dropout = nn.Linear(16, 5, bias=biases[2]), nn.Dropout(dropout)

    def hidden(self, x: Tensor) -> Tensor:
        return self.combine(self.gate(x), self.up(x))

    def forward(self, x: Tensor) -> Any:
        return self.down(self.dropout(self.hidden(x)))


class Plain(MLP):
    """The same without the gate: `combine(up, up)`."""

    def hidden(self, x: Tensor) -> Tensor:
        up = self.up(x)
        return self.combine(up, up)


class Conv1D(nn.Module):
    """GPT-2's form: addmm of (K, N) weights with views around."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes = (16, 5)
        self.up, self.down = nn.Parameter(torch.randn(6, 16)), nn.Parameter(torch.randn(16, 5))
        self.b_up, self.b_down = nn.Parameter(torch.randn(16)), nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        up = torch.addmm(self.b_up, x.view(-1, 6), self.up).view(2, 7, 16)
        hidden = F.gelu(up, approximate="tanh")
        return torch.addmm(self.b_down, hidden.view(-1, 16), self.down).view(2, 7, 5)


def mlp(activation: str, gated: bool, b_up: bool = False, b_down: bool = False) -> dict[str, Any]:
    sizes = {"M": 14, "K": 6, "H": 16, "N": 5}
    return {**sizes, "gated": gated, "b_up": b_up, "b_down": b_down, "activation": activation}


def gelu_new(x: Tensor) -> Tensor:
    """As GPT-2 of Hugging Face has it."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def gelu_fast(x: Tensor) -> Tensor:
    """The same with fewer products, as BERT's descendants have it."""
    return 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))


MLP_FOUND: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "SwiGLU": (lambda: MLP(lambda gate, up: F.silu(gate) * up), mlp("silu", True)),
    "gate on the right": (lambda: MLP(lambda gate, up: up * F.silu(gate)), mlp("silu", True)),
    "GEGLU": (lambda: MLP(lambda gate, up: F.gelu(gate) * up), mlp("gelu", True)),
    "gate, biases after it": (lambda: MLP(lambda g, u: F.silu(g) * u, (False, True, True)), mlp("silu", True, True, True)),
    "gate, dropout in eval": (lambda: MLP(lambda g, u: F.silu(g) * u, dropout=0.1), mlp("silu", True)),
    "silu": (lambda: Plain(lambda up, _: F.silu(up)), mlp("silu", False)),
    "gelu": (lambda: Plain(lambda up, _: F.gelu(up), (False, True, True)), mlp("gelu", False, True, True)),
    "gelu tanh": (lambda: Plain(lambda up, _: F.gelu(up, approximate="tanh")), mlp("gelu_tanh", False)),
    "one bias": (lambda: Plain(lambda up, _: F.gelu(up), (False, False, True)), mlp("gelu", False, False, True)),
    "relu, square": (lambda: Plain(lambda up, _: F.relu(up).square()), mlp("relu2", False)),
    "relu, power of two": (lambda: Plain(lambda up, _: F.relu(up) ** 2), mlp("relu2", False)),
    "relu times itself": (lambda: Plain(lambda up, _: (lambda r: r * r)(F.relu(up))), mlp("relu2", False)),
    "silu, written out": (lambda: MLP(lambda gate, up: gate * torch.sigmoid(gate) * up), mlp("silu", True)),
    "gelu, written out": (lambda: Plain(lambda up, _: up * 0.5 * (1 + torch.erf(up / 2**0.5))), mlp("gelu", False)),
    "gelu tanh, written out": (lambda: Plain(lambda up, _: gelu_new(up)), mlp("gelu_tanh", False)),
    "gelu tanh, factored": (lambda: Plain(lambda up, _: gelu_fast(up)), mlp("gelu_tanh", False)),
    "gelu tanh in float32": (lambda: Plain(lambda up, _: gelu_new(up.double()).float()), mlp("gelu_tanh", False)),
    "Conv1D": (Conv1D, mlp("gelu_tanh", False, True, True)),
}


@pytest.mark.parametrize("name", MLP_FOUND)
def test_mlp(name: str) -> None:
    make, expected = MLP_FOUND[name]
    assert find("fused_mlp", make(), torch.randn(2, 7, 6)) == [expected]


def test_mlp_in_float16() -> None:
    module = MLP(lambda gate, up: F.silu(gate) * up).half()
    assert find("fused_mlp", module, torch.randn(2, 7, 6).half()) == [mlp("silu", True)]


class HiddenReturned(MLP):
    def forward(self, x: Tensor) -> Any:
        hidden = self.hidden(x)
        return self.down(hidden), hidden


class UpReturned(MLP):
    def forward(self, x: Tensor) -> Any:
        up = self.up(x)
        return self.down(F.silu(self.gate(x)) * up), up


class TwoInputs(MLP):
    def hidden(self, x: Tensor) -> Tensor:
        return self.combine(self.gate(x), self.up(x + 1))


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


MLP_LEFT_ALONE: dict[str, Callable[[], nn.Module]] = {
    "gate with a bias": lambda: MLP(swiglu, (True, False, False)),
    "gate and up of different inputs": lambda: TwoInputs(swiglu),
    "hidden values used elsewhere": lambda: HiddenReturned(swiglu),
    "up used elsewhere": lambda: UpReturned(swiglu),
    "nearly gelu": lambda: Plain(lambda up, _: up * torch.sigmoid(1.702 * up)),
    "gelu tanh with another constant": lambda: Plain(lambda up, _: 0.5 * up * (1 + torch.tanh(0.8 * (up + 0.044715 * up**3)))),
    "another activation": lambda: Plain(lambda up, _: F.relu(up)),
    "gate without an activation": lambda: MLP(lambda gate, up: gate * up),
    "activation after the product": lambda: MLP(lambda gate, up: F.silu(gate * up) + 1),
    "relu, cube": lambda: Plain(lambda up, _: F.relu(up) ** 3),
    "square without relu": lambda: Plain(lambda up, _: up.square()),
    "scaled hidden values": lambda: MLP(lambda gate, up: F.silu(gate) * up * 0.5),
    "gate of one column": lambda: MLP(lambda gate, up: F.silu(gate[..., :1]) * up),
    "rows mixed": lambda: Plain(lambda up, _: F.silu(up).transpose(0, 1).reshape(2, 7, 16)),
}


@pytest.mark.parametrize("name", MLP_LEFT_ALONE)
def test_mlp_left_alone(name: str) -> None:
    assert find("fused_mlp", MLP_LEFT_ALONE[name](), torch.randn(2, 7, 6)) == []
