"""Attention in Triton: out = softmax(q k^T * scale) v, without ever storing the scores.

Each program keeps a tile of queries and walks over the keys, with a running maximum m and sum l for each query:

    s = q k^T * scale,  m' = max(m, max s),  p = exp(s - m'),  l' = l exp(m - m') + sum p,  out' = out exp(m - m') + p v

and out / l at the end. Powers are taken to the base 2, with log2(e) folded into the scale. Blocks of keys that every query of
the tile sees need no mask and come first; the diagonal and the end of the keys follow. Query heads that share a key-value head
read it in place; when their queries are few, as in decoding, they share one tile. Where programs are few and the keys many,
several programs take a part of the keys each, and a second kernel joins their results by their sums, in a fixed order.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

KERNEL_TYPE = "flash_attention"

# Tiles (BLOCK_M queries, BLOCK_N keys, warps, stages) by the largest padded head dimension that they hold.
TILES_HALF = {64: (64, 64, 4, 3), 128: (64, 64, 4, 3), 256: (64, 64, 8, 2)}
# IEEE float32 has no tensor cores: tiles that threads can hold in registers.
TILES_FLOAT32 = {64: (16, 32, 2, 2), 128: (64, 64, 8, 2), 256: (32, 16, 4, 2)}
# Up to 16 queries that share their keys, as in decoding: reading the keys is all the work.
FEW_QUERIES = 16
TILES_FEW = {64: (16, 128, 4, 3), 128: (16, 128, 4, 2), 256: (16, 64, 4, 2)}
TILES_FEW_FLOAT32 = {64: (16, 32, 2, 3), 128: (16, 16, 2, 2), 256: (16, 16, 4, 2)}
# For many queries in half precision and heads of up to 128, these take the place of what the table says; None leaves it to it.
TILE_M = None  # tune: [None, 16, 32, 64, 128, 256]
TILE_N = None  # tune: [None, 16, 32, 64, 128]
WARPS = None  # tune: [None, 2, 4, 8]
STAGES = None  # tune: [None, 1, 2, 3, 4]

# From so many queries on, float32 keys are copied with the head dimension outermost, so that threads that work on neighbouring
# keys read neighbouring words of shared memory.
TURN_KEYS_FROM = 128
BLOCK_TURN = 32

# Multiprocessors of an H100 or H200, and the fewest keys that are worth a program of their own.
PROCESSORS = 132
MIN_SPLIT_KEYS = 256  # tune: [128, 256, 512, 1024, 1048576]
# Bytes of keys and values that programs running together may share in the L2 cache.
CACHED_BYTES = 24 << 20

MAX_HEAD_DIM = 256
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@triton.jit
def _turn(k, turned, stride_kb, stride_kh, stride_kn, stride_kd, Hkv, Sk, D, width, BLOCK: tl.constexpr):
    """A block of k (B, Hkv, Sk, D) into turned (B, Hkv, D, width), whose rows hold the Sk keys."""
    row = tl.program_id(0).to(tl.int64)
    keys = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dims = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    k += row // Hkv * stride_kb + row % Hkv * stride_kh
    there = (keys < Sk)[:, None] & (dims < D)[None, :]
    block = tl.load(k + keys.to(tl.int64)[:, None] * stride_kn + dims[None, :] * stride_kd, mask=there)
    tl.store(turned + row * D * width + dims.to(tl.int64)[None, :] * width + keys[:, None], block, mask=there)


@triton.jit
def _load(pointers, keys_there, dims_there, MASKED: tl.constexpr, EVEN_D: tl.constexpr):
    """A block of keys or values, with zeros past the end of the keys (MASKED) and of the head dimension (not EVEN_D)."""
    if MASKED:
        there = keys_there if EVEN_D else keys_there & dims_there
        block = tl.load(pointers, mask=there, other=0.0)
    elif EVEN_D:
        block = tl.load(pointers)
    else:
        block = tl.load(pointers, mask=dims_there, other=0.0)
    return block


@triton.jit
def _walk(
    q,
    k,
    v,
    total,
    peak,
    weight,
    limits,
    first,
    last,
    stride_kn,
    stride_kd,
    stride_vn,
    stride_vd,
    Sk,
    D,
    scale,
    MASKED: tl.constexpr,
    EVEN_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Take the keys from `first` to `last` into total (BLOCK_M, BLOCK_D), peak and weight (BLOCK_M,).

    The query of row i sees the keys below limits[i]; without MASKED it sees them all.
    """
    columns = tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    k_tile = dims[:, None] * stride_kd + columns[None, :] * stride_kn
    v_tile = columns[:, None] * stride_vn + dims[None, :] * stride_vd
    for start in range(first, last, BLOCK_N):
        start = tl.multiple_of(start, BLOCK_N)
        k_block = k + tl.cast(start, tl.int64) * stride_kn
        v_block = v + tl.cast(start, tl.int64) * stride_vn
        there = start + columns < Sk
        keys = _load(k_block + k_tile, there[None, :], (dims < D)[:, None], MASKED, EVEN_D)
        scores = tl.dot(q, keys, input_precision="ieee")
        if MASKED:
            scores = tl.where((start + columns)[None, :] < limits[:, None], scores * scale, float("-inf"))
            new_peak = tl.maximum(peak, tl.max(scores, 1))
            # A query that has seen no key yet: minus infinity less itself is no number.
            new_peak = tl.where(new_peak == float("-inf"), 0.0, new_peak)
            p = tl.exp2(scores - new_peak[:, None])
        else:
            new_peak = tl.maximum(peak, tl.max(scores, 1) * scale)
            p = tl.exp2(scores * scale - new_peak[:, None])
        shrink = tl.exp2(peak - new_peak)
        weight = weight * shrink + tl.sum(p, 1)
        total = total * shrink[:, None]
        values = _load(v_block + v_tile, there[:, None], (dims < D)[None, :], MASKED, EVEN_D)
        total = tl.dot(p.to(values.dtype), values, total, input_precision="ieee")
        peak = new_peak
    return total, peak, weight


