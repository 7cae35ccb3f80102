"""Every kernel that cheats is refused with a reason that names the fault; every honest one beside it passes."""

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from cheat_table import CHEATS, CHEATS_FOLDER, PASS, Cheat

from autokernel import hardware, kernels
from autokernel.errors import InputError
from autokernel.judge.isolated import Judge
from autokernel.judge.process import Budgets
from autokernel.judge.verdict import Options, Verdict, judge
from autokernel.results import Status

BUDGETS = Budgets(import_s=15, compile_s=25, run_s=8, total_s=120)
SEED = 20261
HONEST = sorted({(cheat.honest, cheat.gpu) for cheat in CHEATS} - {(c.honest, True) for c in CHEATS if not c.gpu})


@pytest.fixture(scope="module")
def session() -> Iterator[Judge]:
    with Judge(hardware.device(), BUDGETS) as judge_:
        yield judge_


def judged(session: Judge, file: str) -> Verdict:
    kernel = kernels.read(CHEATS_FOLDER / file)
    return judge(session, kernel, None, (), torch.float16, SEED, Options())


def marked(file: str, gpu: bool, value: object) -> object:
    return pytest.param(value, id=file.removesuffix(".py"), marks=[pytest.mark.gpu, pytest.mark.alone] if gpu else [])


def outcome(session: Judge, file: str) -> tuple[str, str]:
    """Status and reason; a file whose text alone shows that it is no kernel is refused as INVALID here."""
    try:
        verdict = judged(session, file)
    except InputError as fault:
        return Status.INVALID.value, str(fault)
    assert verdict.status is not None
    return verdict.status.value, verdict.reason


@pytest.mark.parametrize("cheat", [marked(c.file, c.gpu, c) for c in CHEATS if not c.target])
def test_a_cheat_is_refused_by_name(session: Judge, cheat: Cheat) -> None:
    status, reason = outcome(session, cheat.file)
    assert status in cheat.status, reason
    if status == PASS:
        assert cheat.note, "a cheat may pass only where the table says what holds instead"
    else:
        assert re.search(cheat.reason, reason, re.IGNORECASE), reason


@pytest.mark.parametrize("cheat", [marked(c.file, c.gpu, c) for c in CHEATS if c.target])
def test_a_kernel_of_an_easier_operation_does_not_answer_the_target(cheat: Cheat) -> None:
    try:
        named = kernels.read(CHEATS_FOLDER / cheat.file).operation.name
    except InputError as fault:
        named = str(fault)
    assert named != cheat.target


@pytest.mark.parametrize("file", [marked(file, gpu, file) for file, gpu in HONEST])
def test_its_honest_twin_passes(session: Judge, file: str) -> None:
    verdict = judged(session, file)
    assert (verdict.status, verdict.reason) == (Status.PASS, "")


def test_after_one_that_hangs_and_one_that_dies_an_honest_one_passes(session: Judge) -> None:
    short = replace(BUDGETS, run_s=2, compile_s=2)
    with Judge(hardware.device(), short) as other:
        for file, ends in (("26a_endless_loop.py", "TIMEOUT"), ("23c_os_exit.py", "CRASH")):
            assert judged(other, file).status is Status(ends)
        assert judged(other, "23a_prints_a_pass_honest.py").status is Status(PASS)
