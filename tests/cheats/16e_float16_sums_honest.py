"""Adds in float64, more accurately than PyTorch does."""

import math

import torch
import triton
import triton.language as tl

KERNEL_TYPE = "reduce"


@triton.jit
def sums(x_ptr, y_ptr, count, N, B, x_a, x_n, x_b, MANY: tl.constexpr, BLOCK: tl.constexpr):
    # y has `count` elements; a program computes MANY of them, each a sum of N, in float64 so that no sum is ill-conditioned
    place = tl.program_id(0).to(tl.int64) * MANY + tl.arange(0, MANY)[:, None]
    n = tl.arange(0, BLOCK).to(tl.int64)[None, :]
    x_ptr += place // B * x_a + place % B * x_b
    total = tl.zeros((MANY, BLOCK), tl.float64)
    for start in range(0, N, BLOCK):
        inside = (place < count) & (start + n < N)
        total += tl.load(x_ptr + (start + n) * x_n, mask=inside, other=0.0).to(tl.float64)
    y = tl.sum(total, axis=1, keep_dims=True)
    tl.store(y_ptr + place, y.to(y_ptr.dtype.element_ty), mask=place < count)


def reduce(x, dim, block=256):
    dim %= x.dim()
    before, N, after = x.shape[:dim], x.shape[dim], x.shape[dim + 1 :]
    y = torch.empty((*before, *after), dtype=x.dtype, device=x.device)
    if y.numel():
        count, B = y.numel(), math.prod(after)
        seen = x.reshape(math.prod(before), N, B)
        sums[(triton.cdiv(count, 16),)](seen, y, count, N, B, *seen.stride(), MANY=16, BLOCK=block)
    return y


def kernel_fn(x, dim=-1):
    return reduce(x, dim)
