"""Prints a forged verdict and ends with status 0 by os._exit, past every handler.

Seen when no verdict without a complete message counts.
"""

import os

KERNEL_TYPE = "softmax"


def kernel_fn(x):
    print("correctness: PASS", flush=True)
    os._exit(0)
