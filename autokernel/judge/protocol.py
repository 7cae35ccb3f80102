"""What parent and worker say to each other: plain structs, msgpack, one packet each, of bounded size. Do not edit.

Nothing that a worker sends is ever unpickled or evaluated: it is decoded as one of the structs below or refused. The values
of tensors never travel in a message; they lie in the arena (see `arena`), at the places that a message names.
"""

from typing import Any

import msgspec

from autokernel.judge.early import LIMIT

KEPT_BYTES = 64 << 20  # the longest answer that is kept, to be read again after the next call


class Struct(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag=True):
    """A message or a part of one."""


class Placed(Struct, frozen=True):
    """A tensor in the arena: its storage begins at `place` and has `nbytes`; strides and offset are in elements."""

    place: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Argument(Struct, frozen=True):
    """One argument of `kernel_fn`: a tensor, or a plain value."""

    name: str
    tensor: Placed | None = None
    value: Any = None


class Landing(Struct, frozen=True):
    """Where an answer goes: its logical values, in order, if it is no longer than `capacity` bytes."""

    place: int
    capacity: int


# --- parent to warm process


class Spawn(Struct, frozen=True):
    """Fork a worker. Descriptors come with it: its channel, its keeper's, and the arena's file if there is one."""

    environment: dict[str, str]
    scratch: str  # removed when the worker has ended
    folder: str  # its working folder, in there
    writable: tuple[str, ...]  # folders that it may write to
    hidden: tuple[str, ...]  # paths that it may not read
    level: int  # of confinement, see `sandbox`
    arena_bytes: int  # of the file; 0: none, the arena is on the GPU


# --- keeper to parent


class Started(Struct, frozen=True):
    """The worker runs."""

    pid: int


class Ended(Struct, frozen=True):
    """The worker and all that it started are gone."""

    status: int  # as os.waitpid gives it
    log: str  # the last of what it printed
    left: int  # processes that it left behind


# --- parent to worker


class Request(Struct, frozen=True):
    """`token` must come back with the reply."""

    token: str


class Attach(Request, frozen=True):
    """Open the arena: the memory behind a CUDA IPC handle, in place of the one that was open; or the file, if there is none."""

    device: str
    size: int
    handle: bytes | None = None


class Detach(Request, frozen=True):
    """Let go of the arena, which is about to be another."""


class Load(Request, frozen=True):
    """Import the kernel file."""

    path: str
    module: str
    operation: str


class Call(Request, frozen=True):
    """Call `kernel_fn` once, with a record of the operators that it calls.

    `reuse` passes the very tensor objects of the call before, whose values are now others. The answer of the call before is
    read again, into `earlier`.
    """

    arguments: tuple[Argument, ...]
    landing: Landing
    earlier: Landing | None = None
    reuse: bool = False


class Prepare(Request, frozen=True):
    """Call `kernel_fn` on arguments of these cases, made by the worker itself, so that what they need is compiled."""

    operation: str
    device: str
    cases: tuple["PreparedCase", ...]


class PreparedSpec(Struct, frozen=True):
    """An `inputs.Spec`."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str


class PreparedCase(Struct, frozen=True):
    """A `cases.Case`, without what matters only to its answer."""

    shape: dict[str, Any]
    dtype: str
    layout: str
    specs: dict[str, PreparedSpec]


class Time(Request, frozen=True):
    """Call `kernel_fn` `repeats` times, in one place: before call i the values of set i (modulo) are copied there.

    Each call is enclosed by events; its answer goes to slot i (modulo), right after. `flush_bytes` are written before each
    call, if any. `graph` captures the call into a CUDA graph first, and times replays.
    """

    arguments: tuple[Argument, ...]
    sets: tuple[tuple[int, ...], ...]  # for each set, the places of its tensors, in the order of `arguments`
    repeats: int
    flush_bytes: int
    graph: bool
    recorded: bool  # keep the record, as in any other call
    slots: tuple[Landing, ...]


# --- worker to parent


class Reply(Struct, frozen=True):
    token: str


class Ready(Reply, frozen=True):
    """Done. `note` says how the worker is confined, after Attach."""

    note: str = ""


class Form(Struct, frozen=True):
    """What an answer is, besides its values."""

    type_name: str
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    dtype: str = ""
    device: str = ""
    layout: str = ""
    shares_input: str = ""  # the argument whose memory it is
    fault: str = ""  # anything else that a plain tensor is not
    landed: bool = False


class Answered(Reply, frozen=True):
    """`kernel_fn` returned."""

    form: Form
    operators: tuple[str, ...] = ()  # that do work and are not the kernel's own
    threads: int = 0  # started in the call, or left from before
    tampered: str = ""  # what was done to the record
    earlier_landed: bool = False


class Timed(Reply, frozen=True):
    """Times by the worker's events. `form` is that of the last answer; `fault` says why there are no times."""

    times_us: tuple[float, ...]
    form: Form | None
    peak_bytes: int  # allocated at most during one call, beyond what was before
    operators: tuple[str, ...] = ()
    threads: int = 0
    tampered: str = ""
    fault: str = ""


class Raised(Reply, frozen=True):
    """Something was raised. `by_kernel` is False where the worker itself could not do what it was asked."""

    type_name: str
    text: str
    by_kernel: bool


class Misfit(Reply, frozen=True):
    """The file is no kernel of this operation."""

    text: str


ToWorker = Attach | Detach | Load | Call | Prepare | Time
ToParent = Ready | Answered | Timed | Raised | Misfit
FromKeeper = Started | Ended

_encoder = msgspec.msgpack.Encoder()
to_worker = msgspec.msgpack.Decoder(ToWorker)
to_parent = msgspec.msgpack.Decoder(ToParent)
from_keeper = msgspec.msgpack.Decoder(FromKeeper)
to_warm = msgspec.msgpack.Decoder(Spawn)


class BadMessage(Exception):
    """A packet is none of the messages that are expected."""


def encode(message: Struct) -> bytes:
    data = _encoder.encode(message)
    if len(data) > LIMIT:
        raise ValueError(f"a {type(message).__name__} of {len(data)} bytes is longer than a packet")
    return data


def decode(decoder: msgspec.msgpack.Decoder[Any], data: bytes) -> Any:
    if len(data) > LIMIT:
        raise BadMessage("a packet is too long")
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise BadMessage("a packet is none of the judge's messages") from None
