"""A model's graph, and the regions found in it: right, disjoint, replaceable, named."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from autokernel import ops
from autokernel.capture import Capture, NotCapturable, call_of, capture, select, shortened, site_names
from autokernel.graph import Region
from models import bert_base, gpt2, llama_7b

SEQUENCE = 32
# Two layers each. A GPT-2 block has 2 norms, 2 linear layers beside its MLP; a LLaMA block 2 norms, 4 linear layers and a rope
# for queries and one for keys; a BERT layer 2 norms and 4 linear layers. Then a last (or first) norm and an output (or pooler).
MODELS = {
    "gpt2": (gpt2.GPT2, gpt2.TINY, {"layernorm": 5, "matmul": 5, "flash_attention": 2, "fused_mlp": 2}),
    "llama": (
        llama_7b.LlamaModel,
        llama_7b.TINY,
        {"rmsnorm": 5, "matmul": 9, "flash_attention": 2, "fused_mlp": 2, "rotary_embedding": 4},
    ),
    "bert": (bert_base.BertModel, bert_base.TINY, {"layernorm": 5, "matmul": 9, "flash_attention": 2, "fused_mlp": 2}),
}


def captured(name: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, tuple[Tensor], Capture]:
    build, configuration, _ = MODELS[name]
    torch.manual_seed(0)
    model = build(**configuration).eval().to(dtype)
    args = (torch.randint(0, configuration["vocab_size"], (2, SEQUENCE)),)
    return model, args, capture(model, args, {})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_every_operation_is_found(name, dtype):
    _, _, found = captured(name, dtype)
    assert Counter(region.operation for region in found.regions) == MODELS[name][2]
    assert not found.refused


@pytest.mark.parametrize("name", MODELS)
def test_the_graph_computes_what_the_model_computes(name):
    model, args, found = captured(name)
    with torch.no_grad():
        expected, result = model(*args), found.module(*args)
    torch.testing.assert_close(result, expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", MODELS)
def test_the_graph_has_the_weights_of_the_model(name):
    model, _, found = captured(name)
    ours = {parameter.data_ptr() for parameter in found.module.parameters()}
    assert ours <= {parameter.data_ptr() for parameter in model.parameters()}


@pytest.mark.parametrize("name", MODELS)
def test_regions_are_disjoint_in_order_and_replaceable(name):
    _, _, found = captured(name)
    order = {node: position for position, node in enumerate(found.module.graph.nodes)}
    nodes = [node for region in found.regions for node in region.nodes]
    assert len(nodes) == len(set(nodes))
    places = [order[region.output] for region in found.regions]
    assert places == sorted(places)
    hidden = {node for region in found.regions for node in region.nodes if node is not region.output}
    for region in found.regions:
        assert all(order[node] < order[region.output] for node in region.inputs)
        assert not hidden.intersection(region.inputs)


@pytest.mark.parametrize("name", MODELS)
def test_the_call_of_a_region_computes_the_region(name):
    _, args, found = captured(name)
    values: dict[fx.Node, object] = {}

    class Keep(fx.Interpreter):
        def run_node(self, n: fx.Node) -> object:
            values[n] = super().run_node(n)
            return values[n]

    with torch.no_grad():
        Keep(found.module).run(*args)
        for region in found.regions:
            arguments = region.bind(*(values[node] for node in region.inputs))
            result = region.finish(ops.get(region.operation).reference(**arguments))
            torch.testing.assert_close(result, values[region.output], rtol=1e-4, atol=1e-5)
            call = call_of(region)
            for argument, spec in call.tensors.items():
                assert tuple(arguments[argument].shape) == spec.shape
                assert arguments[argument].stride() == spec.stride
                assert str(arguments[argument].dtype) == f"torch.{spec.dtype}"


def test_equal_calls_have_equal_keys_and_others_do_not():
    _, _, found = captured("gpt2")
    keys = {name: call_of(region).key for region, name in site_names(found.regions).items()}
    assert keys["h.0.attn.c_attn"] == keys["h.1.attn.c_attn"]
    assert len({keys["h.0.attn.c_attn"], keys["h.0.attn.c_proj"], keys["lm_head"]}) == 3
    assert len(set(keys.values())) < len(keys)


def test_the_tied_output_projection_of_gpt2():
    _, _, found = captured("gpt2", torch.float16)
    (region,) = [region for region, name in site_names(found.regions).items() if name == "lm_head"]
    call = call_of(region)
    assert call.operation == "matmul"
    assert call.dtype == "float16"
    assert (call.shape["M"], call.shape["N"], call.shape["K"]) == (2 * SEQUENCE, 503, 64)
    assert call.tensors["b"].stride == (1, 64)  # the embedding's weight, seen transposed


def test_sites_of_llama():
    _, _, found = captured("llama")
    sites = [name for region, name in site_names(found.regions).items() if region.operation == "matmul"]
    wanted = [f"layers.{layer}.attention.{weight}" for layer in (0, 1) for weight in ("wq", "wk", "wv", "wo")]
    assert sorted(sites) == sorted([*wanted, "output"])


class Repeated(nn.Module):
    """One layer called three times, and a product in the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, scale: Tensor | None = None, twice: bool = True) -> dict[str, Tensor]:
        y = self.layer(self.layer(self.layer(x)))
        return {"y": y @ y.transpose(0, 1) * (2 if twice else 1)}


