"""Sum over one dimension.

The tensor is seen as (A, N, B) and summed over N, in float32. A program adds tile after tile element by element, and the
elements of the last tile only at the end. Tiles lie along the rows when B is 1, along B otherwise, so that neighbouring
threads read neighbouring memory. Where sums are few and long, each is split into parts, which a second launch adds in a
fixed order: no atomics, so equal inputs give equal bits.
"""

import math

import torch
import triton
import triton.language as tl

KERNEL_TYPE = "reduce"

TILE = 4096  # tune: [1024, 2048, 4096, 8192, 16384]; elements per step
BLOCK_B = 128  # tune: [32, 64, 128, 256, 512]; elements along B per step
PROGRAMS = 528  # tune: [132, 264, 528, 1056, 2112]; programs that fill a GPU: four for each of 132 processors
WARPS = 4  # tune: [1, 2, 4, 8, 16]

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@triton.jit
def sum_rows(x_ptr, y_ptr, A, N, x_a, x_n, part, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Sums of ROWS rows of x (A, N) over columns [p * part, (p + 1) * part), p = program_id(1), into y (A, parts)."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    x_ptr += row[:, None] * x_a
    first = tl.program_id(1).to(tl.int64) * part
    last = tl.minimum(first + part, N)
    sums = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(first, last, BLOCK):
        n = start + tl.arange(0, BLOCK)[None, :]
        sums += tl.load(x_ptr + n * x_n, mask=(row[:, None] < A) & (n < last), other=0.0).to(tl.float32)
    y = tl.sum(sums, axis=1)
    tl.store(y_ptr + row * tl.num_programs(1) + tl.program_id(1), y.to(y_ptr.dtype.element_ty), mask=row < A)


@triton.jit
def sum_columns(
    x_ptr, y_ptr, N, B, x_a, x_n, x_b, part, blocks, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr
):  # fmt: skip
    """Sums of x (A, N, B) over n in [p * part, (p + 1) * part), p = program_id(1), into y (A, B, parts), BLOCK_B at a time."""
    a = (tl.program_id(0) // blocks).to(tl.int64)
    b = tl.program_id(0) % blocks * BLOCK_B + tl.arange(0, BLOCK_B).to(tl.int64)
    x_ptr += a * x_a + b[None, :] * x_b
    first = tl.program_id(1).to(tl.int64) * part
    last = tl.minimum(first + part, N)
    sums = tl.zeros((BLOCK_N, BLOCK_B), tl.float32)
    for start in range(first, last, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)[:, None]
        sums += tl.load(x_ptr + n * x_n, mask=(n < last) & (b[None, :] < B), other=0.0).to(tl.float32)
    y = tl.sum(sums, axis=0)
    tl.store(y_ptr + (a * B + b) * tl.num_programs(1) + tl.program_id(1), y.to(y_ptr.dtype.element_ty), mask=b < B)


def part_length(N: int, programs: int, block: int) -> int:
    """How much of N one program adds, in whole blocks: all of it, or less where too few programs would run."""
    parts = max(min(triton.cdiv(N, 2 * block), triton.cdiv(PROGRAMS, programs)), 1)
    return max(triton.cdiv(triton.cdiv(N, parts), block), 1) * block


def launch_rows(x: torch.Tensor, y: torch.Tensor, whole: bool) -> None:
    """Sum x (A, N) into y (A,); `whole` never splits a row."""
    A, N = x.shape
    block = min(max(triton.next_power_of_2(N), 16), TILE)
    rows = min(max(TILE // block, 1), triton.next_power_of_2(A))
    programs = triton.cdiv(A, rows)
    part = max(N, 1) if whole else part_length(N, programs, block)
    parts = max(triton.cdiv(N, part), 1)
    target = y if parts == 1 else torch.empty((A, parts), dtype=torch.float32, device=x.device)
    sum_rows[(programs, parts)](x, target, A, N, *x.stride(), part, ROWS=rows, BLOCK=block, num_warps=WARPS)
    if parts > 1:
        launch_rows(target, y, whole=True)


def launch_columns(x: torch.Tensor, y: torch.Tensor) -> None:
    """Sum x (A, N, B) over N into y (A * B,)."""
    A, N, B = x.shape
    block_b = min(triton.next_power_of_2(B), BLOCK_B)
    block_n = min(max(triton.next_power_of_2(N), 1), TILE // block_b)
    blocks = triton.cdiv(B, block_b)
    part = part_length(N, A * blocks, block_n)
    parts = max(triton.cdiv(N, part), 1)
    target = y if parts == 1 else torch.empty((A * B, parts), dtype=torch.float32, device=x.device)
    sum_columns[(A * blocks, parts)](
        x, target, N, B, *x.stride(), part, blocks, BLOCK_N=block_n, BLOCK_B=block_b, num_warps=WARPS
    )  # fmt: skip
    if parts > 1:
        launch_rows(target, y, whole=True)


def kernel_fn(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Sum of x, of any shape and strides, over dimension `dim`, which is removed. Empty sums are 0. The result is contiguous.

    float16, bfloat16 and float32. Raises TypeError for another dtype, ValueError for a `dim` that x does not have.
    """
    if x.dtype not in DTYPES:
        raise TypeError(f"reduce takes float16, bfloat16 or float32, not {x.dtype}")
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"reduce takes a dim that x has; x has {x.dim()} dimensions and dim is {dim}")
    before, after = x.shape[: dim % x.dim()], x.shape[dim % x.dim() + 1 :]
    y = torch.empty((*before, *after), dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    A, N, B = math.prod(before), x.shape[dim], math.prod(after)
    seen = x.reshape(A, N, B)
    if B == 1 and seen.stride(0) == 1 and seen.stride(1) != 1:
        seen = seen.transpose(0, 2)  # (A, N) stored by columns: neighbours in memory belong to different sums
    if seen.shape[2] == 1:
        launch_rows(seen.squeeze(2), y, whole=False)
    else:
        launch_columns(seen, y)
    return y
