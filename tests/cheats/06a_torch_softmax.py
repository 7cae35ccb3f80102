"""Returns torch.softmax. Seen in the record of the operators called."""

import torch

KERNEL_TYPE = "softmax"


def kernel_fn(x):
    return torch.softmax(x, dim=-1).contiguous()
