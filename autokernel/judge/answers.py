"""What a candidate answered, as the judge reads it in its own memory; what gates need of whoever answers. Do not edit."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from autokernel.judge import arena as arenas
from autokernel.judge.arena import Memory
from autokernel.judge.cases import Case
from autokernel.judge.process import WorkerFault
from autokernel.judge.protocol import Form, Landing
from autokernel.judge.truth import baseline_of
from autokernel.ops import Arguments, Operation
from autokernel.results import Status


@dataclass(frozen=True)
class Answer:
    """What `kernel_fn` returned. `value` is in the judge's memory, contiguous; None where it is no tensor of the right size."""

    value: Tensor | None
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    dtype: str = ""  # as PyTorch prints it
    device: str = ""
    layout: str = ""
    type_name: str = "Tensor"
    shares_input: str = ""  # the argument whose memory it is
    operators: tuple[str, ...] = ()  # of torch, that do work
    threads: int = 0  # started in the call, or left behind before
    tampered: str = ""  # what was done to the record
    fault: str = ""  # anything else that a plain tensor is not


@dataclass(frozen=True)
class Times:
    """What `timed` saw. `answer(slot)` is to be read before the next request to the worker."""

    times_us: tuple[float, ...]  # by the worker's events, for each call
    wall_s: float  # by the judge's clock, from the request to the reply
    peak_bytes: int  # allocated at most during one call, its arguments not counted
    fault: str  # why there are no times; only for graphs
    form: Form | None
    operators: tuple[str, ...]
    threads: int
    tampered: str
    _memory: Memory
    _slots: tuple[Landing, ...]

    def answer(self, slot: int) -> Answer:
        """The answer that was last put into a slot: call i uses slot i modulo their number."""
        assert self.form is not None
        return read(self._memory, self.form, self._slots[slot])


class Judged(Protocol):
    """What the gates call: a `Worker`, or for their own tests a function of this process."""

    def call(self, arguments: Arguments, reuse: bool = False) -> Answer: ...

    def again(self) -> Answer: ...

    def precompile(self, cases: Sequence[Case]) -> None: ...

    def close(self) -> None: ...


def read(memory: Memory, form: Form, landing: Landing) -> Answer:
    """The answer in a landing, of the form that the worker says it has."""
    value = None
    if form.landed:
        try:
            dtype = arenas.dtype_of(form.dtype.removeprefix("torch."))
        except ValueError:
            raise WorkerFault(Status.INVALID, "the worker named a dtype that is none") from None
        if min(form.shape, default=0) < 0 or math.prod(form.shape) * dtype.itemsize > landing.capacity:
            raise WorkerFault(Status.INVALID, "the worker named a shape that does not fit its answer")
        value = memory.values(landing.place, form.shape, dtype).clone()
    return Answer(
        value=value,
        shape=form.shape,
        stride=form.stride,
        dtype=form.dtype,
        device=form.device,
        layout=form.layout,
        type_name=form.type_name,
        shares_input=form.shares_input,
        fault=form.fault,
    )


def answer_bytes(operation: Operation, arguments: Arguments) -> int:
    """The size of the right answer, found by computing it: shape inference on "meta" imports a compiler first, for seconds."""
    answer = baseline_of(operation, arguments)
    return answer.numel() * answer.element_size()


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one dtype hold the same bytes; NaN equals itself."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))
