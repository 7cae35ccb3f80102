"""What an answer is compared with: PyTorch's in the same dtype, and the exact one. Do not edit."""

import torch
from torch import Tensor

from autokernel.ops import Arguments, Operation

COMPACT = torch.contiguous_format
ALIGNED = 16  # bytes


def baseline_of(operation: Operation, arguments: Arguments) -> Tensor:
    """PyTorch's answer in the kernel's dtype, from contiguous, aligned copies of whatever is not.

    PyTorch computes the same from those, and some of its own kernels cannot do without: SDPA's backends refuse strides and
    addresses that are no multiples of 16 bytes, or fault on them and leave the judge without a GPU.
    """
    return operation.reference(**{k: _plain(v) if isinstance(v, Tensor) else v for k, v in arguments.items()})


def _plain(x: Tensor) -> Tensor:
    return x if x.is_contiguous() and x.data_ptr() % ALIGNED == 0 else x.clone(memory_format=COMPACT)


def oracle_of(operation: Operation, arguments: Arguments) -> Tensor:
    """The exact answer in float64, or float32 (no TF32) where float64 does not fit the GPU; from contiguous copies."""
    try:
        return operation.reference(**_cast(arguments, torch.float64))
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return operation.reference(**_cast(arguments, torch.float32))


def nudged(operation: Operation, arguments: Arguments) -> Arguments:
    """The arguments in float64, each row and each value moved by one rounding up or down.

    That of float32, in which kernels compute; the values by one of their dtype, where the operation rounds inside.
    """

    def nudge(x: Tensor) -> Tensor:
        generator = torch.Generator(x.device).manual_seed(0)

        def moves(shape: torch.Size, dtype: torch.dtype) -> Tensor:
            signs = torch.randint(0, 2, shape, device=x.device, generator=generator) * 2 - 1
            return torch.finfo(dtype).eps * signs.double()

        values = moves(x.shape, x.dtype if operation.rounds_inside else torch.float32)
        return x.double() * (1 + values + moves(x.shape[:-1], torch.float32)[..., None])

    return {key: nudge(v) if isinstance(v, Tensor) and v.is_floating_point() else v for key, v in arguments.items()}


def _cast(arguments: Arguments, dtype: torch.dtype) -> Arguments:
    return {
        key: value.to(dtype, copy=True, memory_format=COMPACT)
        if isinstance(value, Tensor) and value.is_floating_point()
        else value
        for key, value in arguments.items()
    }
