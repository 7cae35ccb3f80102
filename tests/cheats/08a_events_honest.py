"""Times two block sizes once with events and a clock, replaces nothing, and keeps the faster for good."""

import time

import torch
import triton
import triton.language as tl

KERNEL_TYPE = "softmax"
CHOSEN = []


@triton.jit
def rows(x_ptr, y_ptr, N, x_row, x_column, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK).to(tl.int64)
    x_ptr += row * x_row
    tops, sums = tl.full((BLOCK,), float("-inf"), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for start in range(0, N, BLOCK):
        x = tl.load(x_ptr + (start + column) * x_column, mask=start + column < N, other=float("-inf"))
        tops = tl.maximum(tops, x.to(tl.float32))
    top = tl.max(tops, axis=0)
    for start in range(0, N, BLOCK):
        x = tl.load(x_ptr + (start + column) * x_column, mask=start + column < N, other=float("-inf"))
        sums += tl.exp(x.to(tl.float32) - top)
    total = tl.sum(sums, axis=0)
    for start in range(0, N, BLOCK):
        x = tl.load(x_ptr + (start + column) * x_column, mask=start + column < N, other=float("-inf"))
        y = tl.exp(x.to(tl.float32) - top) / total
        tl.store(y_ptr + row * N + start + column, y.to(y_ptr.dtype.element_ty), mask=start + column < N)


def timed(x, y, block):
    start = time.perf_counter()
    rows[x.shape[:1]](x, y, x.shape[1], *x.stride(), BLOCK=block)
    if x.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def kernel_fn(x):
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel():
        if not CHOSEN:
            CHOSEN.append(min((1024, 4096), key=lambda block: timed(x, y, block)))
        rows[x.shape[:1]](x, y, x.shape[1], *x.stride(), BLOCK=CHOSEN[0])
    return y
