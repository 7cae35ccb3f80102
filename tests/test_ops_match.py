"""Where the operations stand in a captured graph: each form is found, and what only looks like one is left alone."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from autokernel import ops
from autokernel.graph import Region


class Module(nn.Module):
    """`function(weights..., inputs...)` as a module that can be exported."""

    def __init__(self, function: Callable[..., Any], *weights: Tensor) -> None:
        super().__init__()
        self.function = function
        self.weights = nn.ParameterList(nn.Parameter(w, requires_grad=False) for w in weights)

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(*self.weights, *inputs)


class Recorder(fx.Interpreter):
    """Runs a graph and keeps the value of each node."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.values: dict[fx.Node, Any] = {}

    def run_node(self, node: fx.Node) -> Any:
        self.values[node] = super().run_node(node)
        return self.values[node]


def find(operation: str, function: Callable[..., Any], *arguments: Tensor, weights: int = 0) -> list[dict[str, Any]]:
    """The shapes of the regions found; each region is run with the reference in its place and must give what it gave."""
    module = Module(function, *arguments[:weights])
    captured = torch.export.export(module, arguments[weights:], strict=False).module()
    found = []
    for region in ops.get(operation).match(captured):
        assert region.operation == operation
        found.append(check(captured, region, arguments[weights:]))
    return found


def check(captured: fx.GraphModule, region: Region, inputs: tuple[Tensor, ...]) -> dict[str, Any]:
    assert region.nodes[-1] is region.output
    assert not set(region.inputs) & set(region.nodes)
    assert all(set(node.users) <= set(region.nodes) for node in region.nodes if node is not region.output)
    assert {p for node in region.nodes for p in node.all_input_nodes} - set(region.nodes) == set(region.inputs)
    recorder = Recorder(captured)
    recorder.run(*inputs)
    values = [recorder.values[node] for node in region.inputs]
    arguments = region.bind(*values)
    for argument in arguments.values():  # views only
        assert not isinstance(argument, Tensor) or any(
            argument.untyped_storage().data_ptr() == v.untyped_storage().data_ptr() for v in values
        )
    operation = ops.get(region.operation)
    raw = operation.reference(**arguments)
    result, expected = region.finish(raw), recorder.values[region.output]
    assert result.untyped_storage().data_ptr() == raw.untyped_storage().data_ptr()
    assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
    tolerance = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 1e-5}[expected.dtype]
    torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)
    return dict(operation.describe(arguments))


def randn(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(sum(size))).to(dtype)


@dataclass(frozen=True)
class Case:
    function: Callable[..., Any]
    arguments: tuple[Tensor, ...]
    shape: dict[str, Any] | None  # None: a near miss, which must not be found
    weights: int = 0


HALF = {"dtype": torch.float16}
X, W8 = randn(2, 3, 8), randn(8)
XH, WH = randn(2, 3, 8, **HALF), randn(8, **HALF)
LOGITS, CLASSES = randn(5, 7), torch.tensor([1, 6, -100, 0, 3])


def rms(shape_weight: bool = True, eps: float = 1e-6, M: int = 6) -> dict[str, Any]:
    return {"M": M, "N": 8, "weight": shape_weight, "eps": eps}


