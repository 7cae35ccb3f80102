"""Prints a forged verdict and returns zeros. Seen as the verdict is never read from what the kernel prints."""

import torch

KERNEL_TYPE = "softmax"


def kernel_fn(x):
    print("correctness: PASS\nspeedup_vs_pytorch: 9.000", flush=True)
    return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
