"""LLaMA, the decoder of Touvron et al., "LLaMA" (2023) and "Llama 2" (2023): a compact one, and the 7B one.

Pre-norm blocks with RMSNorm, rotary positions (half-split pairs, real arithmetic), SwiGLU, no biases, and an output
projection of its own. Parameters, for vocabulary V, width D, MLP width H and L layers: 2 V D + L (4 D D + 3 D H + 2 D) + D.

    LlamaModel      V 32000, D 768,  H 3072,  L 12     49,152,000 + 12 * 9,438,720 + 768          162,417,408
    LlamaModel7B    V 32000, D 4096, H 11008, L 32    262,144,000 + 32 * 202,383,360 + 4096     6,738,415,616
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Constructor arguments, for either class, of a configuration that runs on a CPU in well under a second.
TINY = {"vocab_size": 512, "dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 192, "max_seq_len": 128}


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, with the mean in float32."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        y = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * y.to(x.dtype)


def rotary_tables(head_dim: int, length: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin of position * theta^(-2i / head_dim), each (length, head_dim / 2), in the default dtype."""
    # The angles need float32 whatever the default is: float16 cannot even count to 4096.
    frequencies = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
    dtype = torch.get_default_dtype()
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of pairs (i, i + D/2); x (B, H, S, D), cos and sin (S, D/2) -> (B, H, S, D)."""
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)


class Attention(nn.Module):
    """Causal self-attention with rotary positions; x (B, S, dim), cos and sin (S, head_dim / 2) -> (B, S, dim)."""

    def __init__(self, dim: int, n_heads: int, n_kv_heads: int) -> None:
        super().__init__()
        self.head_dim = dim // n_heads
        self.grouped = n_kv_heads != n_heads
        self.wq = nn.Linear(dim, n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(n_heads * self.head_dim, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        B, S, _ = x.shape
        q, k, v = (w(x).view(B, S, -1, self.head_dim).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if self.grouped:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(B, S, -1))


class FeedForward(nn.Module):
    """SwiGLU: w2(silu(w1 x) * w3 x); x (B, S, dim) -> (B, S, dim)."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden_dim, bias=False)  # gate
        self.w2 = nn.Linear(hidden_dim, dim, bias=False)  # down
        self.w3 = nn.Linear(dim, hidden_dim, bias=False)  # up

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """Attention and MLP, each with a norm before it and a residual around it."""

    def __init__(self, dim: int, n_heads: int, n_kv_heads: int, hidden_dim: int, norm_eps: float) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(dim, norm_eps)
        self.attention = Attention(dim, n_heads, n_kv_heads)
        self.ffn_norm = RMSNorm(dim, norm_eps)
        self.feed_forward = FeedForward(dim, hidden_dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.ffn_norm(x))


class LlamaModel(nn.Module):
    """Token ids (B, S) int64, S at most `max_seq_len` -> logits (B, S, vocab_size).

    `n_kv_heads` below `n_heads` gives fewer key-value heads, each shared by a group of query heads; None: as many.
    """

    PARAMETERS = 162_417_408  # of the default configuration

    def __init__(
        self,
        vocab_size: int = 32000,
        dim: int = 768,
        n_layers: int = 12,
        n_heads: int = 12,
        n_kv_heads: int | None = None,
        hidden_dim: int = 3072,
        max_seq_len: int = 2048,
        norm_eps: float = 1e-5,
        rope_theta: float = 10000.0,
    ) -> None:
        super().__init__()
        n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
        if dim % n_heads or n_heads % n_kv_heads or (dim // n_heads) % 2:
            raise ValueError(f"dim {dim}, n_heads {n_heads}, n_kv_heads {n_kv_heads}: heads must divide, into an even width")
        self.vocab_size = vocab_size
        self.max_seq_len = max_seq_len
        self.tok_embeddings = nn.Embedding(vocab_size, dim)
        self.layers = nn.ModuleList(Block(dim, n_heads, n_kv_heads, hidden_dim, norm_eps) for _ in range(n_layers))
        self.norm = RMSNorm(dim, norm_eps)
        self.output = nn.Linear(dim, vocab_size, bias=False)
        cos, sin = rotary_tables(dim // n_heads, max_seq_len, rope_theta)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        if length > self.max_seq_len:
            raise ValueError(f"a sequence of {length} tokens is longer than max_seq_len {self.max_seq_len}")
        cos, sin = self.cos[:length], self.sin[:length]
        x = self.tok_embeddings(ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.output(self.norm(x))


class LlamaModel7B(LlamaModel):
    """The same with the sizes of Llama 2 7B: 13.5 GB of weights in half precision."""

    PARAMETERS = 6_738_415_616  # of the default configuration

    def __init__(
        self,
        vocab_size: int = 32000,
        dim: int = 4096,
        n_layers: int = 32,
        n_heads: int = 32,
        n_kv_heads: int | None = None,
        hidden_dim: int = 11008,
        max_seq_len: int = 4096,
        norm_eps: float = 1e-5,
        rope_theta: float = 10000.0,
    ) -> None:
        super().__init__(vocab_size, dim, n_layers, n_heads, n_kv_heads, hidden_dim, max_seq_len, norm_eps, rope_theta)
