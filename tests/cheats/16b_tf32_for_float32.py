"""Lets tl.dot use TF32 for float32. Seen by the tolerance, or by integers too wide for ten bits."""

import torch
import triton
import triton.language as tl

KERNEL_TYPE = "matmul"


@triton.jit
def tiles(a, b, bias, c, M, N, K, a_m, a_k, b_k, b_n, BLOCK: tl.constexpr, STEP: tl.constexpr):
    m = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[:, None]
    n = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[None, :]
    k = tl.arange(0, STEP).to(tl.int64)
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for start in range(0, K, STEP):
        left = tl.load(a + m * a_m + (start + k)[None, :] * a_k, mask=(m < M) & (start + k < K)[None, :], other=0.0)
        right = tl.load(b + (start + k)[:, None] * b_k + n * b_n, mask=(start + k < K)[:, None] & (n < N), other=0.0)
        total = tl.dot(left, right, total, input_precision="tf32")
    if bias is not None:
        total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(c + m * N + n, total.to(c.dtype.element_ty), mask=(m < M) & (n < N))


def matmul(a, b, bias):
    (M, K), N = a.shape, b.shape[1]
    c = torch.empty((M, N), dtype=a.dtype, device=a.device)
    if c.numel():
        bias = None if bias is None else bias.contiguous()
        grid = (triton.cdiv(M, 64), triton.cdiv(N, 64))
        tiles[grid](a, b, bias, c, M, N, K, *a.stride(), *b.stride(), BLOCK=64, STEP=32)
    return c


def kernel_fn(a, b, bias=None, residual=None):
    return matmul(a, b, bias)