def test_a_site_that_repeats_is_numbered_and_the_model_itself_has_a_name():
    found = capture(Repeated().eval(), (torch.randn(4, 8),), {"twice": False, "scale": None})
    assert list(site_names(found.regions).values()) == ["layer", "layer#2", "layer#3", "model"]
    x = torch.randn(4, 8)
    assert set(found.module(x, twice=False, scale=None)) == {"y"}


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if x.sum() > 0 else x - 1


def test_a_model_that_cannot_be_captured_says_why_in_one_line(capfd):
    with pytest.raises(NotCapturable) as fault:
        capture(Branching(), (torch.ones(2),), {})
    assert "data-dependent" in fault.value.reason
    assert "\n" not in fault.value.reason
    assert capfd.readouterr().out == ""  # standard output is a contract


class InDtype(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("weight", torch.ones(8, 8, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.weight.dtype) @ self.weight


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.complex64], ids=str)
def test_what_no_kernel_computes_in_is_left_to_pytorch(dtype):
    found = capture(InDtype(dtype), (torch.ones(4, 8),), {})
    assert found.regions == ()
    assert [refusal.reason for refusal in found.refused] == [f"no kernel computes in {dtype}"]


# Regions made by hand --------------------------------------------------------------------------------------------------


class Chain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        first = F.softmax(x, dim=-1)
        second = first.sin()
        third = F.softmax(first + second, dim=-1)
        third.add_(1)
        return F.softmax(third, dim=-1)


def chain() -> tuple[fx.GraphModule, dict[str, fx.Node]]:
    module = torch.export.export(Chain(), (torch.randn(4, 8),), strict=False).module(check_guards=False)
    nodes = {node.name: node for node in module.graph.nodes}
    assert {"x", "softmax", "sin", "add", "softmax_1", "add_", "softmax_2"} <= set(nodes)
    return module, nodes


def softmax_region(nodes: dict[str, fx.Node], names: str, inputs: str, **options) -> Region:
    inside = tuple(nodes[name] for name in names.split())
    outside = tuple(nodes[name] for name in inputs.split())
    return Region("softmax", inside[-1], inside, outside, bind=lambda x, *others: {"x": x}, **options)


def test_the_larger_region_wins_then_the_earlier_one():
    module, nodes = chain()
    large = softmax_region(nodes, "add softmax_1", "softmax sin")
    small = softmax_region(nodes, "softmax_1", "add")
    apart = softmax_region(nodes, "softmax", "x")
    assert select(module, [small, large, apart]) == ((apart, large), ())
    again = softmax_region(nodes, "softmax_1", "add")
    kept, _ = select(module, [small, again])
    assert len(kept) == 1


@pytest.mark.parametrize(
    ("names", "inputs", "reason"),
    [
        ("softmax add softmax_1", "x sin", "softmax inside it is also used outside"),  # sin needs softmax: a cycle
        ("softmax", "x sin", "sin is computed after its output"),
        ("softmax", "softmax", "its inputs are part of it"),
        ("softmax_1 add_ softmax_2", "add", None),
    ],
)
def test_a_region_that_cannot_be_replaced_is_refused(names, inputs, reason):
    module, nodes = chain()
    region = softmax_region(nodes, names, inputs)
    kept, refused = select(module, [region])
    assert [refusal.reason for refusal in refused] == ([] if reason is None else [reason])
    assert kept == ((region,) if reason is None else ())


def test_a_region_across_a_write_in_place_is_refused():
    class Written(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            half = x * 2
            y.add_(1)
            return F.softmax(half, dim=-1) + y

    module = torch.export.export(Written(), (torch.randn(4, 8), torch.randn(4, 8)), strict=False).module(check_guards=False)
    nodes = {node.name: node for node in module.graph.nodes}
    kept, refused = select(module, [softmax_region(nodes, "mul softmax", "x")])
    assert kept == ()
    assert refused[0].reason == "a tensor is written in place while it runs"


def test_a_region_whose_operation_gives_something_else_is_refused():
    module, nodes = chain()
    wrong_shape = softmax_region(nodes, "softmax", "x", finish=lambda y: y.view(8, 4))
    wrong_dtype = softmax_region(nodes, "softmax", "x", finish=lambda y: y.double())
    kept, refused = select(module, [wrong_shape, wrong_dtype])
    assert kept == ()
    assert all("the operation gives" in refusal.reason for refusal in refused)


def test_every_match_can_be_called_where_it_was_found():
    """No operation's `match` claims a region that its own reference cannot compute."""
    for name in MODELS:
        _, _, found = captured(name, torch.float16)
        for operation in ops.names():
            candidates = ops.get(operation).match(found.module)
            assert select(found.module, candidates)[1] == (), (name, operation)


@pytest.mark.parametrize(
    ("sites", "text"),
    [
        ([f"layers.{i}.attention.wq" for i in range(12)], "layers.0..11.attention.wq"),
        ([f"h.{i}.mlp" for i in (0, 1, 2, 5)], "h.0..2,5.mlp"),
        (["h.0.ln", "h.1.ln", "ln_f"], "h.0..1.ln, ln_f"),
        (["a.0.b.0", "a.1.b.1"], "a.0.b.0, a.1.b.1"),
        (["layer", "layer#2"], "layer, layer#2"),
        (["0", "1", "2"], "0..2"),
        (["a", "b", "c", "d", "e", "f"], "a, b, c, d and 2 more"),
        (["model"], "model"),
        ([], ""),
    ],
)
def test_sites_in_one_line(sites, text):
    assert shortened(sites) == text
