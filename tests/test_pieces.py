"""Models that torch.export cannot capture: what is found in the graphs between the places where Python decides."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import reference
from autokernel import breakdown, profiling, state
from autokernel.capture import Capture, NotCapturable, call_of
from autokernel.pieces import Pieces, capture_or_pieces
from autokernel.state import Plan, Profile, Verification
from autokernel.substitute import observed, substitute

CPU = torch.device("cpu")
FILE = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.wide = nn.Linear(width, 3 * width, bias=False)
        self.narrow = nn.Linear(3 * width, width, bias=False)
        self.register_buffer("scale", torch.full((width,), 0.5))

    def forward(self, x):
        y = self.narrow(torch.tanh(self.wide(self.norm(x))))
        if y.abs().max() > 1e3:  # Python must wait for the GPU to know
            y = y * 0
        return x + y * self.scale


class Deciding(nn.Module):
    vocab_size = 32

    def __init__(self, width=16, n_layers=3):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(32, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(n_layers))
        self.head = nn.Linear(width, 32)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
"""
# The embedding and the head are called from the loop in which the graphs break: Dynamo leaves such a function to Python.
SITES = {f"layers.{n}.{part}" for n in range(3) for part in ("norm", "wide", "narrow")}
TOKENS = torch.arange(24).reshape(2, 12)


def deciding() -> nn.Module:
    scope: dict[str, Any] = {}
    exec(FILE, scope)
    model: nn.Module = scope["Deciding"]()
    return model.eval()


@pytest.fixture
def model() -> nn.Module:
    return deciding()


@pytest.fixture
def found(model: nn.Module) -> Pieces:
    pieces = capture_or_pieces(model, (TOKENS,), {})
    assert isinstance(pieces, Pieces)
    return pieces


def called(module: nn.Module, tokens: Tensor = TOKENS) -> Tensor:
    with torch.no_grad():
        result: Tensor = module(tokens)
    return result


def test_a_model_that_can_be_exported_is_one_graph() -> None:
    assert isinstance(capture_or_pieces(nn.Linear(4, 4).eval(), (torch.ones(2, 4),), {}), Capture)


def test_every_layer_has_its_own_regions_although_they_share_a_graph(found: Pieces) -> None:
    assert "data-dependent" in found.reason
    assert set(found.names.values()) == SITES
    shapes = {found.names[region]: call_of(region).shape for region in found.regions}
    assert (shapes["layers.2.wide"]["K"], shapes["layers.2.wide"]["N"]) == (16, 48)
    assert len({piece.code for piece in found.pieces}) < len(found.pieces)


def test_kernels_are_called_once_in_each_place_and_change_nothing(model: nn.Module, found: Pieces) -> None:
    kernels = {region: getattr(reference, region.operation) for region in found.regions}
    substitution = substitute(found, kernels)
    assert {site.name for site in substitution.sites} == SITES
    for forwards in (1, 2):
        assert torch.equal(called(substitution.module), called(model))
        substitution.check_called(forwards)
    substitution.restore()
    substitution.reset_counts()
    assert torch.equal(called(substitution.module), called(model))
    assert [site.calls for site in substitution.sites] == [0] * len(SITES)


def test_each_place_has_the_kernel_that_was_put_there(model: nn.Module, found: Pieces) -> None:
    """A kernel that gives nothing in one layer alone: the model's output is that without this layer's branch."""
    (region,) = [region for region, name in found.names.items() if name == "layers.1.narrow"]
    substitution = substitute(found, {region: lambda **arguments: torch.zeros_like(reference.matmul(**arguments))})
    result = called(substitution.module)
    nn.init.zeros_(model.layers[1].narrow.weight)  # type: ignore[union-attr,arg-type]
    assert torch.equal(result, called(model))


def test_the_weights_are_the_models_own(model: nn.Module, found: Pieces) -> None:
    substitution = substitute(found, {region: getattr(reference, region.operation) for region in found.regions})
    other = deciding()
    with torch.no_grad():
        for tensor in other.state_dict().values():
            tensor.mul_(0.7)
    model.load_state_dict(other.state_dict())
    assert torch.equal(called(substitution.module), called(other))
    substitution.check_called()


def test_another_shape_and_another_way_through_the_model_run_as_they_are(model: nn.Module, found: Pieces) -> None:
    substitution = substitute(found, {region: getattr(reference, region.operation) for region in found.regions})
    tokens = torch.arange(10).reshape(1, 10)
    assert torch.equal(called(substitution.module, tokens), called(model, tokens))
    assert sum(site.calls for site in substitution.sites) == 0
    with torch.no_grad():
        model.layers[0].narrow.weight.mul_(1e6)  # type: ignore[union-attr,operator]
    assert torch.equal(called(substitution.module), called(model))


def test_probes_see_each_region_once(model: nn.Module, found: Pieces) -> None:
    seen: list[str] = []
    names = found.names
    module = observed(found, {region: lambda *_, name=name: seen.append(name) for region, name in names.items()})
    with torch.no_grad():
        assert torch.equal(module(TOKENS), called(model))
    assert sorted(seen) == sorted(SITES)


def test_the_time_of_every_piece_is_owned_once(found: Pieces) -> None:
    owned = profiling.run_graph(found, (TOKENS,), {}, CPU)
    assert set(found.regions) <= set(owned)
    rows, unmatched, _ = breakdown.of_graph(found, owned, None)
    assert sum(row.share for row in (*rows, *unmatched)) == pytest.approx(1, abs=1e-6)
    assert {site for row in rows for site in row.sites} == SITES


def test_a_model_of_which_nothing_can_be_captured_says_both_reasons() -> None:
    class Hidden(nn.Module):
        @torch.compiler.disable
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if x.sum() > 0 else x

    with pytest.raises(NotCapturable, match=r"data-dependent.*; the 0 graphs between such places hold no known operation"):
        capture_or_pieces(Hidden().eval(), (torch.ones(2),), {})


def test_profile_extract_and_verify(stage: Any, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "deciding.py").write_text(FILE)
    arguments = ("--model", "deciding.py", "--class-name", "Deciding", "--input-shape", "2,12", "--dtype", "float16")
    done = stage("profile.py", *arguments)
    assert done.returncode == 0, done.stderr
    assert "captured: in " in done.stdout
    assert "not_captured_because: GuardOnDataDependentSymNode" in done.stdout
    assert stage("extract.py", "--top", "3").returncode == 0
    done = stage("verify.py", "--save", "taken")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "saved: nothing: apply() needs a model that is one graph" in done.stdout
    monkeypatch.setattr(state, "WORKSPACE", project / "workspace")
    assert state.load(Profile).graphs > 1
    assert len(state.load(Plan).targets) == 3
    verification = state.load(Verification)
    assert verification.correct
    assert verification.sites_replaced == verification.sites_found >= 7
