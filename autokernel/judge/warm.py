"""A process that has imported torch and Triton but not touched CUDA, and forks workers. Do not edit.

    python -m autokernel.judge.warm DESCRIPTOR     as `isolated.Warm` starts it

A fork of it is ready in a fraction of the seconds that a fresh process needs. CUDA does not survive a fork, so the judge,
whose own process uses the GPU, cannot be what is forked. Each fork is a keeper, which forks the worker in turn: the keeper is
the parent of whatever the worker starts and leaves behind, kills all of it when the judge says so or is gone, and drains
what the worker prints, so that nobody ever waits for a pipe.
"""

import contextlib
import gc
import importlib
import os
import select
import shutil
import signal
import socket
import sys
import warnings

import triton

from autokernel import ops
from autokernel.judge import early, orphans, protocol, sandbox, worker
from autokernel.judge.protocol import Ended, Started

LOG_BYTES = 16 * 1024  # kept of what a worker prints: the last of it
# What a kernel file, or its first launch, imports; not every version of Triton has all of it.
LAUNCHED_WITH = (
    "triton.language",
    "triton.compiler.code_generator",
    "triton.experimental.gluon",
    "triton.tools.tensor_descriptor",
)


def serve(requests: socket.socket) -> None:
    """Fork a keeper for every request, until the judge is gone."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers are not waited for
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the judge's to handle
    requests.send(protocol.encode(protocol.Ready(token="")))
    while True:
        packet, descriptors, _, _ = socket.recv_fds(requests, early.LIMIT + 1, 3)
        if not packet:
            return
        spawn = protocol.decode(protocol.to_warm, packet)
        if os.fork() == 0:
            requests.close()
            status = 1
            try:
                _keep(spawn, descriptors)
                status = 0
            finally:
                os._exit(status)  # nothing of the warm process's own may run at exit
        for descriptor in descriptors:
            os.close(descriptor)


def _keep(spawn: protocol.Spawn, descriptors: list[int]) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    sandbox.die_with_parent(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda number, frame: orphans.end_all())
    sandbox.adopt_orphans()
    os.setsid()
    channel, control = socket.socket(fileno=descriptors[0]), socket.socket(fileno=descriptors[1])
    arena = descriptors[2] if spawn.arena_bytes else None
    log_out, log_in = os.pipe()
    pid = os.fork()
    if pid == 0:
        control.close()
        os.close(log_out)
        _become_worker(channel, arena, log_in, spawn)
    channel.close()
    os.close(log_in)
    if arena is not None:
        os.close(arena)
    log = bytearray()
    with contextlib.suppress(OSError):  # the judge may be gone already: then the poll says so
        control.send(protocol.encode(Started(pid=pid)))
    _watch(pid, control, log_out, log)
    left = len(orphans.children()) - (1 if _is_child(pid) else 0)
    status = orphans.end_all(pid)
    shutil.rmtree(spawn.scratch, ignore_errors=True)  # here, since the judge may be gone
    _drain(log_out, log)
    text = bytes(log).decode(errors="replace").replace("\0", " ")
    with contextlib.suppress(OSError):
        control.send(protocol.encode(Ended(status=status, log=text[-LOG_BYTES // 4 :], left=max(left, 0))))


def _become_worker(channel: socket.socket, arena: int | None, log: int, spawn: protocol.Spawn) -> None:
    status = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDONLY)
        for target, source in ((0, nothing), (1, log), (2, log)):
            os.dup2(source, target)
        kept = {0, 1, 2, channel.fileno(), *([] if arena is None else [arena])}
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            if descriptor not in kept:
                with contextlib.suppress(OSError):  # the listing's own descriptor is closed already
                    os.close(descriptor)
        worker.main(channel, arena, spawn)
        status = 0
    except BaseException:
        import traceback

        traceback.print_exc()
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _watch(pid: int, control: socket.socket, log_out: int, log: bytearray) -> None:
    """Until the worker has ended, or the judge says a word or is gone."""
    process = os.pidfd_open(pid)
    poll = select.poll()
    for descriptor in (process, control.fileno(), log_out):
        poll.register(descriptor, select.POLLIN)
    os.set_blocking(log_out, False)
    while True:
        ready = {descriptor for descriptor, _ in poll.poll()}
        if log_out in ready and not _drain(log_out, log):
            poll.unregister(log_out)
        if process in ready or control.fileno() in ready:
            return


def _drain(log_out: int, log: bytearray) -> bool:
    """Take what was printed; False when nobody can print any more."""
    for _ in range(64):  # a worker that never stops printing must not hold the keeper up
        try:
            data = os.read(log_out, 65536)
        except BlockingIOError:
            return True
        if not data:
            return False
        log += data
        del log[:-LOG_BYTES]
    return True


def _is_child(pid: int) -> bool:
    return pid in orphans.children()


def _know_triton() -> None:
    """Have the hash of Triton itself, half a second's work that its cache remembers, before workers are forked."""
    triton_key = getattr(triton.runtime.cache, "triton_key", None)  # it is not always there
    if triton_key is not None:
        triton_key()


def main() -> None:
    for name in LAUNCHED_WITH:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for name in ops.names():
        ops.get(name)
    if not triton.knobs.runtime.interpret:
        _know_triton()
    # Threads that torch's libraries start at import hold no lock that a worker, which has its own, would wait for.
    warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork", category=DeprecationWarning)
    gc.collect()
    gc.freeze()  # forks share what is there, untouched
    serve(socket.socket(fileno=int(sys.argv[1])))
    os._exit(0)  # what libraries say of their own end helps nobody


if __name__ == "__main__":
    main()
