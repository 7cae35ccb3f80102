"""Models of transformers, built from a configuration: what is found in each, and that kernels keep its output."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from autokernel import kernels, ops
from autokernel.capture import Capture, capture
from autokernel.models import output_tensors
from autokernel.substitute import substitute
from autokernel.verification import fingerprint, relative_error

transformers = pytest.importorskip("transformers")

LAYERS, VOCABULARY = 2, 199
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
GPT2 = {"n_embd": 64, "n_layer": LAYERS, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": 64}
IMAGES = {"image_size": 32, "patch_size": 8}
# Two norms in a layer and one at the end; q, k, v and the output of attention; q and k are rotated.
LLAMA = {"rmsnorm": 5, "matmul": 9, "rotary_embedding": 4, "flash_attention": 2, "fused_mlp": 2}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, int]]] = {
    "llama": ("AutoModelForCausalLM", GROUPED, LLAMA),
    "mistral": ("AutoModelForCausalLM", GROUPED, LLAMA),
    "gemma": ("AutoModelForCausalLM", {**GROUPED, "head_dim": 16}, LLAMA),  # norms that multiply by 1 + w
    # q and k have norms of their own
    "qwen3": ("AutoModelForCausalLM", {**GROUPED, "head_dim": 16}, {**LLAMA, "rmsnorm": 9}),
    # its experts are one operator of transformers, behind a softmax over four and two sums for each layer
    "mixtral": (
        "AutoModelForCausalLM",
        {**GROUPED, "num_local_experts": 4},
        {"rmsnorm": 5, "matmul": 11, "rotary_embedding": 4, "flash_attention": 2, "softmax": 2, "reduce": 4},
    ),
    # q, k and v are one product of Conv1D, the GELU is written out
    "gpt2": ("AutoModelForCausalLM", GPT2, {"layernorm": 5, "matmul": 5, "flash_attention": 2, "fused_mlp": 2}),
    # one norm in a layer, half of each head is rotated
    "phi": (
        "AutoModelForCausalLM",
        SIZES,
        {"layernorm": 3, "matmul": 9, "rotary_embedding": 4, "flash_attention": 2, "fused_mlp": 2},
    ),
    "bert": ("AutoModelForMaskedLM", SIZES, {"layernorm": 6, "matmul": 10, "flash_attention": 2, "fused_mlp": 2}),
    "vit": (
        "AutoModelForImageClassification",
        {**SIZES, **IMAGES},
        {"layernorm": 5, "matmul": 9, "flash_attention": 2, "fused_mlp": 2},
    ),
}
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def built(name: str, dtype: torch.dtype) -> tuple[nn.Module, dict[str, Any]]:
    """The model with random weights, and inputs for it."""
    class_name, sizes, _ = MODELS[name]
    torch.manual_seed(0)
    # no token means "begin" or "end" in so small a vocabulary
    config = transformers.AutoConfig.for_model(name, **sizes, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    config.use_cache = False
    model = getattr(transformers, class_name).from_config(config).eval().to(dtype).requires_grad_(False)
    if name == "vit":
        return model, {"pixel_values": torch.randn(1, 3, 32, 32).to(dtype)}
    return model, {"input_ids": torch.randint(0, VOCABULARY, (2, 8))}


def found(captured: Capture) -> dict[str, int]:
    return dict(Counter(region.operation for region in captured.regions))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_what_is_found_and_that_the_operations_are_those(name: str, dtype: torch.dtype) -> None:
    model, inputs = built(name, dtype)
    before = fingerprint(model)
    captured = capture(model, (), inputs)
    assert found(captured) == MODELS[name][2]
    assert captured.refused == ()
    substitution = substitute(captured, {region: ops.get(region.operation).reference for region in captured.regions})
    right = output_tensors(model(**inputs))
    error = relative_error(output_tensors(substitution.module(**inputs)), right)
    assert error < 8 * torch.finfo(dtype).eps
    substitution.check_called()
    substitution.restore()
    assert all(map(torch.equal, output_tensors(substitution.module(**inputs)), right))
    assert fingerprint(model) == before


@pytest.mark.parametrize("name", MODELS)
def test_the_starters_keep_the_output(name: str) -> None:
    model, inputs = built(name, torch.float16)
    captured = capture(model, (), inputs)
    starters = {region: kernels.load(kernels.starter(region.operation)).function for region in captured.regions}
    substitution = substitute(captured, starters)
    exact = built(name, torch.float32)[0]
    exact.load_state_dict({key: value.float() for key, value in model.state_dict().items()})
    wide = {key: value.float() if value.is_floating_point() else value for key, value in inputs.items()}
    right = output_tensors(exact(**wide))
    ours = relative_error(output_tensors(substitution.module(**inputs)), right)
    theirs = relative_error(output_tensors(model(**inputs)), right)
    # an output of two numbers, as ViT's, may by chance be nearer to the exact one than its dtype lets any other be
    assert ours <= max(1.25 * theirs, torch.finfo(torch.float16).eps)
    substitution.check_called()
