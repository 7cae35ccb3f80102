"""softmax over the last dimension.

    y_i = exp(x_i - m) / sum_j exp(x_j - m)    with m = max_j x_j

Three ways, by the length and the number of rows:
- a row that fits in registers is read once; a program takes several short rows;
- a longer row is read twice in chunks. The first pass keeps a running maximum m and the sum s of exp(x - m); when a chunk
  raises the maximum to m', the sum so far becomes s * exp(m - m'). The second read mostly hits the L2 cache;
- long rows that are too few to fill the GPU are split: one launch leaves (m, s) of each part, the next combines them.

Everything is computed in float32.
"""

import torch
import triton
import triton.language as tl

KERNEL_TYPE = "softmax"

WHOLE_ROW = 32768  # longest row that one program holds in registers
TILE = 4096  # tune: [512, 1024, 2048, 4096, 8192, 16384]; elements per program when rows are short
CHUNK = 8192  # tune: [1024, 2048, 4096, 8192, 16384]; elements per step when rows are long
PARTS = 32  # tune: [8, 16, 32, 64]; parts of a split row, a power of two
FEW_ROWS = 128  # tune: [0, 32, 128, 512]; at most so many long rows are split
ELEMENTS_PER_WARP = 512  # tune: [128, 256, 512, 1024, 2048]

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@triton.jit
def absorb(m, s, x):
    """Maximum and sum of exponentials, (m, s), with the chunk x taken in."""
    raised = tl.maximum(m, tl.max(x, axis=0))
    # While all is -inf the difference -inf - -inf would be NaN: such elements count as exp(-inf) = 0.
    shift = tl.where(raised == float("-inf"), 0.0, raised)
    return raised, s * tl.exp(m - shift) + tl.sum(tl.exp(x - shift), axis=0)


@triton.jit
def whole_rows(x_ptr, y_ptr, M, N, x_row, x_column, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """A program computes ROWS rows, each in one piece."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    # Rows past the last one repeat it, and are not stored.
    from_ptr = x_ptr + tl.minimum(row, M - 1) * x_row + column.to(tl.int64) * x_column
    x = tl.load(from_ptr, mask=column < N, other=float("-inf")).to(tl.float32)
    e = tl.exp(x - tl.max(x, axis=1, keep_dims=True))
    y = e / tl.sum(e, axis=1, keep_dims=True)
    tl.store(y_ptr + row * N + column, y.to(y_ptr.dtype.element_ty), mask=(row < M) & (column < N))


@triton.jit
def long_rows(x_ptr, y_ptr, N, x_row, x_column, CHUNK: tl.constexpr):
    """A program computes one row in chunks."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_row
    y_ptr += row * N
    m, s = -float("inf"), 0.0
    for start in range(0, N, CHUNK):
        column = start + tl.arange(0, CHUNK)
        x = tl.load(x_ptr + column.to(tl.int64) * x_column, mask=column < N, other=float("-inf"))
        m, s = absorb(m, s, x.to(tl.float32))
    for start in range(0, N, CHUNK):
        column = start + tl.arange(0, CHUNK)
        x = tl.load(x_ptr + column.to(tl.int64) * x_column, mask=column < N, other=float("-inf"))
        y = tl.exp(x.to(tl.float32) - m) / s
        tl.store(y_ptr + column, y.to(y_ptr.dtype.element_ty), mask=column < N)


@triton.jit
def part_sums(x_ptr, m_ptr, s_ptr, N, length, x_row, x_column, PARTS: tl.constexpr, CHUNK: tl.constexpr):
    """Maximum and sum of exponentials of one part of a row, into m and s (M, PARTS)."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    x_ptr += row * x_row
    end = tl.minimum((part + 1) * length, N)
    m, s = -float("inf"), 0.0
    for start in range(part * length, end, CHUNK):
        column = start + tl.arange(0, CHUNK)
        x = tl.load(x_ptr + column.to(tl.int64) * x_column, mask=column < end, other=float("-inf"))
        m, s = absorb(m, s, x.to(tl.float32))
    tl.store(m_ptr + row * PARTS + part, m)
    tl.store(s_ptr + row * PARTS + part, s)


@triton.jit
def part_results(x_ptr, y_ptr, m_ptr, s_ptr, N, length, x_row, x_column, PARTS: tl.constexpr, CHUNK: tl.constexpr):
    """The results of one part of a row, from the maxima and sums of all its parts."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    x_ptr += row * x_row
    y_ptr += row * N
    each = row * PARTS + tl.arange(0, PARTS)
    part_m = tl.load(m_ptr + each)
    m = tl.max(part_m, axis=0)
    s = tl.sum(tl.load(s_ptr + each) * tl.exp(part_m - m), axis=0)
    end = tl.minimum((part + 1) * length, N)
    for start in range(part * length, end, CHUNK):
        column = start + tl.arange(0, CHUNK)
        x = tl.load(x_ptr + column.to(tl.int64) * x_column, mask=column < end, other=float("-inf"))
        y = tl.exp(x.to(tl.float32) - m) / s
        tl.store(y_ptr + column, y.to(y_ptr.dtype.element_ty), mask=column < end)


def warps(elements: int) -> int:
    """Warps for a program that holds so many elements at once."""
    return min(max(elements // ELEMENTS_PER_WARP, 4), 32)


def kernel_fn(x: torch.Tensor) -> torch.Tensor:
    """Softmax over the last dimension of x (..., N), any strides -> (..., N) in x's dtype, contiguous.

    float16, bfloat16 and float32. Raises TypeError for another dtype, ValueError for a tensor without dimensions.
    """
    if x.dtype not in DTYPES:
        raise TypeError(f"softmax takes float16, bfloat16 or float32, not {x.dtype}")
    if x.dim() == 0:
        raise ValueError("softmax takes a tensor of at least one dimension")
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return y
    rows = x.reshape(-1, x.shape[-1])
    M, N = rows.shape
    strides = rows.stride()
    if N <= WHOLE_ROW:
        block = max(triton.next_power_of_2(N), 16)
        per_program = min(max(TILE // block, 1), triton.next_power_of_2(M))
        grid = (triton.cdiv(M, per_program),)
        whole_rows[grid](rows, y, M, N, *strides, ROWS=per_program, BLOCK=block, num_warps=warps(per_program * block))
    elif M > FEW_ROWS:
        long_rows[(M,)](rows, y, N, *strides, CHUNK=CHUNK, num_warps=warps(CHUNK))
    else:
        m = torch.empty((M, PARTS), dtype=torch.float32, device=x.device)
        s = torch.empty_like(m)
        length = triton.cdiv(triton.cdiv(N, PARTS), 16) * 16  # parts of an aligned row start aligned
        chunk = min(triton.next_power_of_2(length), CHUNK)
        sizes = {"PARTS": PARTS, "CHUNK": chunk, "num_warps": warps(chunk)}
        part_sums[(M, PARTS)](rows, m, s, N, length, *strides, **sizes)
        part_results[(M, PARTS)](rows, y, m, s, N, length, *strides, **sizes)
    return y
