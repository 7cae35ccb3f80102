"""Compile Triton kernels in forks of this process, side by side, instead of in it. Do not edit."""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

from triton.runtime.jit import JITFunction

_compile: Callable[..., Any] | None = getattr(JITFunction, "_do_compile", None)  # None: this Triton calls it otherwise


@contextlib.contextmanager
def compiling(most: int) -> Iterator[None]:
    """Inside, a launch of what is not compiled yet only starts its compilation; in the end all of them are waited for.

    At most `most` forks run at once. What they compile is in Triton's cache on disk. A fork cannot use CUDA, and need not; it
    ends after its one compilation, and what goes wrong there, the next launch will meet again.
    """
    if _compile is None:
        yield
        return
    compile_here, begun, running = _compile, set(), 0

    def wait_for_one() -> None:
        nonlocal running
        with contextlib.suppress(ChildProcessError):  # somebody else has waited for it
            os.wait()
        running -= 1

    def elsewhere(function: Any, key: Any, *rest: Any) -> None:
        nonlocal running
        if (id(function), key) in begun:
            return
        begun.add((id(function), key))
        if running >= most:
            wait_for_one()
        if os.fork():
            running += 1
            return
        try:
            compile_here(function, key, *rest)
        finally:
            os._exit(0)

    JITFunction._do_compile = elsewhere
    try:
        yield
    finally:
        JITFunction._do_compile = compile_here
        while running > 0:
            wait_for_one()
