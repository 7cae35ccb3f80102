"""An external agent: how it is run, limited and ended, what it is told, and what it may change."""

import os
import sys
import time
from pathlib import Path

import msgspec
import pytest
from test_keeping import row
from test_orchestrate import commit, here, make_plan  # noqa: F401  `here` is a fixture

from autokernel import experiments, guard, kernels, prompt, results, state
from autokernel.agents import External, Task, Tuner
from autokernel.errors import InputError
from autokernel.experiments import Begun, Experiment, Log, Outcome
from autokernel.repository import Repository
from autokernel.results import Status

MATMUL_KERNEL = 'KERNEL_TYPE = "matmul"\nTILE = 64  # tune: [32, 64, 128]\n'


@pytest.fixture
def task(here: Path) -> Task:  # noqa: F811
    """An experiment on a matmul, begun, in a repository."""
    plan = make_plan(here, current="kernel_matmul_1")
    (here / ".gitignore").write_text("workspace/*\nresults.tsv\n")
    for path in (here / "kernel.py", here / "workspace" / "kernel_matmul_1.py"):
        path.write_text(MATMUL_KERNEL)
    commit(here, "kernel.py", "kernels", ".gitignore")
    return Task(results.reserve(), plan.targets[0], kernels.KERNEL, Log())


def agent(code: str, limit_s: float = 30.0, *words: str) -> External:
    return External(" ".join((sys.executable, "-c", f'"{code}"', *words)), limit_s)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_the_prompt_comes_on_standard_input_and_where_the_command_says(task: Task, tmp_path: Path) -> None:
    code = "import sys; a, b = sys.argv[1:]; assert a == sys.stdin.read() == open(b).read() and '$(x)' in a; print('done')"
    task.kernel.write_text(MATMUL_KERNEL + "# `x` $(x) ; rm -rf / \n")
    edit = agent(code, 30.0, "{prompt}", "{prompt_file}").edit(task)
    assert (edit.description, edit.fault) == ("done", None)


def test_what_it_leaves_running_is_ended(task: Task) -> None:
    code = "import subprocess; print(subprocess.Popen(['sleep', '100'], start_new_session=True).pid)"
    pid = int(agent(code).edit(task).description)
    assert not is_running(pid)


def test_a_time_limit_ends_it_and_all_that_it_started(task: Task) -> None:
    start = "print(subprocess.Popen(['sleep', '100'], start_new_session=True).pid, flush=True)"
    code = f"import subprocess, time; {start}; time.sleep(100)"
    began = time.monotonic()
    edit = agent(code, 1.0).edit(task)
    assert time.monotonic() - began < 20
    assert (edit.fault, edit.reason) == (Outcome.AGENT_TIMEOUT, "it did not end within 1 s")
    assert not is_running(int(edit.description))


@pytest.mark.parametrize(("code", "status"), [("import sys; sys.exit(3)", 3), ("import os; os.kill(os.getpid(), 9)", 137)])
def test_an_exit_status_is_said(task: Task, code: str, status: int) -> None:
    edit = agent(code).edit(task)
    assert edit.fault is Outcome.AGENT_FAILED
    assert edit.reason.startswith(f"exit status {status} after ")


def test_a_description_is_one_plain_line(task: Task) -> None:
    code = r"print('first'); print('\x1b[31mwider\x07\ttiles\x1b[0m ' + 'x' * 500); print()"
    description = agent(code).edit(task).description
    assert description.startswith("wider tiles xxx")
    assert len(description) == 200
    assert description.isprintable()


def test_a_program_that_is_not_there_is_bad_input() -> None:
    with pytest.raises(InputError, match=r"'nowhere/agent', which is not there"):
        External("nowhere/agent -p x", 1.0)


def test_the_prompt_tells_of_the_call_and_of_what_was_tried(task: Task) -> None:
    results.append(row(kernels.sha256_of(task.kernel), experiment=0))
    for number, outcome, reason in ((11, Outcome.KEPT, "1.3 times as fast"), (12, Outcome.REVERTED, "FAIL: smoke: off\nby 3")):
        (state.WORKSPACE / "experiments" / str(number)).mkdir()
        verdict = Status.PASS if outcome is Outcome.KEPT else Status.FAIL
        ended = Experiment(
            number=number,
            target="kernel_matmul_1",
            operation="matmul",
            agent="x",
            description=f"idea {number}",
            outcome=outcome,
            reason=reason,
            verdict=verdict,
        )
        experiments.finish(ended)
    text = prompt.prompt(task.target, task.kernel, task.log)
    for fact in (
        "# One experiment on kernel_matmul_1",
        "shape: M=16 N=32 K=8 bias=False transposed=True",
        "- roofline of one call: 33.33 us",
        "- the kept version: PASS, unmeasured us, 2.000 times as fast as PyTorch",
        "- helped: 11 kept: idea 11 (1.3 times as fast)",
        "- 1 ended as FAIL",
        "- 12 reverted: idea 12 (FAIL: smoke: off by 3)",
        MATMUL_KERNEL,
    ):
        assert fact in text, fact


