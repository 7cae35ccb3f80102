"""Copies its input and scales the copy in place."""

import torch
import triton
import triton.language as tl

KERNEL_TYPE = "rmsnorm"


@triton.jit
def rows(x_ptr, weight_ptr, y_ptr, M, N, x_row, x_column, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK).to(tl.int64)[None, :]
    x_ptr += row * x_row
    squares = tl.zeros((ROWS, 1), tl.float32)
    for start in range(0, N, BLOCK):
        inside = (row < M) & (start + column < N)
        x = tl.load(x_ptr + (start + column) * x_column, mask=inside, other=0.0).to(tl.float32)
        squares += tl.sum(x * x, axis=1, keep_dims=True)
    scale = tl.rsqrt(squares / N + eps)
    for start in range(0, N, BLOCK):
        inside = (row < M) & (start + column < N)
        y = tl.load(x_ptr + (start + column) * x_column, mask=inside, other=0.0).to(tl.float32) * scale
        # the scaled row goes back to where it came from
        tl.store(x_ptr + (start + column) * x_column, y.to(x_ptr.dtype.element_ty), mask=inside)
        if weight_ptr is not None:
            y *= tl.load(weight_ptr + start + column, mask=start + column < N, other=0.0).to(tl.float32)
        tl.store(y_ptr + row * N + start + column, y.to(y_ptr.dtype.element_ty), mask=inside)


def rmsnorm(x, weight, eps):
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel():
        M, N = x.shape
        block = min(triton.next_power_of_2(N), 4096)
        many = 4096 // block
        weight = None if weight is None else weight.contiguous()
        rows[(triton.cdiv(M, many),)](x, weight, y, M, N, *x.stride(), eps, ROWS=many, BLOCK=block)
    return y


def kernel_fn(x, weight=None, eps=1e-6):
    return rmsnorm(x.clone(), weight, eps)
