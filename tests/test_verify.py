"""verify.py on tiny models: what passes, what fails and is named, the proof of calls, and bad input."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from conftest import Stage
from plans import (
    EXACT,
    MODELS,
    NAN,
    ONE_PERCENT,
    TINY_GPT2,
    WRITES,
    WRONG_DTYPE,
    WRONG_SHAPE,
    first,
    plan_for,
    source,
    write_kernel,
)

import verify
from autokernel import diagnosis, kernels, models, results, state, verification
from autokernel.capture import capture
from autokernel.errors import InputError
from autokernel.results import Row, Status
from autokernel.state import ModelSource, Plan, Verification


@pytest.fixture(autouse=True)
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """workspace/, kernel.py and results.tsv in a folder of the test's own."""
    folder = tmp_path / "workspace"
    folder.mkdir()
    monkeypatch.setattr(state, "WORKSPACE", folder)
    monkeypatch.setattr(kernels, "KERNEL", tmp_path / "kernel.py")
    monkeypatch.setattr(results, "path", lambda: tmp_path / "results.tsv")
    return folder


def judged(name: str, status: Status) -> None:
    """A row of results.tsv for the kernel file of a target."""
    path = state.WORKSPACE / f"{name}.py"
    results.append(
        Row(
            kernel_type="matmul",
            correctness=status,
            dtype="float16",
            shape={},
            kernel_sha256=kernels.sha256_of(path),
            harness_sha256="",
            gpu="cpu",
            torch="",
            triton="",
        )
    )


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, str]]:
    """The stage's exit status and its `key: value` lines."""
    status = verify.main(arguments)
    said = capsys.readouterr().out
    return status, dict(line.split(": ", 1) for line in said.splitlines())


@pytest.mark.parametrize("name", MODELS)
def test_every_kernel_in_every_model(name: str, capsys: pytest.CaptureFixture[str]):
    plan = plan_for(source(name))
    status, said = run(capsys)
    assert (status, said["correctness"]) == (0, "PASS")
    sites = sum(target.count for target in plan.targets)
    assert int(said["sites_found"]) == int(said["sites_replaced"]) == sites
    assert 0 < float(said["error"]) <= float(said["error_limit"])
    assert said["speedup_end_to_end"] == said["fastest_ours"] == said["end_to_end"] == "unmeasured"
    verified = state.load(Verification)
    assert verified.correct
    assert verified.exact_dtype == "float32"
    assert verified.speedup is None
    for target, replaced in zip(plan.targets, verified.replacements, strict=True):
        assert replaced.target == target.name
        assert replaced.sites == target.sites
        assert replaced.calls == (1,) * target.count
        assert replaced.verdict == "not judged"
        assert said[target.name].startswith(f"not judged, sites {target.count}, calls {target.count} in")


def test_float32_is_compared_with_float64(capsys: pytest.CaptureFixture[str]):
    plan_for(source(dtype="float32"))
    assert run(capsys)[0] == 0
    verified = state.load(Verification)
    assert verified.exact_dtype == "float64"
    assert verified.error < 1e-5


def test_the_starters_in_a_model(capsys: pytest.CaptureFixture[str]):
    plan = plan_for(source())
    for target in plan.targets:
        text = kernels.starter(target.operation).read_text()
        (state.WORKSPACE / f"{target.name}.py").write_text(text)
    status, said = run(capsys)
    assert (status, said["correctness"]) == (0, "PASS")
    assert int(said["sites_replaced"]) == sum(target.count for target in plan.targets)


def test_a_slightly_wrong_kernel_is_found_and_named(capsys: pytest.CaptureFixture[str]):
    wrong = first(source(), "layernorm")
    plan = plan_for(source(), **{wrong: ONE_PERCENT})
    assert verify.main([]) == 1
    quiet = capsys.readouterr()
    assert "correctness: FAIL" in quiet.out
    assert re.search(r"reason: the error \S+ is above the limit", quiet.out)
    assert "--diagnose" in quiet.err
    assert not state.load(Verification).correct
    status, said = run(capsys, "--diagnose")
    assert status == 1
    assert said["guilty"] == wrong
    errors = {target.name: float(said[f"error_without_{target.name}"]) for target in plan.targets}
    assert min(errors, key=errors.__getitem__) == wrong
    assert errors[wrong] <= float(said["error_limit"])
    for line in (value for key, value in said.items() if key.startswith("site ")):
        name, isolated, pytorch = re.match(r"(\w+), isolated (\S+), PyTorch (\S+), accumulated", line).groups()
        assert float(pytorch) < 2e-3
        assert (float(isolated) > 5e-3) is (name == wrong), line


def test_diagnosis_of_a_correct_model_blames_nobody(capsys: pytest.CaptureFixture[str]):
    plan_for(source())
    status, said = run(capsys, "--diagnose")
    assert (status, said["guilty"]) == (0, "none")
    assert sum(key.startswith("site ") for key in said) == int(said["sites_replaced"])


