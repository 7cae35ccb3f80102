"""autokernel.apply on what verify.py --save wrote: the same outputs, the model's own weights, clear refusals."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from plans import EXACT, plan_for, source, write_kernel
from torch import Tensor, nn

import autokernel
import verify
from autokernel import models, results, state
from autokernel.errors import InputError
from autokernel.optimized import MANIFEST, Applied


@pytest.fixture(autouse=True)
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "workspace"
    folder.mkdir()
    monkeypatch.setattr(state, "WORKSPACE", folder)
    monkeypatch.setattr(results, "path", lambda: tmp_path / "results.tsv")
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What verify.py --save writes for GPT-2, with PyTorch's own operations as kernels."""
    plan_for(source())
    assert verify.main(["--save", str(tmp_path / "optimized")]) == 0
    return tmp_path / "optimized"


@pytest.fixture
def model() -> nn.Module:
    return models.load(source()).model


def tokens(length: int = 16, seed: int = 3) -> Tensor:
    return torch.randint(0, 503, (1, length), generator=torch.Generator().manual_seed(seed))


def close(ours: Tensor, theirs: Tensor) -> bool:
    return torch.allclose(ours.float(), theirs.float(), rtol=1e-2, atol=1e-2)


def test_three_lines_in_another_program(folder: Path, model: nn.Module) -> None:
    fast = autokernel.apply(model, tokens(), folder)
    output = fast(tokens(seed=4))
    assert close(output, model(tokens(seed=4)))
    assert fast.sites
    assert all(site.calls == 1 for site in fast.sites)
    assert fast.fallbacks == 0
    manifest = msgspec.json.decode((folder / MANIFEST).read_bytes())
    assert sum(len(kernel["sites"]) for kernel in manifest["kernels"]) == len(fast.sites)
    assert {f"{kernel['name']}.py" for kernel in manifest["kernels"]} == {p.name for p in (folder / "kernels").iterdir()}
    assert "Verification: PASS" in (folder / "report.md").read_text()


def test_the_starters_under_a_compiler(tmp_path: Path, model: nn.Module) -> None:
    plan = plan_for(source(), lambda target: target.operation in ("layernorm", "matmul"))
    for target in plan.targets:
        write_kernel(state.WORKSPACE / f"{target.name}.py", target.operation)
    assert verify.main(["--save", str(tmp_path / "o")]) == 0
    fast = autokernel.apply(model, tokens(), tmp_path / "o")
    compiled = torch.compile(fast, backend="aot_eager", fullgraph=True)
    assert close(compiled(tokens(seed=5)), model(tokens(seed=5)))
    assert all(site.calls == 1 for site in fast.sites)  # in the compiled graph, not beside it


@pytest.mark.parametrize("form", [lambda x: (x,), lambda x: [x], lambda x: {"tokens": x}], ids=["tuple", "list", "mapping"])
def test_forms_of_example_inputs(folder: Path, model: nn.Module, form: Callable[[Tensor], Any]) -> None:
    example = form(tokens())
    if isinstance(example, dict):
        name = next(iter(vars(model.__class__)["forward"].__annotations__))
        example = {name: tokens()}
    fast = autokernel.apply(model, example, folder)
    output = fast(**example) if isinstance(example, dict) else fast(*example)
    assert close(output, model(tokens()))
    assert fast.fallbacks == 0


def test_another_shape_is_answered_by_the_model(folder: Path, model: nn.Module) -> None:
    fast = autokernel.apply(model, tokens(), folder)
    assert torch.equal(fast(tokens(9)), model(tokens(9)))
    assert fast.fallbacks == 1
    assert all(site.calls == 0 for site in fast.sites)


def test_under_no_grad_and_inference_mode(folder: Path, model: nn.Module) -> None:
    fast = autokernel.apply(model, tokens(), folder)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert close(fast(tokens()), model(tokens()))
    assert not fast(tokens()).requires_grad


def test_the_weights_are_the_models_own(folder: Path, model: nn.Module) -> None:
    fast = autokernel.apply(model, tokens(), folder)
    assert list(fast.state_dict()) == list(model.state_dict())
    assert [id(p) for p in fast.parameters()] == [id(p) for p in model.parameters()]
    before = fast(tokens())
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})
    assert close(fast(tokens()), model(tokens()))
    assert not torch.equal(fast(tokens()), before)
    fast.load_state_dict({name: value * 2 for name, value in fast.state_dict().items()})
    assert close(fast(tokens()), before)


