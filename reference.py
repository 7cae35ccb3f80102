"""What each operation must compute, in plain PyTorch. Do not edit: every kernel is judged against this file.

Each function is at once the oracle, when its arguments are float64, and the PyTorch baseline, when they have the
dtype of the kernel: it calls what a PyTorch user would call. Its signature is the signature of `kernel_fn`.
`autokernel/ops/<name>.py` makes arguments for the function of the same name.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(),
}


def matmul(a: Tensor, b: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """a (M, K) @ b (K, N) + bias (N,) + residual (M, N) -> (M, N).

    Any strides; `b` is often the transposed view of an (N, K) weight.
    """
    product = a @ b if bias is None else torch.addmm(bias, a, b)
    return product if residual is None else product + residual


def softmax(x: Tensor) -> Tensor:
    """Softmax over the last dimension of x (..., N) -> (..., N)."""
    return F.softmax(x, dim=-1)


def layernorm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dimension; x (..., N), weight and bias (N,)."""
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def rmsnorm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; x (..., N), weight (N,)."""
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def flash_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None) -> Tensor:
    """softmax(q k^T * scale) v; q (B, H, Sq, D), k and v (B, Hkv, Sk, D), H a multiple of Hkv -> (B, H, Sq, D).

    `scale` is D^-0.5 when None. Query heads share key-value heads in consecutive groups of H / Hkv.
    `causal` aligns the last query with the last key (lower right, as FlashAttention 2.1 and later) and needs Sq <= Sk.
    """
    if q.numel() == 0:
        return torch.empty_like(q)  # for an empty batch PyTorch 2.11 gives None on a GPU whose backend is cuDNN
    grouped = q.shape[1] != k.shape[1]
    if not causal or q.shape[2] == k.shape[2]:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped)
    # PyTorch's own `is_causal` aligns the first query with the first key, so the mask is given.
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(k.shape[2] - q.shape[2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped)


def fused_mlp(
    x: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    w_gate: Tensor | None = None,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    activation: str = "silu",
    residual: Tensor | None = None,
) -> Tensor:
    """act(x w_gate) * (x w_up + b_up) w_down + b_down, or act(x w_up + b_up) w_down + b_down without `w_gate`; + residual.

    x (M, K), w_up and w_gate (K, H), w_down (H, N), b_up (H,), b_down (N,), residual (M, N) -> (M, N). Weights and residual
    of any stride, as in `matmul`.
    `activation` is one of ACTIVATIONS: "silu" with `w_gate` is SwiGLU, "relu2" is ReLU squared.
    """
    act = ACTIVATIONS[activation]
    up = matmul(x, w_up, b_up)
    hidden = act(up) if w_gate is None else act(x @ w_gate) * up
    return matmul(hidden, w_down, b_down, residual)


def cross_entropy(logits: Tensor, target: Tensor, ignore_index: int = -100, reduction: str = "mean") -> Tensor:
    """-log softmax(logits)[target]; logits (M, V), target (M,) int64 -> (M,) for "none", () for "mean" and "sum".

    Rows whose target is `ignore_index` give 0 and do not count in the mean; with no row left the mean is NaN, as in PyTorch.
    """
    return F.cross_entropy(logits, target, ignore_index=ignore_index, reduction=reduction)


def rotary_embedding(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate pairs of the last dimension; x (B, H, S, D), cos and sin (S, W) or (B, S, W), W = D or D / 2 -> (B, H, S, D).

    Half-split pairs (i, i + D/2), the form of GPT-NeoX and Hugging Face; `interleaved` pairs (2i, 2i + 1), that of RoFormer
    and Meta's LLaMA. With W = D each element has its own cos and sin; with W = D / 2 both elements of a pair share them.
    """
    half = x.shape[-1] // 2
    if cos.dim() == 3:  # (B, S, W): the same for every head
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    if interleaved:
        if cos.shape[-1] == half:
            cos, sin = cos.repeat_interleave(2, dim=-1), sin.repeat_interleave(2, dim=-1)
        turned = torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)
    else:
        if cos.shape[-1] == half:
            cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)
        turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + turned * sin


def reduce(x: Tensor, dim: int = -1) -> Tensor:
    """Sum of x over one dimension, which is removed: (..., N, ...) -> (..., ...). Empty sums are 0."""
    return x.sum(dim)
