"""What the stages of AutoKernel share. Nothing in here imports a stage."""

import os
from typing import Any

import torch

# Triton reads this once, when it is itself imported: without a GPU its interpreter runs the kernels.
# This is the only place that sets it. `device_count` asks the driver without creating a CUDA context.
if torch.cuda.device_count() == 0:
    os.environ.setdefault("TRITON_INTERPRET", "1")


def apply(model: torch.nn.Module, example_inputs: Any, folder: Any) -> Any:
    """A module that computes what `model` does, with the kernels that `verify.py --save` wrote to `folder`.

    See `autokernel.optimized.apply`.
    """
    from autokernel import optimized  # here, because most stages do not need it

    return optimized.apply(model, example_inputs, folder)