def test_nan_is_a_failure_and_its_kernel_is_named(capsys: pytest.CaptureFixture[str]):
    wrong = first(source(), "layernorm")
    plan_for(source(), **{wrong: NAN})
    status, said = run(capsys, "--diagnose")
    assert (status, said["correctness"], said["error"], said["guilty"]) == (1, "FAIL", "inf", wrong)
    assert said["reason"].startswith("the output has NaN")
    assert state.load(Verification).error == sys.float_info.max


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (WRONG_SHAPE, r"raised RuntimeError|gives .* where the model needs"),
        (WRONG_DTYPE, r"gives .* float64 on cpu where the model needs .* float16"),
        ("raise ValueError('too wide')", r"raised ValueError \(too wide\)"),
        (WRITES, "a kernel wrote into a parameter or buffer"),
    ],
    ids=["shape", "dtype", "raises", "writes"],
)
def test_a_kernel_that_cannot_stand_there_fails(body: str, reason: str, capsys: pytest.CaptureFixture[str]):
    wrong = first(source(), "matmul")
    plan_for(source(), lambda target: target.name == wrong, **{wrong: body})
    status, said = run(capsys, "--diagnose")
    assert (status, said["correctness"]) == (1, "FAIL")
    assert re.search(reason, said["reason"])
    if "wrote" not in reason:
        assert said["reason"].startswith(f"{wrong} at ")
    assert not state.load(Verification).correct


def test_a_site_that_is_never_called_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def untouched(*arguments: Any) -> Any:
        substitution = original(*arguments)
        substitution.restore()  # the module computes without the kernels
        return substitution

    original = verify.substitute
    monkeypatch.setattr(verify, "substitute", untouched)
    plan_for(source())
    status, said = run(capsys)
    assert (status, said["correctness"]) == (1, "FAIL")
    assert "was put into the model but never called" in said["reason"]


def test_the_last_verdict_decides_whether_a_kernel_is_used(capsys: pytest.CaptureFixture[str]):
    plan = plan_for(source())
    for target in plan.targets[:3]:  # each file must have a text, and so a hash, of its own
        write_kernel(state.WORKSPACE / f"{target.name}.py", target.operation, f"name = {target.name!r}; {EXACT}")
    good, bad, mended = (target.name for target in plan.targets[:3])
    judged(good, Status.PASS)
    judged(bad, Status.PASS)
    judged(bad, Status.TIMEOUT)
    judged(mended, Status.FAIL)
    judged(mended, Status.PASS)
    status, said = run(capsys)
    assert status == 0
    assert said["left_out"] == f"{bad}: the last verdict on {bad}.py is TIMEOUT"
    verified = state.load(Verification)
    assert verified.left_out == {bad: f"the last verdict on {bad}.py is TIMEOUT"}
    verdicts = {one.target: one.verdict for one in verified.replacements}
    assert bad not in verdicts
    assert (verdicts[good], verdicts[mended]) == ("PASS", "PASS")
    assert set(verdicts.values()) == {"PASS", "not judged"}
    assert verified.sites_found - verified.sites_replaced == next(t.count for t in plan.targets if t.name == bad)


def test_no_kernel_left_is_no_pass(capsys: pytest.CaptureFixture[str]):
    name = first(source(), "matmul")
    plan_for(source(), lambda target: target.name == name)
    judged(name, Status.FAIL)
    status, said = run(capsys)
    assert (status, said["correctness"], said["sites_replaced"]) == (1, "FAIL", "0")
    assert said["reason"] == "no kernel was put into the model"


def test_the_current_target_is_in_kernel_py(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    name = first(source(), "layernorm")
    plan = plan_for(source(), lambda target: target.operation == "layernorm", **{name: ONE_PERCENT})
    state.save(msgspec.structs.replace(plan, current=name))
    mine = write_kernel(tmp_path / "kernel.py", "layernorm")
    assert run(capsys)[0] == 0
    assert state.load(Verification).replacements[0].kernel_sha256 == kernels.sha256_of(mine)


def test_another_model_leaves_out_what_it_does_not_call(capsys: pytest.CaptureFixture[str]):
    plan = plan_for(source("gpt2"))
    smaller = msgspec.structs.replace(source("gpt2"), model_args={**TINY_GPT2, "vocab_size": 300})
    state.save(msgspec.structs.replace(plan, source=smaller))
    status, said = run(capsys)
    assert status == 0
    left_out = state.load(Verification).left_out
    assert set(left_out.values()) == {"this model makes no such call"}
    heads = [target.name for target in plan.targets if target.shape.get("N") == TINY_GPT2["vocab_size"]]
    assert list(left_out) == heads
    assert said["left_out"] == f"{heads[0]}: this model makes no such call"


def test_the_model_on_the_command_line_wins(capsys: pytest.CaptureFixture[str]):
    plan_for(source("gpt2"))
    line = [
        "--model",
        "models/gpt2.py",
        "--class-name",
        "GPT2",
        "--model-args",
        "tiny",
        "--input-shape",
        "1,24",
        "--device",
        "cpu",
    ]
    with pytest.raises(InputError, match=r"makes none of the calls of plan\.json"):
        verify.main(line)
    line[line.index("1,24")] = "1,16"
    assert run(capsys, *line)[0] == 0


def broken(text: str | None) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.unlink() if text is None else path.write_text(text)

    return write


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (broken(None), r"there is no kernel file .*kernel_layernorm_\d+\.py"),
        (broken("KERNEL_TYPE = 'layernorm'\n"), "defines no function kernel_fn"),
        (broken("KERNEL_TYPE = 'no_such'\n"), "no operation"),
        (broken("def kernel_fn(:\n"), "syntax error in line 1"),
        (broken("KERNEL_TYPE = 'softmax'\nkernel_fn = print\n"), "is a kernel for softmax, but .* is a layernorm"),
    ],
    ids=["missing", "no kernel_fn", "unknown type", "syntax", "other type"],
)
def test_bad_kernel_files_are_bad_input(spoil: Callable[[Path], None], message: str):
    name = first(source(), "layernorm")
    plan_for(source(), lambda target: target.name == name)
    spoil(state.WORKSPACE / f"{name}.py")
    with pytest.raises(InputError, match=message):
        verify.main([])


