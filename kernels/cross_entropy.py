"""Cross entropy of logits against class numbers.

    loss_i = log(sum_j exp(x_ij)) - x_i,target(i)

A program reads one row of logits once, in chunks. It keeps a running maximum m and the sum s of exp(x - m); when a chunk
raises the maximum to m', the sum so far becomes s * exp(m - m'). Then loss = log(s) + m - x_target, and of the targets'
logits only one per row is gathered. Rows whose target is `ignore_index` give 0. For "mean" and "sum" the losses of the
rows stay in float32, and a second launch of one program adds them in a fixed order and counts the rows that are kept.
"""

import torch
import triton
import triton.language as tl

KERNEL_TYPE = "cross_entropy"

CHUNK = 4096  # tune: [1024, 2048, 4096, 8192, 16384]; logits per step
ROWS = 4096  # tune: [1024, 2048, 4096, 8192]; losses per step of the sum
WARPS = 8  # tune: [2, 4, 8, 16, 32]

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
REDUCTIONS = ("none", "mean", "sum")


@triton.jit
def row_losses(
    x_ptr, target_ptr, loss_ptr, V, x_row, x_column, target_step, ignore_index, CHUNK: tl.constexpr
):  # fmt: skip
    """A program computes the loss of one row."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_row
    target = tl.load(target_ptr + row * target_step)
    # A class that does not exist is never read; its loss is NaN.
    exists = (target >= 0) & (target < V)
    x_target = tl.load(x_ptr + target * x_column, mask=exists, other=float("nan")).to(tl.float32)
    m, s = -float("inf"), 0.0
    for start in range(0, V, CHUNK):
        column = start + tl.arange(0, CHUNK)
        x = tl.load(x_ptr + column.to(tl.int64) * x_column, mask=column < V, other=float("-inf")).to(tl.float32)
        raised = tl.maximum(m, tl.max(x, axis=0))
        # While all is -inf the difference -inf - -inf would be NaN: such elements count as exp(-inf) = 0.
        shift = tl.where(raised == float("-inf"), 0.0, raised)
        s = s * tl.exp(m - shift) + tl.sum(tl.exp(x - shift), axis=0)
        m = raised
    loss = tl.where(target == ignore_index, 0.0, tl.log(s) + (m - x_target))
    tl.store(loss_ptr + row, loss.to(loss_ptr.dtype.element_ty))


@triton.jit
def total(loss_ptr, target_ptr, result_ptr, M, target_step, ignore_index, MEAN: tl.constexpr, ROWS: tl.constexpr):
    """One program adds all losses (M,); for MEAN it divides by the number of rows that are kept."""
    sums = tl.zeros((ROWS,), tl.float32)
    kept = tl.zeros((ROWS,), tl.int32)
    for start in range(0, M, ROWS):
        row = start + tl.arange(0, ROWS)
        sums += tl.load(loss_ptr + row, mask=row < M, other=0.0)
        if MEAN:
            target = tl.load(target_ptr + row.to(tl.int64) * target_step, mask=row < M, other=ignore_index)
            kept += (target != ignore_index).to(tl.int32)
    result = tl.sum(sums, axis=0)
    if MEAN:
        result = result / tl.sum(kept, axis=0).to(tl.float32)
    tl.store(result_ptr, result.to(result_ptr.dtype.element_ty))


def kernel_fn(logits: torch.Tensor, target: torch.Tensor, ignore_index: int = -100, reduction: str = "mean") -> torch.Tensor:
    """Cross entropy of logits (M, V), any strides, and target (M,) int64 -> (M,) for "none", () for "mean" and "sum".

    float16, bfloat16 and float32; the loss has the dtype of the logits. A target outside 0 to V - 1 other than
    `ignore_index` gives NaN. Raises TypeError for another dtype, ValueError for other shapes or reductions.
    """
    if logits.dtype not in DTYPES or target.dtype != torch.int64:
        raise TypeError("cross_entropy takes logits in float16, bfloat16 or float32, and an int64 target")
    if logits.dim() != 2 or target.shape != logits.shape[:1]:
        raise ValueError(f"cross_entropy takes logits (M, V) and target (M,), not {tuple(logits.shape)}, {tuple(target.shape)}")
    if reduction not in REDUCTIONS:
        raise ValueError(f"cross_entropy takes reduction none, mean or sum, not {reduction!r}")
    M, V = logits.shape
    each = reduction == "none"
    losses = torch.empty((M,), dtype=logits.dtype if each else torch.float32, device=logits.device)
    step = target.stride(0)
    if M:
        chunk = min(max(triton.next_power_of_2(V), 16), CHUNK)
        row_losses[(M,)](
            logits, target, losses, V, *logits.stride(), step, ignore_index, CHUNK=chunk, num_warps=WARPS
        )  # fmt: skip
    if each:
        return losses
    result = torch.empty((), dtype=logits.dtype, device=logits.device)
    rows = min(max(triton.next_power_of_2(M), 16), ROWS)
    total[(1,)](losses, target, result, M, step, ignore_index, MEAN=reduction == "mean", ROWS=rows, num_warps=WARPS)
    return result
