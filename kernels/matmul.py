"""Matrix product in Triton: c = a b + bias.

    c[m, n] = sum over k of a[m, k] b[k, n], plus bias[n]

Each program keeps one tile of c in float32 and walks along K, multiplying a tile of a by a tile of b at each step. Programs
are numbered so that those that run together share rows of a and columns of b in the L2 cache. Where c has too few tiles to
occupy the GPU and K is long, several programs share one tile, each with its part of K; their partial sums go to a workspace
and a second kernel adds them in a fixed order, so that the result is the same every time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

KERNEL_TYPE = "matmul"

# Tiles (BLOCK_M, BLOCK_N, BLOCK_K, warps, stages) from the largest: the first of which there are enough is taken.
TILES_HALF = (
    (128, 128, 64, 8, 4),
    (64, 128, 64, 4, 4),
    (64, 64, 64, 4, 4),
)
# Up to 16 rows: reading b is all the work, so many narrow tiles and long steps along K.
TILES_HALF_SKINNY = ((16, 64, 128, 4, 4), (16, 32, 128, 4, 5))
# IEEE float32 has no tensor cores.
TILES_FLOAT32 = (
    (128, 128, 16, 4, 3),
    (64, 128, 16, 2, 3),
    (64, 64, 16, 2, 3),
)
TILES_FLOAT32_SKINNY = ((16, 128, 16, 1, 4),)

# In half precision these take the place of what the tables say; None leaves it to them.
TILE_M = None  # tune: [None, 16, 32, 64, 128, 256]
TILE_N = None  # tune: [None, 32, 64, 128, 256]
TILE_K = None  # tune: [None, 32, 64, 128, 256]
WARPS = None  # tune: [None, 2, 4, 8]
STAGES = None  # tune: [None, 2, 3, 4, 5, 6]
PARTS = None  # tune: [None, 1, 2, 3, 4, 6, 8]; programs that share one tile, each with its part of K

# From so many rows on, a transposed float32 b is copied, so that threads that work on neighbouring columns read neighbouring
# words of shared memory.
TURN_FROM = 128
BLOCK_TURN = 32

# Rows of tiles that are walked together before the next column of tiles.
GROUP_M = 8  # tune: [1, 2, 4, 8, 16, 32]
# Multiprocessors of an H100 or H200. The tiles are enough when there are so many for each, with four warps or more.
PROCESSORS = 132
ENOUGH_HALF = 0.75
ENOUGH_FLOAT32 = 1.25
# The shortest part of K that is worth a program of its own, in half precision and in float32.
MIN_SPLIT_HALF = 768
MIN_SPLIT_FLOAT32 = 256
# Elements that one program of the second kernel adds up.
BLOCK_SUM = 1024

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@triton.jit
def _turn(b, turned, K, N, stride_bk, stride_bn, width, BLOCK: tl.constexpr):
    """A block of b (K, N) into turned (K, width), whose rows hold the N columns next to each other."""
    k = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    n = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    there = (k < K)[:, None] & (n < N)[None, :]
    block = tl.load(b + k[:, None] * stride_bk + n[None, :] * stride_bn, mask=there)
    tl.store(turned + k[:, None] * width + n[None, :], block, mask=there)


@triton.jit
def _tile_of_program(M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """Row and column of this program's tile: columns of GROUP_M tiles, one after the other."""
    program = tl.program_id(0)
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    group = program // (GROUP_M * tiles_n)
    first_m = group * GROUP_M
    height = min(tiles_m - first_m, GROUP_M)
    inside = program % (GROUP_M * tiles_n)
    return first_m + inside % height, inside // height