def test_weights_that_are_other_tensors_are_refused(folder: Path, model: nn.Module) -> None:
    fast = autokernel.apply(model, tokens(), folder)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    with pytest.raises(InputError, match=r"weights were replaced by other tensors: call autokernel\.apply again"):
        fast(tokens())


def test_training_and_gradients_are_refused(folder: Path, model: nn.Module) -> None:
    fast = autokernel.apply(model, tokens(), folder)
    fast.train()
    with pytest.raises(InputError, match=r"in training mode, .*: call eval\(\)"):
        fast(tokens())
    fast.eval()
    fast(tokens())
    with pytest.raises(InputError, match=r"call autokernel\.apply again"):
        fast.double()
    model.train()
    with pytest.raises(InputError, match=r"in training mode, .*: call model\.eval\(\) first"):
        autokernel.apply(model, tokens(), folder)


def test_an_input_with_a_gradient_is_refused() -> None:
    model = nn.Linear(3, 3).eval()
    fast = Applied(model, model, (), ((torch.ones(2, 3),), {}))
    with pytest.raises(InputError, match="an input requires a gradient"):
        fast(torch.ones(2, 3, requires_grad=True))
    with torch.no_grad():
        fast(torch.ones(2, 3, requires_grad=True))


def test_a_model_that_does_not_match_is_refused(folder: Path) -> None:
    other = models.load(msgspec.structs.replace(source(), model_args={**source().model_args, "n_layers": 3})).model
    with pytest.raises(InputError, match=r"makes the call of kernel_\w+ in 7 places, and .* was made for 5: give the model"):
        autokernel.apply(other, tokens(), folder)
    with pytest.raises(InputError, match=r"in 0 places"):
        autokernel.apply(models.load(source()).model, tokens(12), folder)


def spoilt(text: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / MANIFEST).write_text(text)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda folder: (folder / MANIFEST).unlink(),
            r"holds no optimized\.json: make the folder with `uv run verify\.py --save",
        ),
        (spoilt("{"), r"optimized\.json is damaged"),
        (lambda folder: next((folder / "kernels").iterdir()).open("a").write("# x\n"), "is not the kernel that was verified"),
        (lambda folder: next((folder / "kernels").iterdir()).unlink(), "there is no kernel file"),
    ],
    ids=["no manifest", "damaged", "another kernel", "no kernel"],
)
def test_a_folder_that_cannot_be_used(folder: Path, model: nn.Module, spoil: Callable[[Path], Any], message: str) -> None:
    spoil(folder)
    with pytest.raises(InputError, match=message):
        autokernel.apply(model, tokens(), folder)


def test_example_inputs_of_no_use(folder: Path, model: nn.Module) -> None:
    with pytest.raises(InputError, match="example_inputs is a int: give a tensor"):
        autokernel.apply(model, 3, folder)


def test_saving_over_something_else_is_refused_before_anything_is_done(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("precious")
    with pytest.raises(InputError, match="notes holds something else than optimised kernels"):
        verify.main(["--save", str(tmp_path / "notes")])  # there is no plan either: that would be the next sentence
    assert (tmp_path / "notes" / "mine.txt").read_text() == "precious"


def test_saving_again_replaces_the_kernels(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_for(source(), lambda target: target.operation == "layernorm")
    capsys.readouterr()
    assert verify.main(["--save", str(folder)]) == 0
    assert re.search(rf"^saved: {folder} \({len(plan.targets)} kernels\)$", capsys.readouterr().out, re.MULTILINE)
    assert {path.stem for path in (folder / "kernels").iterdir()} == {target.name for target in plan.targets}


def test_a_wrong_model_saves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = next(t.name for t in plan_for(source()).targets if t.operation == "layernorm")
    plan_for(source(), **{wrong: EXACT + " * 1.1"})
    assert verify.main(["--save", str(tmp_path / "o")]) == 1
    assert "saved: nothing: the model is not right" in capsys.readouterr().out
    assert not (tmp_path / "o").exists()
