"""compute-sanitizer on a few edge cases: does the kernel touch memory that is not its own, do its threads race? Do not edit."""

import re
import tempfile
from pathlib import Path

import torch

from autokernel.judge import cases
from autokernel.judge.cases import Case
from autokernel.judge.watched import Unwatched, watch
from autokernel.ops import Operation

TOOLS = ("memcheck", "racecheck")
EDGES = 3  # of the operation's edges, the larger ones: sanitised code is a hundred times slower
TIMEOUT_S = 300.0
# racecheck's warnings are about what is no error on this hardware; its errors are read and write hazards.
SUMMARIES = {
    "memcheck": re.compile(r"^=+ ERROR SUMMARY: (\d+) error", re.MULTILINE),
    "racecheck": re.compile(r"^=+ RACECHECK SUMMARY: \d+ hazards? displayed \((\d+) errors?", re.MULTILINE),
}
_FIRST = re.compile(r"^=+ ((?:Invalid|Error|Race|Program hit|Potential|Misaligned)[^\n]*)", re.MULTILINE)


def sanitize(path: Path, operation: Operation, device: torch.device) -> tuple[str, bool]:
    """(what was found, whether it is a fault of the kernel).

    Nothing is held against the kernel where a tool is not installed or did not finish: then the text says so.
    """
    tried = edges(operation, device)
    said = []
    with tempfile.TemporaryDirectory(prefix="autokernel-sanitize-") as folder:
        for tool in TOOLS:
            try:
                # Without the cache every tensor is an allocation of its own, past whose end memcheck can see.
                printed = watch(
                    ("compute-sanitizer", "--tool", tool, "--target-processes", "all"),
                    path,
                    operation.name,
                    tried,
                    Path(folder),
                    TIMEOUT_S,
                    {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
                )
            except Unwatched as fault:
                return f"unmeasured ({fault})", False
            errors, first = summary(tool, printed)
            if errors is None:
                said.append(f"{tool} gave no summary")
            elif errors:
                return f"{tool}: {errors} errors, the first: {first or 'not described'}", True
            else:
                said.append(f"{tool}: 0 errors")
    return f"{', '.join(said)} in {len(tried)} cases", False


def edges(operation: Operation, device: torch.device) -> list[Case]:
    """The largest edges in each dtype, and one whose rows begin off 16 bytes."""
    largest = sorted(operation.edges, key=lambda shape: -operation.bytes(shape, 2))[:EDGES]
    tried = [Case("edge", shape, dtype) for dtype in cases.dtypes_checked(device) for shape in largest]
    return [*tried, Case("offset layout", operation.sweep_cpu[0], torch.float16, layout="offset")]


def summary(tool: str, printed: str) -> tuple[int | None, str]:
    """(errors, the first of them in the tool's words); None if the tool did not come to its summary.

    The kernel's process can print too, but only more errors, not fewer: all summaries are added.
    """
    counts = [int(found) for found in SUMMARIES[tool].findall(printed)]
    first = _FIRST.search(printed)
    return (sum(counts) if counts else None), first.group(1).strip() if first else ""
