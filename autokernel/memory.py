"""Tell in advance when the memory of a CPU machine will not do: there the system may end the process without a word.

A GPU says so itself, as torch.OutOfMemoryError.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from autokernel import hardware

# Below this many elements in the inputs the estimate of a forward pass would take longer than it is worth.
_SMALL_INPUT = 1 << 14
_GB = 1e9
# How PyTorch's allocator for the CPU words it, in an exception that is only a RuntimeError.
_SHORTAGE_WORDS = ("not enough memory", "can't allocate memory", "Storage size calculation overflowed")


class Shortage(Exception):
    """More memory is needed than the machine has; the message says how much."""


def is_shortage(fault: BaseException) -> bool:
    """Whether PyTorch or Python ran out of memory, on a GPU or a CPU."""
    if isinstance(fault, (torch.OutOfMemoryError, MemoryError, Shortage)):
        return True
    return isinstance(fault, RuntimeError) and any(words in str(fault) for words in _SHORTAGE_WORDS)


def require(needed: int, device: torch.device) -> None:
    """Raise Shortage if `needed` bytes are more than the whole memory of the device."""
    there = hardware.memory_bytes(device)
    if needed > there:
        raise Shortage(f"it needs {needed / _GB:.1f} GB, and this machine has {there / _GB:.1f} GB")


def of_weights(build: Callable[[], nn.Module], dtype: torch.dtype) -> int:
    """Bytes of the parameters that a constructor makes, in `dtype`; 0 for one that cannot run without real tensors."""
    try:
        with torch.device("meta"):
            model = build()
    except Exception:
        return 0  # unknown: the caller builds it for real, and hears of any fault
    return sum(parameter.numel() for parameter in model.parameters()) * dtype.itemsize


def of_forward(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Bytes of the weights and the largest amount of activations that live at once, or 0 if the input is small.

    Found with tensors that have no content; a model that depends on values cannot run so, and gives 0 as well.
    """
    elements = sum(x.numel() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor))
    if elements < _SMALL_INPUT:
        return 0
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    activations = _Live()
    try:
        with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True) as fake:
            fake_args, fake_kwargs = tree_map(
                lambda x: fake.from_tensor(x) if isinstance(x, Tensor) else x, (tuple(args), kwargs)
            )
            with activations:
                model(*fake_args, **fake_kwargs)
    except Exception:
        return 0  # unknown: the caller runs it for real, and hears of any fault
    return weights + activations.most


class _Live(TorchDispatchMode):
    """Counts the bytes of storage that operators create, until it is released; `most` is the most at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)  # a storage keeps its Python object as long as it lives
        if key in self._seen:
            return
        self._seen.add(key)
        size = storage.nbytes()
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._release, key, size)

    def _release(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size
