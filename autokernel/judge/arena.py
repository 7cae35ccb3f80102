"""One block of memory that judge and worker both see, on the device where the kernel runs. Do not edit.

On a GPU the judge allocates it past PyTorch's allocator, so that it holds nothing else, and the worker opens it by CUDA IPC:
no byte is copied. On a CPU it is an anonymous file that both map. The judge writes arguments into it, each with its strides
and its storage offset, and keeps its own copies elsewhere; the worker writes answers, and could write anything: what lies in
the arena is evidence, never truth.
"""

import contextlib
import mmap
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from autokernel.judge.driver import GRANULE, CudaFault, driver
from autokernel.judge.protocol import Argument, Placed
from autokernel.ops import Arguments

ALIGNMENT = 512  # bytes: what PyTorch's allocator on a GPU gives, and more than any vector needs
GUARD = 512  # bytes kept free, and checked, on both sides of a storage
FILE_BYTES = 16 << 30  # of the file on a CPU: pages that nobody touches cost nothing
LEAST_BYTES = 256 << 20  # of the first block on a GPU
PLACES = 64  # to choose from, so that no address says which call it is
FILLED = 0xFF  # guards, gaps and landings: NaN in every floating type
GAP = 5  # every other element of a gap


class Memory:
    """Bytes at an address of this process's device, as tensors."""

    def __init__(self, size: int, view: Callable[[int, int], Tensor]) -> None:
        self.size = size
        self._view = view

    def bytes(self, place: int, count: int) -> Tensor:
        """`count` bytes as a uint8 tensor with a storage of its own: nothing around them can be reached through it."""
        if not 0 <= place <= place + count <= self.size:
            raise ValueError(f"bytes {place} to {place + count} are not in an arena of {self.size}")
        return self._view(place, count)

    def tensor(self, placed: Placed) -> Tensor:
        """The tensor that lies there."""
        dtype = dtype_of(placed.dtype)
        raw = self.bytes(placed.place, placed.nbytes)
        return torch.empty(0, dtype=dtype, device=raw.device).set_(
            raw.untyped_storage(), placed.offset, placed.shape, placed.stride
        )

    def values(self, place: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor that begins at `place`."""
        count = dtype.itemsize
        for size in shape:
            count *= size
        if count == 0:
            return torch.empty(tuple(shape), dtype=dtype, device=self.bytes(0, 1).device)
        return self.bytes(place, count).view(dtype).view(tuple(shape))


class _AtAddress:
    """Lets torch wrap memory that it did not allocate."""

    def __init__(self, address: int, count: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (count,),
            "typestr": "|u1",
            "strides": None,
            "version": 2,
        }


def on_gpu(address: int, size: int, device: torch.device) -> Memory:
    """Memory on a GPU."""
    return Memory(size, lambda place, count: torch.as_tensor(_AtAddress(address + place, max(count, 1)), device=device))


def in_file(descriptor: int, size: int) -> Memory:
    """Memory in an anonymous file."""
    mapped = mmap.mmap(descriptor, size)
    return Memory(size, lambda place, count: torch.frombuffer(mapped, dtype=torch.uint8, count=max(count, 1), offset=place))


def dtype_of(name: str) -> torch.dtype:
    """Any dtype by name, integers too; ValueError for a name that is none."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no dtype")
    return dtype


@dataclass
class Image:
    """What the judge wrote for one tensor: `expected` bytes, guards included, from `start` on."""

    name: str
    placed: Placed
    start: int
    expected: Tensor


