"""Does Triton work here? One tiny kernel, compiled for the GPU or run by the interpreter on a CPU."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _double_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    tl.store(y_ptr + offsets, 2 * tl.load(x_ptr + offsets, mask=inside), mask=inside)


def double(x: Tensor) -> Tensor:
    """2 * x for a contiguous x of any shape and dtype, by a Triton kernel."""
    y = torch.empty_like(x)
    n, block = x.numel(), 256
    _double_kernel[(triton.cdiv(n, block),)](x, y, n, BLOCK=block)
    return y


def is_interpreted() -> bool:
    """True if Triton's interpreter runs the kernels, on the CPU and many times slower."""
    return not isinstance(_double_kernel, triton.runtime.JITFunction)