@pytest.mark.parametrize("text", [None, "{", '{"source": 3}'], ids=["missing", "cut off", "wrong type"])
def test_a_missing_or_damaged_plan_is_bad_input(text: str | None):
    if text is not None:
        state.path_of(Plan).write_text(text)
    with pytest.raises(InputError, match=r"plan\.json is (missing|damaged).*extract\.py"):
        verify.main([])


def test_a_model_that_cannot_be_captured_is_bad_input(tmp_path: Path):
    file = tmp_path / "branching.py"
    file.write_text(
        "import torch\n\n\nclass Branching(torch.nn.Module):\n"
        "    vocab_size = 9\n\n"
        "    def __init__(self):\n        super().__init__()\n        self.weight = torch.nn.Parameter(torch.ones(1))\n\n"
        "    def forward(self, x):\n        return x * self.weight if int(x.sum()) % 2 else x + self.weight\n"
    )
    plan = plan_for(source())
    other = ModelSource(model=str(file), class_name="Branching", input_shape=(1, 8), dtype="float16", device="cpu")
    state.save(msgspec.structs.replace(plan, source=other))
    with pytest.raises(InputError, match=r"Branching cannot be captured, so no kernel can be put into it \(.+\)"):
        verify.main([])


def test_bfloat16_needs_a_gpu():
    plan_for(source(dtype="bfloat16"))
    with pytest.raises(InputError, match="kernels cannot be run in bfloat16 on a CPU: verify in float16"):
        verify.main([])


def test_too_little_memory_is_bad_input(monkeypatch: pytest.MonkeyPatch):
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    plan_for(source())
    monkeypatch.setattr(verification, "exact_outputs", full)
    with pytest.raises(InputError, match="verifying GPT2 at 1,16 needs more memory than there is: use a smaller"):
        verify.main([])


def test_as_a_command(stage: Stage, project: Path, workspace: Path):
    plan = plan_for(source(), lambda target: target.operation == "layernorm")
    for file in workspace.iterdir():
        (project / "workspace" / file.name).write_bytes(file.read_bytes())
    done = stage("verify.py", "--diagnose")
    assert done.returncode == 0, done.stderr
    assert "correctness: PASS\n" in done.stdout
    assert f"{plan.targets[0].name}: not judged" in done.stdout
    saved = project / "workspace" / "verification.json"
    assert f"verification: {saved}" in done.stdout
    assert json.loads(saved.read_text())["correct"] is True

    (project / "workspace" / "plan.json").write_text("{")
    damaged = stage("verify.py")
    assert (damaged.returncode, damaged.stdout) == (2, "")
    assert re.fullmatch(
        r"error: workspace/plan\.json is damaged \(.*\): run `uv run extract\.py` to make it again\n", damaged.stderr
    )


@pytest.mark.gpu
def test_timed_on_a_gpu(capsys: pytest.CaptureFixture[str]):
    plan_for(msgspec.structs.replace(source(), device="cuda"))
    status, said = run(capsys)
    assert status == 0
    for key in ("eager_ms", "eager_graph_ms", "torch_compile_ms", "torch_compile_reduce_overhead_ms"):
        assert float(said[key]) > 0
    if said["fastest_ours"].startswith("none"):  # it may well be that no kernel helps a model this small
        assert said["speedup_end_to_end"] == "unmeasured"
    else:
        assert float(said["speedup_low"]) <= float(said["speedup_end_to_end"]) <= float(said["speedup_high"])
        assert said["end_to_end"] in ("faster", "slower", "no measurable difference")


def test_guilt_needs_an_error_above_the_limit():
    loaded = models.load(source())
    batch = models.inputs(loaded, 1)
    captured = capture(loaded.model, *batch)
    wrong = first(source(), "layernorm")
    choice = verification.choose(plan_for(source(), **{wrong: ONE_PERCENT}), captured)
    exact = verification.exact_outputs(loaded, [batch])[0]
    assert diagnosis.diagnose(captured, choice, batch, exact, torch.float32, limit=1e-3).guilty == wrong
    assert diagnosis.diagnose(captured, choice, batch, exact, torch.float32, limit=1.0).guilty is None