@dataclass
class Arena:
    """The judge's side. Use `place` for arguments, then `changed` to see whether they still are what they were."""

    device: torch.device
    memory: Memory = field(init=False)
    handle: bytes | None = None
    descriptor: int | None = None
    _address: int = 0

    def __post_init__(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # makes PyTorch's context current in this thread
            self._allocate(LEAST_BYTES)
        else:
            self.descriptor = os.memfd_create("autokernel-arena", os.MFD_CLOEXEC)
            os.ftruncate(self.descriptor, FILE_BYTES)
            self.memory = in_file(self.descriptor, FILE_BYTES)

    def fits(self, size: int) -> bool:
        return size <= self.memory.size

    def grow(self, size: int) -> None:
        """Make room for `size` bytes: all that was in it is lost, and workers must have closed it."""
        if self.device.type != "cuda":
            raise MemoryError(f"{size} bytes do not fit into the {FILE_BYTES} of a call on a CPU")
        driver().free(self._address)
        self._allocate(max(size, min(2 * self.memory.size, size + (1 << 30))))

    def close(self) -> None:
        """Give the memory back."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None
        if self._address:
            with contextlib.suppress(CudaFault):  # a context that is past use takes its memory with it
                driver().free(self._address)
            self._address = 0

    def _allocate(self, size: int) -> None:
        size = -(-size // GRANULE) * GRANULE
        self._address = 0
        try:
            self._address = driver().allocate(size)
        except CudaFault:
            torch.cuda.empty_cache()
            self._address = driver().allocate(size)
        self.handle = driver().export(self._address)
        self.memory = on_gpu(self._address, size, self.device)


def room_for(arguments: Arguments) -> int:
    """Bytes that `place` needs at most."""
    storages = (value.untyped_storage().nbytes() for value in arguments.values() if isinstance(value, Tensor))
    return PLACES * ALIGNMENT + sum(size + 2 * GUARD + 2 * ALIGNMENT for size in storages)


def write(memory: Memory, arguments: Arguments, start: int | None = None) -> tuple[tuple[Argument, ...], list[Image], int]:
    """Write arguments from `start` on (None: anywhere near the beginning); also what was written, and where it ends."""
    end = secrets.randbelow(PLACES) * ALIGNMENT if start is None else start
    placed, images = [], []
    for name, value in arguments.items():
        if not isinstance(value, Tensor):
            placed.append(Argument(name=name, value=value))
            continue
        nbytes = value.untyped_storage().nbytes()
        begin = end
        place = -(-(begin + GUARD) // ALIGNMENT) * ALIGNMENT
        end = place + -(-nbytes // ALIGNMENT) * ALIGNMENT + GUARD
        dtype = str(value.dtype).removeprefix("torch.")
        where = Placed(
            place=place,
            nbytes=nbytes,
            dtype=dtype,
            shape=tuple(value.shape),
            stride=value.stride(),
            offset=int(value.storage_offset()),
        )
        images.append(rewrite(memory, Image(name, where, begin, torch.empty(0)), value, end - begin))
        placed.append(Argument(name=name, tensor=where))
    return tuple(placed), images, end


def rewrite(memory: Memory, image: Image, value: Tensor, count: int | None = None) -> Image:
    """Write other values of the same form to the same place."""
    count = image.expected.numel() if count is None else count
    # What lies between the elements of a padded tensor may be the remains of anything, so it is not copied.
    expected = torch.full((count,), FILLED, dtype=torch.uint8, device=value.device)
    if value.numel():
        inside = expected[image.placed.place - image.start :][: image.placed.nbytes]
        if image.placed.nbytes > value.numel() * value.element_size():
            # NaN shows who reads there and stays NaN whatever is added to it; a number shows who adds.
            gaps = inside.view(value.dtype)
            gaps[torch.rand(gaps.shape, device=gaps.device) < 0.5] = GAP
        typed = inside.view(value.dtype).as_strided(value.shape, value.stride(), typed_offset(inside, value))
        typed.copy_(value) if 0 not in value.stride() else _once(typed).copy_(_once(value))
    memory.bytes(image.start, count).copy_(expected)
    return Image(image.name, image.placed, image.start, expected)


def typed_offset(inside: Tensor, value: Tensor) -> int:
    """The storage offset of a view at `value`'s place within `inside`, in elements of `value`."""
    return int(inside.storage_offset()) // value.element_size() + int(value.storage_offset())


def changed(memory: Memory, images: Sequence[Image]) -> str:
    """A clause that says which argument is not what it was; "" if all are."""
    for image in images:
        now = memory.bytes(image.start, image.expected.numel())
        if torch.equal(now, image.expected):
            continue
        inside = slice(image.placed.place - image.start, image.placed.place - image.start + image.placed.nbytes)
        if torch.equal(now[inside], image.expected[inside]):
            return f"wrote outside its input {image.name}, beyond the end or before the beginning of its memory"
        if torch.equal(_elements(now, image), _elements(image.expected, image)):
            return f"wrote between the rows of its input {image.name}, which are not its own"
        return f"wrote into its input {image.name}"
    return ""


def same_form(argument: Argument, value: Any) -> bool:
    """Whether a value could take this argument's place and nobody could tell by anything but what is in it."""
    placed = argument.tensor
    if placed is None or not isinstance(value, Tensor):
        return placed is None and not isinstance(value, Tensor) and bool(argument.value == value)
    ours = placed.shape, placed.stride, placed.offset, placed.nbytes, placed.dtype
    theirs = tuple(value.shape), value.stride(), value.storage_offset(), value.untyped_storage().nbytes()
    return ours == (*theirs, str(value.dtype).removeprefix("torch."))


def _elements(raw: Tensor, image: Image) -> Tensor:
    # As bytes: NaN differs from itself.
    placed, dtype = image.placed, dtype_of(image.placed.dtype)
    inside = raw[placed.place - image.start :][: placed.nbytes].clone().view(dtype)
    return inside.as_strided(placed.shape, placed.stride, placed.offset).contiguous().view(-1).view(torch.uint8)


def _once(tensor: Tensor) -> Tensor:
    """A broadcast tensor without its repetitions."""
    for dimension, step in enumerate(tensor.stride()):
        if step == 0 and tensor.shape[dimension] > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor
