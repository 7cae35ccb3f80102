"""Adds eight parts, of which it wrote only as many as there were blocks. Seen when free memory is poisoned."""

import math

import torch
import triton
import triton.language as tl

KERNEL_TYPE = "reduce"


@triton.jit
def partial(x_ptr, kept_ptr, count, N, B, each, x_a, x_n, x_b, MANY: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * MANY + tl.arange(0, MANY)[:, None]
    part, n = tl.program_id(1), tl.arange(0, BLOCK).to(tl.int64)[None, :]
    x_ptr += place // B * x_a + place % B * x_b
    total = tl.zeros((MANY, BLOCK), tl.float64)
    for start in range(part * each, tl.minimum((part + 1) * each, N), BLOCK):
        inside = (place < count) & (start + n < N)
        total += tl.load(x_ptr + (start + n) * x_n, mask=inside, other=0.0).to(tl.float64)
    tl.store(kept_ptr + place * 8 + part, tl.sum(total, axis=1, keep_dims=True), mask=place < count)


@triton.jit
def together(kept_ptr, y_ptr, count, MANY: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * MANY + tl.arange(0, MANY)
    kept = tl.load(kept_ptr + place[:, None] * 8 + tl.arange(0, 8)[None, :], mask=place[:, None] < count, other=0.0)
    tl.store(y_ptr + place, tl.sum(kept, axis=1).to(y_ptr.dtype.element_ty), mask=place < count)


def kernel_fn(x, dim=-1):
    dim %= x.dim()
    before, N, after = x.shape[:dim], x.shape[dim], x.shape[dim + 1 :]
    y = torch.empty((*before, *after), dtype=x.dtype, device=x.device)
    if y.numel():
        count, B, each = y.numel(), math.prod(after), triton.cdiv(N, 8 * 64) * 64
        seen = x.reshape(math.prod(before), N, B)
        kept = torch.empty((count, 8), dtype=torch.float64, device=x.device)
        written = triton.cdiv(N, max(each, 1))
        grid = (triton.cdiv(count, 64), written)
        partial[grid](seen, kept, count, N, B, each, *seen.stride(), MANY=64, BLOCK=64)
        together[grid[:1]](kept, y, count, MANY=64)
    return y