def test_the_tuner_changes_one_constant_and_ends_when_all_were_tried(task: Task) -> None:
    results.append(row(kernels.sha256_of(task.kernel), experiment=1))
    experiments.archive(1, MATMUL_KERNEL.encode(), "")
    for number, value in ((2, 32), (3, 128)):
        edit = Tuner().edit(task)
        assert edit.description == f"TILE 64 -> {value}"
        tried = task.kernel.read_bytes()
        assert tried == MATMUL_KERNEL.replace("= 64", f"= {value}").encode()
        experiments.archive(number, tried, "")
        results.append(row(kernels.sha256_of(task.kernel), experiment=number, speedup_vs_pytorch=1.9))
        task.kernel.write_text(MATMUL_KERNEL)
    assert Tuner().edit(task).exhausted


def test_the_tuner_gives_up_on_a_kernel_that_it_cannot_read(task: Task) -> None:
    task.kernel.write_text(MATMUL_KERNEL + "X = f()  # tune: [1]\n")
    edit = Tuner().edit(task)
    assert edit.exhausted
    assert "line 3 of the kernel is no tunable constant" in edit.reason


# the guard ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def repository(task: Task) -> Repository:
    return Repository(task.kernel.parent)


def test_an_edit_of_the_kernel_alone_is_no_offence(task: Task, repository: Repository) -> None:
    watch = guard.Watch(repository, task.kernel)
    task.kernel.write_text("new")
    assert watch.offences(task.number) == []
    assert task.kernel.read_text() == "new"


def test_everything_else_is_put_back_and_kept_for_people_to_see(task: Task, repository: Repository) -> None:
    root = task.kernel.parent
    results.append(row(experiment=7))
    watch = guard.Watch(repository, task.kernel)
    before = (root / "results.tsv").read_bytes()
    (root / "kernels" / "softmax.py").unlink()
    (root / "kernels" / "matmul.py").write_text("changed")
    (root / "new").mkdir()
    (root / "new" / "file").write_text("new")
    (root / "link").symlink_to("/etc/passwd")
    (root / "workspace" / "plan.json").write_text("{}")
    (root / "workspace" / "kernel_matmul_9.py").write_text("more")
    (root / "results.tsv").write_text("")
    os.chmod(task.kernel, 0o755)
    named = watch.offences(task.number)
    assert set(named) == {
        *("kernels/softmax.py", "kernels/matmul.py", "new/file", "link"),
        *("workspace/plan.json", "workspace/kernel_matmul_9.py", "results.tsv"),
    }
    assert repository.changed() in ([], ["kernel.py"])  # its mode may have changed
    assert (root / "kernels" / "matmul.py").read_text() == 'KERNEL_TYPE = "matmul"\n'
    assert not (root / "link").is_symlink()
    assert not (root / "workspace" / "kernel_matmul_9.py").exists()
    assert (root / "results.tsv").read_bytes() == before
    refused = experiments.folder(task.number) / "refused"
    assert (refused / "kernels" / "matmul.py").read_text() == "changed"
    assert (refused / "workspace" / "plan.json").read_text() == "{}"


def test_nothing_hides_behind_a_changed_gitignore(task: Task, repository: Repository) -> None:
    root = task.kernel.parent
    watch = guard.Watch(repository, task.kernel)
    with (root / ".gitignore").open("a") as file:
        file.write("hidden\n.gitignore\n")
    (root / "hidden").write_text("new")
    assert watch.offences(task.number) == [".gitignore", "hidden"]
    assert not (root / "hidden").exists()


def test_bytecode_that_an_agent_left_is_not_run(task: Task, repository: Repository) -> None:
    cache = task.kernel.parent / "autokernel" / "judge" / "__pycache__"
    cache.mkdir(parents=True)
    for name in ("mine.pyc", "changed.pyc"):
        (cache / name).write_bytes(b"before")
    (task.kernel.parent / ".git" / "info" / "exclude").write_text("__pycache__/\n")
    watch = guard.Watch(repository, task.kernel)
    times = (cache / "changed.pyc").stat()
    (cache / "changed.pyc").write_bytes(b"other!")
    os.utime(cache / "changed.pyc", ns=(times.st_atime_ns, times.st_mtime_ns))
    (cache / "new.pyc").write_bytes(b"new")
    assert watch.offences(task.number) == []
    assert [path.name for path in cache.iterdir()] == ["mine.pyc"]


def test_rows_of_another_gpu_stay_and_forged_ones_go(task: Task, repository: Repository) -> None:
    results.append(row(experiment=7))
    watch = guard.Watch(repository, task.kernel, busy={"kernel_softmax_2"})
    results.append(row(experiment=8, target="kernel_softmax_2"))
    results.append(row(experiment=9))
    assert watch.offences(task.number) == ["results.tsv"]
    assert [found.experiment for found in results.rows()] == [7, 8]


