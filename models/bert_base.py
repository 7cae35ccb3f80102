"""BERT-base (uncased), the encoder of Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers" (2018).

Post-norm blocks, learned positions and token types, exact GELU, and a pooler on the first token. Parameters of the
default configuration:

    embeddings and their norm       (30522 + 512 + 2) * 768 + 2 * 768                23,837,184
    each of 12 layers: attention    4 * (768 * 768 + 768)                             2,362,368
                       MLP          768 * 3072 + 3072 + 3072 * 768 + 768              4,722,432
                       norms        2 * 2 * 768                                           3,072
    pooler                          768 * 768 + 768                                     590,592
                                                                        in all      109,482,240
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Constructor arguments of a configuration that runs on a CPU in well under a second.
TINY = {"vocab_size": 499, "dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 256, "max_seq_len": 128}


class Embeddings(nn.Module):
    """Sum of word, position and token-type embeddings, normalised; ids and types (B, S) -> (B, S, dim)."""

    def __init__(self, vocab_size: int, dim: int, max_seq_len: int, n_token_types: int, norm_eps: float) -> None:
        super().__init__()
        self.word = nn.Embedding(vocab_size, dim)
        self.position = nn.Embedding(max_seq_len, dim)
        self.token_type = nn.Embedding(n_token_types, dim)
        self.norm = nn.LayerNorm(dim, eps=norm_eps)

    def forward(self, ids: Tensor, types: Tensor | None) -> Tensor:
        positions = self.position.weight[: ids.shape[1]]
        type_embedding = self.token_type.weight[0] if types is None else self.token_type(types)
        return self.norm(self.word(ids) + positions + type_embedding)


class Attention(nn.Module):
    """Self-attention in both directions; x (B, S, dim), mask (B, 1, 1, S) bool or None -> (B, S, dim)."""

    def __init__(self, dim: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.query = nn.Linear(dim, dim)
        self.key = nn.Linear(dim, dim)
        self.value = nn.Linear(dim, dim)
        self.output = nn.Linear(dim, dim)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        B, S, dim = x.shape
        heads = (B, S, self.n_heads, dim // self.n_heads)
        q, k, v = (w(x).view(heads).transpose(1, 2) for w in (self.query, self.key, self.value))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.output(y.transpose(1, 2).reshape(B, S, dim))


class MLP(nn.Module):
    """Two linear layers with exact GELU between them; x (B, S, dim) -> (B, S, dim)."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden_dim)
        self.down = nn.Linear(hidden_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Layer(nn.Module):
    """Attention and MLP, each with a residual around it and a norm after it."""

    def __init__(self, dim: int, n_heads: int, hidden_dim: int, norm_eps: float) -> None:
        super().__init__()
        self.attention = Attention(dim, n_heads)
        self.attention_norm = nn.LayerNorm(dim, eps=norm_eps)
        self.mlp = MLP(dim, hidden_dim)
        self.mlp_norm = nn.LayerNorm(dim, eps=norm_eps)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = self.attention_norm(x + self.attention(x, mask))
        return self.mlp_norm(x + self.mlp(x))


class BertModel(nn.Module):
    """Token ids (B, S) int64, S at most `max_seq_len` -> last hidden states (B, S, dim) and pooled first token (B, dim).

    `token_type_ids` (B, S) int64, all 0 when None. `attention_mask` (B, S), 0 where a token is padding; None: no mask at all.
    """

    PARAMETERS = 109_482_240  # of the default configuration

    def __init__(
        self,
        vocab_size: int = 30522,
        dim: int = 768,
        n_layers: int = 12,
        n_heads: int = 12,
        hidden_dim: int = 3072,
        max_seq_len: int = 512,
        n_token_types: int = 2,
        norm_eps: float = 1e-12,  # below float16's smallest number, but layer_norm computes in float32
    ) -> None:
        super().__init__()
        if dim % n_heads:
            raise ValueError(f"dim {dim} is not a multiple of n_heads {n_heads}")
        self.vocab_size = vocab_size
        self.max_seq_len = max_seq_len
        self.embeddings = Embeddings(vocab_size, dim, max_seq_len, n_token_types, norm_eps)
        self.layers = nn.ModuleList(Layer(dim, n_heads, hidden_dim, norm_eps) for _ in range(n_layers))
        self.pooler = nn.Linear(dim, dim)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(
        self, input_ids: Tensor, token_type_ids: Tensor | None = None, attention_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        length = input_ids.shape[1]
        if length > self.max_seq_len:
            raise ValueError(f"a sequence of {length} tokens is longer than max_seq_len {self.max_seq_len}")
        mask = None if attention_mask is None else attention_mask[:, None, None, :].bool()
        x = self.embeddings(input_ids, token_type_ids)
        for layer in self.layers:
            x = layer(x, mask)
        return x, torch.tanh(self.pooler(x[:, 0]))
