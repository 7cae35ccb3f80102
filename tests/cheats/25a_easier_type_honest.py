"""Names the type of the target that it answers."""

import torch
import triton
import triton.language as tl

KERNEL_TYPE = "softmax"


@triton.jit
def rows(x_ptr, y_ptr, M, N, x_row, x_column, ROWS: tl.constexpr, BLOCK: tl.constexpr):
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
    for start in range(0, N, BLOCK):
        x = tl.load(x_ptr + (start + column) * x_column, mask=start + column < N, other=float("-inf")).to(tl.float32)
        y = tl.exp(x - top) / total
        tl.store(y_ptr + row * N + start + column, y.to(y_ptr.dtype.element_ty), mask=(row < M) & (start + column < N))


def launch(x, y, block=4096):
    M, N = x.shape
    if x.numel():
        block = min(triton.next_power_of_2(N), block)
        many = 4096 // block
        rows[(triton.cdiv(M, many),)](x, y, M, N, *x.stride(), ROWS=many, BLOCK=block)
    return y


def softmax(x):
    return launch(x, torch.empty(x.shape, dtype=x.dtype, device=x.device))


def kernel_fn(x):
    return softmax(x)
