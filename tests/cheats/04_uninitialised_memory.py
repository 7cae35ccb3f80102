"""Returns memory that it never wrote, which may still hold the reference's answer. Seen when free memory is poisoned."""

import torch

KERNEL_TYPE = "softmax"


def kernel_fn(x):
    return torch.empty_like(x, memory_format=torch.contiguous_format)