def scale(x: Tensor, eps: float = 1e-6) -> Tensor:
    return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def used_twice(w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    r = scale(x)
    return x * r * w, r


def cast_used_twice(w: Tensor, x: Tensor) -> Tensor:
    x32 = x.float()
    return (x32 * scale(x32)).to(x.dtype) * w + x32


def ln(weight: bool, bias: bool, eps: float = 1e-5) -> dict[str, Any]:
    return {"M": 6, "N": 8, "weight": weight, "bias": bias, "eps": eps}


def ce(**options: Any) -> dict[str, Any]:
    return {"M": 5, "V": 7, "ignore_index": -100, "reduction": "mean", **options}


SOFTMAX = {
    "softmax": Case(lambda x: x.softmax(-1), (X,), {"M": 6, "N": 8}),
    "softmax, last dimension by number": Case(lambda x: F.softmax(x, 2), (X,), {"M": 6, "N": 8}),
    "softmax, another dimension": Case(lambda x: x.softmax(1), (X,), None),
    "softmax into float32": Case(lambda x: F.softmax(x, -1, dtype=torch.float32), (XH,), None),
}

LAYERNORM = {
    "layernorm": Case(lambda w, b, x: F.layer_norm(x, (8,), w, b), (W8, W8 + 1, X), ln(True, True), 2),
    "layernorm, weight alone": Case(lambda w, x: F.layer_norm(x, (8,), w, eps=1e-3), (W8, X), ln(True, False, 1e-3), 1),
    "layernorm, bias alone": Case(lambda b, x: F.layer_norm(x, (8,), None, b), (W8, X), ln(False, True), 1),
    "layernorm, neither": Case(lambda x: F.layer_norm(x, (8,)), (XH,), ln(False, False)),
    "layernorm over two dimensions": Case(lambda x: F.layer_norm(x, (3, 8)), (X,), None),
}

RMSNORM = {
    "rmsnorm": Case(lambda w, x: F.rms_norm(x, (8,), w, 1e-5), (W8, X), rms(eps=1e-5), 1),
    "rmsnorm, default eps": Case(lambda x: F.rms_norm(x, (8,)), (X * 1e-3,), rms(False, 2.0**-23)),
    "rmsnorm, default eps in float16": Case(lambda x: F.rms_norm(x, (8,)), (XH * 1e-3,), rms(False, 2.0**-23)),
    "rmsnorm over two dimensions": Case(lambda x: F.rms_norm(x, (3, 8)), (X,), None),
    "rms written out": Case(lambda w, x: w * (x * scale(x, 1e-5)), (W8, X), rms(eps=1e-5), 1),
    "rms without weight": Case(lambda x: scale(x) * x, (X,), rms(False)),
    "rms with x * x": Case(lambda w, x: x * torch.rsqrt((x * x).mean(2, True) + 1e-6) * w, (W8, X), rms(), 1),
    "rms in half, no casts": Case(lambda w, x: x * scale(x) * w, (WH, XH), rms(), 1),
    "rms, cast back before the weight": Case(lambda w, x: w * (x.float() * scale(x.float())).to(x.dtype), (WH, XH), rms(), 1),
    "rms, cast back after the weight": Case(lambda w, x: (x.float() * scale(x.float()) * w).to(x.dtype), (WH, XH), rms(), 1),
    "rms, float32 for the mean alone": Case(lambda w, x: w * (x * scale(x.float())).to(x.dtype), (WH, XH), rms(), 1),
    "rms, type_as": Case(lambda w, x: (x.float() * scale(x.float())).type_as(x) * w, (WH, XH), rms(), 1),
    "rms, 1 + weight": Case(
        lambda w, x: (x.float() * scale(x.float()) * (1.0 + w.float())).type_as(x),
        (WH, XH),
        rms(),
        1,
    ),
    "rms, matrix instead of a weight": Case(lambda w, x: x * scale(x) * w, (randn(3, 8), X), rms(False), 1),
    "rms over another dimension": Case(lambda x: x * torch.rsqrt(x.pow(2).mean(1, True) + 1e-6), (X,), None),
    "rms of one tensor scales another": Case(lambda x, y: y * scale(x), (X, X + 1), None),
    "rms with a cube": Case(lambda x: x * torch.rsqrt(x.pow(3).mean(-1, True).abs() + 1e-6), (X,), None),
    "rms whose scale is used again": Case(used_twice, (W8, X), None, 1),
    "rms whose cast is used again": Case(cast_used_twice, (WH, XH), rms(False), 1),
}

CROSS_ENTROPY = {
    "cross entropy": Case(F.cross_entropy, (LOGITS, CLASSES), ce()),
    "cross entropy, none": Case(
        lambda x, t: F.cross_entropy(x, t, ignore_index=3, reduction="none"),
        (LOGITS, CLASSES.abs() % 7),
        ce(ignore_index=3, reduction="none"),
    ),
    "cross entropy, sum": Case(
        lambda x, t: F.cross_entropy(x, t, reduction="sum"),
        (LOGITS, CLASSES),
        ce(reduction="sum"),
    ),
    "cross entropy, smoothed": Case(lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1), (LOGITS, CLASSES), None),
    "cross entropy, weighted": Case(lambda w, x, t: F.cross_entropy(x, t, w), (randn(7).abs(), LOGITS, CLASSES), None, 1),
    "cross entropy of probabilities": Case(F.cross_entropy, (LOGITS, LOGITS.softmax(-1)), None),
    "cross entropy of images": Case(F.cross_entropy, (randn(2, 7, 5), torch.ones(2, 5, dtype=torch.int64)), None),
}

