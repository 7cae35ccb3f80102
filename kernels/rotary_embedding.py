"""Rotary position embedding: each pair (a, b) of the last dimension is turned by the angle of its position.

    a' = a cos - b sin
    b' = b cos + a sin

Half-split pairs are (i, i + D/2), interleaved pairs (2i, 2i + 1): one kernel serves both, with the distance between
neighbouring pairs (`pair_step`) and between the two elements of a pair (`gap`). A program turns a block of positions of
several heads, so that cos and sin are read once for all of these. Computed in float32.
"""

import torch
import triton
import triton.language as tl

KERNEL_TYPE = "rotary_embedding"

PAIRS = 1024  # tune: [128, 256, 512, 1024, 2048]; pairs of one head per step: positions times D / 2
HEADS = 4  # tune: [1, 2, 4, 8, 16]; heads per program
WARPS = 4  # tune: [1, 2, 4, 8]

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@triton.jit
def rotate(
    x_ptr, y_ptr, cos_ptr, sin_ptr,
    H, S, half, position_blocks, head_blocks, pair_step, gap,
    x_b, x_h, x_s, x_d, y_b, y_h, y_s, y_d,
    cos_b, cos_s, cos_w, sin_b, sin_s, sin_w,
    FULL_WIDTH: tl.constexpr, POSITIONS: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """A program turns POSITIONS positions of HEADS heads. With FULL_WIDTH each element has a cos and sin of its own."""
    program = tl.program_id(0)
    position = (program % position_blocks) * POSITIONS + tl.arange(0, POSITIONS)[:, None].to(tl.int64)
    first_head = (program // position_blocks % head_blocks).to(tl.int64) * HEADS
    batch = (program // position_blocks // head_blocks).to(tl.int64)
    pair = tl.arange(0, HALF)[None, :]
    inside = (position < S) & (pair < half)
    a = (pair * pair_step).to(tl.int64)
    b = a + gap

    angle = a if FULL_WIDTH else pair.to(tl.int64)
    cos_ptr += batch * cos_b + position * cos_s
    sin_ptr += batch * sin_b + position * sin_s
    cos_a = tl.load(cos_ptr + angle * cos_w, mask=inside, other=0.0).to(tl.float32)
    sin_a = tl.load(sin_ptr + angle * sin_w, mask=inside, other=0.0).to(tl.float32)
    cos_for_b, sin_for_b = cos_a, sin_a
    if FULL_WIDTH:
        cos_for_b = tl.load(cos_ptr + b * cos_w, mask=inside, other=0.0).to(tl.float32)
        sin_for_b = tl.load(sin_ptr + b * sin_w, mask=inside, other=0.0).to(tl.float32)

    x_ptr += batch * x_b + position * x_s
    y_ptr += batch * y_b + position * y_s
    for head in range(first_head, tl.minimum(first_head + HEADS, H)):
        x_head = x_ptr + head * x_h
        y_head = y_ptr + head * y_h
        x_a = tl.load(x_head + a * x_d, mask=inside, other=0.0).to(tl.float32)
        x_b_ = tl.load(x_head + b * x_d, mask=inside, other=0.0).to(tl.float32)
        y_a = x_a * cos_a - x_b_ * sin_a
        y_b_ = x_b_ * cos_for_b + x_a * sin_for_b
        tl.store(y_head + a * y_d, y_a.to(y_ptr.dtype.element_ty), mask=inside)
        tl.store(y_head + b * y_d, y_b_.to(y_ptr.dtype.element_ty), mask=inside)


def kernel_fn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """x (B, H, S, D), cos and sin (S, W) or (B, S, W), W = D or D / 2, any strides -> (B, H, S, D).

    The result is laid out in memory as x is (its dimensions in the same order, without gaps). float16, bfloat16 and
    float32; where cos and x differ the result has the wider dtype. Raises TypeError for another dtype, ValueError for
    shapes that do not fit or an odd D.
    """
    if any(t.dtype not in DTYPES for t in (x, cos, sin)) or cos.dtype != sin.dtype:
        raise TypeError("rotary_embedding takes float16, bfloat16 or float32, and cos and sin of one dtype")
    if x.dim() != 4 or x.shape[-1] % 2:
        raise ValueError(f"rotary_embedding takes x of shape (B, H, S, D) with an even D, not {tuple(x.shape)}")
    B, H, S, D = x.shape
    if cos.shape != sin.shape or cos.shape not in ((S, D), (S, D // 2), (B, S, D), (B, S, D // 2)):
        raise ValueError(f"rotary_embedding takes cos and sin of shape (S, W) or (B, S, W), W = D or D / 2, with S={S}, D={D}")
    y = torch.empty_like(x, dtype=torch.promote_types(x.dtype, cos.dtype))
    if x.numel() == 0:
        return y
    half = D // 2
    block = triton.next_power_of_2(half)
    positions = min(max(PAIRS // block, 1), triton.next_power_of_2(S))
    position_blocks, head_blocks = triton.cdiv(S, positions), triton.cdiv(H, HEADS)
    pair_step, gap = (2, 1) if interleaved else (1, half)
    angle_strides = [stride for t in (cos, sin) for stride in ((0, *t.stride()) if t.dim() == 2 else t.stride())]
    rotate[(B * position_blocks * head_blocks,)](
        x, y, cos, sin, H, S, half, position_blocks, head_blocks, pair_step, gap, *x.stride(), *y.stride(), *angle_strides,
        FULL_WIDTH=cos.shape[-1] == D, POSITIONS=positions, HALF=block, HEADS=HEADS, num_warps=WARPS,
    )  # fmt: skip
    return y
