"""End every process that another left behind. Do not edit. Nothing but the standard library is imported here."""

import contextlib
import os
import signal
import time
from pathlib import Path

KILL_S = 60.0  # for all processes to be gone: a GPU is given back in their last moments
POLL_S = 0.002


def end_all(pid: int = 0) -> int:
    """Kill every descendant until none is left; the exit status of `pid`, as os.waitpid gives it."""
    status, deadline = 0, time.monotonic() + KILL_S
    while time.monotonic() < deadline:
        # Whose parent is killed becomes a child of this process, and is next. One that ended by itself is only waited for.
        try:
            ended, how = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        if ended:
            status = how if ended == pid else status
            continue
        for child in children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        time.sleep(POLL_S)
    return status


def children() -> list[int]:
    """The children of this process, those that have ended but were not waited for included."""
    mine, found = str(os.getpid()), []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                # pid (name) state parent ...; the name may hold spaces and brackets
                if Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()[1] == mine:
                    found.append(int(entry))
    return found
