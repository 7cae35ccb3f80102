"""The judge: five correctness gates, then the clock. Do not edit: it decides which kernels may be kept.

`cases` says what is tried, `compare` when an answer is right, `gates` runs them, `clock` measures, `verdict` sums up.

The candidate runs in another process: `isolated` is the judge's handle on it, `process` starts, asks and kills, `arena` is the
memory that both see, `protocol` what they say to each other. `warm` forks `worker`, which `sandbox` confines; `record` notes
what a kernel leaves to others, `repeat` is the worker's side of the clock,
`early` starts `warm`, `compilers` and `forks` compile ahead of the gates, `driver` the few calls of CUDA past PyTorch.
"""
