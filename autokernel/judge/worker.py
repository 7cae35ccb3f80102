"""The worker: the process, forked for one candidate, that imports it and calls it. Do not edit.

It decides nothing. It does what the judge asks over its channel, puts answers where the judge will read them, and says what
it saw. What it needs of torch is looked up before the candidate is imported, so that a candidate that replaces parts of
torch replaces them for itself.
"""

import gc
import importlib.util
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from autokernel import ops
from autokernel.inputs import InputMaker, Spec
from autokernel.judge import arena, early, protocol, sandbox
from autokernel.judge.arena import Memory
from autokernel.judge.driver import CudaFault, driver
from autokernel.judge.forks import compiling
from autokernel.judge.protocol import KEPT_BYTES, Answered, Form, Landing, Raised, Ready, Reply
from autokernel.judge.record import Recorder, function_modes
from autokernel.ops import Arguments

TEXT_LENGTH = 500  # characters of an exception
EMPTIED_SHARE = 4  # the allocator's cache is emptied above a quarter of the GPU's memory

_type_name = type.__dict__["__name__"].__get__
_copy, _stride, _is_neg, _is_conj = Tensor.copy_, Tensor.stride, Tensor.is_neg, Tensor.is_conj
_size, _element_size, _numel, _storage = Tensor.size, Tensor.element_size, Tensor.numel, Tensor.untyped_storage
_zero_tensor = Tensor._is_zerotensor
_address, _bytes_of = torch.UntypedStorage.data_ptr, torch.UntypedStorage.nbytes
_no_functions, _no_grad = torch._C.DisableTorchFunction, torch.no_grad
_deterministic, _fill = torch._C._set_deterministic_algorithms, torch._C._set_deterministic_fill_uninitialized_memory
_randn, _softmax = torch.randn, torch.softmax
_reserved, _empty_cache = torch.cuda.memory_reserved, torch.cuda.empty_cache
_current_stream, _set_stream = torch.cuda.current_stream, torch.cuda.set_stream
# Missing where PyTorch is built without CUDA, and then not called.
_current_raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0)


class KernelRaised(Exception):
    """The candidate raised; what it raised is in `fault`, whatever it is."""

    def __init__(self, fault: BaseException) -> None:
        super().__init__()
        self.fault = fault


@dataclass
class Candidate:
    """A `kernel_fn`, called under a record."""

    function: Callable[..., Any]
    recorder: Recorder
    device: torch.device
    stream: Any = None  # of the device, on which it is called

    def __post_init__(self) -> None:
        if self.device.type == "cuda":
            self.stream = _current_stream(self.device)

    def __call__(self, arguments: Arguments, recorded: bool = True) -> Any:
        """What it returns; KernelRaised if it raises anything at all. Work on the GPU is not waited for."""
        recorder = self.recorder
        recorder.listening = True
        try:
            with _no_grad():
                if not recorded:
                    return self.function(**arguments)
                with recorder:
                    try:
                        return self.function(**arguments)
                    finally:
                        recorder.end()
        except BaseException as fault:  # SystemExit and worse included: a call that does not return has failed
            raise KernelRaised(fault) from None
        finally:
            recorder.listening = False
            if self.stream is not None and _current_raw_stream(self.stream.device_index) != self.stream.cuda_stream:
                _set_stream(self.stream)


def form_of(answer: Any, arguments: Arguments, memory: Memory | None = None) -> Form:
    """What the answer is, besides its values."""
    if type(answer) is not Tensor:
        return Form(type_name=_type_name(type(answer)))
    with _no_functions():
        fault = ""
        if _is_neg(answer) or _is_conj(answer) or _zero_tensor(answer):
            fault = "has a lazy negative, conjugate or zero bit set, so that its memory does not hold its values"
        elif answer.requires_grad:
            fault = "requires a gradient"
        strided = answer.layout is torch.strided
        return Form(
            type_name="Tensor",
            shape=tuple(_size(answer)),
            stride=_stride(answer) if strided else (),
            dtype=str(answer.dtype),
            device=str(answer.device),
            layout=str(answer.layout),
            shares_input=_shared(answer, arguments) if strided else "",
            fault=fault,
        )


