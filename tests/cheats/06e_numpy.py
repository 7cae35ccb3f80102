"""Computes with numpy, past every operator of torch. Seen when leaving torch (`numpy`, `tolist`) is refused."""

import numpy as np
import torch

KERNEL_TYPE = "matmul"


def kernel_fn(a, b, bias=None):
    product = np.matmul(a.cpu().numpy().astype(np.float32), b.cpu().numpy().astype(np.float32))
    if bias is not None:
        product = product + bias.cpu().numpy().astype(np.float32)
    return torch.from_numpy(product).to(a.dtype).to(a.device)
