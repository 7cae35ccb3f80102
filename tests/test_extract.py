"""From a profile to kernels to write: ranked by what could be saved, as valid files, with nobody's work lost."""

import ast
import shutil
from pathlib import Path

import msgspec
import pytest

import extract
from autokernel import kernels, ops, state
from autokernel.errors import InputError
from autokernel.state import ModelSource, Plan, Profile, ProfileRow, TensorSpec

SOURCE = ModelSource(model="models/gpt2.py", class_name="GPT2", input_shape=(1, 1024), dtype="float16", device="cuda")
VERSIONS = state.Versions(python="3.12", torch="2.11", triton="3.6", cuda="13.0", driver="580")


def row(operation: str, time_us: float, saved_us: float | None, sites: tuple[str, ...] = ("a",), **shape: object) -> ProfileRow:
    return ProfileRow(
        operation=operation,
        sites=sites,
        count=len(sites),
        shape=shape,
        tensors={"x": TensorSpec(shape=(8, 16), stride=(32, 1), dtype="float16")},
        dtype="float16",
        time_us=time_us,
        share=time_us / 1000,
        flops=10,
        bytes=20,
        bound="unmeasured" if saved_us is None else "memory",
        roofline_us=None if saved_us is None else time_us - saved_us,
        pct_roofline=None if saved_us is None else 50.0,
        saved_us=saved_us,
        kernels=(),
    )


def profile_of(*rows: ProfileRow, captured: bool = True, source: ModelSource = SOURCE) -> Profile:
    return Profile(
        source=source,
        parameters=1,
        gpu="NVIDIA H200",
        versions=VERSIONS,
        clock="gpu kernels",
        captured=captured,
        not_captured_because="" if captured else "GuardOnDataDependentSymNode: no",
        total_us=1000.0,
        wall_us=2000.0,
        rows=rows,
        unmatched=(),
    )


ROWS = (
    row("softmax", 300, 10, M=8, N=16),
    row("matmul", 200, 150, tuple(f"h.{i}.attn.c_attn" for i in range(12)), M=1024, N=2304, K=768, bias=True),
    row("matmul", 100, 90, ("lm_head",), M=1024, N=50257, K=768, bias=False),
    row("layernorm", 50, 20, M=1024, N=768),
)


