"""Root-mean-square normalisation over the last dimension.

    y_i = x_i / sqrt(sum_j x_j^2 / N + eps) * weight_i

A row that fits in registers is read once, and a program takes several short rows. A longer row is read twice in
chunks: first for the sum of squares, then, mostly out of the L2 cache, for the result. Everything is computed in float32.
"""

import torch
import triton
import triton.language as tl

KERNEL_TYPE = "rmsnorm"

WHOLE_ROW = 16384  # longest row that one program holds in registers
TILE = 4096  # tune: [512, 1024, 2048, 4096, 8192, 16384]; elements per program when rows are short
CHUNK = 8192  # tune: [1024, 2048, 4096, 8192, 16384]; elements per step when rows are long
ELEMENTS_PER_WARP = 512  # tune: [128, 256, 512, 1024, 2048]

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@triton.jit
def scaled(x, weight_ptr, column, inside):
    """x * weight, which may be missing."""
    if weight_ptr is not None:
        x *= tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    return x


@triton.jit
def whole_rows(x_ptr, weight_ptr, y_ptr, M, N, x_row, x_column, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """A program computes ROWS rows, each in one piece."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < M) & (column < N)
    x = tl.load(x_ptr + row * x_row + column.to(tl.int64) * x_column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / N + eps)
    y = scaled(x * scale, weight_ptr, column, column < N)
    tl.store(y_ptr + row * N + column, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def long_rows(x_ptr, weight_ptr, y_ptr, N, x_row, x_column, eps, CHUNK: tl.constexpr):
    """A program computes one row in chunks."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_row
    y_ptr += row * N
    squares = tl.zeros((CHUNK,), tl.float32)
    for start in range(0, N, CHUNK):
        column = start + tl.arange(0, CHUNK)
        x = tl.load(x_ptr + column.to(tl.int64) * x_column, mask=column < N, other=0.0).to(tl.float32)
        squares += x * x
    scale = tl.rsqrt(tl.sum(squares, axis=0) / N + eps)
    for start in range(0, N, CHUNK):
        column = start + tl.arange(0, CHUNK)
        inside = column < N
        x = tl.load(x_ptr + column.to(tl.int64) * x_column, mask=inside, other=0.0).to(tl.float32)
        y = scaled(x * scale, weight_ptr, column, inside)
        tl.store(y_ptr + column, y.to(y_ptr.dtype.element_ty), mask=inside)


def warps(elements: int) -> int:
    """Warps for a program that holds so many elements at once."""
    return min(max(elements // ELEMENTS_PER_WARP, 4), 32)


def kernel_fn(x: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 1e-6) -> torch.Tensor:
    """RMS norm over the last dimension of x (..., N), any strides; weight (N,) -> (..., N) in x's dtype, contiguous.

    float16, bfloat16 and float32; weight may have another of these dtypes than x. Raises TypeError for any other,
    ValueError for x without dimensions or a weight that is not (N,).
    """
    if x.dtype not in DTYPES or (weight is not None and weight.dtype not in DTYPES):
        raise TypeError("rmsnorm takes x and weight in float16, bfloat16 or float32")
    if x.dim() == 0:
        raise ValueError("rmsnorm takes a tensor of at least one dimension")
    N = x.shape[-1]
    if weight is not None:
        if weight.shape != (N,):
            raise ValueError(f"rmsnorm takes a weight of shape ({N},), not {tuple(weight.shape)}")
        weight = weight.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return y
    rows = x.reshape(-1, N)
    M, strides = rows.shape[0], rows.stride()
    if N <= WHOLE_ROW:
        block = max(triton.next_power_of_2(N), 16)
        per_program = min(max(TILE // block, 1), triton.next_power_of_2(M))
        sizes = {"ROWS": per_program, "BLOCK": block, "num_warps": warps(per_program * block)}
        whole_rows[(triton.cdiv(M, per_program),)](rows, weight, y, M, N, *strides, eps, **sizes)
    else:
        long_rows[(M,)](rows, weight, y, N, *strides, eps, CHUNK=CHUNK, num_warps=warps(CHUNK))
    return y
