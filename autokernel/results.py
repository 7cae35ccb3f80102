"""results.tsv: one row for every experiment, appended under a lock, never rewritten.

Tab-separated, a header, one line a row; a tab, newline or backslash inside a text is escaped as \\t, \\n, \\\\, and a leading
quotation mark as \\", so that any reader of tab-separated files sees the same rows. Imports no stage.
"""

import contextlib
import enum
import json
import math
import os
import re
from collections.abc import Collection, Iterator
from datetime import datetime, timezone
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

import filelock
import msgspec

from autokernel import cli, state
from autokernel.errors import InputError

if TYPE_CHECKING:
    import pandas

UNMEASURED = "unmeasured"

LOCK_TIMEOUT_S = 60.0


class Status(str, enum.Enum):
    """The verdict on a kernel. Only PASS is a success."""

    PASS = "PASS"
    FAIL = "FAIL"  # a wrong or a forbidden output
    CRASH = "CRASH"  # it raised, ran out of memory or died
    TIMEOUT = "TIMEOUT"
    INVALID = "INVALID"  # it broke a rule, or the measurement is at fault
    SCREENED = "SCREENED"  # timed briefly, no faster than the version to beat; the gates were not run

    def __str__(self) -> str:
        return self.value


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One experiment; the order of fields is the order of columns. None is a figure that was not measured."""

    experiment: int = 0  # assigned by `append`
    tag: str = ""
    kernel_type: str
    throughput_tflops: float | None = None
    latency_us: float | None = None
    pct_peak: float | None = None
    speedup_vs_pytorch: float | None = None
    correctness: Status
    peak_vram_mb: float | None = None
    description: str = ""
    target: str = ""  # name in plan.json, "" for a standard shape
    dtype: str
    shape: dict[str, Any]
    speedup_low: float | None = None
    speedup_high: float | None = None
    baseline_us: float | None = None
    bottleneck: str = UNMEASURED
    reason: str = ""  # why it is not a PASS
    kernel_sha256: str
    harness_sha256: str
    gpu: str
    torch: str
    triton: str
    time: str = msgspec.field(default_factory=_now)  # ISO 8601, UTC
    latency_low_us: float | None = None  # the 95% interval of latency_us
    latency_high_us: float | None = None
    graph_us: float | None = None  # replayed in a CUDA graph
    launch_us: float | None = None  # what an eager call costs on top of that
    allow_torch: bool = False  # judged with --allow-torch: torch operators may do the work
    isolation: str = UNMEASURED  # what kept the kernel apart from its judge
    seconds: float | None = None  # wall time of the judgement
    incumbent_sha256: str = ""  # the kernel file that was timed in turn with it, if any
    speedup_vs_incumbent: float | None = None
    incumbent_low: float | None = None  # the 95% interval of speedup_vs_incumbent
    incumbent_high: float | None = None


COLUMNS: tuple[str, ...] = Row.__struct_fields__
FIGURES: frozenset[str] = frozenset(name for name, kind in get_type_hints(Row).items() if kind == (float | None))
FLAGS: frozenset[str] = frozenset(name for name, kind in get_type_hints(Row).items() if kind is bool)
_HEADER = "\t".join(COLUMNS)


def path() -> Path:
    """Where results.tsv lies."""
    return state.ROOT / "results.tsv"


def append(row: Row) -> int:
    """Add the row, with the next experiment number unless it has one, which is returned. Safe for many processes at once.

    InputError if the file has other columns, or if another process holds the lock for more than a minute.
    """
    with _locked():
        return _append_locked(row)


def content() -> bytes:
    """The file as it is."""
    with _locked():
        return path().read_bytes() if path().exists() else b""


def take_back(known: bytes, others: Collection[str] = ()) -> bytes | None:
    """Have the file as it was when `content` gave `known`, and rows that were added since for the targets `others`.

    For a file that an agent has written to. Returns what it was like, or None if there was nothing to take back.
    """
    with _locked():
        now = path().read_bytes() if path().exists() else b""
        added = now[len(known) :] if now.startswith(known) else now
        rightful = [line for line in added.splitlines(keepends=True) if _target_of(line) in others and line not in known]
        wanted = known + b"".join(rightful)
        if now == wanted:
            return None
        temporary = path().with_suffix(".restored")
        temporary.write_bytes(wanted)
        os.replace(temporary, path())
    return now


def _target_of(line: bytes) -> str:
    fields = line.rstrip(b"\n").split(b"\t")
    return fields[COLUMNS.index("target")].decode(errors="replace") if len(fields) == len(COLUMNS) else ""


def reserve() -> int:
    """The next experiment number, for a row yet to come, with the folder workspace/experiments/<number>."""
    with _locked():
        number = next_number()
        (state.WORKSPACE / "experiments" / str(number)).mkdir(parents=True)
    return number


def next_number() -> int:
    """The number that the next experiment will have, unless another process is faster."""
    return 1 + max((*_numbers(_text().split("\n")), *reserved()), default=0)


def reserved() -> list[int]:
    """The numbers that have a folder, in order."""
    folder = state.WORKSPACE / "experiments"
    names = (entry.name for entry in folder.iterdir()) if folder.is_dir() else ()
    return sorted(int(name) for name in names if re.fullmatch(r"[1-9]\d*", name))


@contextlib.contextmanager
def _locked() -> Iterator[None]:
    state.WORKSPACE.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(state.WORKSPACE / ".results.lock")
    try:
        lock.acquire(timeout=LOCK_TIMEOUT_S)
    except filelock.Timeout:
        raise InputError(
            f"another process holds the lock of {path().name}: end it, or wait for it, and run the command again"
        ) from None
    try:
        yield
    finally:
        lock.release()


def _append_locked(row: Row) -> int:
    text = _text()
    lines = text.split("\n")
    if _HEADER.startswith(text):  # no file, an empty one, or a crash while the header was written
        prefix = _HEADER[len(text) :] + "\n"
    else:
        _check_header(lines[0])
        # After a crash the last line has no end: it stays as it is, and the new row begins a line of its own.
        prefix = "" if text.endswith("\n") else "\n"
    taken = set(_numbers(lines))
    if row.experiment in taken:
        raise ValueError(f"experiment {row.experiment} has its row already")
    experiment = row.experiment or 1 + max(taken.union(reserved()), default=0)
    line = "\t".join(_write_field(name, getattr(row, name)) for name in COLUMNS[1:])
    with path().open("ab") as file:
        file.write(f"{prefix}{experiment}\t{line}\n".encode(errors="replace"))
        file.flush()
        os.fsync(file.fileno())
    return experiment


def _numbers(lines: list[str]) -> Iterator[int]:
    found = (re.match(r"(\d+)\t", line) for line in lines[1:])
    return (int(match.group(1)) for match in found if match)


def _text() -> str:
    # Decoded by hand: reading as text would turn a lone carriage return into the end of a line.
    return path().read_bytes().decode(errors="replace") if path().exists() else ""


def _check_header(line: str) -> None:
    if line != _HEADER:
        raise InputError(
            f"{path().name} has other columns than {len(COLUMNS)} from {COLUMNS[0]} to {COLUMNS[-1]}, "
            f"so nothing was read or written: rename it (mv {path().name} results.old.tsv) and run the command again"
        )


def rows() -> list[Row]:
    """All rows in the order of the file; a line that a crash left incomplete is named on standard error and left out."""
    return list(_rows())


def _rows() -> Iterator[Row]:
    text = _text()
    if _HEADER.startswith(text):
        return
    header, *lines = text.split("\n")
    _check_header(header)
    for number, line in enumerate(lines, start=2):
        if not line:
            continue
        try:
            yield _read_row(line)
        except (ValueError, msgspec.ValidationError) as fault:
            cli.note(f"warning: line {number} of {path().name} is incomplete or damaged and is left out ({fault})")


@lru_cache(maxsize=1 << 16)  # lines are never rewritten, and a night reads them again and again
def _read_row(line: str) -> Row:
    fields = line.split("\t")
    if len(fields) != len(COLUMNS):
        raise ValueError(f"{len(fields)} fields, not {len(COLUMNS)}")
    return msgspec.convert({name: _read_field(name, field) for name, field in zip(COLUMNS, fields, strict=True)}, Row)


def read() -> "pandas.DataFrame":
    """The rows as a table: figures are floats and NaN where unmeasured, `shape` is JSON text, other texts are unescaped."""
    import pandas  # here, for it takes longer to import than a row to append

    records = [
        {**msgspec.structs.asdict(row), "correctness": str(row.correctness), "shape": _json(row.shape)} for row in _rows()
    ]
    table = pandas.DataFrame.from_records(records, columns=list(COLUMNS))
    return table.astype({"experiment": "int64", **dict.fromkeys(FIGURES, "float64"), **dict.fromkeys(FLAGS, "bool")})


def last_for(sha256: str, target: str | None = None) -> Row | None:
    """The newest row of the kernel file with this hash, for this target if one is named."""
    found = [row for row in _rows() if row.kernel_sha256 == sha256 and target in (None, row.target)]
    return found[-1] if found else None


def _json(shape: dict[str, Any]) -> str:
    return json.dumps(shape, separators=(",", ":"))


def _write_field(name: str, value: Any) -> str:
    if name in FIGURES:
        measured = value is not None and math.isfinite(value)
        return str(float(f"{value:.6g}")) if measured else UNMEASURED
    if name in FLAGS:
        return "yes" if value else "no"
    if name == "shape":
        return _escape(_json(value))
    return _escape(str(value))


def _read_field(name: str, text: str) -> Any:
    if name in FIGURES:
        return None if text == UNMEASURED else float(text)
    if name in FLAGS:
        if text not in ("yes", "no"):
            raise ValueError(f"{name} is {text!r}, neither yes nor no")
        return text == "yes"
    if name == "experiment":
        return int(text)
    return json.loads(_unescape(text)) if name == "shape" else _unescape(text)


_ESCAPES = {"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r"}
_UNESCAPES = {escaped: plain for plain, escaped in _ESCAPES.items()} | {'\\"': '"'}


def _escape(text: str) -> str:
    escaped = re.sub(r"[\\\t\n\r]", lambda found: _ESCAPES[found.group()], text)
    # A reader that honours quotation marks would take everything up to the next one for one field.
    return f"\\{escaped}" if escaped.startswith('"') else escaped


def _unescape(text: str) -> str:
    return re.sub(r"\\.", lambda found: _UNESCAPES.get(found.group(), found.group()), text)
