"""Take the kernels home: a folder that holds those a model uses, and a module that uses them in somebody else's program.

import autokernel
fast = autokernel.apply(model, example_inputs, "optimized/")
outputs = fast(*inputs)
"""

import itertools
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autokernel import kernels
from autokernel.capture import Call, NotCapturable, call_of, capture
from autokernel.errors import InputError
from autokernel.graph import Region
from autokernel.state import TensorSpec, Verification, Versions, Way, write_text
from autokernel.substitute import Site, substitute
from autokernel.verification import Choice

MANIFEST = "optimized.json"
REPORT = "report.md"
KERNELS = "kernels"

_OPERATORS = torch.library.Library("autokernel", "FRAGMENT")
_numbers = itertools.count()


class Used(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One kernel, and the calls that it stands for."""

    name: str  # kernels/<name>.py
    sha256: str
    operation: str
    shape: dict[str, Any]
    tensors: dict[str, TensorSpec]
    dtype: str
    sites: tuple[str, ...]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """optimized.json: which kernels belong where, and what was measured."""

    class_name: str
    gpu: str
    versions: Versions
    kernels: tuple[Used, ...]
    ways: tuple[Way, ...]  # empty: unmeasured


def refuse_other_folders(folder: Path) -> None:
    """InputError for a folder that `save` would spoil: one that holds anything else than an earlier save."""
    if folder.exists() and not (folder.is_dir() and (not any(folder.iterdir()) or (folder / MANIFEST).is_file())):
        raise InputError(f"{folder} holds something else than optimised kernels: name another folder, or an empty one")


def save(folder: Path, choice: Choice, used: Collection[str], found: Verification, report: str) -> None:
    """Write the kernels of the targets in `used`, what they replace, and the report, as a folder that `apply` reads.

    An earlier such folder is replaced; InputError for a folder that holds anything else.
    """
    refuse_other_folders(folder)
    sites = {replaced.target: replaced.sites for replaced in found.replacements}
    chosen = [one for one in choice.chosen if one.target.name in used]
    manifest = Manifest(
        class_name=found.source.class_name,
        gpu=found.gpu,
        versions=found.versions,
        kernels=tuple(
            Used(
                name=one.target.name,
                sha256=one.kernel.sha256,
                operation=one.target.operation,
                shape=one.target.shape,
                tensors=one.target.tensors,
                dtype=one.target.dtype,
                sites=sites[one.target.name],
            )
            for one in chosen
        ),
        ways=found.ways,
    )
    shutil.rmtree(folder / KERNELS, ignore_errors=True)
    for one in chosen:
        write_text(folder / KERNELS / f"{one.target.name}.py", one.kernel.path.read_text(encoding="utf-8"))
    write_text(folder / REPORT, report)
    write_text(folder / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest), indent=2).decode() + "\n")


def apply(model: nn.Module, example_inputs: Any, folder: str | Path) -> "Applied":
    """A module that computes what `model` does, with the kernels of `folder` where they belong.

    `example_inputs` are a tensor, a tuple of positional arguments, or a mapping of named ones. The kernels serve calls with
    tensors of those shapes, dtypes and devices; any other call is answered by the model itself. The weights are the
    model's own, not copies. InputError if the model is in training mode, cannot be captured, or does not make the very
    calls that the folder was made for.
    """
    folder = Path(folder)
    manifest = _load(folder)
    if model.training:
        raise InputError("the model is in training mode, and the kernels compute no gradients: call model.eval() first")
    args, kwargs = _arguments(example_inputs)
    try:
        captured = capture(model, args, kwargs)
    except NotCapturable as fault:
        name = type(model).__name__
        raise InputError(f"{name} cannot be captured, so no kernel can be put into it ({fault.reason})") from None
    places: dict[Any, list[Region]] = {}
    for region in captured.regions:
        places.setdefault(call_of(region).key, []).append(region)
    functions: dict[Region, Any] = {}
    targets: dict[Region, str] = {}
    for used in manifest.kernels:
        regions = places.get(Call(used.operation, used.shape, used.tensors, used.dtype).key, [])
        if len(regions) != len(used.sites):
            raise InputError(
                f"this model, with these inputs, makes the call of {used.name} in {len(regions)} places, and {folder} was made "
                f"for {len(used.sites)}: give the model and the shapes of then, or make the folder again with verify.py --save"
            )
        function = _kernel(folder, used)
        functions |= dict.fromkeys(regions, function)
        targets |= dict.fromkeys(regions, used.name)
    substitution = substitute(captured, functions, targets)
    for site in substitution.sites:
        _register(site)
    return Applied(model, substitution.module, substitution.sites, (args, kwargs))


class Applied(nn.Module):
    """A model with kernels in it; made by `apply`. It has the model's own parameters, buffers and submodules, and their names.

    `sites` are the places of the kernels and count their calls; `fallbacks` counts the calls that the model itself answered.
    For inference: no gradient flows through it.
    """

    original: nn.Module
    with_kernels: nn.Module

    def __init__(self, model: nn.Module, module: nn.Module, sites: tuple[Site, ...], example: Any) -> None:
        super().__init__()
        # Shared, not copied: what is loaded into either is loaded into both, and state_dict has the model's own keys.
        self._parameters, self._buffers, self._modules = model._parameters, model._buffers, model._modules
        self.training = False
        self.sites, self.fallbacks = sites, 0
        # Not as submodules: their weights would count twice.
        self.__dict__["original"], self.__dict__["with_kernels"] = model, module
        self._form = _form(example)
        self._weights = [
            (tensors, name, tensors[name])
            for part in model.modules()
            for tensors in (part._parameters, part._buffers)
            for name in tensors
        ]
        device = next((value.device for value in pytree.tree_leaves(example) if isinstance(value, Tensor)), None)
        self._index = device.index if device is not None and device.type == "cuda" else None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.training or self.original.training:
            raise InputError("the model is in training mode, and the kernels compute no gradients: call eval() on it")
        if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in (*args, *kwargs.values())):
            raise InputError(
                "an input requires a gradient, and the kernels compute none: use torch.no_grad(), or the model itself"
            )
        with torch.no_grad():
            if _form((args, kwargs)) != self._form:
                self.fallbacks += 1
                return self.original(*args, **kwargs)
            if torch.compiler.is_compiling():
                return self.with_kernels(*args, **kwargs)
            if any(tensors.get(name) is not weight for tensors, name, weight in self._weights):
                raise InputError("the model's weights were replaced by other tensors: call autokernel.apply again")
            if self._index is None or self._index == torch.cuda.current_device():
                return self.with_kernels(*args, **kwargs)
            with torch.cuda.device(self._index):  # Triton launches on the current device
                return self.with_kernels(*args, **kwargs)

    def _apply(self, *_: Any, **__: Any) -> Any:
        raise InputError("the kernels hold for this dtype and device: move or cast the model, and call autokernel.apply again")


def _arguments(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example_inputs, Tensor):
        return (example_inputs,), {}
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, Sequence) and not isinstance(example_inputs, str):
        return tuple(example_inputs), {}
    what = type(example_inputs).__name__
    raise InputError(f"example_inputs is a {what}: give a tensor, a tuple of positional arguments or a mapping of named ones")


def _form(call: Any) -> tuple[Any, ...]:
    """Equal for calls for which the same captured graph serves."""
    leaves, structure = pytree.tree_flatten(call)
    return structure, *((x.shape, x.dtype, x.device) if isinstance(x, Tensor) else x for x in leaves)


def _load(folder: Path) -> Manifest:
    path = folder / MANIFEST
    try:
        return msgspec.json.decode(path.read_bytes(), type=Manifest)
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(f"{folder} holds no {MANIFEST}: make the folder with `uv run verify.py --save {folder}`") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as fault:
        raise InputError(
            f"{path} is damaged ({fault}): make the folder again with `uv run verify.py --save {folder}`"
        ) from None


def _kernel(folder: Path, used: Used) -> Any:
    kernel = kernels.load(folder / KERNELS / f"{used.name}.py")
    if kernel.sha256 != used.sha256 or kernel.operation.name != used.operation:
        raise InputError(f"{kernel.path} is not the kernel that was verified: make the folder again with verify.py --save")
    return kernel.function


def _register(site: Site) -> None:
    """Make the site an operator of torch, which a compiler leaves as it is. Its result has the captured strides."""
    name = f"{site.__name__}_{next(_numbers)}"
    shape, stride, dtype, device = site.form

    def call(*inputs: Tensor) -> Tensor:
        result = site(*inputs)
        if result.stride() == stride:
            return result
        return torch.empty_strided(shape, stride, dtype=dtype, device=device).copy_(result)

    def fake(*inputs: Tensor) -> Tensor:
        return torch.empty_strided(shape, stride, dtype=dtype, device=device)

    inputs = ", ".join(f"Tensor x{number}" for number in range(len(site.region.inputs)))
    _OPERATORS.define(f"{name}({inputs}) -> Tensor")
    _OPERATORS.impl(name, call, "CompositeExplicitAutograd")
    torch.library.register_fake(f"autokernel::{name}", fake, lib=_OPERATORS)
    site.operator = getattr(torch.ops.autokernel, name)
