"""Stops its process with SIGSTOP, so that it neither ends nor answers. Seen by the run budget."""

import os
import signal

import torch

KERNEL_TYPE = "softmax"


def kernel_fn(x):
    os.kill(os.getpid(), signal.SIGSTOP)
    return torch.zeros_like(x)