@triton.jit
def _product(
    a,
    b,
    bias,
    c,
    M,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    stride_bias,
    wrap_n,
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    WIDE: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """One tile of c (M, N), or with SPLIT_K > 1 one tile of partial sums of c (SPLIT_K, M, N), which is then float32."""
    tile_m, tile_n = _tile_of_program(M, N, BLOCK_M, BLOCK_N, GROUP_M)
    split = tl.program_id(1)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    steps = tl.cdiv(K, BLOCK_K)
    steps_each = tl.cdiv(steps, SPLIT_K)
    first = split * steps_each
    last = min(first + steps_each, steps)

    # Rows and columns past the edge wrap around: they are never stored, and the loads need no mask for them. Columns wrap at
    # wrap_n >= N, up to which b may be read: a multiple of 16 keeps the loads of a b with contiguous rows wide.
    # The start of a step moves as one pointer; the offsets inside a tile stay, in 32 bits unless a tensor is too large.
    k = tl.arange(0, BLOCK_K)
    row, column, row_k = rows % M, columns % wrap_n, k
    if WIDE:
        row, column, row_k = row.to(tl.int64), column.to(tl.int64), k.to(tl.int64)
    a_tile = row[:, None] * stride_am + row_k[None, :] * stride_ak
    b_tile = row_k[:, None] * stride_bk + column[None, :] * stride_bn
    start = tl.cast(first, tl.int64) * BLOCK_K
    a += start * stride_ak
    b += start * stride_bk
    step_a = tl.cast(BLOCK_K, tl.int64) * stride_ak
    step_b = tl.cast(BLOCK_K, tl.int64) * stride_bk
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for step in range(first, last):
        if EVEN_K:
            a_values = tl.load(a + a_tile)
            b_values = tl.load(b + b_tile)
        else:
            rest = K - step * BLOCK_K
            a_values = tl.load(a + a_tile, mask=k[None, :] < rest, other=0.0)
            b_values = tl.load(b + b_tile, mask=k[:, None] < rest, other=0.0)
        total = tl.dot(a_values, b_values, total, input_precision="ieee")
        a += step_a
        b += step_b

    if HAS_BIAS:
        total += tl.load(bias + columns * stride_bias, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    c_tile = c + (split.to(tl.int64) * M + rows)[:, None] * N + columns[None, :]
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    tl.store(c_tile, total.to(c.dtype.element_ty), mask=inside)


@triton.jit
def _add_parts(parts, bias, c, size, N, stride_bias, HAS_BIAS: tl.constexpr, SPLIT_K: tl.constexpr, BLOCK: tl.constexpr):
    """c = the sum of parts (SPLIT_K, M, N) over its first dimension, plus bias; `size` is M * N."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < size
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for part in tl.static_range(SPLIT_K):
        total += tl.load(parts + part * size + offsets, mask=inside, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + (offsets % N) * stride_bias, mask=inside, other=0.0).to(tl.float32)
    tl.store(c + offsets, total.to(c.dtype.element_ty), mask=inside)


def _choose_tile(M: int, N: int, K: int, dtype: torch.dtype) -> tuple[tuple[int, int, int, int, int], int]:
    """The tile and the number of parts of K: the largest tile of which there are enough to occupy the GPU."""
    if dtype == torch.float32:
        tiles, min_split, enough = TILES_FLOAT32_SKINNY if M <= 16 else TILES_FLOAT32, MIN_SPLIT_FLOAT32, ENOUGH_FLOAT32
    else:
        tiles, min_split, enough = TILES_HALF_SKINNY if M <= 16 else TILES_HALF, MIN_SPLIT_HALF, ENOUGH_HALF
        own = (TILE_M, TILE_N, TILE_K, WARPS, STAGES)
        tiles = [tuple(mine or usual for mine, usual in zip(own, tile, strict=True)) for tile in tiles]
    for tile in tiles:
        count = triton.cdiv(M, tile[0]) * triton.cdiv(N, tile[1])
        wanted = PROCESSORS * max(1, 4 // tile[3])
        parts = max(1, min(round(wanted / count), K // min_split))
        if count * parts >= enough * wanted:
            break
    if PARTS is not None and dtype != torch.float32:
        parts = max(1, min(PARTS, triton.cdiv(K, tile[2])))
    return tile, parts


def _is_wide(x: Tensor) -> bool:
    """Whether an offset into `x` may need more than 32 bits."""
    return sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True)) >= 2**31


def kernel_fn(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """a (M, K) @ b (K, N) + bias (N,) -> (M, N), contiguous, in the dtype of a.

    All of one dtype, float16, bfloat16 or float32, with any strides; sizes may be 0. Sums are float32, and float32 inputs are
    multiplied in IEEE float32. TypeError for other or mixed dtypes, ValueError for shapes that do not fit.
    """
    if a.dtype not in DTYPES or b.dtype != a.dtype or (bias is not None and bias.dtype != a.dtype):
        raise TypeError("a, b and bias must share one dtype: float16, bfloat16 or float32")
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"a must be (M, K) and b (K, N), not {tuple(a.shape)} and {tuple(b.shape)}")
    (M, K), N = a.shape, b.shape[1]
    if bias is not None and bias.shape != (N,):
        raise ValueError(f"bias must be ({N},), not {tuple(bias.shape)}")
    c = torch.empty((M, N), dtype=a.dtype, device=a.device)
    if c.numel() == 0:
        return c

    wrap_n = N
    if a.dtype == torch.float32 and M >= TURN_FROM and b.stride(1) != 1:
        wrap_n = triton.cdiv(N, 16) * 16
        turned = torch.empty((K, wrap_n), dtype=b.dtype, device=b.device)
        _turn[(triton.cdiv(K, BLOCK_TURN), triton.cdiv(N, BLOCK_TURN))](b, turned, K, N, *b.stride(), wrap_n, BLOCK=BLOCK_TURN)
        b = turned[:, :N]
    (BLOCK_M, BLOCK_N, BLOCK_K, warps, stages), parts = _choose_tile(M, N, K, a.dtype)
    split = parts > 1
    target = torch.empty((parts, M, N), dtype=torch.float32, device=a.device) if split else c
    stride_bias = 0 if bias is None else bias.stride(0)
    _product[(triton.cdiv(M, BLOCK_M) * triton.cdiv(N, BLOCK_N), parts)](
        a,
        b,
        bias,
        target,
        M,
        N,
        K,
        *a.stride(),
        *b.stride(),
        stride_bias,
        wrap_n,
        HAS_BIAS=bias is not None and not split,
        EVEN_K=K % BLOCK_K == 0,
        WIDE=_is_wide(a) or _is_wide(b),
        SPLIT_K=parts,
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
        BLOCK_K=BLOCK_K,
        GROUP_M=GROUP_M,
        num_warps=warps,
        num_stages=stages,
    )
    if split:
        _add_parts[(triton.cdiv(M * N, BLOCK_SUM),)](
            target, bias, c, M * N, N, stride_bias, HAS_BIAS=bias is not None, SPLIT_K=parts, BLOCK=BLOCK_SUM
        )
    return c