@pytest.fixture(autouse=True)
def workspace(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(state, "ROOT", tmp_path)
    monkeypatch.setattr(state, "WORKSPACE", tmp_path / "workspace")
    state.save(profile_of(*ROWS))
    return tmp_path / "workspace"


def test_targets_are_ranked_by_what_could_be_saved(workspace, capsys):
    assert extract.main(["--top", "3"]) == 0
    plan = state.load(Plan)
    assert [target.name for target in plan.targets] == ["kernel_matmul_1", "kernel_matmul_2", "kernel_layernorm_3"]
    assert [target.rank for target in plan.targets] == [1, 2, 3]
    assert plan.source == SOURCE
    assert plan.current is None
    assert sorted(path.name for path in workspace.glob("kernel_*.py")) == sorted(f"{t.name}.py" for t in plan.targets)
    assert "plan: workspace/plan.json" in capsys.readouterr().out
    taken = {"sites", "count", "shape", "tensors", "dtype", "time_us", "share", "roofline_us", "saved_us", "bound"}
    for field in taken:
        assert getattr(plan.targets[0], field) == getattr(ROWS[1], field)


def test_without_a_roofline_they_are_ranked_by_time():
    unmeasured = [msgspec.structs.replace(row, roofline_us=None, pct_roofline=None, saved_us=None) for row in ROWS]
    targets = extract.rank(profile_of(*unmeasured), 10)
    assert [target.name for target in targets] == [
        "kernel_softmax_1",
        "kernel_matmul_2",
        "kernel_matmul_3",
        "kernel_layernorm_4",
    ]


@pytest.mark.parametrize("operation", ops.names())
def test_every_starter_makes_a_kernel_file_that_loads(operation, workspace):
    state.save(profile_of(row(operation, 300, 10, ("h.0.x", "h.1.x"), M=8, N=16)))
    extract.main([])
    path = workspace / f"kernel_{operation}_1.py"
    kernel = kernels.load(path)
    assert kernel.operation.name == operation
    document = ast.get_docstring(ast.parse(path.read_text()))
    assert document is not None
    for part in (
        operation,
        "GPT2 of models/gpt2.py",
        "input 1x1024",
        "h.0..1.x",
        "M=8 N=16",
        "30.0%",
        "float16 [8, 16]",
        "[32, 1]",
    ):
        assert part in document
    starter = kernels.starter(operation).read_text()
    assert ast.get_docstring(ast.parse(starter)) in document
    # beside the docstring, the file is the starter
    assert [ast.dump(node) for node in ast.parse(path.read_text()).body[1:]] == [
        ast.dump(node) for node in ast.parse(starter).body[1:]
    ]
    heading = document.removesuffix(ast.get_docstring(ast.parse(starter)))
    assert max(map(len, heading.splitlines())) <= extract.LINE_LENGTH


@pytest.mark.parametrize("name", ['x""" + 1 """', "C:\\new\\u12", "'''", 'ends with "'])
def test_no_name_ends_the_docstring(name, workspace):
    source = msgspec.structs.replace(SOURCE, model=name, pretrained=name)
    state.save(profile_of(*ROWS, source=source))
    extract.main([])
    kernels.load(workspace / "kernel_matmul_1.py")


def test_extracting_again_changes_nothing(workspace):
    extract.main([])
    before = {path: path.read_text() for path in workspace.rglob("*") if path.is_file()}
    extract.main([])
    assert {path: path.read_text() for path in workspace.rglob("*") if path.is_file()} == before


def test_an_edited_kernel_is_kept_aside(workspace, capfd):
    extract.main([])
    edited = workspace / "kernel_matmul_1.py"
    text = edited.read_text() + "# tuned\n"
    edited.write_text(text)
    extract.main([])
    (saved,) = (workspace / "saved").glob("*.py")
    assert saved.name.startswith("kernel_matmul_1_")
    assert saved.read_text() == text
    assert "# tuned" not in edited.read_text()
    assert f"workspace/saved/{saved.name}" in capfd.readouterr().err.replace("\n", "")


@pytest.mark.parametrize("damaged_plan", [False, True])
def test_kernels_of_an_earlier_plan_go_unless_they_were_edited(workspace, damaged_plan):
    extract.main([])
    (workspace / "kernel_softmax_4.py").write_text("# mine\n")
    if damaged_plan:  # then nobody can say what was edited, so everything is kept
        (workspace / "plan.json").write_text("{")
    state.save(profile_of(ROWS[3]))
    extract.main([])
    assert [path.name for path in workspace.glob("kernel_*.py")] == ["kernel_layernorm_1.py"]
    saved = {path.name.rsplit("_", 1)[0] for path in (workspace / "saved").iterdir()}
    others = {"kernel_matmul_1", "kernel_matmul_2", "kernel_layernorm_3"}
    assert saved == ({"kernel_softmax_4"} | others if damaged_plan else {"kernel_softmax_4"})


def test_bad_input_is_one_sentence(workspace):
    def fault(*arguments: str) -> str:
        with pytest.raises(InputError) as caught:
            extract.main(arguments)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "--top 0" in fault("--top", "0")
    state.save(profile_of(captured=False))
    assert "GuardOnDataDependentSymNode" in fault()
    state.save(profile_of())
    assert "no operation was recognised" in fault()
    (workspace / "profile.json").write_text('{"source": 1}')
    assert "profile.json is damaged" in fault()
    (workspace / "profile.json").unlink()
    assert "profile.json is missing" in fault()
    assert not (workspace / "plan.json").exists()


def test_the_stage_as_its_user_runs_it(stage, project, workspace):
    shutil.copy(workspace / "profile.json", project / "workspace")
    result = stage("extract.py", "--top", "2")
    assert result.returncode == 0, result.stderr
    assert {"model: GPT2", "targets: 2", "plan: workspace/plan.json"} <= set(result.stdout.splitlines())
    assert len(list((project / "workspace").glob("kernel_matmul_*.py"))) == 2
    (project / "workspace" / "profile.json").unlink()
    result = stage("extract.py")
    assert result.returncode == 2
    assert result.stderr.startswith("error: workspace/profile.json is missing")
