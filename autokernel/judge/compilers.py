"""Compile what the gates will call, many kernels side by side, before they need it. Do not edit."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from autokernel import hardware
from autokernel.judge import protocol
from autokernel.judge.cases import Case
from autokernel.judge.process import Budgets, CannotStart, WorkerFault, load, new_token
from autokernel.kernels import KernelFile
from autokernel.results import Status

if TYPE_CHECKING:
    from autokernel.judge.isolated import Judge

ROOM = 8  # what is larger than this part of the GPU is left for the gates to compile


class Compiler:
    """A process that shares a worker's cache of compiled kernels, and is thrown away. It starts while the worker does."""

    def __init__(self, judge: "Judge", kernel: KernelFile, budgets: Budgets) -> None:
        self._judge, self._kernel, self._budgets = judge, kernel, budgets
        self._pool = ThreadPoolExecutor(1)
        self._started = self._pool.submit(lambda: judge.process(kernel.sha256, budgets.total_s))

    def compile(self, cases: Sequence[Case]) -> None:
        """Call the kernel for each case, without a launch; each kernel that is to be compiled is, in a fork of the process.

        What goes wrong there is left for the gates to find, and to say in one sentence; but WorkerFault if it does not come to
        an end within its budget: the gates would only wait as long again.
        """
        process, kernel, budgets = self._started.result(), self._kernel, self._budgets
        most = torch.cuda.get_device_properties(self._judge.device).total_memory / ROOM
        small = [case for case in cases if kernel.operation.bytes(case.shape, case.dtype.itemsize) < most]
        request = protocol.Prepare(
            token=new_token(),
            operation=kernel.operation.name,
            device=str(self._judge.device),
            cases=tuple(map(_prepared, small)),
        )
        try:
            load(process, kernel, budgets)
            process.ask(request, budgets.compile_s, "the kernel, called for the first time,")
        except WorkerFault as fault:
            if fault.status is Status.TIMEOUT:
                raise
        finally:
            process.close()

    def close(self) -> None:
        """Kill the process and all that it started."""
        with suppress(CannotStart):  # then there is none
            self._started.result().close()
        self._pool.shutdown()


def _prepared(case: Case) -> protocol.PreparedCase:
    specs = {
        name: protocol.PreparedSpec(shape=spec.shape, stride=spec.stride, dtype=str(spec.dtype).removeprefix("torch."))
        for name, spec in case.specs.items()
    }
    return protocol.PreparedCase(shape=dict(case.shape), dtype=hardware.dtype_name(case.dtype), layout=case.layout, specs=specs)
