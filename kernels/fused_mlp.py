"""A transformer's feed-forward block in Triton, in two kernels.

    h = act(x w_gate) * (x w_up + b_up), or act(x w_up + b_up) without w_gate
    y = h w_down + b_down + residual

The first kernel computes the tiles of x w_gate and x w_up together, so that x is read once for both, applies bias, activation
and product to the float32 sums, and writes h (M, H) once, in the dtype of x. The second is a matrix product. Where y has too
few tiles to occupy the GPU and H is long, several programs share one tile, each with its part of H; their partial sums go to a
workspace and a third kernel adds them in a fixed order, so that the result is the same every time.

silu(z) = z sigmoid(z), gelu(z) = z (1 + erf(z / sqrt 2)) / 2, relu2(z) = max(z, 0)^2, and, (1 + tanh u) / 2 being sigmoid(2 u),
gelu_tanh(z) = z sigmoid(2 sqrt(2 / pi) (z + 0.044715 z^3)): no form here overflows to a NaN.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

KERNEL_TYPE = "fused_mlp"
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu2")

# Tiles (BLOCK_M, BLOCK_N, BLOCK_K, warps, stages) from the largest: the first of which there are enough is taken.
TILES_HALF = (
    (128, 256, 64, 8, 3),
    (128, 128, 64, 4, 3),
    (64, 128, 64, 4, 4),
    (64, 64, 64, 4, 4),
)
# A tile of the gate and one of up at once take twice the registers.
TILES_HALF_GATED = ((128, 128, 64, 8, 3), (64, 128, 64, 4, 3), (64, 64, 64, 4, 3))
# Up to 16 rows: reading the weights is all the work, so many narrow tiles and long steps along K.
TILES_HALF_SKINNY = ((16, 64, 128, 4, 4), (16, 32, 128, 4, 4))
# IEEE float32 has no tensor cores.
TILES_FLOAT32 = ((128, 128, 16, 4, 3), (64, 128, 16, 2, 3), (64, 64, 16, 2, 3))
TILES_FLOAT32_GATED = ((128, 64, 16, 4, 3), (64, 64, 16, 2, 3), (32, 64, 16, 2, 3))
TILES_FLOAT32_SKINNY = ((16, 64, 16, 1, 4),)
# In half precision these take the place of what the tables say, in the first kernel and in the second; None leaves it to them.
UP_M = None  # tune: [None, 16, 32, 64, 128, 256]
UP_N = None  # tune: [None, 32, 64, 128, 256]
UP_K = None  # tune: [None, 32, 64, 128]
UP_WARPS = None  # tune: [None, 4, 8]
UP_STAGES = None  # tune: [None, 2, 3, 4, 5]
DOWN_M = None  # tune: [None, 16, 32, 64, 128, 256]
DOWN_N = None  # tune: [None, 32, 64, 128, 256]
DOWN_K = None  # tune: [None, 32, 64, 128]
DOWN_WARPS = None  # tune: [None, 4, 8]
DOWN_STAGES = None  # tune: [None, 2, 3, 4, 5]
PARTS = None  # tune: [None, 1, 2, 3, 4, 6, 8]; programs that share one tile of y, each with its part of H

# From so many rows on, transposed float32 weights are copied, so that threads that work on neighbouring columns read
# neighbouring words of shared memory.
TURN_FROM = 128
BLOCK_TURN = 32

# Rows of tiles that are walked together before the next column of tiles.
GROUP_M = 8  # tune: [1, 2, 4, 8, 16, 32]
# Multiprocessors of an H100 or H200. The tiles are enough when they fill three quarters of them with four warps or more.
PROCESSORS = 132
ENOUGH = 0.75
# The shortest part of H that is worth a program of its own, in half precision and in float32.
MIN_SPLIT_HALF = 768
MIN_SPLIT_FLOAT32 = 256
# Elements that one program of the third kernel adds up.
BLOCK_SUM = 1024

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


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
def _turn(w, turned, K, N, stride_wk, stride_wn, BLOCK: tl.constexpr):
    """A block of w (K, N) into turned (K, N), whose rows are contiguous."""
    k = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    n = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    there = (k < K)[:, None] & (n < N)[None, :]
    block = tl.load(w + k[:, None] * stride_wk + n[None, :] * stride_wn, mask=there)
    tl.store(turned + k[:, None] * N + n[None, :], block, mask=there)


@triton.jit
def _activate(z, ACTIVATION: tl.constexpr):
    """The activation of float32 values."""
    if ACTIVATION == "silu":
        z = z / (1.0 + tl.exp(-z))
    elif ACTIVATION == "gelu":
        z = 0.5 * z * (1.0 + tl.erf(z * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        z = z / (1.0 + tl.exp(-1.5957691216057308 * (z + 0.044715 * z * z * z)))
    else:
        z = tl.maximum(z, 0.0)
        z = z * z
    return z


@triton.jit
def _load(pointers, there, EVEN: tl.constexpr):
    """A tile, with zeros where it is past the end unless EVEN says that it never is."""
    return tl.load(pointers) if EVEN else tl.load(pointers, mask=there, other=0.0)


@triton.jit
def _hidden(
    x,
    w_up,
    w_gate,
    b_up,
    hidden,
    M,
    H,
    K,
    stride_xm,
    stride_xk,
    stride_uk,
    stride_uh,
    stride_gk,
    stride_gh,
    stride_bias,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """One tile of hidden (M, H)."""
    tile_m, tile_n = _tile_of_program(M, H, BLOCK_M, BLOCK_N, GROUP_M)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)

    # Rows and columns past the edge wrap around: they are never stored, and the loads need no mask for them.
    # The start of a step moves as one pointer; the offsets inside a tile stay, in 32 bits unless a tensor is too large.
    k = tl.arange(0, BLOCK_K)
    row, column, row_k = rows % M, columns % H, k
    if WIDE:
        row, column, row_k = row.to(tl.int64), column.to(tl.int64), k.to(tl.int64)
    x_tile = row[:, None] * stride_xm + row_k[None, :] * stride_xk
    up_tile = row_k[:, None] * stride_uk + column[None, :] * stride_uh
    if GATED:
        gate_tile = row_k[:, None] * stride_gk + column[None, :] * stride_gh
    step_k = tl.cast(BLOCK_K, tl.int64)
    up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    gate = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for step in range(0, tl.cdiv(K, BLOCK_K)):
        there = k < K - step * BLOCK_K
        x_values = _load(x + x_tile, there[None, :], EVEN_K)
        up = tl.dot(x_values, _load(w_up + up_tile, there[:, None], EVEN_K), up, input_precision="ieee")
        x += step_k * stride_xk
        w_up += step_k * stride_uk
        if GATED:
            gate = tl.dot(x_values, _load(w_gate + gate_tile, there[:, None], EVEN_K), gate, input_precision="ieee")
            w_gate += step_k * stride_gk

    if HAS_BIAS:
        up += tl.load(b_up + columns * stride_bias, mask=columns < H, other=0.0).to(tl.float32)[None, :]
    values = _activate(gate, ACTIVATION) * up if GATED else _activate(up, ACTIVATION)
    hidden_tile = hidden + rows.to(tl.int64)[:, None] * H + columns[None, :]
    tl.store(hidden_tile, values.to(hidden.dtype.element_ty), mask=(rows < M)[:, None] & (columns < H)[None, :])


@triton.jit
def _product(
    a, b, bias, residual, c, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, stride_bias, stride_rm, stride_rn,
    ADDS: tl.constexpr, EVEN_K: tl.constexpr, WIDE: tl.constexpr, SPLIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """One tile of c (M, N), or with SPLIT_K > 1 one tile of partial sums of c (SPLIT_K, M, N), which is then float32.

    Without ADDS neither bias nor residual is added here, whether there is one or not.
    """
    tile_m, tile_n = _tile_of_program(M, N, BLOCK_M, BLOCK_N, GROUP_M)
    split = tl.program_id(1)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    steps = tl.cdiv(K, BLOCK_K)
    steps_each = tl.cdiv(steps, SPLIT_K)
    first = split * steps_each
    last = min(first + steps_each, steps)

    # Rows and columns past the edge wrap around: they are never stored, and the loads need no mask for them.
    # The start of a step moves as one pointer; the offsets inside a tile stay, in 32 bits unless a tensor is too large.
    k = tl.arange(0, BLOCK_K)
    row, column, row_k = rows % M, columns % N, k
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
    if ADDS and bias is not None:
        total += tl.load(bias + columns * stride_bias, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    if ADDS and residual is not None:
        place = rows.to(tl.int64)[:, None] * stride_rm + columns.to(tl.int64)[None, :] * stride_rn
        total += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(c_tile, total.to(c.dtype.element_ty), mask=inside)


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


def _with_own(tiles: tuple[tuple[int, ...], ...], *own: int | None) -> tuple[tuple[int, ...], ...]:
    """The tiles, with those figures that are not None in place of their own."""
    return tuple(tuple(mine or usual for mine, usual in zip(own, tile, strict=True)) for tile in tiles)


def _choose_tile(tiles: tuple[tuple[int, ...], ...], M: int, N: int) -> tuple[int, ...]:
    """The largest tile of which there are enough to occupy the GPU, or else the smallest."""
    for tile in tiles:
        if triton.cdiv(M, tile[0]) * triton.cdiv(N, tile[1]) >= ENOUGH * PROCESSORS * max(1, 4 // tile[3]):
            break
    return tile


def _choose_tile_and_parts(
    tiles: tuple[tuple[int, ...], ...], M: int, N: int, K: int, min_split: int
) -> tuple[tuple[int, ...], int]:
    """The tile and the number of parts of K: the largest tile of which there are enough when K is shared out."""
    for tile in tiles:
        count = triton.cdiv(M, tile[0]) * triton.cdiv(N, tile[1])
        wanted = PROCESSORS * max(1, 4 // tile[3])
        parts = max(1, min(round(wanted / count), K // min_split))
        if count * parts >= ENOUGH * wanted:
            break
    return tile, parts


def _is_wide(*tensors: Tensor) -> bool:
    """Whether an offset into one of the tensors may need more than 32 bits."""
    return any(sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True)) >= 2**31 for x in tensors)


def _check(x: Tensor, w_up: Tensor, w_down: Tensor, *optional: Tensor | None) -> None:
    """TypeError or ValueError unless the arguments fit together."""
    w_gate, b_up, b_down, residual = optional
    given = [y for y in (x, w_up, w_down, *optional) if y is not None]
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32) or any(y.dtype != x.dtype for y in given):
        raise TypeError("x, the weights, the biases and the residual must share one dtype: float16, bfloat16 or float32")
    if x.dim() != 2 or w_up.dim() != 2 or w_down.dim() != 2 or x.shape[1] != w_up.shape[0] or w_up.shape[1] != w_down.shape[0]:
        shapes = ", ".join(str(tuple(y.shape)) for y in (x, w_up, w_down))
        raise ValueError(f"x must be (M, K), w_up (K, H) and w_down (H, N), not {shapes}")
    if w_gate is not None and w_gate.shape != w_up.shape:
        raise ValueError(f"w_gate must have the shape of w_up, {tuple(w_up.shape)}, not {tuple(w_gate.shape)}")
    if b_up is not None and b_up.shape != w_up.shape[1:]:
        raise ValueError(f"b_up must be {tuple(w_up.shape[1:])}, not {tuple(b_up.shape)}")
    if residual is not None and residual.shape != (x.shape[0], w_down.shape[1]):
        raise ValueError(f"residual must be ({x.shape[0]}, {w_down.shape[1]}), not {tuple(residual.shape)}")
    if b_down is not None and b_down.shape != w_down.shape[1:]:
        raise ValueError(f"b_down must be {tuple(w_down.shape[1:])}, not {tuple(b_down.shape)}")


def _readable(w: Tensor, M: int) -> Tensor:
    """The weight (K, N), as a copy with contiguous rows where M rows make that worth it."""
    if w.dtype != torch.float32 or M < TURN_FROM or w.stride(1) == 1 or w.numel() == 0:
        return w
    K, N = w.shape
    turned = torch.empty((K, N), dtype=w.dtype, device=w.device)
    _turn[(triton.cdiv(K, BLOCK_TURN), triton.cdiv(N, BLOCK_TURN))](w, turned, K, N, *w.stride(), BLOCK=BLOCK_TURN)
    return turned


def _up(x: Tensor, w_up: Tensor, w_gate: Tensor | None, b_up: Tensor | None, activation: str) -> Tensor:
    """The first kernel: hidden (M, H)."""
    (M, K), H = x.shape, w_up.shape[1]
    gated = w_gate is not None
    hidden = torch.empty((M, H), dtype=x.dtype, device=x.device)
    if H == 0:
        return hidden
    w_up, w_gate = _readable(w_up, M), None if w_gate is None else _readable(w_gate, M)
    if x.dtype == torch.float32:
        tiles = TILES_FLOAT32_SKINNY if M <= 16 else TILES_FLOAT32_GATED if gated else TILES_FLOAT32
    else:
        tiles = TILES_HALF_SKINNY if M <= 16 else TILES_HALF_GATED if gated else TILES_HALF
        tiles = _with_own(tiles, UP_M, UP_N, UP_K, UP_WARPS, UP_STAGES)
    BLOCK_M, BLOCK_N, BLOCK_K, warps, stages = _choose_tile(tiles, M, H)
    gate = w_up if w_gate is None else w_gate
    _hidden[(triton.cdiv(M, BLOCK_M) * triton.cdiv(H, BLOCK_N),)](
        x, w_up, w_gate, b_up, hidden, M, H, K,
        *x.stride(), *w_up.stride(), *gate.stride(), 0 if b_up is None else b_up.stride(0),
        ACTIVATION=activation, GATED=gated, HAS_BIAS=b_up is not None, EVEN_K=K % BLOCK_K == 0, WIDE=_is_wide(x, w_up, gate),
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, GROUP_M=GROUP_M, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return hidden


def _down(a: Tensor, b: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    """The second kernel, and the third if the sum is shared out: a (M, K) @ b (K, N) + bias (N,) + residual (M, N)."""
    (M, K), N = a.shape, b.shape[1]
    b = _readable(b, M)
    c = torch.empty((M, N), dtype=a.dtype, device=a.device)
    if a.dtype == torch.float32:
        tiles, min_split = TILES_FLOAT32_SKINNY if M <= 16 else TILES_FLOAT32, MIN_SPLIT_FLOAT32
    else:
        tiles, min_split = TILES_HALF_SKINNY if M <= 16 else TILES_HALF, MIN_SPLIT_HALF
        tiles = _with_own(tiles, DOWN_M, DOWN_N, DOWN_K, DOWN_WARPS, DOWN_STAGES)
    (BLOCK_M, BLOCK_N, BLOCK_K, warps, stages), parts = _choose_tile_and_parts(tiles, M, N, K, min_split)
    if PARTS is not None and a.dtype != torch.float32:
        parts = max(1, min(PARTS, triton.cdiv(K, BLOCK_K)))
    split = parts > 1
    target = torch.empty((parts, M, N), dtype=torch.float32, device=a.device) if split else c
    steps = (0 if bias is None else bias.stride(0), *((0, 0) if residual is None else residual.stride()))
    _product[(triton.cdiv(M, BLOCK_M) * triton.cdiv(N, BLOCK_N), parts)](
        a, b, bias, residual, target, M, N, K, *a.stride(), *b.stride(), *steps,
        ADDS=not split, EVEN_K=K % BLOCK_K == 0, WIDE=_is_wide(a, b), SPLIT_K=parts,
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, GROUP_M=GROUP_M, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    if split:
        _add_parts[(triton.cdiv(M * N, BLOCK_SUM),)](
            target, bias, residual, c, M * N, N, *steps, SPLIT_K=parts, BLOCK=BLOCK_SUM
        )  # fmt: skip
    return c


def kernel_fn(
    x: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    w_gate: Tensor | None = None,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    activation: str = "silu",
    residual: Tensor | None = None,
) -> Tensor:
    """x (M, K), w_up and w_gate (K, H), w_down (H, N), b_up (H,), b_down (N,), residual (M, N) -> (M, N), contiguous, as x.

    All of one dtype, float16, bfloat16 or float32, with any strides; sizes may be 0. Sums and the activation are float32, and
    float32 inputs are multiplied in IEEE float32. TypeError for other or mixed dtypes; ValueError for shapes that do not fit
    and for an activation that is not one of ACTIVATIONS.
    """
    _check(x, w_up, w_down, w_gate, b_up, b_down, residual)
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, not {activation!r}")
    M, N = x.shape[0], w_down.shape[1]
    if M == 0 or N == 0:
        return torch.empty((M, N), dtype=x.dtype, device=x.device)
    return _down(_up(x, w_up, w_gate, b_up, activation), w_down, b_down, residual)