@pytest.mark.parametrize("detached", [False, True])
def test_commits_branches_and_the_index_are_undone(task: Task, repository: Repository, detached: bool) -> None:
    root = task.kernel.parent
    if detached:
        repository.git("checkout", "-q", "--detach")
    before = repository.position()
    watch = guard.Watch(repository, task.kernel)
    task.kernel.write_text("new")
    for command in ("checkout -qb mine", "-c user.name=a -c user.email=a@b commit -qam mine"):
        repository.git(*command.split())
    (root / "kernels" / "matmul.py").write_text("staged")
    repository.git("add", "-A")
    mine = repository.position().head
    assert watch.offences(task.number) == ["kernels/matmul.py"]
    assert repository.position() == before
    assert repository.changed() == ["kernel.py"]
    assert task.kernel.read_text() == "new"
    assert repository.git("rev-parse", f"refs/autokernel/experiment-{task.number}").strip() == mine


@pytest.mark.parametrize(
    ("spoil", "clause"),
    [
        (lambda path: path.unlink(), "is no regular file"),
        (lambda path: (path.unlink(), path.symlink_to("kernels/matmul.py")), "is no regular file"),
        (lambda path: (path.unlink(), path.mkdir(), (path / "x").write_text("x")), "is no regular file"),
        (lambda path: path.write_bytes(b"\xff\xfe"), "is not UTF-8 text"),
        (lambda path: path.write_bytes(b"#" * (2 << 20)), "is larger than 1 MB"),
    ],
    ids=["gone", "link", "folder", "bytes", "large"],
)
def test_what_can_be_no_kernel_is_refused(task: Task, repository: Repository, spoil, clause: str) -> None:  # type: ignore[no-untyped-def]
    watch = guard.Watch(repository, task.kernel)
    spoil(task.kernel)
    assert any(clause in name for name in watch.offences(task.number))
    assert task.kernel.read_text() == MATMUL_KERNEL
    assert repository.changed() == []


# git ----------------------------------------------------------------------------------------------------------------


def test_a_commit_is_of_one_file_whatever_else_is_staged(task: Task, repository: Repository) -> None:
    (task.kernel.parent / "kernels" / "matmul.py").write_text("staged")
    repository.git("add", "-A")
    task.kernel.write_text("new")
    head = repository.commit(task.kernel, "a message\n")
    assert repository.git("show", "--format=%s", "--name-only", head).split("\n") == ["a message", "", "kernel.py", ""]
    assert repository.changed() == ["kernels/matmul.py"]
    assert repository.commit(task.kernel, "again\n") == head  # nothing to commit


def test_hooks_and_signing_cannot_stop_a_commit(task: Task, repository: Repository) -> None:
    hook = task.kernel.parent / ".git" / "hooks" / "pre-commit"
    hook.write_text("#!/bin/sh\nexit 1\n")
    hook.chmod(0o755)
    repository.git("config", "commit.gpgsign", "true")
    task.kernel.write_text("new")
    repository.commit(task.kernel, "a message\n")
    assert repository.committed(task.kernel) == b"new"


def test_the_lock_of_a_git_that_was_killed_is_removed(task: Task, repository: Repository) -> None:
    lock = task.kernel.parent / ".git" / "index.lock"
    lock.touch()
    os.utime(lock, (time.time() - 60, time.time() - 60))
    task.kernel.write_text("new")
    repository.commit(task.kernel, "a message\n")
    assert repository.changed() == []


def test_a_part_of_a_larger_repository(tmp_path: Path) -> None:
    root = tmp_path / "large" / "part"
    root.mkdir(parents=True)
    (root / "kernel.py").write_text("old")
    (tmp_path / "large" / "other").write_text("old")
    commit(tmp_path / "large", "part/kernel.py", "other")
    (tmp_path / "large" / "other").write_text("new")
    (root / "kernel.py").write_text("new")
    repository = Repository(root)
    assert repository.changed() == ["kernel.py"]
    assert repository.committed(root / "kernel.py") == b"old"
    repository.restore(["kernel.py"])
    assert (root / "kernel.py").read_text() == "old"


def test_no_repository_is_none(tmp_path: Path) -> None:
    assert Repository.at(tmp_path) is None


def test_an_experiment_begun_and_not_ended_is_known(task: Task) -> None:
    begun = Begun(
        target="kernel_matmul_1",
        operation="matmul",
        agent="x",
        parent_sha256="",
        kernel=str(task.kernel),
        trusted=False,
        began="",
    )
    experiments.begin(task.number, begun)
    assert Log().unfinished() == {task.number: begun}
    assert msgspec.json.decode((experiments.folder(task.number) / "begun.json").read_bytes(), type=Begun) == begun
