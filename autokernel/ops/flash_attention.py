"""flash_attention: softmax(q k^T * scale) v, causal or not, with fewer key-value heads or as many."""

import random
from collections.abc import Sequence

import torch
from torch import fx

from autokernel import graph
from autokernel.graph import Region, aten
from autokernel.inputs import InputMaker
from autokernel.ops import Arguments, Operation, Shape

# The largest head dimension of PyTorch's own fused kernels, and of the starter.
MAX_HEAD_DIM = 256

# An additive mask this low leaves a score without weight; the lowest float16 is less far down.
_NEVER = -1e9

_COPIES = {aten.clone.default, aten.contiguous.default, aten.alias.default}
_RESHAPES = {aten.reshape.default, aten.view.default, aten._unsafe_view.default}


def _shape(
    B: int,
    H: int,
    S: int,
    D: int,
    causal: bool = True,
    *,
    Hkv: int | None = None,
    Sk: int | None = None,
    scale: float | None = None,
) -> Shape:
    Hkv, Sk = H if Hkv is None else Hkv, S if Sk is None else Sk
    return {"B": B, "H": H, "Hkv": Hkv, "Sq": S, "Sk": Sk, "D": D, "causal": causal, "scale": scale}


def inputs(shape: Shape, make: InputMaker) -> Arguments:
    B, H, Hkv, Sq, Sk, D = (shape[size] for size in ("B", "H", "Hkv", "Sq", "Sk", "D"))
    return {
        "q": make.tensor("q", B, H, Sq, D),
        "k": make.tensor("k", B, Hkv, Sk, D),
        "v": make.tensor("v", B, Hkv, Sk, D),
        "causal": shape["causal"],
        "scale": shape["scale"],
    }


def describe(arguments: Arguments) -> Shape:
    (B, H, Sq, D), (_, Hkv, Sk, _) = arguments["q"].shape, arguments["k"].shape
    return _shape(B, H, Sq, D, arguments.get("causal", False), Hkv=Hkv, Sk=Sk, scale=arguments.get("scale"))


def flops(shape: Shape) -> int:
    Sq, Sk = shape["Sq"], shape["Sk"]
    # causal: query i sees Sk - Sq + 1 + i keys, half of them when Sq = Sk
    pairs = Sq * (Sk - Sq) + Sq * (Sq + 1) // 2 if shape["causal"] else Sq * Sk
    # one multiply and one add per element of q k^T and of the product with v; by convention the softmax is not counted
    return 4 * shape["B"] * shape["H"] * pairs * shape["D"]


def byte_count(shape: Shape, itemsize: int) -> int:
    B, H, Hkv, Sq, Sk, D = (shape[size] for size in ("B", "H", "Hkv", "Sq", "Sk", "D"))
    # read q, write the output; read k and v
    return (2 * B * H * Sq * D + 2 * B * Hkv * Sk * D) * itemsize


def draw(rng: random.Random, small: bool) -> Shape:
    Hkv = rng.choice((1, 2)) if small else rng.choice((1, 2, 4, 8))
    H = Hkv * rng.choice((1, 2, 3) if small else (1, 4, 8))
    D = rng.choice((1, 8, 24, 33)) if small else rng.choice((64, 80, 96, 128))
    Sk = rng.randint(1, 70 if small else 2048)
    Sq = rng.choice((1, Sk, rng.randint(1, Sk)))
    scale = rng.choice((None, 0.3))
    return _shape(rng.randint(1, 2), H, Sq, D, rng.random() < 0.5, Hkv=Hkv, Sk=Sk, scale=scale)


def match(graph_module: fx.GraphModule) -> Sequence[Region]:
    """Scaled dot-product attention without dropout whose mask, if any, is proven to be "all" or "causal"."""
    regions = []
    meanings: dict[fx.Node, bool | None] = {}
    for node in graph.calls(graph_module, aten.scaled_dot_product_attention.default):
        q, k, v = (graph.argument(node, i, name) for i, name in enumerate(("query", "key", "value")))
        if not _fits(node, q, k, v):
            continue
        causal = _causal(node, q, k, meanings)
        if causal is None:
            continue
        k, v, path = _unrepeated(k, v)
        scale = graph.argument(node, 6, "scale")
        regions.append(_region(node, (q, k, v), path, causal, scale))
    return regions


def _region(
    node: fx.Node, inputs: tuple[fx.Node, fx.Node, fx.Node], path: list[fx.Node], causal: bool, scale: float | None
) -> Region:
    return Region(
        operation="flash_attention",
        output=node,
        nodes=graph.closed_part((*path, node), node),
        inputs=inputs,
        bind=lambda q, k, v: {"q": q, "k": k, "v": v, "causal": causal, "scale": scale},
    )


def _fits(node: fx.Node, q: fx.Node, k: fx.Node, v: fx.Node) -> bool:
    """Whether the call is one that `reference.flash_attention` can express, its mask left aside."""
    shapes = [tuple(graph.value(x).shape) for x in (q, k, v)]
    if any(len(shape) != 4 for shape in shapes) or shapes[1] != shapes[2] or len({graph.value(x).dtype for x in (q, k, v)}) > 1:
        return False
    (B, H, _, D), (Bk, Hkv, _, Dk) = shapes[0], shapes[1]
    grouped = graph.argument(node, 7, "enable_gqa", False)
    heads = Hkv == H or (grouped and Hkv > 0 and H % Hkv == 0)
    return heads and Bk == B and Dk == D and D <= MAX_HEAD_DIM and graph.argument(node, 4, "dropout_p", 0.0) == 0.0


