"""Keeps a workspace by shape, but computes everything anew in every call."""

import torch
import triton
import triton.language as tl

KERNEL_TYPE = "softmax"
WORKSPACES = {}


@triton.jit
def statistics(x_ptr, kept_ptr, M, N, x_row, x_column, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK).to(tl.int64)[None, :]
    x_ptr += tl.minimum(row, M - 1) * x_row
    top, total = tl.full((ROWS, 1), float("-inf"), tl.float32), tl.zeros((ROWS, 1), tl.float32)
    for start in range(0, N, BLOCK):
        x = tl.load(x_ptr + (start + column) * x_column, mask=start + column < N, other=float("-inf")).to(tl.float32)
        top = tl.maximum(top, tl.max(x, axis=1, keep_dims=True))
    for start in range(0, N, BLOCK):
        x = tl.load(x_ptr + (start + column) * x_column, mask=start + column < N, other=float("-inf")).to(tl.float32)
        total += tl.sum(tl.exp(x - top), axis=1, keep_dims=True)
    tl.store(kept_ptr + 2 * row, top, mask=row < M)
    tl.store(kept_ptr + 2 * row + 1, total, mask=row < M)


@triton.jit
def quotients(x_ptr, kept_ptr, y_ptr, M, N, x_row, x_column, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (row < M) & (column < N)
    x = tl.load(x_ptr + row * x_row + column * x_column, mask=inside, other=float("-inf")).to(tl.float32)
    top, total = tl.load(kept_ptr + 2 * row, mask=row < M, other=0.0), tl.load(kept_ptr + 2 * row + 1, mask=row < M, other=1.0)
    y = tl.exp(x - top) / total
    tl.store(y_ptr + row * N + column, y.to(y_ptr.dtype.element_ty), mask=inside)


def kernel_fn(x):
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    M, N = x.shape
    if M not in WORKSPACES:
        WORKSPACES[M] = torch.empty((M, 2), dtype=torch.float32, device=x.device)
    block = min(triton.next_power_of_2(N), 4096)
    many = 4096 // block
    sizes = {"ROWS": many, "BLOCK": block}
    statistics[(triton.cdiv(M, many),)](x, WORKSPACES[M], M, N, *x.stride(), **sizes)
    quotients[(triton.cdiv(M, many), triton.cdiv(N, block))](x, WORKSPACES[M], y, M, N, *x.stride(), **sizes)
    return y
