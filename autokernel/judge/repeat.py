"""The worker's side of the clock: many calls, their times, and every answer in a place of its own. Do not edit.

No function here, nor any below `kernel_fn` in another call, is named after what it is for: a kernel that looks at its callers
cannot tell by their names which of its calls are timed.
"""

import contextlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autokernel.judge import protocol
from autokernel.judge.driver import driver
from autokernel.judge.protocol import Form, Reply, Timed
from autokernel.ops import Arguments

if TYPE_CHECKING:
    from autokernel.judge.worker import Worker

CAPTURE_WARMUP = 2  # calls on the side stream before a capture, as PyTorch advises

_now = time.perf_counter_ns
_graph_class, _graph_context, _stream_class, _on_stream = (
    torch.cuda.CUDAGraph,
    torch.cuda.graph,
    torch.cuda.Stream,
    torch.cuda.stream,
)
_reset_peak, _peak, _allocated = (
    torch.cuda.reset_peak_memory_stats,
    torch.cuda.max_memory_allocated,
    torch.cuda.memory_allocated,
)
_fill, _copy = Tensor.fill_, Tensor.copy_
_deterministic = torch._C._set_deterministic_algorithms


class _OnCPU:
    """Encloses calls by the processor's clock."""

    def __init__(self) -> None:
        self._times_us: list[float] = []

    def start(self) -> None:
        self._began = _now()

    def stop(self) -> None:
        self._times_us.append((_now() - self._began) / 1e3)

    def results(self) -> tuple[tuple[float, ...], int]:
        """Microseconds of each call, and bytes allocated at most beyond what was; the latter is not known on a CPU."""
        return tuple(self._times_us), 0


class _OnGPU:
    """Encloses calls by CUDA events on their stream."""

    def __init__(self, device: torch.device, stream: int, calls: int) -> None:
        self._device, self._stream = device, stream
        self._events = [(driver().event(), driver().event()) for _ in range(calls)]
        self._made = 0
        _reset_peak(device)
        self._before = _allocated(device)

    def start(self) -> None:
        driver().record(self._events[self._made][0], self._stream)

    def stop(self) -> None:
        driver().record(self._events[self._made][1], self._stream)
        self._made += 1

    def results(self) -> tuple[tuple[float, ...], int]:
        """Microseconds of each call, and bytes allocated at most beyond what was; once the device is idle."""
        times_us = tuple(driver().elapsed_us(*pair) for pair in self._events[: self._made])
        for pair in self._events:
            for event in pair:
                driver().forget(event)
        return times_us, _peak(self._device) - self._before


def repeat(worker: "Worker", request: protocol.Time) -> Reply:
    """Do what `Time` says."""
    from autokernel.judge.worker import said

    candidate = worker.candidate
    assert candidate is not None
    recorder = candidate.recorder
    on_gpu = worker.device.type == "cuda"
    arguments = worker.arguments_at(request.arguments)
    copies = _copies(worker, request)
    flush = torch.empty(request.flush_bytes, dtype=torch.int8, device=worker.device) if request.flush_bytes else None
    _deterministic(False)  # no filling of memory, which only the gates want
    recorder.begin()
    call: Callable[[], Any] = lambda: candidate(arguments, request.recorded)  # noqa: E731
    if request.graph:
        if not on_gpu:
            return _without(request, "there are no CUDA graphs on a CPU")
        try:
            call = _captured(worker, arguments, copies[0])
        except Exception as fault:  # a kernel need not be capturable: this is no crash
            with contextlib.suppress(Exception):
                driver().synchronize()
            name, text = said(getattr(fault, "fault", fault))
            return _without(request, f"it cannot be captured into a CUDA graph ({name}: {text})")
    enclosing = _OnGPU(worker.device, candidate.stream.cuda_stream, request.repeats) if on_gpu else _OnCPU()
    form: Form | None = None
    for number in range(request.repeats):
        for target, source in copies[number % len(copies)]:
            _copy(target, source)
        if on_gpu:
            driver().reset_l2()
        if flush is None:
            worker.wait()  # an idle device
        else:
            _fill(flush, number & 1)  # while it lasts, the call is launched
        enclosing.start()
        answer = call()
        enclosing.stop()
        form = worker.deliver(answer, arguments, request.slots[number % len(request.slots)])
        del answer
        if not form.landed:
            break
    worker.wait()
    times_us, peak_bytes = enclosing.results()
    return Timed(
        token=request.token,
        times_us=times_us,
        form=form,
        peak_bytes=peak_bytes,
        operators=tuple(recorder.operators),
        threads=recorder.threads(),
        tampered=recorder.tampered,
    )


def _copies(worker: "Worker", request: protocol.Time) -> list[list[tuple[Tensor, Tensor]]]:
    """For each set of inputs, what to copy from where, storages whole."""
    memory = worker.memory
    assert memory is not None
    tensors = [a.tensor for a in request.arguments if a.tensor is not None]
    targets = [memory.bytes(t.place, t.nbytes) for t in tensors]
    return [
        [(target, memory.bytes(place, t.nbytes)) for target, place, t in zip(targets, places, tensors, strict=True)]
        for places in request.sets
    ]


def _captured(worker: "Worker", arguments: Arguments, copies: list[tuple[Tensor, Tensor]]) -> Callable[[], Any]:
    """Replays a CUDA graph of one call, and gives the answer that each replay writes anew."""
    candidate = worker.candidate
    assert candidate is not None
    for target, source in copies:
        _copy(target, source)
    driver().synchronize()
    side, main = _stream_class(worker.device), candidate.stream
    try:
        candidate.stream = side
        with _on_stream(side):
            for _ in range(CAPTURE_WARMUP):
                candidate(arguments, recorded=False)
        driver().synchronize()
        graph = _graph_class()
        with _graph_context(graph, stream=side):
            answer = candidate(arguments, recorded=False)
    finally:
        candidate.stream = main
    driver().synchronize()

    def replay() -> Any:
        graph.replay()
        return answer

    return replay


def _without(request: protocol.Time, fault: str) -> Timed:
    return Timed(token=request.token, times_us=(), form=None, peak_bytes=0, fault=fault)
