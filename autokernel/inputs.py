"""Random arguments for an operation: values, layouts and strides. Imports only torch.

An operation's `inputs(shape, make)` asks the maker for each tensor by name; the judge decides what it gets. So one
description of the arguments serves every gate, and the real strides of a model's call reach the kernel unchanged.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

VALUES = ("normal", "large", "small", "mixed", "constant", "ones", "masked", "integers")
LAYOUTS = ("contiguous", "padded", "transposed", "offset")

LARGE = 64.0  # a product of two such values still fits float16
SMALL = 2.0**-10


@dataclass(frozen=True)
class Spec:
    """Shape, strides (in elements) and dtype of one tensor of a real call."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass
class InputMaker:
    """Makes the tensors of one call.

    `values`: "normal" N(0, 1); "large" and "small" the same times 64 and 2^-10; "mixed" one power of two from 2^-6 to 2^6
    per row; "constant" one value per row; "ones" the same value everywhere, so that the answer is known in closed form;
    "masked" N(0, 1) with -inf at the start of each row and here and there, its last value left; "integers" from -2 to 2, whose
    sums float32 holds exactly.
    `layout`: "contiguous"; "padded" rows of a wider buffer; "transposed" last two dimensions swapped in memory;
    "offset" storage that starts one element late, so that no row is 16-byte aligned.
    `specs`: by argument name, the exact shape, strides and dtype to give (a real call of a model); they win over both.
    """

    dtype: torch.dtype
    device: torch.device
    generator: torch.Generator
    values: str = "normal"
    layout: str = "contiguous"
    specs: Mapping[str, Spec] = field(default_factory=dict)

    def tensor(self, name: str, *size: int, scale: float = 1.0, transposed: bool = False) -> Tensor:
        """A floating-point argument of shape `size`. `scale` multiplies random values, integers excepted.

        `transposed` lays out the last two dimensions swapped, as the weight of an `nn.Linear` seen as (K, N).
        """
        spec = self.specs.get(name)
        if spec is not None:
            values = self._draw(spec.shape, scale).to(spec.dtype)
            return _with_strides(values, spec.stride)
        return self._lay_out(self._draw(size, scale).to(self.dtype), transposed)

    def integers(self, name: str, low: int, high: int, *size: int) -> Tensor:
        """An int64 argument with values in [low, high)."""
        spec = self.specs.get(name)
        shape = spec.shape if spec is not None else size
        return torch.randint(low, high, shape, device=self.device, generator=self.generator)

    def _draw(self, size: tuple[int, ...], scale: float) -> Tensor:
        if self.values == "integers":
            return torch.randint(-2, 3, size, device=self.device, generator=self.generator).float()
        if self.values == "ones":
            return torch.full(size, scale, device=self.device)
        x = torch.randn(size, device=self.device, generator=self.generator) * scale
        if self.values == "large":
            return x * LARGE
        if self.values == "small":
            return x * SMALL
        rows = (*size[:-1], 1) if size else ()
        if self.values == "mixed":
            exponents = torch.randint(-6, 7, rows, device=self.device, generator=self.generator).float()
            return x * torch.exp2(exponents)
        if self.values == "masked" and size:
            # Whole blocks at the start of a row are what a running maximum stumbles over: -inf minus -inf is NaN.
            starts = torch.rand(rows, device=self.device, generator=self.generator) * size[-1]
            hidden = torch.arange(size[-1], device=self.device) < starts
            hidden |= torch.rand(size, device=self.device, generator=self.generator) < 1 / 8
            hidden[..., -1:] = False
            return x.masked_fill(hidden, float("-inf"))
        if self.values == "constant":
            return (torch.randn(rows, device=self.device, generator=self.generator) * scale).expand(size)
        return x

    def _lay_out(self, x: Tensor, transposed: bool) -> Tensor:
        if self.layout == "transposed":
            transposed = not transposed
        swap = transposed and x.dim() >= 2
        x = x.transpose(-1, -2).contiguous().transpose(-1, -2) if swap else x.contiguous()
        if self.layout == "offset":
            buffer = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
            return buffer[1:].as_strided(x.shape, x.stride(), 1).copy_(x)
        if self.layout == "padded" and x.dim() >= 1:
            buffer = torch.empty(*x.shape[:-1], x.shape[-1] + 3, dtype=x.dtype, device=x.device)
            return buffer[..., : x.shape[-1]].copy_(x)
        return x


def _with_strides(values: Tensor, stride: tuple[int, ...]) -> Tensor:
    # A broadcast input (stride 0) repeats its first slice; any other gets exactly these strides.
    if values.numel() == 0:
        return values.contiguous()
    extent = 1 + sum((size - 1) * step for size, step in zip(values.shape, stride, strict=True))
    result = torch.empty(extent, dtype=values.dtype, device=values.device).as_strided(values.shape, stride)
    for dimension, step in enumerate(stride):
        if step == 0:
            values = values.narrow(dimension, 0, 1)
    target = result
    for dimension, step in enumerate(stride):
        if step == 0:
            target = target.narrow(dimension, 0, 1)
    target.copy_(values)
    return result