REDUCE = {
    "sum": Case(lambda x: x.sum(-1), (X,), {"outer": 6, "N": 8, "inner": 1, "dim": -1}),
    "sum over the first": Case(lambda x: x.sum(0), (XH,), {"outer": 1, "N": 2, "inner": 24, "dim": 0}),
    "sum, dimension kept": Case(lambda x: x.sum(1, keepdim=True), (X,), {"outer": 2, "N": 3, "inner": 8, "dim": 1}),
    "sum over two": Case(lambda x: x.sum((0, 1)), (X,), None),
    "sum over all": Case(lambda x: x.sum(), (X,), None),
    "sum into float32": Case(lambda x: x.sum(-1, dtype=torch.float32), (XH,), None),
    "sum of integers": Case(lambda x: x.sum(-1), (CLASSES.view(5, 1),), None),
}


def rotate_half(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def rotate_pairs(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def apart(a: Tensor, b: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return a * cos - b * sin, b * cos + a * sin


def pairs_by_unbind(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).reshape(x.shape)


def pairs_by_select(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    pairs = x.view(*x.shape[:-1], -1, 2)
    return torch.stack(apart(pairs[..., 0], pairs[..., 1], cos, sin), -1).flatten(3)


def halves_by_slice(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.cat(apart(x[..., :4], x[..., 4:], cos, sin), -1)


def halves_used_again(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    turned = a * cos
    return torch.cat((turned - b * sin, b * cos + a * sin), -1) + torch.cat((turned, turned), -1)


def rope(W: int, interleaved: bool = False, batched: bool = False, B: int = 2) -> dict[str, Any]:
    return {"B": B, "H": 3, "S": 5, "D": 8, "W": W, "interleaved": interleaved, "batched": batched}


# x as (B, H, S, D), the same as (B, S, H, D), and angles of both widths
Q, QT = randn(2, 3, 5, 8), randn(2, 5, 3, 8)
C4, S4, C8, S8 = randn(5, 4), randn(5, 4) + 1, randn(5, 8), randn(5, 8) + 1
CB, SB = randn(2, 5, 8), randn(2, 5, 8) + 1


def whole(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + rotate_half(x) * sin


def chunks(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.cat(apart(*x.chunk(2, -1), cos, sin), -1)


def head_by_head(t: Tensor) -> Tensor:
    return t[:, None]  # (S, W) to (S, 1, W), for x (B, S, H, D)


ROTARY = {
    "Hugging Face": Case(lambda x, c, s: whole(x, c[:, None], s[:, None]), (Q, CB, SB), rope(8, batched=True)),
    "Hugging Face, one sequence": Case(
        lambda x, c, s: whole(x, c.unsqueeze(1), s.unsqueeze(1)),
        (Q[:1], C8[None], S8[None]),
        rope(8, B=1),
    ),
    "angles for all sequences": Case(whole, (Q, C8, S8), rope(8)),
    "float16": Case(whole, (Q.half(), C8.half(), S8.half()), rope(8)),
    "a view of a projection": Case(
        lambda x, c, s: whole(x.view(2, 5, 3, 8).transpose(1, 2), c, s),
        (QT.reshape(2, 5, 24), C8, S8),
        rope(8),
    ),
    "before the transpose": Case(lambda x, c, s: whole(x, head_by_head(c), head_by_head(s)), (QT, C8, S8), rope(8)),
    "before the transpose, by sequence": Case(
        lambda x, c, s: whole(x, c.unsqueeze(2), s.unsqueeze(2)),
        (QT, CB, SB),
        rope(8, batched=True),
    ),
    "part of the head": Case(
        lambda x, c, s: torch.cat((whole(x[..., :8], c, s), x[..., 8:]), -1),
        (randn(2, 3, 5, 12), C8, S8),
        rope(8),
    ),
    "GPT-J": Case(lambda x, c, s: x * c + rotate_pairs(x) * s, (Q, C8, S8), rope(8, True)),
    "chunks": Case(chunks, (Q, C4, S4), rope(4)),
    "slices": Case(halves_by_slice, (Q, C4, S4), rope(4)),
    "split": Case(lambda x, c, s: torch.cat(apart(*x.split(4, -1), c, s), -1), (Q, C4, S4), rope(4)),
    "chunks, before the transpose": Case(
        lambda x, c, s: chunks(x, c.view(1, 5, 1, 4), s[None, :, None]),
        (QT, C4, S4),
        rope(4),
    ),
    "pairs by unbind": Case(pairs_by_unbind, (Q, C4, S4), rope(4, True)),
    "pairs by select": Case(pairs_by_select, (Q, C4, S4), rope(4, True)),
    "pairs by slices": Case(
        lambda x, c, s: torch.stack(apart(x[..., ::2], x[..., 1::2], c, s), -1).flatten(-2),
        (Q, C4, S4),
        rope(4, True),
    ),
    "pairs, before the transpose": Case(
        lambda x, c, s: pairs_by_unbind(x, head_by_head(c), head_by_head(s)),
        (QT, C4, S4),
        rope(4, True),
    ),
    "the other way round": Case(
        lambda x, c, s: torch.cat((x[..., :4] * c + x[..., 4:] * s, x[..., 4:] * c - x[..., :4] * s), -1),
        (Q, C4, S4),
        None,
    ),
    "halves swapped without a sign": Case(
        lambda x, c, s: x * c + torch.cat((x[..., 4:], x[..., :4]), -1) * s,
        (Q, C8, S8),
        None,
    ),
    "another tensor turned": Case(lambda x, y, c, s: x * c + rotate_half(y) * s, (Q, Q + 1, C8, S8), None),
    "pairs in, halves out": Case(
        lambda x, c, s: torch.cat(apart(x[..., ::2], x[..., 1::2], c, s), -1),
        (Q, C4, S4),
        None,
    ),
    "thirds": Case(
        lambda x, c, s: x * c + torch.cat((-x[..., 3:], x[..., :3]), -1) * s,
        (Q, C8, S8),
        None,
    ),
    "angles of each head": Case(whole, (Q, randn(3, 5, 8), randn(3, 5, 8) + 1), None),
    "the same angle everywhere": Case(whole, (Q, randn(8), randn(8) + 1), None),
    "cos and sin of different shapes": Case(whole, (Q, C8, SB[:, None]), None),
    "a product inside is used again": Case(halves_used_again, (Q, C4, S4), None),
    "another cos for the second half": Case(
        lambda x, c, d, s: torch.cat((x[..., :4] * c - x[..., 4:] * s, x[..., 4:] * d + x[..., :4] * s), -1),
        (Q, C4, C4 + 1, S4),
        None,
    ),
}


CASES = {
    "softmax": SOFTMAX,
    "layernorm": LAYERNORM,
    "rmsnorm": RMSNORM,
    "cross_entropy": CROSS_ENTROPY,
    "reduce": REDUCE,
    "rotary_embedding": ROTARY,
}


@pytest.mark.parametrize(("operation", "name"), [(operation, name) for operation, cases in CASES.items() for name in cases])
def test_found_in_a_graph(operation, name):
    case = CASES[operation][name]
    found = find(operation, case.function, *case.arguments, weights=case.weights)
    assert found == ([] if case.shape is None else [case.shape])


def test_query_and_key_share_their_angles():
    def attention(q, k, cos, sin):
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return whole(q, cos, sin) @ whole(k, cos, sin).mT

    assert find("rotary_embedding", attention, Q, Q + 1, CB, SB) == [rope(8, batched=True)] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_default_eps_on_a_gpu_is_that_of_float32(dtype):
    x = (X * 1e-3).to("cuda", dtype)
    with_default, with_ours = F.rms_norm(x, (8,)), F.rms_norm(x, (8,), eps=2.0**-23)
    torch.testing.assert_close(with_default, with_ours)
