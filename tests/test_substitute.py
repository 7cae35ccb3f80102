"""Kernels in the place of regions: same output, counted calls, clear faults, and a model that is never touched."""

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import reference
from autokernel import graph
from autokernel.capture import Capture, capture
from autokernel.graph import Region, aten
from autokernel.substitute import SiteFault, needs_strides, observed, substitute

WIDTH, HEADS, LENGTH, VOCABULARY = 24, 3, 10, 40


class Block(nn.Module):
    """Attention written out with a mask, and a tied output layer: views, buffers, and a weight used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("offset", torch.randn(WIDTH), persistent=False)

    def forward(self, tokens: Tensor, scale: Tensor | None = None) -> dict[str, Tensor]:
        x = self.embedding(tokens) + self.offset
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        weights = (q @ k.transpose(-1, -2) / 3).masked_fill(later, float("-inf")).softmax(-1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))
        logits = self.head(x)
        # the weights are an output, so that the softmax stays an operation of its own
        return {"logits": logits if scale is None else logits * scale, "weights": weights}


class Attention(nn.Module):
    """Attention with an explicit mask, whose result is seen through `view`, which only the captured strides allow."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).tril()
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        # elementwise, so the strides of q live on
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=seen) * 0 + q
        return mixed.transpose(1, 2).view(q.shape[0], -1)


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return Block().eval().requires_grad_(False)


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(0, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def captured(model: nn.Module, tokens: Tensor) -> Capture:
    return capture(model, (tokens,), {"scale": torch.tensor(0.5)})


def references(captured: Capture) -> dict[Region, Callable[..., Any]]:
    return {region: getattr(reference, region.operation) for region in captured.regions}


def called(module: nn.Module, tokens: Tensor) -> dict[str, Tensor]:
    return module(tokens, scale=torch.tensor(0.5))


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


def region_of(captured: Capture, operation: str) -> Region:
    return next(region for region in captured.regions if region.operation == operation)


def test_output_signature_and_calls(model: nn.Module, tokens: Tensor, captured: Capture):
    assert {region.operation for region in captured.regions} >= {"matmul", "softmax"}
    substitution = substitute(captured, references(captured))
    expected = called(model, tokens)
    for forwards in (1, 2):
        ours = called(substitution.module, tokens)
        for key, value in expected.items():
            torch.testing.assert_close(ours[key], value, rtol=1e-5, atol=1e-6)
        substitution.check_called(forwards)
    assert [site.calls for site in substitution.sites] == [2] * len(captured.regions)
    substitution.reset_counts()
    with pytest.raises(SiteFault, match="never called"):
        substitution.check_called()


def test_sites_are_named_by_module_and_target(captured: Capture):
    region = region_of(captured, "softmax")
    named = substitute(captured, {region: reference.softmax}, {region: "kernel_softmax_1"}).sites
    assert [(site.region, site.target) for site in named] == [(region, "kernel_softmax_1")]
    names = {site.name for site in substitute(captured, references(captured)).sites if site.region.operation == "matmul"}
    assert {"qkv", "out", "head"} <= names


def test_only_the_chosen_regions_are_replaced(model: nn.Module, tokens: Tensor, captured: Capture):
    region = region_of(captured, "softmax")
    substitution = substitute(captured, {region: reference.softmax})
    targets = [node.target for node in substitution.module.graph.nodes]
    assert targets.count(substitution.sites[0]) == 1
    assert aten.softmax.int not in targets
    assert targets.count(aten.linear.default) == 3
    assert same(called(substitution.module, tokens), called(model, tokens))


def test_model_and_capture_stay_as_they_were(model: nn.Module, tokens: Tensor, captured: Capture):
    seen = []
    hook = model.head.register_forward_hook(lambda *_: seen.append("hook"))
    before = {name: (value.data_ptr(), value.clone()) for name, value in model.state_dict().items()}
    code = captured.module.code
    output = called(model, tokens)
    substitution = substitute(captured, references(captured))
    called(substitution.module, tokens)
    shared = {value.data_ptr() for value in (*model.parameters(), *model.buffers())}
    held = [*substitution.module.parameters(), *substitution.module.buffers()]
    assert {value.data_ptr() for value in held} == shared
    substitution.restore()
    assert captured.module.code == code
    for name, value in model.state_dict().items():
        assert value.data_ptr() == before[name][0]
        assert torch.equal(value, before[name][1])
    assert same(called(model, tokens), output)
    assert seen == ["hook", "hook"]
    assert hook.id in model.head._forward_hooks


def test_restore_computes_the_captured_graph_again(model: nn.Module, tokens: Tensor, captured: Capture):
    wrong = {
        region: lambda **kwargs: torch.zeros_like(kwargs["x"]) for region in captured.regions if region.operation == "softmax"
    }
    substitution = substitute(captured, wrong)
    assert not same(called(substitution.module, tokens), called(model, tokens))
    substitution.restore()
    substitution.reset_counts()
    assert same(called(substitution.module, tokens), called(captured.module, tokens))
    assert substitution.sites[0].calls == 0
    assert [node.name for node in substitution.module.graph.nodes] == [node.name for node in captured.module.graph.nodes]


def test_an_input_may_be_the_result_of_another_site():
    model = nn.Sequential(nn.Linear(6, 6), nn.Softmax(-1), nn.Linear(6, 5)).eval().requires_grad_(False)
    x = torch.randn(3, 6)
    captured = capture(model, (x,), {})
    substitution = substitute(captured, references(captured))
    operators = [node.target for node in substitution.module.graph.nodes if node.op == "call_function"]
    assert operators == list(substitution.sites)
    assert torch.allclose(substitution.module(x), model(x), atol=1e-6)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda x: x[..., :-1], r"gives \(2, 3, 10, 9\) float32 on cpu where the model needs \(2, 3, 10, 10\) float32"),
        (lambda x: x.half(), r"gives \(2, 3, 10, 10\) float16 on cpu where the model needs .* float32"),
        (lambda x: x.to("meta"), "gives .* on meta where the model needs .* on cpu"),
        (lambda x: None, "returned a NoneType, no tensor"),
        (lambda x: x.no_such_attribute, "raised AttributeError"),
    ],
    ids=["shape", "dtype", "device", "none", "raises"],
)
def test_a_kernel_that_cannot_stand_there_is_named(captured: Capture, tokens: Tensor, returned: Callable, message: str):
    region = region_of(captured, "softmax")
    substitution = substitute(captured, {region: returned}, {region: "kernel_softmax_1"})
    with pytest.raises(SiteFault, match=f"kernel_softmax_1 at model {message}.*correct the kernel"):
        called(substitution.module, tokens)


