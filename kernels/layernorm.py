"""Layer normalisation over the last dimension.

    y_i = (x_i - mean) / sqrt(var + eps) * weight_i + bias_i    with var = sum_i (x_i - mean)^2 / N

A row that fits in registers is read once: the variance is taken from the differences to the mean, never as
E[x^2] - mean^2, which cancels. A longer row is read twice in chunks; its first pass joins the mean and the squared
differences q of chunk after chunk (Chan, Golub and LeVeque, 1979):

    d = mean_chunk - mean;  mean += d * n_chunk / n;  q += q_chunk + d^2 * n_before * n_chunk / n

Everything is computed in float32.
"""

import torch
import triton
import triton.language as tl

KERNEL_TYPE = "layernorm"

WHOLE_ROW = 16384  # longest row that one program holds in registers
TILE = 4096  # tune: [512, 1024, 2048, 4096, 8192, 16384]; elements per program when rows are short
CHUNK = 8192  # tune: [1024, 2048, 4096, 8192, 16384]; elements per step when rows are long
ELEMENTS_PER_WARP = 512  # tune: [128, 256, 512, 1024, 2048]

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@triton.jit
def scaled(x, weight_ptr, bias_ptr, column, inside):
    """x * weight + bias, either of which may be missing."""
    if weight_ptr is not None:
        x *= tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        x += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    return x


@triton.jit
def whole_rows(
    x_ptr, weight_ptr, bias_ptr, y_ptr, M, N, x_row, x_column, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """A program computes ROWS rows, each in one piece."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < M) & (column < N)
    x = tl.load(x_ptr + row * x_row + column.to(tl.int64) * x_column, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(x, axis=1, keep_dims=True) / N
    centred = tl.where(column < N, x - mean, 0.0)
    variance = tl.sum(centred * centred, axis=1, keep_dims=True) / N
    y = scaled(centred * tl.rsqrt(variance + eps), weight_ptr, bias_ptr, column, column < N)
    tl.store(y_ptr + row * N + column, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def long_rows(x_ptr, weight_ptr, bias_ptr, y_ptr, N, x_row, x_column, eps, CHUNK: tl.constexpr):
    """A program computes one row in chunks."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_row
    y_ptr += row * N
    mean, q = 0.0, 0.0
    for start in range(0, N, CHUNK):
        column = start + tl.arange(0, CHUNK)
        inside = column < N
        x = tl.load(x_ptr + column.to(tl.int64) * x_column, mask=inside, other=0.0).to(tl.float32)
        count = tl.minimum(N - start, CHUNK).to(tl.float32)
        total = tl.minimum(N, start + CHUNK).to(tl.float32)
        chunk_mean = tl.sum(x, axis=0) / count
        centred = tl.where(inside, x - chunk_mean, 0.0)
        difference = chunk_mean - mean
        mean += difference * (count / total)
        q += tl.sum(centred * centred, axis=0) + difference * difference * (start * (count / total))
    scale = tl.rsqrt(q / N + eps)
    for start in range(0, N, CHUNK):
        column = start + tl.arange(0, CHUNK)
        inside = column < N
        x = tl.load(x_ptr + column.to(tl.int64) * x_column, mask=inside, other=0.0).to(tl.float32)
        y = scaled((x - mean) * scale, weight_ptr, bias_ptr, column, inside)
        tl.store(y_ptr + column, y.to(y_ptr.dtype.element_ty), mask=inside)


def warps(elements: int) -> int:
    """Warps for a program that holds so many elements at once."""
    return min(max(elements // ELEMENTS_PER_WARP, 4), 32)


def per_column(name: str, tensor: torch.Tensor | None, N: int) -> torch.Tensor | None:
    """A weight or bias (N,) with its elements side by side."""
    if tensor is None:
        return None
    if tensor.shape != (N,):
        raise ValueError(f"layernorm takes {name} of shape ({N},), not {tuple(tensor.shape)}")
    if tensor.dtype not in DTYPES:
        raise TypeError(f"layernorm takes {name} in float16, bfloat16 or float32, not {tensor.dtype}")
    return tensor.contiguous()


def kernel_fn(
    x: torch.Tensor, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None, eps: float = 1e-5
) -> torch.Tensor:
    """Layer norm over the last dimension of x (..., N), any strides; weight and bias (N,) -> (..., N) in x's dtype, contiguous.

    float16, bfloat16 and float32; weight and bias may have another of these dtypes than x. Raises TypeError for any other,
    ValueError for x without dimensions or a weight or bias that is not (N,).
    """
    if x.dtype not in DTYPES:
        raise TypeError(f"layernorm takes x in float16, bfloat16 or float32, not {x.dtype}")
    if x.dim() == 0:
        raise ValueError("layernorm takes a tensor of at least one dimension")
    N = x.shape[-1]
    weight, bias = per_column("weight", weight, N), per_column("bias", bias, N)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return y
    rows = x.reshape(-1, N)
    M, strides = rows.shape[0], rows.stride()
    if N <= WHOLE_ROW:
        block = max(triton.next_power_of_2(N), 16)
        per_program = min(max(TILE // block, 1), triton.next_power_of_2(M))
        sizes = {"ROWS": per_program, "BLOCK": block, "num_warps": warps(per_program * block)}
        whole_rows[(triton.cdiv(M, per_program),)](rows, weight, bias, y, M, N, *strides, eps, **sizes)
    else:
        long_rows[(M,)](rows, weight, bias, y, N, *strides, eps, CHUNK=CHUNK, num_warps=warps(CHUNK))
    return y
