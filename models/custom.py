"""A template for your own model: copy this file, replace the class, and profile it.

    uv run profile.py --model models/custom.py --class-name CustomModel --dtype float16

Three things connect a model to AutoKernel, and only the first is needed:

- a class that is an `nn.Module`. Arguments of its constructor without a default are given on the command line:
  `--model-args dim=512 n_layers=2`; `--model-args tiny` gives those of the dictionary TINY, where a file has one.
- `vocab_size`, when the only input is token ids: they are drawn at random below it, in the shape of `--input-shape 1,512`.
  A model without a vocabulary gets normally distributed numbers of that shape and of the model's dtype.
- `example_inputs`, when the inputs are anything else. `--input-shape` is then not used.

This one classifies padded sentences, so its inputs are token ids and the length of each sentence. Parameters of the default
configuration: 1000 * 128 + 2 * (2 * 2 * 128 + 4 * 128 * 128 + 3 * 128 * 384) + 2 * 128 + 128 * 10 + 10 = 556,554.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Constructor arguments of a configuration that runs on a CPU in well under a second.
TINY = {"vocab_size": 200, "dim": 32, "n_layers": 1, "n_heads": 2, "hidden_dim": 96}


class Block(nn.Module):
    """Self-attention and a SwiGLU, each with a norm before it; x (B, S, dim), mask (B, 1, 1, S) bool -> (B, S, dim)."""

    def __init__(self, dim: int, n_heads: int, hidden_dim: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.norm_1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim, bias=False)
        self.norm_2 = nn.LayerNorm(dim)
        self.gate = nn.Linear(dim, hidden_dim, bias=False)
        self.up = nn.Linear(dim, hidden_dim, bias=False)
        self.down = nn.Linear(hidden_dim, dim, bias=False)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        B, S, dim = x.shape
        heads = (B, S, self.n_heads, dim // self.n_heads)
        q, k, v = (part.view(heads).transpose(1, 2) for part in self.qkv(self.norm_1(x)).split(dim, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.proj(y.transpose(1, 2).reshape(B, S, dim))
        h = self.norm_2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class CustomModel(nn.Module):
    """Token ids (B, S) int64 and lengths (B,) int64, from 1 to S -> logits (B, n_classes)."""

    PARAMETERS = 556_554  # of the default configuration

    def __init__(
        self,
        vocab_size: int = 1000,
        dim: int = 128,
        n_layers: int = 2,
        n_heads: int = 4,
        hidden_dim: int = 384,
        n_classes: int = 10,
    ) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.embedding = nn.Embedding(vocab_size, dim)
        self.blocks = nn.ModuleList(Block(dim, n_heads, hidden_dim) for _ in range(n_layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, n_classes)

    def example_inputs(self) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        """Arguments and keyword arguments of `forward`; a tuple of arguments alone is enough too.

        Draw with torch's own generator, on the CPU and in float32: AutoKernel seeds it, and moves floating-point tensors to the
        model's dtype and all tensors to its device.
        """
        B, S = 4, 64
        ids = torch.randint(0, self.vocab_size, (B, S))
        lengths = torch.randint(1, S + 1, (B,))
        return (ids,), {"lengths": lengths}

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        S = ids.shape[1]
        real = torch.arange(S, device=ids.device) < lengths[:, None]  # (B, S), False where a token is padding
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, real[:, None, None, :])
        weights = real.to(x.dtype) / lengths[:, None].to(x.dtype)
        mean = (self.norm(x) * weights[:, :, None]).sum(dim=1)
        return self.head(mean)