def test_memory_is_not_the_kernels_fault(captured: Capture, tokens: Tensor):
    def full(x: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("no memory left")

    with pytest.raises(torch.OutOfMemoryError):
        called(substitute(captured, {region_of(captured, "softmax"): full}).module, tokens)


@pytest.mark.parametrize("shape", [(1, LENGTH), (2, LENGTH - 1)])
def test_other_inputs_than_the_captured_ones_are_refused(captured: Capture, shape: tuple[int, int]):
    region = next(region for region in captured.regions if graph.site(region.output) == "qkv")
    substitution = substitute(captured, {region: reference.matmul})
    with pytest.raises(SiteFault, match=r"qkv gets .* where \(2, 10, 24\) float32 was captured"):
        called(substitution.module, torch.zeros(shape, dtype=torch.int64))


def attention_capture() -> tuple[Capture, tuple[Tensor, ...]]:
    inputs = tuple(torch.randn(2, LENGTH, HEADS, 8) for _ in range(3))
    exported = torch.export.export(Attention(), inputs, strict=False).module(check_guards=False)
    node = next(graph.calls(exported, aten.scaled_dot_product_attention.default))
    region = Region(
        operation="flash_attention",
        output=node,
        nodes=(node,),
        inputs=tuple(node.args[:3]),
        bind=lambda q, k, v: {"q": q, "k": k, "v": v, "causal": True},
    )
    return Capture(exported, (region,)), inputs


def test_a_mask_that_nothing_needs_goes():
    captured, inputs = attention_capture()
    substitution = substitute(captured, {captured.regions[0]: reference.flash_attention})
    left = {node.target for node in substitution.module.graph.nodes}
    assert aten.tril.default in {node.target for node in captured.module.graph.nodes}
    assert left.isdisjoint({aten.tril.default, aten.ones.default, aten.scaled_dot_product_attention.default})
    assert sum(node.op == "placeholder" for node in substitution.module.graph.nodes) == 3
    assert torch.allclose(substitution.module(*inputs), captured.module(*inputs), atol=1e-6)


class Strided(nn.Module):
    """The node of the region gives a transposed layout; what follows it is given by the test."""

    def __init__(self, after: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.after = after

    def forward(self, x: Tensor) -> Tensor:
        return self.after(torch.relu(x.transpose(1, 2)))  # relu keeps the strides of its argument


@pytest.mark.parametrize(
    ("after", "bound"),
    [
        (lambda y: y.transpose(1, 2).view(2, -1), True),
        (lambda y: (y.transpose(1, 2) * 2).view(2, -1), True),
        (lambda y: y.transpose(1, 2).unbind(0)[0].view(-1), True),
        (lambda y: y.transpose(1, 2).reshape(2, -1), False),
        # export leaves `contiguous` out where the captured layout already was
        (lambda y: y.transpose(1, 2).contiguous().view(2, -1), True),
        (lambda y: y.contiguous().view(2, -1), False),
        (lambda y: y.sum(-1).view(-1), False),
    ],
    ids=["view", "elementwise then view", "unbind then view", "reshape", "no-op contiguous", "contiguous", "sum"],
)
def test_strides_are_matched_only_where_a_later_node_needs_them(after: Callable[[Tensor], Tensor], bound: bool):
    x = torch.randn(2, 5, 7)
    module = torch.export.export(Strided(after), (x,), strict=False).module(check_guards=False)
    node = next(graph.calls(module, aten.relu.default))
    region = Region("reduce", node, (node,), (node.args[0],), bind=lambda x: {"x": x})
    substitution = substitute(Capture(module, (region,)), {region: lambda x: x.clamp(min=0).contiguous()})
    assert needs_strides(node) is bound
    torch.testing.assert_close(substitution.module(x), Strided(after)(x))
    assert substitution.sites[0].copies == int(bound)


def test_a_site_outside_the_output_is_reported(captured: Capture, tokens: Tensor):
    substitution = substitute(captured, references(captured))
    site = substitution.sites[-1]
    node = next(node for node in substitution.module.graph.nodes if node.target is site)
    node.target = lambda *inputs: site.region.finish(site.kernel(**site.region.bind(*inputs)))
    substitution.module.recompile()  # as if the graph had been edited after the fact
    called(substitution.module, tokens)
    with pytest.raises(SiteFault, match=f"{site.name} was put into the model but never called"):
        substitution.check_called()


def test_foreign_and_overlapping_regions_are_refused(model: nn.Module, tokens: Tensor, captured: Capture):
    other = capture(model, (tokens,), {"scale": torch.tensor(0.5)})
    with pytest.raises(ValueError, match="not of this capture"):
        substitute(captured, {other.regions[0]: reference.matmul})
    region = region_of(captured, "softmax")
    twice = Region("softmax", region.output, region.nodes, region.inputs, bind=lambda x: {"x": x})
    overlapping = Capture(captured.module, (region, twice))
    with pytest.raises(ValueError, match="overlaps"):
        substitute(overlapping, {region: reference.softmax, twice: reference.softmax})


def test_nodes_with_effects_and_notes_survive():
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            scores = x.softmax(-1)
            self.total.add_(x)
            return scores

    captured = capture(Writes().eval(), (torch.randn(4, 4),), {})
    region = region_of(captured, "softmax")
    kept = {node.target for node in substitute(captured, {region: reference.softmax}).module.graph.nodes}
    before = {node.target for node in captured.module.graph.nodes}
    assert before - kept == {region.output.target}


def test_observed_shows_each_region_and_computes_the_same(tokens: Tensor, captured: Capture):
    seen: dict[Region, tuple[Tensor, ...]] = {}
    probes = {region: lambda *values, region=region: operator.setitem(seen, region, values) for region in captured.regions}
    module = observed(captured, probes)
    assert same(called(module, tokens), called(captured.module, tokens))
    assert seen.keys() == set(captured.regions)
    for region, (output, *inputs) in seen.items():
        expected = region.finish(getattr(reference, region.operation)(**region.bind(*inputs)))
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)


def test_watch_sees_each_value(captured: Capture, tokens: Tensor):
    substitution = substitute(captured, references(captured))
    seen: list[Tensor] = []
    for site in substitution.sites:
        site.watch = seen.append
    called(substitution.module, tokens)
    assert [value.shape for value in seen] == [graph.value(site.region.output).shape for site in substitution.sites]
