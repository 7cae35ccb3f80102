"""What the stages of AutoKernel share. Nothing in here imports a stage."""

import os

import torch

# Triton reads this once, when it is itself imported: without a GPU its interpreter runs the kernels.
# This is the only place that sets it. `device_count` asks the driver without creating a CUDA context.
if torch.cuda.device_count() == 0:
    os.environ.setdefault("TRITON_INTERPRET", "1")
