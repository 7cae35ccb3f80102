"""What a worker may not do, asked of the Linux kernel before the candidate is imported. Do not edit. Imports no torch.

Without root this can be enforced, where the kernel has Landlock (5.13 and later; network 6.7, signals 6.12):
- it writes only to its own folders (and to the devices of the GPU), so neither results.tsv nor the plan, the harness, /tmp or
  /dev/shm are in its reach;
- it cannot read the golden answers;
- it cannot look into the memory of a process outside (Landlock denies it what ptrace would be denied);
- it opens no TCP connection and sends no signal to a process outside.
And on every kernel: it gains no privileges, leaves no core file, writes no file above FILE_BYTES, is killed with its parent,
and keeps no capability of root but those over files.

What remains: a worker runs as the same user. Without Landlock it can write what that user can write. With it, it can still
change modes and times of files, use UDP and abstract sockets (CUDA's sharing of memory needs those), and read other files.
"""

import contextlib
import ctypes
import os
import resource
import stat
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

FILE_BYTES = 2 << 30

# Levels of confinement: each gives up what the one before may have broken.
STRICT, LENIENT, OPEN = range(3)

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on every architecture
_VERSION = 1  # LANDLOCK_CREATE_RULESET_VERSION
_PATH_BENEATH = 1  # LANDLOCK_RULE_PATH_BENEATH

_WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 1, 1 << 2, 1 << 3
_REMOVE_DIR, _REMOVE_FILE = 1 << 4, 1 << 5
_MAKE_CHAR, _MAKE_DIR, _MAKE_REG, _MAKE_SOCK, _MAKE_FIFO, _MAKE_BLOCK, _MAKE_SYM = (1 << bit for bit in range(6, 13))
_REFER, _TRUNCATE, _IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15  # since versions 2, 3 and 5
_SINCE = {_REFER: 2, _TRUNCATE: 3, _IOCTL_DEV: 5}
_IN_A_FILE = _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV  # the rights that a rule on a file may hold
_CHANGES = _WRITE_FILE | _REMOVE_DIR | _REMOVE_FILE | _MAKE_DIR | _MAKE_REG | _MAKE_SOCK | _MAKE_FIFO | _MAKE_SYM
_BIND_TCP, _CONNECT_TCP = 1, 2  # since version 4
_SCOPE_SIGNAL = 2  # since version 6

_PDEATHSIG, _DUMPABLE, _SUBREAPER, _NO_NEW_PRIVS, _CAPBSET_DROP = 1, 4, 36, 38, 24
_CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH, _LAST_CAP = 1, 2, 40

HARMLESS_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
GPU_DEVICES = ("nvidia*", "dxg", "nvidia-caps", "nvidia-caps-imex-channels")  # dxg: WSL
SECRET_DEVICES = ("mem", "kmem", "port", "kvm", "kmsg")  # readable with root's capabilities over files

_libc = ctypes.CDLL(None, use_errno=True)


def landlock_version() -> int:
    """The kernel's version of Landlock; 0: it has none, or it is switched off."""
    return max(_libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(_VERSION)), 0)


def prctl(option: int, value: int) -> None:
    """OSError if the kernel refuses."""
    zero = ctypes.c_ulong(0)
    if _libc.prctl(ctypes.c_int(option), ctypes.c_ulong(value), zero, zero, zero):
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def die_with_parent(signal_number: int) -> None:
    """Have the kernel send this signal when the parent ends."""
    prctl(_PDEATHSIG, signal_number)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent has ended."""
    prctl(_SUBREAPER, 1)


def hide_memory() -> None:
    """Close this process's memory to others of the same user; root is not stopped by it."""
    prctl(_DUMPABLE, 0)


