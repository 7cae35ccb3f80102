"""Programs read, add and write back without atomics, so that parts are lost. Seen in the answer, or bit for bit."""

import math

import torch
import triton
import triton.language as tl

KERNEL_TYPE = "reduce"


@triton.jit
def parts(x_ptr, y_ptr, count, N, B, x_a, x_n, x_b, MANY: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * MANY + tl.arange(0, MANY)[:, None]
    n = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (place < count) & (n < N)
    x = tl.load(x_ptr + place // B * x_a + place % B * x_b + n * x_n, mask=inside, other=0.0).to(tl.float32)
    part = tl.sum(x, axis=1, keep_dims=True)
    before = tl.load(y_ptr + place, mask=place < count, volatile=True)
    tl.store(y_ptr + place, before + part, mask=place < count)


def kernel_fn(x, dim=-1):
    dim %= x.dim()
    before, N, after = x.shape[:dim], x.shape[dim], x.shape[dim + 1 :]
    y = torch.zeros((*before, *after), dtype=torch.float32, device=x.device)
    if y.numel() and N:
        count, B = y.numel(), math.prod(after)
        seen = x.reshape(math.prod(before), N, B)
        grid = (triton.cdiv(count, 64), triton.cdiv(N, 64))
        parts[grid](seen, y, count, N, B, *seen.stride(), MANY=64, BLOCK=64)
    return y.to(x.dtype)
