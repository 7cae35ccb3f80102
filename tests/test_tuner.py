"""The tuner: how it reads a kernel, what it tries next, and that every choice of every starter computes the right thing."""

import itertools
import math
from pathlib import Path

import pytest
import test_kernels
import torch
from test_kernels import STARTERS, check, make_arguments

from autokernel import kernels, ops, tuner
from autokernel.errors import InputError
from autokernel.tuner import Attempt, Proposal, propose

KERNEL = """KERNEL_TYPE = "softmax"
TILE = 64  # tune: [16, 32, 64, 128, 256]; elements per program
WARPS = 4  # tune: [1, 2, 4, 8]
OWN = None  # tune: [None, 1, 2]
OTHER = 3
"""


def test_a_constant_has_its_choices_beside_it():
    tile, warps, own = tuner.tunables(KERNEL)
    assert (tile.name, tile.value, tile.choices) == ("TILE", 64, (16, 32, 64, 128, 256))
    assert (warps.name, warps.value) == ("WARPS", 4)
    assert (own.value, own.choices) == (None, (None, 1, 2))


def test_other_values_change_nothing_else():
    changed = tuner.with_values(KERNEL, {"TILE": 128, "OWN": 2})
    assert changed == KERNEL.replace("TILE = 64 ", "TILE = 128 ").replace("OWN = None", "OWN = 2")


@pytest.mark.parametrize(
    ("line", "clause"),
    [
        ("TILE = 64  # tune: 32, 64", "line 2 of the kernel is no tunable constant"),
        ("TILE = f()  # tune: [32, 64]", "line 2 of the kernel is no tunable constant"),
        ("    TILE = 64  # tune: [32, 64]", "line 2 of the kernel is no tunable constant"),
        ("TILE = 64  # tune: [32, 128]", "line 2 of the kernel sets TILE to 64, which is not among its choices"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(line, clause):
    with pytest.raises(InputError, match=clause):
        tuner.tunables(f"first\n{line}\n")


def test_the_first_proposals_change_one_constant_to_the_nearest_choice():
    proposal = propose(KERNEL, [Attempt(KERNEL, 1.0)])
    assert proposal == Proposal(tuner.with_values(KERNEL, {"TILE": 32}), "TILE 64 -> 32")


def test_a_kernel_without_tunable_constants_leaves_nothing_to_try():
    assert propose("OTHER = 3\n", []) is None


def test_every_change_of_one_constant_is_tried_before_two_are_changed():
    attempts = [Attempt(KERNEL, 1.0)]
    described = []
    for _ in range(4 + 3 + 2):
        proposal = propose(KERNEL, attempts)
        assert proposal is not None
        described.append(proposal.description)
        attempts.append(Attempt(proposal.text, 0.95))
    assert len(set(described)) == 9
    assert not any("," in description for description in described)
    proposal = propose(KERNEL, attempts)
    assert proposal is not None
    assert "," in proposal.description


def test_what_failed_alone_is_not_tried_with_something_else():
    attempts = [Attempt(KERNEL, 1.0)]
    for name, value in (("TILE", 16), ("TILE", 32), ("TILE", 128), ("TILE", 256), ("WARPS", 1), ("WARPS", 2)):
        attempts.append(Attempt(tuner.with_values(KERNEL, {name: value}), None))
    for name, value in (("WARPS", 8), ("OWN", 1), ("OWN", 2)):
        attempts.append(Attempt(tuner.with_values(KERNEL, {name: value}), 0.99))
    tried = []
    while (proposal := propose(KERNEL, attempts)) is not None:
        tried.append(proposal.description)
        attempts.append(Attempt(proposal.text, 0.9))
    assert sorted(tried) == ["WARPS 4 -> 8, OWN None -> 1", "WARPS 4 -> 8, OWN None -> 2"]


def test_what_was_learnt_of_an_earlier_version_is_used_for_the_next():
    """WARPS 8 was good with another TILE, so it comes first now, and a version of another text teaches nothing."""
    kept = tuner.with_values(KERNEL, {"TILE": 128})
    other = KERNEL.replace("OTHER = 3", "OTHER = 4")
    attempts = [
        Attempt(KERNEL, 1.0),
        Attempt(kept, 1.2),
        Attempt(tuner.with_values(KERNEL, {"WARPS": 8}), 1.15),
        *[Attempt(tuner.with_values(other, {"WARPS": value}), 9.0) for value in (1, 2)],
    ]
    proposal = propose(kept, attempts)
    assert proposal is not None
    assert proposal.description == "WARPS 4 -> 8"


def test_the_best_of_a_landscape_is_found_in_a_part_of_the_experiments():
    """Speed falls off from an optimum that is two changes at once away, some corners fail; all is 5 * 4 * 3 = 60 versions."""

    def speed(text: str) -> float | None:
        tile, warps, own = (constant.value for constant in tuner.tunables(text))
        if tile * warps > 1024:
            return None
        return math.exp(-0.1 * abs(math.log2(tile / 128)) - 0.2 * abs(math.log2(warps / 8)) + 0.05 * (own or 0))

    values = itertools.product((16, 32, 64, 128, 256), (1, 2, 4, 8), (None, 1, 2))
    texts = [tuner.with_values(KERNEL, dict(zip(("TILE", "WARPS", "OWN"), one, strict=True))) for one in values]
    optimum = max(speed(text) or 0.0 for text in texts)
    kept, best, attempts = KERNEL, speed(KERNEL) or 0.0, [Attempt(KERNEL, speed(KERNEL))]
    for _ in range(15):
        proposal = propose(kept, attempts)
        assert proposal is not None
        assert proposal.text not in {attempt.text for attempt in attempts}
        found = speed(proposal.text)
        attempts.append(Attempt(proposal.text, found))
        if found is not None and found > best:
            kept, best = proposal.text, found
    assert best == pytest.approx(optimum)


@pytest.mark.parametrize("name", STARTERS)
def test_a_starter_declares_what_the_tuner_may_vary(name):
    text = kernels.starter(name).read_text()
    constants = tuner.tunables(text)
    assert len(constants) >= 3
    assert tuner.with_values(text, {constant.name: constant.value for constant in constants}) == text


CONSTANTS = [(name, constant) for name in STARTERS for constant in tuner.tunables(kernels.starter(name).read_text())]


@pytest.mark.parametrize(("name", "constant"), CONSTANTS, ids=[f"{name}-{constant.name}" for name, constant in CONSTANTS])
def test_every_choice_is_right(name: str, constant: tuner.Tunable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = kernels.starter(name).read_text()
    for value in (constant.choices[0], constant.choices[-1]):
        path = tmp_path / f"{name}_{value}.py"
        path.write_text(tuner.with_values(text, {constant.name: value}))
        function = kernels.load(path).function
        monkeypatch.setattr(test_kernels, "starter", lambda _, function=function: function)
        for shape in (*ops.get(name).sweep_cpu[:2], ops.get(name).edges[-1]):
            check(name, make_arguments(name, shape, torch.float16))
