"""The files in workspace/ that carry state from one stage to the next: typed, validated, written atomically.

Each file is one frozen struct. A damaged file stops the stage with the file's name, the JSON path of the fault and the
command that rebuilds it. Imports no other part of AutoKernel but the errors.
"""

import os
import tempfile
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import msgspec

from autokernel.errors import InputError

ROOT = Path(__file__).resolve().parent.parent
WORKSPACE = ROOT / "workspace"


class State(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A file in workspace/. `FILE` is its name, `MADE_BY` the command that makes it."""

    FILE: ClassVar[str]
    MADE_BY: ClassVar[str]


class Versions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a figure was measured with."""

    python: str
    torch: str
    triton: str
    cuda: str  # "" without a GPU
    driver: str  # "" without a GPU


class Ceilings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What this machine reached, as measured by prepare.py."""

    copy_gb_s: float  # device-to-device copy, bytes read and written
    read_gb_s: float  # sum of a large tensor, bytes read
    matmul_tflops: dict[str, float]  # by dtype name


class Baseline(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The time of one operation in PyTorch eager."""

    operation: str
    shape: dict[str, Any]
    dtype: str
    latency_us: float


class Machine(State, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """machine.json: what this machine is and what it reaches."""

    FILE: ClassVar[str] = "machine.json"
    MADE_BY: ClassVar[str] = "uv run prepare.py"

    device: str  # "cuda" or "cpu"
    name: str  # as the driver reports it; the processor's name on a CPU
    compute_capability: tuple[int, int] | None
    memory_gb: float
    l2_bytes: int
    versions: Versions
    ceilings: Ceilings | None  # None: unmeasured, no GPU
    baselines: tuple[Baseline, ...]  # empty: unmeasured, no GPU


class ModelSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How to load the model again, exactly as it was given on the command line."""

    model: str | None = None  # path of a Python file
    module: str | None = None  # importable module, e.g. transformers
    class_name: str
    pretrained: str | None = None  # name or local directory
    config_json: str | None = None  # path of a config: random weights
    model_args: dict[str, Any] = {}
    input_shape: tuple[int, ...]
    dtype: str = "float16"
    device: str = "cuda"


class TensorSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One tensor argument of a call: strides are in elements, dtype is a name such as float16."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str


class KernelTime(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A GPU kernel (on a CPU: an operator) by its name."""

    name: str
    count: int
    time_us: float


class ProfileRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All places of the model that make the same call: one operation, shape, strides and dtype."""

    operation: str
    sites: tuple[str, ...]  # dotted module paths, one for each call
    count: int
    shape: dict[str, Any]
    tensors: dict[str, TensorSpec]  # by argument name, in the order of the signature
    dtype: str
    time_us: float  # of all calls together
    share: float  # of the total, 0 to 1
    flops: int  # of one call
    bytes: int  # of one call
    bound: str  # "compute", "memory", or "unmeasured" on a CPU
    roofline_us: float | None  # of all calls together; None: unmeasured
    pct_roofline: float | None
    saved_us: float | None  # time_us - roofline_us, at least 0
    kernels: tuple[KernelTime, ...]


class UnmatchedRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Time outside every recognised operation, by kernel name."""

    operator: str  # the ATen operator of the graph node, e.g. aten.embedding.default
    sites: tuple[str, ...]
    count: int
    time_us: float
    share: float
    kernels: tuple[KernelTime, ...]


class Profile(State, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """profile.json: where the time of one forward pass goes. Shares of rows and unmatched rows sum to 1."""

    FILE: ClassVar[str] = "profile.json"
    MADE_BY: ClassVar[str] = "uv run profile.py --model models/gpt2.py --class-name GPT2 --input-shape 1,1024"

    source: ModelSource
    parameters: int
    gpu: str  # "cpu" without one
    versions: Versions
    clock: str  # "gpu kernels" or "cpu operators"
    captured: bool  # False: nothing of the model could be exported; rows are operators without sites
    graphs: int = 1  # more where it is captured in pieces, 0 where it is not
    not_captured_because: str  # why it is not one graph; "" if it is
    total_us: float  # sum of all rows, one forward pass
    wall_us: float  # of the unmodified model, eager, one forward pass
    rows: tuple[ProfileRow, ...]  # by time, largest first
    unmatched: tuple[UnmatchedRow, ...]


class Target(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A kernel to write: workspace/<name>.py."""

    name: str  # kernel_<operation>_<rank>
    rank: int
    operation: str
    sites: tuple[str, ...]
    count: int
    shape: dict[str, Any]
    tensors: dict[str, TensorSpec]
    dtype: str
    time_us: float
    share: float
    roofline_us: float | None
    saved_us: float | None
    bound: str


class Plan(State, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """plan.json: the targets, by the time that could be saved, and the one in kernel.py."""

    FILE: ClassVar[str] = "plan.json"
    MADE_BY: ClassVar[str] = "uv run extract.py"

    source: ModelSource
    gpu: str
    total_us: float
    targets: tuple[Target, ...]
    current: str | None = None  # name of the target that `orchestrate.py next` put into kernel.py


class Replacement(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One kernel in the model: where it was put, and how often it was called there."""

    target: str
    kernel_sha256: str
    verdict: str  # of its last row in results.tsv, or "not judged"
    sites: tuple[str, ...]
    calls: tuple[int, ...]  # one for each site, in one forward pass


class Way(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One way to run the model, and how long a forward pass takes."""

    name: str  # such as "eager in a CUDA graph"
    ours: bool  # with kernels in it
    ms: float | None = None  # median; None: unmeasured
    kernels: tuple[str, ...] = ()  # the targets whose kernels are in it
    dropped: dict[str, str] = {}  # target -> why its kernel is not, although it is correct
    note: str = ""  # why it is unmeasured


class Verification(State, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """verification.json: the model with the kernels in it against the model without."""

    FILE: ClassVar[str] = "verification.json"
    MADE_BY: ClassVar[str] = "uv run verify.py"

    source: ModelSource
    gpu: str
    versions: Versions
    correct: bool
    reason: str  # why not; "" when correct
    error: float  # ||output - exact|| / ||exact||, of the model with the kernels
    error_without: float  # the same of the unmodified model
    error_limit: float
    exact_dtype: str  # the precision of the exact output
    replacements: tuple[Replacement, ...]
    left_out: dict[str, str]  # target -> why it was not put in
    sites_found: int
    sites_replaced: int
    ways: tuple[Way, ...] = ()  # empty: unmeasured
    theirs: str = ""  # the fastest way of PyTorch's
    ours: str = ""  # the fastest with kernels; "" when none of them makes the model faster
    speedup: float | None = None  # of `ours` over `theirs`
    speedup_low: float | None = None  # 95% bootstrap interval
    speedup_high: float | None = None


AnyState = TypeVar("AnyState", bound=State)


def path_of(kind: type[State]) -> Path:
    """Where the file of this kind lies."""
    return WORKSPACE / kind.FILE


def load(kind: type[AnyState]) -> AnyState:
    """Read and validate a file of workspace/; InputError if it is missing or damaged."""
    path = path_of(kind)
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        raise InputError(f"{_shown(path)} is missing: run `{kind.MADE_BY}` first") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as fault:
        raise InputError(f"{_shown(path)} is damaged ({fault}): run `{kind.MADE_BY}` to make it again") from None


def load_if_there(kind: type[AnyState]) -> AnyState | None:
    """The same, but None when there is no such file; a damaged one is still an InputError."""
    return load(kind) if path_of(kind).exists() else None


def save(state: State) -> Path:
    """Write a file of workspace/ so that a reader sees the old one or the new one, never half of it."""
    path = path_of(type(state))
    write_text(path, msgspec.json.format(msgspec.json.encode(state), indent=2).decode() + "\n")
    return path


def write_text(path: Path, text: str) -> None:
    """Write to a temporary file in the same folder, then rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _shown(path: Path) -> str:
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)
