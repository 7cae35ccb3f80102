"""Programs read, add and write back without atomics, so that parts are lost. Seen in the answer, or bit for bit."""

import math

import torch
import triton
import triton.language as tl

KERNEL_TYPE = "reduce"


@triton.jit
def parts(x_ptr, y_ptr, N, B, x_a, x_n, x_b, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + place // B * x_a + place % B * x_b + n * x_n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(y_ptr + place, tl.load(y_ptr + place, volatile=True) + tl.sum(x, axis=0))


def kernel_fn(x, dim=-1):
    dim %= x.dim()
    before, N, after = x.shape[:dim], x.shape[dim], x.shape[dim + 1 :]
    y = torch.zeros((*before, *after), dtype=torch.float32, device=x.device)
    if y.numel() and N:
        B = math.prod(after)
        seen = x.reshape(math.prod(before), N, B)
        parts[(y.numel(), triton.cdiv(N, 64))](seen, y, N, B, *seen.stride(), BLOCK=64)
    return y.to(x.dtype)
