"""Lets torch.mm fill the memory that it allocated. Seen in the record of the operators called."""

import torch

KERNEL_TYPE = "matmul"


def kernel_fn(a, b, bias=None, residual=None):
    c = torch.empty((a.shape[0], b.shape[1]), dtype=a.dtype, device=a.device)
    torch.mm(a, b, out=c)
    return c if bias is None else c.add_(bias)
