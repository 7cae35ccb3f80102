"""The judge: five correctness gates, then the clock. Do not edit: it decides which kernels may be kept.

`cases` says what is tried, `compare` when an answer is right, `gates` runs them, `clock` measures, `verdict` sums up.
"""
