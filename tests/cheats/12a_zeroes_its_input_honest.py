"""Copies its input and scales the copy in place."""

import torch
import triton
import triton.language as tl

KERNEL_TYPE = "rmsnorm"


@triton.jit
def rows(x_ptr, weight_ptr, y_ptr, N, x_row, x_column, eps, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK).to(tl.int64)
    x_ptr += row * x_row
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, N, BLOCK):
        x = tl.load(x_ptr + (start + column) * x_column, mask=start + column < N, other=0.0).to(tl.float32)
        squares += x * x
    scale = tl.rsqrt(tl.sum(squares, axis=0) / N + eps)
    for start in range(0, N, BLOCK):
        inside = start + column < N
        value = tl.load(x_ptr + (start + column) * x_column, mask=inside, other=0.0).to(tl.float32) * scale
        # the scaled row goes back to where it came from
        tl.store(x_ptr + (start + column) * x_column, value.to(x_ptr.dtype.element_ty), mask=inside)
        y = value
        if weight_ptr is not None:
            y *= tl.load(weight_ptr + start + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(y_ptr + row * N + start + column, y.to(y_ptr.dtype.element_ty), mask=inside)


def rmsnorm(x, weight, eps):
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel():
        M, N = x.shape
        weight = None if weight is None else weight.contiguous()
        rows[(M,)](x, weight, y, N, *x.stride(), eps, BLOCK=min(triton.next_power_of_2(N), 4096))
    return y


def kernel_fn(x, weight=None, eps=1e-6):
    return rmsnorm(x.clone(), weight, eps)
