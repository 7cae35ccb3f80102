"""Keeps a workspace by shape, but computes everything anew in every call."""

import torch
import triton
import triton.language as tl

KERNEL_TYPE = "softmax"
WORKSPACES = {}


@triton.jit
def statistics(x_ptr, kept_ptr, N, x_row, x_column, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK).to(tl.int64)
    tops, sums = tl.full((BLOCK,), float("-inf"), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for start in range(0, N, BLOCK):
        at = x_ptr + row * x_row + (start + column) * x_column
        tops = tl.maximum(tops, tl.load(at, mask=start + column < N, other=float("-inf")).to(tl.float32))
    top = tl.max(tops, axis=0)
    for start in range(0, N, BLOCK):
        at = x_ptr + row * x_row + (start + column) * x_column
        sums += tl.exp(tl.load(at, mask=start + column < N, other=float("-inf")).to(tl.float32) - top)
    tl.store(kept_ptr + 2 * row, top)
    tl.store(kept_ptr + 2 * row + 1, tl.sum(sums, axis=0))


@triton.jit
def quotients(x_ptr, kept_ptr, y_ptr, N, x_row, x_column, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_row + column * x_column, mask=column < N, other=float("-inf")).to(tl.float32)
    y = tl.exp(x - tl.load(kept_ptr + 2 * row)) / tl.load(kept_ptr + 2 * row + 1)
    tl.store(y_ptr + row * N + column, y.to(y_ptr.dtype.element_ty), mask=column < N)


def kernel_fn(x):
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    M, N = x.shape
    if M not in WORKSPACES:
        WORKSPACES[M] = torch.empty((M, 2), dtype=torch.float32, device=x.device)
    block = min(triton.next_power_of_2(N), 4096)
    statistics[(M,)](x, WORKSPACES[M], N, *x.stride(), BLOCK=block)
    quotients[(M, triton.cdiv(N, block))](x, WORKSPACES[M], y, N, *x.stride(), BLOCK=block)
    return y
