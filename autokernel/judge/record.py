"""A record of what `kernel_fn` has others do for it: operators of torch, conversions out of torch, threads. Do not edit.

It is kept inside the worker, next to the candidate, so it is not proof against a candidate that sets out to break it; the
comparison of answers and the judge's own clock are. It catches what tempts: the library call that should be replaced.
"""

import _thread
import inspect
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.utils._python_dispatch as dispatch
from torch.overrides import _len_torch_function_stack
from torch.utils._python_dispatch import TorchDispatchMode

# Operators that make, view, copy, move or fill memory. Views are known by their schema and are not listed.
ALLOWED = frozenset(
    """
    empty empty_like empty_strided empty_permuted new_empty new_empty_strided zeros zeros_like new_zeros ones ones_like new_ones
    full full_like new_full scalar_tensor arange fill fill_ zero zero_ copy copy_ clone contiguous _to_copy lift_fresh
    set_ resize_ constant_pad_nd pin_memory _pin_memory is_pinned record_stream promote_types result_type can_cast
    lift_fresh_copy
    """.split()
)
# Ways out of torch: what is computed with them is in no record.
EXITS = ("numpy", "tolist", "item", "__array__", "__dlpack__", "__float__", "__int__", "__bool__", "__index__")
# Ways past the record. The context managers of `no_grad` and the like are none of them.
SWITCHES = (
    (dispatch, "_disable_current_modes"),
    (dispatch, "_disable_infra_mode"),
    (dispatch, "_pop_mode"),
    (dispatch, "_pop_mode_temporarily"),
    (torch._C, "_pop_torch_dispatch_stack"),
    (torch._C, "_unset_dispatch_mode"),
    (torch._C, "_DisableTorchDispatch"),
    (torch._C, "_ExcludeDispatchKeyGuard"),
    (torch._C, "_ForceDispatchKeyGuard"),
    (torch._C, "_AutoDispatchBelowADInplaceOrView"),
    (torch._C, "_RestorePythonTLSSnapshot"),
)
# What starts a thread, under all the names that it has in the versions of Python.
STARTS = (
    (_thread, "start_new_thread"),
    (_thread, "start_new"),
    (_thread, "start_joinable_thread"),
    (threading, "_start_new_thread"),
    (threading, "_start_joinable_thread"),
)


class Recorder(TorchDispatchMode):
    """What is noted while `listening`, that is during a call, by name. One for each worker: what it replaces stays replaced."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Otherwise the first operator that is seen imports torch._dynamo, which takes seconds and is never used.
        return False

    def __init__(self) -> None:
        super().__init__()
        self.listening = False
        self.operators: dict[str, None] = {}  # in the order in which they were first seen
        self.tampered = ""
        self.threads_started = 0
        self._threads_at_first = _thread._count()
        self._owner = threading.get_ident()
        for name in EXITS:
            if hasattr(torch.Tensor, name):
                setattr(torch.Tensor, name, self._noting(getattr(torch.Tensor, name), f"Tensor.{name}"))
        for holder, name in SWITCHES:
            if hasattr(holder, name):
                setattr(holder, name, self._flagging(getattr(holder, name), name))
        torch.compile = _no_compile
        for holder, name in STARTS:
            if hasattr(holder, name):
                setattr(holder, name, self._counting(getattr(holder, name)))

    def begin(self) -> None:
        """Forget the call before."""
        self.operators, self.tampered, self.threads_started = {}, "", 0

    def end(self) -> None:
        """Stop; to be called inside `with`, since leaving it is a way past the record too."""
        if not self.on_top():
            self.tampered = self.tampered or "left the record of torch operators switched off"
        self.listening = False

    def threads(self) -> int:
        """Threads of Python that the call started, or that were left behind before."""
        return max(self.threads_started, _thread._count() - self._threads_at_first)

    def on_top(self) -> bool:
        """Whether this is still the innermost mode; to be asked inside `with`."""
        return dispatch._get_current_dispatch_mode() is self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.listening and not _is_allowed(func):
            self.operators[str(func)] = None
        return func(*args, **(kwargs or {}))

    def _noting(self, real: Callable[..., Any], name: str) -> Callable[..., Any]:
        def noted(*arguments: Any, **options: Any) -> Any:
            if self.listening and threading.get_ident() == self._owner:
                self.operators[name] = None
            return real(*arguments, **options)

        return noted

    def _counting(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            if self.listening:
                self.threads_started += 1
            return real(*arguments, **options)

        return counted

    def _flagging(self, real: Any, name: str) -> Callable[..., Any]:
        def flagged(*arguments: Any, **options: Any) -> Any:
            if self.listening:
                self.tampered = self.tampered or f"called {name}, which switches off the record of torch operators"
            return real(*arguments, **options)

        return flagged


# PyTorch wraps this method of a subclass to keep torch.compile away from it, which imports all of torch.compile at the first
# call: seconds, in every worker.
Recorder.__torch_dispatch__ = inspect.unwrap(Recorder.__torch_dispatch__)  # type: ignore[method-assign]


def function_modes() -> int:
    """How many modes change what functions of torch do."""
    return _len_torch_function_stack()


def _no_compile(*arguments: Any, **options: Any) -> Any:
    raise PermissionError("torch.compile makes kernels of torch operators; a kernel file must bring its own")


@cache  # asked in timed calls, and the alias information is slow to read
def _is_allowed(operator: Any) -> bool:
    schema = operator._schema
    name = schema.name.removeprefix("aten::")
    if name in ALLOWED:
        return True
    # A view returns memory of its argument and writes to none.
    aliases = [value.alias_info for value in (*schema.arguments, *schema.returns)]
    writes = any(alias is not None and alias.is_write for alias in aliases)
    shares = any(value.alias_info is not None for value in schema.returns)
    return schema.name.startswith("aten::") and shares and not writes