def enter(writable: Iterable[str], hidden: Iterable[str], level: int) -> str:
    """Confine this process and all that it starts, for good; returns what is in force, for people to read."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
    prctl(_NO_NEW_PRIVS, 1)
    said = []
    if level == STRICT and os.geteuid() == 0:
        _drop_capabilities()
        said.append("no capabilities of root")
    version = landlock_version()
    if level == OPEN or not version:
        why = "not used, CUDA did not start within it" if version else "not in this kernel"
        return ", ".join(["separate process", *said, f"Landlock {why}: it can write wherever this user can"])
    _enter_landlock(version, [Path(path) for path in writable], [Path(path) for path in hidden], level)
    said.append(f"Landlock {version} (no writes outside its folders{' and /dev/shm' * (level == LENIENT)}")
    parts = ["golden answers hidden"] * (level == STRICT) + ["no TCP"] * (version >= 4) + ["no signals out"] * (version >= 6)
    return ", ".join(["separate process", *said, *parts]) + ")"


def _drop_capabilities() -> None:
    """Keep those over files alone: a root without CAP_SYS_PTRACE cannot read its parent's memory."""
    kept = (1 << _CAP_DAC_OVERRIDE) | (1 << _CAP_DAC_READ_SEARCH)
    for capability in range(_LAST_CAP + 1):
        if not kept >> capability & 1:
            # EINVAL: older kernels have fewer of them.
            with contextlib.suppress(OSError):
                prctl(_CAPBSET_DROP, capability)
    header = struct.pack("=Ii", 0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
    data = struct.pack("=6I", kept, kept, 0, 0, 0, 0)  # effective, permitted, inheritable; low words, then high ones
    if _libc.capset(ctypes.c_char_p(header), ctypes.c_char_p(data)):
        raise OSError(ctypes.get_errno(), "capset")


def _enter_landlock(version: int, writable: list[Path], hidden: list[Path], level: int) -> None:
    handled = _CHANGES | _MAKE_CHAR | _MAKE_BLOCK | sum(right for right, since in _SINCE.items() if version >= since)
    if level == STRICT:
        handled |= _READ_FILE
    # struct landlock_ruleset_attr: handled_access_fs, handled_access_net, scoped; older kernels know a shorter one.
    words = [handled]
    if version >= 4:
        words.append(_BIND_TCP | _CONNECT_TCP)
    if version >= 6:
        words.append(_SCOPE_SIGNAL)
    attributes = struct.pack(f"={len(words)}Q", *words)
    ruleset = _libc.syscall(_CREATE_RULESET, ctypes.c_char_p(attributes), ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0))
    if ruleset < 0:
        raise OSError(ctypes.get_errno(), "landlock_create_ruleset")
    try:
        for path in writable:
            _allow(ruleset, path, (_CHANGES | _READ_FILE | _REFER | _TRUNCATE) & handled)
        if level == LENIENT:
            _allow(ruleset, Path("/dev/shm"), (_CHANGES | _TRUNCATE) & handled)
        # A thread's name and the like are set by writing to files here.
        _allow(ruleset, Path("/proc/self"), (_WRITE_FILE | _READ_FILE | _TRUNCATE) & handled)
        for path in _devices():
            _allow(ruleset, path, (_WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV) & handled)
        if level == STRICT:
            for path in _all_but([*hidden, Path("/dev")]):
                _allow(ruleset, path, _READ_FILE)
            for path in _readable_devices():
                _allow(ruleset, path, _READ_FILE)
        if _libc.syscall(_RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint32(0)):
            raise OSError(ctypes.get_errno(), "landlock_restrict_self")
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: Path, rights: int) -> None:
    try:
        # O_NOFOLLOW only on the last part: what a link points to is allowed, or not, where it really lies.
        link = 0 if path == Path("/proc/self") else os.O_NOFOLLOW
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC | link)
    except OSError:
        return  # gone, or out of this user's reach anyway
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISLNK(mode):
            return
        if not stat.S_ISDIR(mode):
            rights &= _IN_A_FILE
        rule = struct.pack("=Qi", rights, descriptor)  # struct landlock_path_beneath_attr, packed
        refused = rights and _libc.syscall(
            _ADD_RULE, ctypes.c_int(ruleset), ctypes.c_int(_PATH_BENEATH), ctypes.c_char_p(rule), ctypes.c_uint32(0)
        )
        if refused:
            raise OSError(ctypes.get_errno(), f"landlock_add_rule({path})")
    finally:
        os.close(descriptor)


def _all_but(hidden: list[Path]) -> Iterator[Path]:
    """Paths that together hold every file that there is now, but those hidden: rules can only allow."""
    hidden = [path.resolve() for path in hidden]
    on_the_way = {parent for path in hidden for parent in path.parents}
    for folder in on_the_way:
        if not folder.is_dir():
            continue
        for child in folder.iterdir():
            if child not in hidden and child not in on_the_way:
                yield child


def _devices() -> Iterator[Path]:
    yield from (Path("/dev") / name for name in HARMLESS_DEVICES)
    for pattern in GPU_DEVICES:
        yield from Path("/dev").glob(pattern)


def _readable_devices() -> Iterator[Path]:
    for path in Path("/dev").iterdir():
        mode = path.lstat().st_mode
        if not (stat.S_ISBLK(mode) or stat.S_ISLNK(mode) or path.name in SECRET_DEVICES):
            yield path
