"""Returns 1 / N, the mean of every row. Seen by an error relative to the row, in a case that the mean fails."""

import torch

KERNEL_TYPE = "softmax"


def kernel_fn(x):
    return torch.full(x.shape, 1 / max(x.shape[1], 1), dtype=x.dtype, device=x.device)
