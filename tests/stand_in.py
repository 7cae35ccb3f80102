"""orchestrate.py as its user runs it, but with a clock of its own: a kernel is as fast as its text says (`# speed 1.3`).

    python stand_in.py real|quick ARGUMENTS OF ORCHESTRATE

`real`: the five gates decide whether a kernel is correct; `quick`: its text does (`# wrong`). The model is not verified.
"""

import hashlib
import re
import sys
import time
from typing import Any

import msgspec
import torch

import orchestrate
from autokernel import cli, kernels, lanes, pipeline, state, trial
from autokernel.judge import cases, verdict
from autokernel.judge.gates import GATES, GateResult
from autokernel.judge.verdict import Verdict
from autokernel.results import Row, Status

BASELINE_US = 100.0
NOISE = 0.01


def speed_of(text: bytes) -> float:
    found = re.findall(rb"# speed ([\d.]+)", text)
    return float(found[-1]) if found else 1.0


def quick_verdict(session: Any, kernel: kernels.KernelFile, target: state.Target, incumbent: Any, screen: bool) -> Verdict:
    time.sleep(0.05)
    timed = cases.timed_case(kernel.operation, target, torch.float16, torch.device("cpu"))
    found = Verdict(kernel, target, timed, {name: GateResult(name) for name in GATES}, False, incumbent)
    wrong = b"# wrong" in kernel.text
    found.refuse(Status.FAIL if wrong else Status.PASS, "smoke: it says so itself" if wrong else "")
    return found


def row_of(found: Verdict, *arguments: Any) -> Row:
    row = verdict.row_of(found, *arguments)
    if row.correctness is not Status.PASS:
        return row
    speed = speed_of(found.kernel.text)
    row = msgspec.structs.replace(
        row,
        latency_us=BASELINE_US / speed,
        baseline_us=BASELINE_US,
        speedup_vs_pytorch=speed,
        speedup_low=speed * (1 - NOISE),
        speedup_high=speed * (1 + NOISE),
    )
    if found.incumbent is None:
        return row
    over = speed / speed_of(found.incumbent.text)
    return msgspec.structs.replace(
        row,
        incumbent_sha256=hashlib.sha256(found.incumbent.text).hexdigest(),
        speedup_vs_incumbent=over,
        incumbent_low=over * (1 - NOISE),
        incumbent_high=over * (1 + NOISE),
    )


class NoJudge:
    def __init__(self, device: torch.device) -> None:
        self.device = device

    def close(self) -> None:
        pass


def main() -> None:
    mode, *arguments = sys.argv[1:]
    trial.row_of = row_of  # type: ignore[attr-defined]
    pipeline.verify = lambda: True
    lanes.SCRIPT = (__file__, mode)  # type: ignore[attr-defined]
    torch.cuda.device_count = lambda: 0
    lanes._check_gpus = lambda gpus: None
    if mode == "quick":
        trial.judged = quick_verdict
        trial.Judge = NoJudge  # type: ignore[misc,assignment]
    cli.run_stage(lambda _: orchestrate.main(arguments))


if __name__ == "__main__":
    main()
