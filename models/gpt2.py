"""GPT-2 small, the decoder of Radford et al., "Language Models are Unsupervised Multitask Learners" (2019).

Pre-norm blocks, learned positions, one fused projection for queries, keys and values, GELU in its tanh form, and an output
projection that shares its weight with the token embedding. Parameters of the default configuration:

    token and position embeddings   50257 * 768 + 1024 * 768                         39,383,808
    each of 12 blocks: norms        2 * 2 * 768                                           3,072
                       attention    768 * 2304 + 2304 + 768 * 768 + 768               2,362,368
                       MLP          768 * 3072 + 3072 + 3072 * 768 + 768              4,722,432
    last norm                       2 * 768                                               1,536
                                                                        in all      124,439,808
"""

import torch.nn.functional as F
from torch import Tensor, nn

# Constructor arguments of a configuration that runs on a CPU in well under a second. The vocabulary is odd, as the real one.
TINY = {"vocab_size": 503, "dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 256, "max_seq_len": 128}


class Attention(nn.Module):
    """Causal self-attention; x (B, S, dim) -> (B, S, dim)."""

    def __init__(self, dim: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.c_attn = nn.Linear(dim, 3 * dim)
        self.c_proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        B, S, dim = x.shape
        heads = (B, S, self.n_heads, dim // self.n_heads)
        q, k, v = (part.view(heads).transpose(1, 2) for part in self.c_attn(x).split(dim, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(B, S, dim))


class MLP(nn.Module):
    """Two linear layers with GELU (tanh form) between them; x (B, S, dim) -> (B, S, dim)."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.c_fc = nn.Linear(dim, hidden_dim)
        self.c_proj = nn.Linear(hidden_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    """Attention and MLP, each with a norm before it and a residual around it."""

    def __init__(self, dim: int, n_heads: int, hidden_dim: int, norm_eps: float) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(dim, eps=norm_eps)
        self.attn = Attention(dim, n_heads)
        self.ln_2 = nn.LayerNorm(dim, eps=norm_eps)
        self.mlp = MLP(dim, hidden_dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT2(nn.Module):
    """Token ids (B, S) int64, S at most `max_seq_len` -> logits (B, S, vocab_size)."""

    PARAMETERS = 124_439_808  # of the default configuration

    def __init__(
        self,
        vocab_size: int = 50257,
        dim: int = 768,
        n_layers: int = 12,
        n_heads: int = 12,
        hidden_dim: int = 3072,
        max_seq_len: int = 1024,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__()
        if dim % n_heads:
            raise ValueError(f"dim {dim} is not a multiple of n_heads {n_heads}")
        self.vocab_size = vocab_size
        self.max_seq_len = max_seq_len
        self.wte = nn.Embedding(vocab_size, dim)
        self.wpe = nn.Embedding(max_seq_len, dim)
        self.h = nn.ModuleList(Block(dim, n_heads, hidden_dim, norm_eps) for _ in range(n_layers))
        self.ln_f = nn.LayerNorm(dim, eps=norm_eps)
        self.lm_head = nn.Linear(dim, vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight
        self._initialise(n_layers)

    def _initialise(self, n_layers: int) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # Projections that add to the residual are scaled down, so that its variance does not grow with depth.
                residual = name.endswith("c_proj.weight")
                nn.init.normal_(parameter, std=0.02 / (2 * n_layers) ** 0.5 if residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        if length > self.max_seq_len:
            raise ValueError(f"a sequence of {length} tokens is longer than max_seq_len {self.max_seq_len}")
        x = self.wte(ids) + self.wpe.weight[:length]
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))