def _shared(answer: Tensor, arguments: Arguments) -> str:
    if not _numel(answer):
        return ""
    start, end = _range(answer)
    for name, value in arguments.items():
        if isinstance(value, Tensor) and value.numel() and value.device == answer.device:
            first, last = _range(value)
            if start < last and first < end:
                return name
    return ""


def _range(tensor: Tensor) -> tuple[int, int]:
    storage = _storage(tensor)
    return _address(storage), _address(storage) + _bytes_of(storage)


def said(fault: BaseException) -> tuple[str, str]:
    """Name of the type and first line of the text of whatever was raised; an exception may do anything when it is asked."""
    name = _plain(_type_name(type(fault)))
    try:
        text = str(fault)
    except BaseException as worse:
        return name, f"its text cannot be made ({_plain(_type_name(type(worse)))})"
    return name, _plain(text)


def _plain(text: str) -> str:
    lines = str.__getitem__(text, slice(0, 20 * TEXT_LENGTH)).encode("utf-8", "replace").decode().strip().splitlines()
    return (lines or [""])[0][:TEXT_LENGTH]


@dataclass
class Worker:
    """What a worker holds between requests."""

    descriptor: int | None  # of the arena's file, on a CPU
    recorder: Recorder
    note: str
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    memory: Memory | None = None
    candidate: Candidate | None = None
    _mapped: int = 0  # address of the arena on the GPU
    _arguments: Arguments = field(default_factory=dict)  # of the call before
    _answer: Tensor | None = None  # of the call before

    def handle(self, request: Any) -> Reply:
        """Do what is asked."""
        token = request.token
        try:
            return getattr(self, type(request).__name__.lower())(request)
        except KernelRaised as raised:
            name, text = said(raised.fault)
            return Raised(token=token, type_name=name, text=text, by_kernel=True)
        except Exception as fault:
            name, text = said(fault)
            # An error of CUDA surfaces wherever the device is next asked for something: the candidate has caused it.
            by_kernel = isinstance(fault, (CudaFault, RuntimeError)) and self.candidate is not None
            return Raised(token=token, type_name=name, text=text, by_kernel=by_kernel)

    def attach(self, request: protocol.Attach) -> Reply:
        self.device = torch.device(request.device)
        if request.handle is None:
            assert self.descriptor is not None
            self.memory = arena.in_file(self.descriptor, request.size)
        else:
            torch.cuda.set_device(self.device)
            torch.cuda.synchronize(self.device)  # creates PyTorch's context and makes it current
            self._mapped = driver().open(request.handle)
            self.memory = arena.on_gpu(self._mapped, request.size, self.device)
        return Ready(token=request.token, note=self.note)

    def detach(self, request: protocol.Detach) -> Reply:
        self._arguments, self._answer, self.memory = {}, None, None
        if self._mapped:
            self.wait()
            driver().close(self._mapped)
            self._mapped = 0
        return Ready(token=request.token)

    def load(self, request: protocol.Load) -> Reply:
        self.candidate = None
        file = Path(request.path)
        specification = importlib.util.spec_from_file_location(request.module, file)
        assert specification is not None
        assert specification.loader is not None
        module = importlib.util.module_from_spec(specification)
        # Triton reads the source of a kernel from its file, and a module must be findable while it is imported.
        sys.modules[request.module] = module
        try:
            specification.loader.exec_module(module)
            kernel_type, function = vars(module).get("KERNEL_TYPE"), vars(module).get("kernel_fn")
        except BaseException as fault:
            raise KernelRaised(fault) from None
        if type(kernel_type) is not str or kernel_type != request.operation:
            text = f"KERNEL_TYPE is not the plain text {request.operation!r} once the file is imported"
            return protocol.Misfit(token=request.token, text=text)
        if not callable(function):
            return protocol.Misfit(token=request.token, text="kernel_fn cannot be called once the file is imported")
        self.candidate = Candidate(function, self.recorder, self.device)
        return Ready(token=request.token)

    def call(self, request: protocol.Call) -> Reply:
        assert self.candidate is not None
        if not (request.reuse and self._arguments):
            self._arguments = self.arguments_at(request.arguments)
        arguments, earlier = self._arguments, self._answer
        if request.reuse:
            self._disturb()
        _deterministic(True, warn_only=True)  # with `_fill`, memory that nobody wrote to holds NaN
        _fill(True)
        self.recorder.begin()
        answer = self.candidate(arguments)
        form = self.deliver(answer, arguments, request.landing)
        earlier_landed = False
        if earlier is not None and request.earlier is not None and _length(earlier) <= request.earlier.capacity:
            self._land(earlier, request.earlier)
            earlier_landed = True
        self.wait()
        kept = form.landed and _length(answer) <= KEPT_BYTES
        self._answer = answer if kept else None
        self._tidy()
        return Answered(
            token=request.token,
            form=form,
            operators=tuple(self.recorder.operators),
            threads=self.recorder.threads(),
            tampered=self.recorder.tampered or ("left a mode behind that changes functions of torch" * (function_modes() > 0)),
            earlier_landed=earlier_landed,
        )

    def prepare(self, request: protocol.Prepare) -> Reply:
        assert self.candidate is not None
        operation, device = ops.get(request.operation), torch.device(request.device)
        with compiling(max(1, len(os.sched_getaffinity(0)) - 1)):
            for case in request.cases:
                specs = {name: Spec(s.shape, s.stride, arena.dtype_of(s.dtype)) for name, s in case.specs.items()}
                generator = torch.Generator(device).manual_seed(0)
                maker = InputMaker(arena.dtype_of(case.dtype), device, generator, "normal", case.layout, specs)
                try:
                    self.candidate(operation.inputs(case.shape, maker), recorded=False)
                    self.wait()
                except KernelRaised:
                    continue  # the gates will find it, and say it better
        return Ready(token=request.token)

    def time(self, request: protocol.Time) -> Reply:
        from autokernel.judge.repeat import repeat  # it imports this file

        return repeat(self, request)

    def arguments_at(self, arguments: tuple[protocol.Argument, ...]) -> Arguments:
        """The arguments that lie in the arena."""
        assert self.memory is not None
        return {a.name: a.value if a.tensor is None else self.memory.tensor(a.tensor) for a in arguments}

    def deliver(self, answer: Any, arguments: Arguments, landing: Landing) -> Form:
        """Copy the answer to its landing, in the order of the stream on which it was asked for: later work is too late."""
        form = form_of(answer, arguments)
        fits = form.layout == "torch.strided" and form.device == str(self._device()) and _length(answer) <= landing.capacity
        if not fits:
            return form
        self._land(answer, landing)
        return msgspec.structs.replace(form, landed=True)

    def wait(self) -> None:
        """Wait for the device; what surfaces here, the candidate has caused."""
        if self.device.type == "cuda":
            try:
                driver().synchronize()
            except Exception as fault:
                raise KernelRaised(fault) from None

    def _land(self, answer: Tensor, landing: Landing) -> None:
        assert self.memory is not None
        with _no_grad(), _no_functions():
            _copy(self.memory.values(landing.place, tuple(_size(answer)), answer.dtype), answer)

    def _disturb(self) -> None:
        """Other work between two calls: it moves allocations and leaves other values in shared memory."""
        with _no_grad(), _no_functions():
            _softmax(_randn(257, 263, device=self.device), -1)

    def _device(self) -> torch.device:
        index = torch.cuda.current_device() if self.device.type == "cuda" and self.device.index is None else self.device.index
        return torch.device(self.device.type, index)

    def _tidy(self) -> None:
        if self.device.type == "cuda":
            total = torch.cuda.get_device_properties(self.device).total_memory
            if _reserved(self.device) > total // EMPTIED_SHARE:
                _empty_cache()


def _length(tensor: Tensor) -> int:
    return _numel(tensor) * _element_size(tensor)


def main(channel: socket.socket, descriptor: int | None, spawn: protocol.Spawn) -> None:
    """Serve until the judge closes the channel. Runs in a process of its own, whose parent is a keeper."""
    sandbox.die_with_parent(signal.SIGKILL)
    os.environ.clear()
    os.environ.update(spawn.environment)
    tempfile.tempdir = None
    os.chdir(spawn.folder)
    note = sandbox.enter(spawn.writable, spawn.hidden, spawn.level)
    gc.enable()
    worker = Worker(descriptor, Recorder(), note)
    receive, send, decode, encode = channel.recv, channel.send, protocol.decode, protocol.encode
    while packet := receive(early.LIMIT + 1):
        send(encode(worker.handle(decode(protocol.to_worker, packet))))
