"""Switches dispatch modes off, then calls torch.softmax. Seen when the record has a gap or switching is refused."""

import torch
from torch.utils._python_dispatch import _disable_current_modes

KERNEL_TYPE = "softmax"


def kernel_fn(x):
    with _disable_current_modes():
        return torch.softmax(x, dim=-1).contiguous()