def _causal(node: fx.Node, q: fx.Node, k: fx.Node, meanings: dict[fx.Node, bool | None]) -> bool | None:
    """Whether the call is causal, or None when its mask says more than that. `meanings` remembers the masks read."""
    Sq, Sk = graph.value(q).shape[2], graph.value(k).shape[2]
    mask, is_causal = graph.argument(node, 3, "attn_mask"), graph.argument(node, 5, "is_causal", False)
    if mask is None:
        # PyTorch aligns its flag with the first key, the operation with the last: the same only for a square.
        return None if is_causal and Sq != Sk else is_causal
    if is_causal:
        return None
    if mask not in meanings:
        content = graph.constant(mask)
        meanings[mask] = None if content is None else _meaning(content, Sq, Sk)
    return meanings[mask]


def _meaning(mask: torch.Tensor, Sq: int, Sk: int) -> bool | None:
    """False for a mask that lets every query see every key, True for the causal one, None for any other."""
    if mask.dim() < 2:
        return None
    if mask.dtype == torch.bool:
        seen = mask
    else:
        seen = mask == 0
        if not (seen | (mask <= max(torch.finfo(mask.dtype).min, _NEVER))).all():
            return None
    seen = seen.expand(*seen.shape[:-2], Sq, Sk)
    if seen.all():
        return False
    lower_right = torch.ones(Sq, Sk, dtype=torch.bool).tril(Sk - Sq)
    return True if Sq <= Sk and (seen == lower_right).all() else None


def _unrepeated(k: fx.Node, v: fx.Node) -> tuple[fx.Node, fx.Node, list[fx.Node]]:
    """Keys and values before they were repeated for each query head, and the nodes that repeat them."""
    path: list[fx.Node] = []
    few_k, few_v = _before_repeat(k, path), _before_repeat(v, path)
    if graph.value(few_k).shape == graph.value(few_v).shape:
        return few_k, few_v, path
    return k, v, []


def _before_repeat(node: fx.Node, path: list[fx.Node]) -> fx.Node:
    """The (B, Hkv, S, D) node whose heads `node` (B, H, S, D) repeats in groups, or `node` itself."""
    passed: list[fx.Node] = []

    def before(current: fx.Node) -> fx.Node:
        passed.append(current)
        return current.args[0]  # type: ignore[return-value]

    B, H, S, D = graph.value(node).shape
    current = node
    while graph.is_call(current, *_COPIES):
        current = before(current)
    if graph.is_call(current, aten.repeat_interleave.self_int):
        if graph.argument(current, 2, "dim") not in (1, -3):
            return node
        current = before(current)
    elif graph.is_call(current, *_RESHAPES):
        current = before(current)
        while graph.is_call(current, *_COPIES):
            current = before(current)
        if not graph.is_call(current, aten.expand.default):
            return node
        expanded = tuple(graph.value(current).shape)
        current = before(current)
        while _takes_all(current):
            current = before(current)
        if not graph.is_call(current, aten.unsqueeze.default) or graph.argument(current, 1, "dim") not in (2, -3):
            return node
        current = before(current)
        few = tuple(graph.value(current).shape)
        if len(few) != 4 or expanded != (B, few[1], H // max(few[1], 1), S, D):
            return node
    else:
        return node
    while _takes_all(current):
        current = before(current)
    if tuple(graph.value(current).shape) != (B, graph.value(current).shape[1], S, D):
        return node
    path.extend(passed)
    return current


def _takes_all(node: fx.Node) -> bool:
    """A slice that leaves nothing out, as `x[:, :, None]` is captured."""
    return graph.is_call(node, aten.slice.Tensor) and graph.value(node).shape == graph.value(node.args[0]).shape


OPERATION = Operation(
    name="flash_attention",
    inputs=inputs,
    describe=describe,
    flops=flops,
    bytes=byte_count,
    sweep=(
        _shape(4, 32, 4096, 128),
        _shape(1, 2, 64, 64),
        _shape(1, 12, 1024, 64),  # GPT-2
        _shape(8, 12, 512, 64, causal=False),  # BERT
        _shape(2, 32, 1024, 64),
        _shape(1, 32, 2048, 128),  # LLaMA 7B
        _shape(1, 32, 2048, 128, Hkv=8),
        _shape(4, 32, 4096, 64),
        _shape(8, 32, 1, 128, causal=False, Hkv=8, Sk=4096),  # decoding
    ),
    sweep_cpu=(
        _shape(1, 2, 64, 32),
        _shape(1, 4, 48, 16, Hkv=2),
        _shape(2, 2, 40, 64, causal=False),
        _shape(1, 4, 1, 32, causal=False, Hkv=1, Sk=96),
    ),
    edges=(
        _shape(1, 1, 1, 1),
        _shape(1, 1, 67, 33),
        _shape(1, 2, 31, 80, causal=False, scale=0.25),
        _shape(1, 3, 13, 96, Hkv=1, Sk=61),
        _shape(1, 2, 1, 8, Sk=131),
        _shape(3, 1, 5, 24, causal=False, Sk=1),
        _shape(1, 1, 17, 200, Sk=19),
        _shape(0, 2, 16, 32),
        _shape(1, 2, 0, 32, causal=False, Sk=16),
    ),
    draw=draw,
    match=match,
    rounds_inside=True,
    uses_dot=True,
)
