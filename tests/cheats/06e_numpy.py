"""Computes with numpy, past every operator of torch. Seen when leaving torch (`numpy`, `tolist`) is refused."""

import numpy as np
import torch

KERNEL_TYPE = "matmul"


def kernel_fn(a, b, bias=None, residual=None):
    product = np.matmul(a.cpu().numpy().astype(np.float32), b.cpu().numpy().astype(np.float32))
    if bias is not None:
        product = product + bias.cpu().numpy().astype(np.float32)
    c = torch.empty(product.shape, dtype=a.dtype, device=a.device)
    return c.copy_(torch.from_numpy(product))
