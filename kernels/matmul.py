"""Matrix product in Triton: c = a b + bias + residual.

    c[m, n] = sum over k of a[m, k] b[k, n], plus bias[n], plus residual[m, n]

Each program keeps one tile of c in float32 and walks along K, multiplying a tile of a by a tile of b at each step. Programs
are numbered so that those that run together share rows of a and columns of b in the L2 cache. Where c has too few tiles to
occupy the GPU and K is long, several programs share one tile, each with its part of K; their partial sums go to a workspace
and a second kernel adds them in a fixed order, so that the result is the same every time.

From Hopper on, half-precision products with tiles enough can take another way (USE_TMA): as many programs as there are
multiprocessors walk over the tiles, and the copy engine (TMA) fetches blocks by their descriptors. It needs rows that start
at multiples of 16 bytes; what lies past an edge it reads as zero and does not write.
"""

from functools import cache

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

# Tiles for the copy engine, likewise. Off, because it is right in Triton's interpreter but was not timed yet.
USE_TMA = False  # tune: [False, True]
TILES_TMA = ((128, 256, 64, 8, 4), (128, 128, 64, 4, 4))
TMA_M = None  # tune: [None, 64, 128, 256]
TMA_N = None  # tune: [None, 64, 128, 256]
TMA_K = None  # tune: [None, 32, 64, 128]
TMA_WARPS = None  # tune: [None, 4, 8]
TMA_STAGES = None  # tune: [None, 2, 3, 4, 5]

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
def _tile_of(program, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """Row and column of a program's tile: columns of GROUP_M tiles, one after the other."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    group = program // (GROUP_M * tiles_n)
    first_m = group * GROUP_M
    height = min(tiles_m - first_m, GROUP_M)
    inside = program % (GROUP_M * tiles_n)
    return first_m + inside % height, inside // height


@triton.jit
def _with_addends(total, bias, residual, rows, columns, M, N, stride_bias, stride_rm, stride_rn):
    """total plus the bias of its columns and the residual at its place, either of which may be missing."""
    if bias is not None:
        total += tl.load(bias + columns * stride_bias, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    if residual is not None:
        place = rows.to(tl.int64)[:, None] * stride_rm + columns.to(tl.int64)[None, :] * stride_rn
        inside = (rows < M)[:, None] & (columns < N)[None, :]
        total += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    return total


@triton.jit
def _product(
    a, b, bias, residual, c, M, N, K,
    stride_am, stride_ak, stride_bk, stride_bn, stride_bias, stride_rm, stride_rn, wrap_n,
    ADDS: tl.constexpr, EVEN_K: tl.constexpr, WIDE: tl.constexpr, SPLIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """One tile of c (M, N), or with SPLIT_K > 1 one tile of partial sums of c (SPLIT_K, M, N), which is then float32.

    Without ADDS neither bias nor residual is added here, whether there is one or not.
    """
    tile_m, tile_n = _tile_of(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP_M)
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

    c_tile = c + (split.to(tl.int64) * M + rows)[:, None] * N + columns[None, :]
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    if ADDS:
        total = _with_addends(total, bias, residual, rows, columns, M, N, stride_bias, stride_rm, stride_rn)
    tl.store(c_tile, total.to(c.dtype.element_ty), mask=inside)


@triton.jit
def _product_tma(
    a, b, bias, residual, c, M, N, K, stride_a, stride_b, stride_bias, stride_rm, stride_rn,
    B_BY_COLUMNS: tl.constexpr, STORE_BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """Every so many tiles of c (M, N). a has contiguous rows; b has contiguous columns (B_BY_COLUMNS) or contiguous rows."""
    HALF: tl.constexpr = BLOCK_N // 2
    a_blocks = tl.make_tensor_descriptor(a, [M, K], [stride_a, 1], [BLOCK_M, BLOCK_K])
    if B_BY_COLUMNS:
        b_blocks = tl.make_tensor_descriptor(b, [N, K], [stride_b, 1], [BLOCK_N, BLOCK_K])
    else:
        b_blocks = tl.make_tensor_descriptor(b, [K, N], [stride_b, 1], [BLOCK_K, BLOCK_N])
    if STORE_BLOCKS:
        c_blocks = tl.make_tensor_descriptor(c, [M, N], [N, 1], [BLOCK_M, HALF])
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    for program in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        tile_m, tile_n = _tile_of(program, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        row, column = tile_m * BLOCK_M, tile_n * BLOCK_N
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, K, BLOCK_K):
            a_values = a_blocks.load([row, k])
            b_values = b_blocks.load([column, k]).T if B_BY_COLUMNS else b_blocks.load([k, column])
            total = tl.dot(a_values, b_values, total)
        rows, columns = row + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_N)
        total = _with_addends(total, bias, residual, rows, columns, M, N, stride_bias, stride_rm, stride_rn)
        if STORE_BLOCKS:  # in two halves, which leaves room for another stage
            left, right = tl.split(tl.permute(tl.reshape(total, (BLOCK_M, 2, HALF)), (0, 2, 1)))
            c_blocks.store([row, column], left.to(c.dtype.element_ty))
            c_blocks.store([row, column + HALF], right.to(c.dtype.element_ty))
        else:
            inside = (rows < M)[:, None] & (columns < N)[None, :]
            tl.store(c + rows.to(tl.int64)[:, None] * N + columns[None, :], total.to(c.dtype.element_ty), mask=inside)


@triton.jit
def _add_parts(
    parts, bias, residual, c, size, N, stride_bias, stride_rm, stride_rn, SPLIT_K: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """c = the sum of parts (SPLIT_K, M, N) over its first dimension, plus bias and residual; `size` is M * N."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < size
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for part in tl.static_range(SPLIT_K):
        total += tl.load(parts + part * size + offsets, mask=inside, other=0.0)
    if bias is not None:
        total += tl.load(bias + (offsets % N) * stride_bias, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        place = offsets // N * stride_rm + offsets % N * stride_rn
        total += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
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


def _choose_tile_tma(a: Tensor, b: Tensor) -> tuple[int, ...] | None:
    """The largest tile for the copy engine of which there are enough; None where it cannot, or is not worth it."""
    if not USE_TMA or a.dtype == torch.float32 or a.shape[1] == 0 or not _has_tma(a.device):
        return None
    if a.stride(1) != 1 or not (_is_aligned(a, 0) and (_is_aligned(b, 1) if b.stride(0) == 1 else _is_aligned(b, 0))):
        return None
    if 1 not in b.stride():
        return None
    own = (TMA_M, TMA_N, TMA_K, TMA_WARPS, TMA_STAGES)
    for usual in TILES_TMA:
        tile = tuple(mine or size for mine, size in zip(own, usual, strict=True))
        if triton.cdiv(a.shape[0], tile[0]) * triton.cdiv(b.shape[1], tile[1]) >= ENOUGH_HALF * PROCESSORS:
            return tile
    return None


@cache
def _has_tma(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def _is_aligned(x: Tensor, dim: int) -> bool:
    """Whether x starts, and each step along `dim` goes, at a multiple of 16 bytes."""
    return x.data_ptr() % 16 == 0 and x.stride(dim) * x.element_size() % 16 == 0 and x.stride(dim) > 0


def _allocate(size: int, alignment: int, stream: int | None) -> Tensor:
    """Memory for the descriptors, which the kernel makes."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


def _is_wide(x: Tensor) -> bool:
    """Whether an offset into `x` may need more than 32 bits."""
    return sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True)) >= 2**31


def _launch_tma(
    a: Tensor, b: Tensor, bias: Tensor | None, residual: Tensor | None, c: Tensor, tile: tuple[int, ...]
) -> Tensor:  # fmt: skip
    (M, K), N = a.shape, b.shape[1]
    BLOCK_M, BLOCK_N, BLOCK_K, warps, stages = tile
    by_columns = b.stride(0) == 1 and _is_aligned(b, 1)
    triton.set_allocator(_allocate)
    _product_tma[(min(PROCESSORS, triton.cdiv(M, BLOCK_M) * triton.cdiv(N, BLOCK_N)),)](
        a, b, bias, residual, c, M, N, K, a.stride(0), b.stride(1 if by_columns else 0), *_steps(bias, residual),
        B_BY_COLUMNS=by_columns, STORE_BLOCKS=N % 8 == 0,
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, GROUP_M=GROUP_M, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return c


def _steps(bias: Tensor | None, residual: Tensor | None) -> tuple[int, int, int]:
    return (0 if bias is None else bias.stride(0), *((0, 0) if residual is None else residual.stride()))


def kernel_fn(a: Tensor, b: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """a (M, K) @ b (K, N) + bias (N,) + residual (M, N) -> (M, N), contiguous, in the dtype of a.

    All of one dtype, float16, bfloat16 or float32, with any strides; sizes may be 0. Sums are float32, and float32 inputs are
    multiplied in IEEE float32. TypeError for other or mixed dtypes, ValueError for shapes that do not fit.
    """
    if a.dtype not in DTYPES or any(x is not None and x.dtype != a.dtype for x in (b, bias, residual)):
        raise TypeError("a, b, bias and residual must share one dtype: float16, bfloat16 or float32")
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"a must be (M, K) and b (K, N), not {tuple(a.shape)} and {tuple(b.shape)}")
    (M, K), N = a.shape, b.shape[1]
    if bias is not None and bias.shape != (N,):
        raise ValueError(f"bias must be ({N},), not {tuple(bias.shape)}")
    if residual is not None and residual.shape != (M, N):
        raise ValueError(f"residual must be ({M}, {N}), not {tuple(residual.shape)}")
    c = torch.empty((M, N), dtype=a.dtype, device=a.device)
    if c.numel() == 0:
        return c

    tile = _choose_tile_tma(a, b)
    if tile is not None:
        return _launch_tma(a, b, bias, residual, c, tile)
    wrap_n = N
    if a.dtype == torch.float32 and M >= TURN_FROM and b.stride(1) != 1:
        wrap_n = triton.cdiv(N, 16) * 16
        turned = torch.empty((K, wrap_n), dtype=b.dtype, device=b.device)
        _turn[(triton.cdiv(K, BLOCK_TURN), triton.cdiv(N, BLOCK_TURN))](b, turned, K, N, *b.stride(), wrap_n, BLOCK=BLOCK_TURN)
        b = turned[:, :N]
    (BLOCK_M, BLOCK_N, BLOCK_K, warps, stages), parts = _choose_tile(M, N, K, a.dtype)
    split, steps = parts > 1, _steps(bias, residual)
    target = torch.empty((parts, M, N), dtype=torch.float32, device=a.device) if split else c
    _product[(triton.cdiv(M, BLOCK_M) * triton.cdiv(N, BLOCK_N), parts)](
        a, b, bias, residual, target, M, N, K, *a.stride(), *b.stride(), *steps, wrap_n,
        ADDS=not split, EVEN_K=K % BLOCK_K == 0, WIDE=_is_wide(a) or _is_wide(b), SPLIT_K=parts,
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, GROUP_M=GROUP_M, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    if split:
        _add_parts[(triton.cdiv(M * N, BLOCK_SUM),)](
            target, bias, residual, c, M * N, N, *steps, SPLIT_K=parts, BLOCK=BLOCK_SUM
        )  # fmt: skip
    return c