@triton.jit
def _attention(
    q,
    k,
    v,
    out,
    log_weights,
    stride_qb,
    stride_qh,
    stride_qm,
    stride_qd,
    stride_kb,
    stride_kh,
    stride_kn,
    stride_kd,
    stride_vb,
    stride_vh,
    stride_vn,
    stride_vd,
    stride_ob,
    stride_oh,
    stride_om,
    stride_od,
    B,
    H,
    Sq,
    Sk,
    D,
    repeats,
    scale,
    units_together,
    keys_each,
    CAUSAL: tl.constexpr,
    NEGATIVE: tl.constexpr,
    SPLIT: tl.constexpr,
    PACK: tl.constexpr,
    EVEN_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """A tile of queries of one head, or with PACK > 1 all queries of PACK heads that share a key-value head.

    With SPLIT `out` is float32 (parts, B, H, Sq, D), of which this program fills the part of its keys, and log_weights
    (parts, B, H, Sq) takes log2 of the sum of exponentials.
    """
    # Units (a head, or heads in one tile) go in sections whose keys fit the L2 cache; in each the longest rows come first.
    program = tl.program_id(0)
    part = tl.program_id(1)
    tiles = tl.cdiv(Sq * PACK, BLOCK_M)
    units_of_batch = H // PACK
    section = program // (units_together * tiles)
    inside = program % (units_together * tiles)
    units = min(units_together, B * units_of_batch - section * units_together)
    tile = tiles - 1 - inside // units
    unit = section * units_together + inside % units
    batch = (unit // units_of_batch).to(tl.int64)
    head = (unit % units_of_batch) * PACK
    k += batch * stride_kb + (head // repeats).to(tl.int64) * stride_kh
    v += batch * stride_vb + (head // repeats).to(tl.int64) * stride_vh

    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    if PACK == 1:
        queries, heads = rows, head
        first_query, last_query = tile * BLOCK_M, min(tile * BLOCK_M + BLOCK_M, Sq) - 1
    else:
        queries, heads = rows % Sq, head + rows // Sq
        first_query, last_query = 0, Sq - 1
    there = (rows < Sq * PACK)[:, None] & (dims < D)[None, :]
    q_rows = batch * stride_qb + tl.cast(heads, tl.int64) * stride_qh + queries.to(tl.int64) * stride_qm
    q_values = tl.load(q + q_rows[:, None] + dims[None, :] * stride_qd, mask=there, other=0.0)
    if NEGATIVE:  # the walk takes the maximum before it scales
        q_values = -q_values

    if CAUSAL:
        limits = tl.minimum(queries + (Sk - Sq + 1), Sk)
        seen_by_all, seen_by_any = first_query + Sk - Sq + 1, last_query + Sk - Sq + 1
    else:
        limits = tl.zeros((BLOCK_M,), dtype=tl.int32) + Sk
        seen_by_all, seen_by_any = Sk, Sk
    first = part * keys_each
    last = min(seen_by_any, first + keys_each)
    bare = max(first, min(seen_by_all, last) // BLOCK_N * BLOCK_N)

    total = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    peak = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    weight = tl.zeros((BLOCK_M,), dtype=tl.float32)
    if q.dtype.element_ty == tl.float32:  # its products take so long that masks do not show, and its code is long to compile
        bare = first
    else:
        total, peak, weight = _walk(
            q_values, k, v, total, peak, weight, limits, first, bare, stride_kn, stride_kd, stride_vn, stride_vd, Sk, D, scale,
            False, EVEN_D, BLOCK_N, BLOCK_D,
        )  # fmt: skip
    total, peak, weight = _walk(
        q_values, k, v, total, peak, weight, limits, bare, last, stride_kn, stride_kd, stride_vn, stride_vd, Sk, D, scale,
        True, EVEN_D, BLOCK_N, BLOCK_D,
    )  # fmt: skip

    empty = weight == 0.0
    total = total / tl.where(empty, 1.0, weight)[:, None]
    if SPLIT:
        row_of_all = ((part.to(tl.int64) * B + batch) * H + heads) * Sq + queries
        log_weight = tl.where(empty, float("-inf"), peak + tl.log2(tl.where(empty, 1.0, weight)))
        tl.store(log_weights + row_of_all, log_weight, mask=rows < Sq * PACK)
        tl.store(out + row_of_all[:, None] * D + dims[None, :], total, mask=there)
    else:
        out_rows = batch * stride_ob + tl.cast(heads, tl.int64) * stride_oh + queries.to(tl.int64) * stride_om
        tl.store(out + out_rows[:, None] + dims[None, :] * stride_od, total.to(out.dtype.element_ty), mask=there)


@triton.jit
def _join(
    results,
    log_weights,
    out,
    stride_ob,
    stride_oh,
    stride_om,
    stride_od,
    B,
    H,
    Sq,
    D,
    PARTS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One query: out (D,) = the mean of results (PARTS, B, H, Sq, D) over the parts, weighted by 2 to their log_weights."""
    row = tl.program_id(0).to(tl.int64)
    rows = tl.cast(B, tl.int64) * H * Sq
    dims = tl.arange(0, BLOCK_D)
    highest = tl.load(log_weights + row)
    for part in tl.static_range(1, PARTS):
        highest = tl.maximum(highest, tl.load(log_weights + part * rows + row))
    total = tl.zeros((BLOCK_D,), dtype=tl.float32)
    weights = highest - highest
    for part in tl.static_range(PARTS):
        weight = tl.exp2(tl.load(log_weights + part * rows + row) - highest)
        weights += weight
        total += weight * tl.load(results + (part * rows + row) * D + dims, mask=dims < D, other=0.0)
    out_row = row // (H * Sq) * stride_ob + row // Sq % H * stride_oh + row % Sq * stride_om
    tl.store(out + out_row + dims * stride_od, (total / weights).to(out.dtype.element_ty), mask=dims < D)


def _choose_tile(B: int, H: int, Hkv: int, Sq: int, Sk: int, D: int, dtype: torch.dtype) -> tuple[tuple[int, ...], int, int]:
    """The tile, the heads that share one tile, and the number of parts of the keys."""
    half = dtype != torch.float32
    padded = next(size for size in (64, 128, MAX_HEAD_DIM) if size >= D)
    pack = H // Hkv if Sq * (H // Hkv) <= FEW_QUERIES else 1
    if Sq * pack <= FEW_QUERIES:
        tile = (TILES_FEW if half else TILES_FEW_FLOAT32)[padded]
    else:
        tile = (TILES_HALF if half else TILES_FLOAT32)[padded]
        if half and padded <= 128:
            own = (TILE_M, TILE_N, WARPS, STAGES)
            tile = tuple(mine or usual for mine, usual in zip(own, tile, strict=True))
    programs = triton.cdiv(Sq * pack, tile[0]) * B * (H // pack)
    parts = max(1, min(2 * PROCESSORS // programs, Sk // MIN_SPLIT_KEYS))
    return tile, pack, parts


def _turned(k: Tensor) -> Tensor:
    """A copy of k (B, Hkv, Sk, D) in whose memory the keys are next to each other; rows stay 16-byte aligned."""
    B, Hkv, Sk, D = k.shape
    width = triton.cdiv(Sk, 16) * 16
    turned = torch.empty((B, Hkv, D, width), dtype=k.dtype, device=k.device)
    grid = (B * Hkv, triton.cdiv(Sk, BLOCK_TURN), triton.cdiv(D, BLOCK_TURN))
    _turn[grid](k, turned, *k.stride(), Hkv, Sk, D, width, BLOCK=BLOCK_TURN)
    return turned[..., :Sk].transpose(2, 3)


def kernel_fn(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None) -> Tensor:
    """q (B, H, Sq, D), k and v (B, Hkv, Sk, D), H a multiple of Hkv -> (B, H, Sq, D), laid out in memory as q.

    All of one dtype, float16, bfloat16 or float32, with any strides; sizes may be 0, and without keys the result is 0.
    `scale` is D^-0.5 when None. `causal` aligns the last query with the last key. Sums are float32, and float32 inputs are
    multiplied in IEEE float32. TypeError for other or mixed dtypes; ValueError for shapes that do not fit, for D above 256
    and for causal with Sq > Sk.
    """
    if q.dtype not in DTYPES or k.dtype != q.dtype or v.dtype != q.dtype:
        raise TypeError("q, k and v must share one dtype: float16, bfloat16 or float32")
    if q.dim() != 4 or k.dim() != 4 or k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
        raise ValueError(f"q must be (B, H, Sq, D), k and v (B, Hkv, Sk, D), not {shapes}")
    (B, H, Sq, D), Hkv, Sk = q.shape, k.shape[1], k.shape[2]
    if Hkv != H and (Hkv == 0 or H % Hkv):
        raise ValueError(f"the {H} query heads must be a multiple of the {Hkv} key-value heads")
    if D > MAX_HEAD_DIM:
        raise ValueError(f"the head dimension must be at most {MAX_HEAD_DIM}, not {D}")
    if causal and Sq > Sk:
        raise ValueError(f"causal attention needs at least as many keys as queries, not {Sk} for {Sq}")
    out = torch.empty_like(q)
    if out.numel() == 0:
        return out

    scale = D**-0.5 if scale is None else scale
    (BLOCK_M, BLOCK_N, warps, stages), pack, parts = _choose_tile(B, H, Hkv, Sq, Sk, D, q.dtype)
    BLOCK_D = max(16, triton.next_power_of_2(D))
    units = B * (H // pack)
    cached = max(1, CACHED_BYTES // max(1, 2 * Sk * D * q.element_size())) * (H // Hkv // pack)
    split = parts > 1
    results, log_weights = out, None
    if split:
        results = torch.empty((parts, B, H, Sq, D), dtype=torch.float32, device=q.device)
        log_weights = torch.empty((parts, B, H, Sq), dtype=torch.float32, device=q.device)
    if q.dtype == torch.float32 and Sq >= TURN_KEYS_FROM and k.stride(3) == 1:
        k = _turned(k)
    _attention[(triton.cdiv(Sq * pack, BLOCK_M) * units, parts)](
        q,
        k,
        v,
        results,
        log_weights,
        *q.stride(),
        *k.stride(),
        *v.stride(),
        *out.stride(),
        B,
        H,
        Sq,
        Sk,
        D,
        H // Hkv,
        abs(scale) * math.log2(math.e),
        min(cached, units),
        triton.cdiv(triton.cdiv(Sk, parts), BLOCK_N) * BLOCK_N,
        CAUSAL=causal,
        NEGATIVE=scale < 0,
        SPLIT=split,
        PACK=pack,
        EVEN_D=D == BLOCK_D,
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
        BLOCK_D=BLOCK_D,
        num_warps=warps,
        num_stages=stages,
    )
    if split:
        _join[(B * H * Sq,)](results, log_weights, out, *out.stride(), B, H, Sq, D, PARTS=parts, BLOCK_D=BLOCK_D, num_warps=1)
    return out
