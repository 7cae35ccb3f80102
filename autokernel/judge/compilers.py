"""Compile a candidate's kernels in several processes side by side, before the gates need them. Do not edit."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

from autokernel import hardware
from autokernel.judge import protocol
from autokernel.judge.cases import Case
from autokernel.judge.process import Budgets, WorkerFault, load, new_token
from autokernel.kernels import KernelFile
from autokernel.results import Status

if TYPE_CHECKING:
    from autokernel.judge.isolated import Judge

MOST_COMPILERS = 8  # each needs a CUDA context: half a gigabyte, and more of them are not sooner there
ROOM = 8  # what is larger than this part of a compiler's share of the GPU is left for the gates to compile


def precompile(judge: "Judge", kernel: KernelFile, cases: Sequence[Case], budgets: Budgets) -> None:
    """Call the kernel for each case once, in workers that share its cache and are thrown away.

    What goes wrong there is left for the gates to find, and to say in one sentence; but WorkerFault if no process comes to an
    end within its budget: the gates would only wait as long again.
    """
    count = max(1, min(MOST_COMPILERS, len(os.sched_getaffinity(0)) - 1))
    largest = torch.cuda.get_device_properties(judge.device).total_memory / (ROOM * count)
    small = [case for case in cases if kernel.operation.bytes(case.shape, case.dtype.itemsize) < largest]

    def compile_some(number: int) -> WorkerFault | None:
        process = judge.process(kernel.sha256, budgets.total_s)
        try:
            load(process, kernel, budgets)
            request = protocol.Prepare(
                token=new_token(),
                operation=kernel.operation.name,
                device=str(judge.device),
                cases=tuple(_prepared(case) for case in small[number::count]),
            )
            process.ask(request, budgets.compile_s, "the kernel, called for the first time,")
        except WorkerFault as fault:
            return fault
        finally:
            process.close()
        return None

    with ThreadPoolExecutor(count) as pool:
        faults = list(pool.map(compile_some, range(count)))
    first = faults[0]
    if first is not None and all(fault is not None and fault.status is Status.TIMEOUT for fault in faults):
        raise first


def _prepared(case: Case) -> protocol.PreparedCase:
    specs = {
        name: protocol.PreparedSpec(shape=spec.shape, stride=spec.stride, dtype=str(spec.dtype).removeprefix("torch."))
        for name, spec in case.specs.items()
    }
    return protocol.PreparedCase(shape=dict(case.shape), dtype=hardware.dtype_name(case.dtype), layout=case.layout, specs=specs)
