"""Whole nights with a scripted agent, each in a repository of its own: every outcome, kill -9 at any moment, two GPUs."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from autokernel.experiments import Experiment, Outcome
from autokernel.results import Status
from autokernel.state import ModelSource, Plan, Target, TensorSpec

TESTS = Path(__file__).parent


def rmsnorm() -> Target:
    x = TensorSpec(shape=(16, 64), stride=(64, 1), dtype="float16")
    return target(
        "kernel_rmsnorm_1",
        {"M": 16, "N": 64, "weight": True, "eps": 1e-6},
        {"x": x, "weight": TensorSpec(shape=(64,), stride=(1,), dtype="float16")},
    )


def softmax() -> Target:
    x = TensorSpec(shape=(16, 48), stride=(48, 1), dtype="float16")
    return target("kernel_softmax_2", {"M": 16, "N": 48}, {"x": x}, time_us=150.0)


def target(name: str, shape: dict[str, object], tensors: dict[str, TensorSpec], time_us: float = 200.0) -> Target:
    return Target(
        name=name,
        rank=int(name[-1]),
        operation=name.split("_")[1],
        sites=("blocks.0",),
        count=2,
        shape=shape,
        tensors=tensors,
        dtype="float16",
        time_us=time_us,
        share=time_us / 1000,
        roofline_us=time_us / 100,
        saved_us=time_us * 0.99,
        bound="memory",
    )


@dataclass
class Place:
    """A copy of the project in a repository, with a plan, and what a user does there."""

    root: Path
    outside: Path

    def git(self, *arguments: str) -> str:
        git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false", *arguments]
        return subprocess.run(git, cwd=self.root, check=True, capture_output=True, text=True).stdout

    def plan(self, *targets: Target) -> None:
        source = ModelSource(model="models/gpt2.py", class_name="GPT2", input_shape=(1, 32), device="cpu")
        plan = Plan(source=source, gpu="cpu", total_us=1000.0, targets=targets)
        (self.root / "workspace" / "plan.json").write_bytes(msgspec.json.encode(plan))
        for one in targets:
            starter = (self.root / "kernels" / f"{one.operation}.py").read_text()
            (self.root / "workspace" / f"{one.name}.py").write_text(starter)

    def agent(self, actions: str) -> str:
        (self.outside / "script").write_text(actions)
        return f"{sys.executable} {TESTS / 'scripted_agent.py'} {self.outside / 'script'} {self.outside / 'counter'}"

    def command(self, mode: str, arguments: Sequence[str]) -> list[str]:
        return [sys.executable, str(TESTS / "stand_in.py"), mode, *arguments]

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(self.root), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}

    def orchestrate(self, *arguments: str, mode: str = "quick") -> "subprocess.CompletedProcess[str]":
        command = self.command(mode, arguments)
        return subprocess.run(command, cwd=self.root, env=self.environment, capture_output=True, text=True, timeout=600)

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        command = self.command("quick", arguments)
        return subprocess.Popen(
            command, cwd=self.root, env=self.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True
        )

    def experiments(self) -> list[Experiment]:
        paths = (self.root / "workspace" / "experiments").glob("*/experiment.json")
        found = [msgspec.json.decode(path.read_bytes(), type=Experiment) for path in paths]
        return sorted(found, key=lambda experiment: experiment.number)

    def rows(self) -> list[list[str]]:
        return [line.split("\t") for line in (self.root / "results.tsv").read_text().splitlines()[1:]]

    def home(self, name: str = "kernel_rmsnorm_1") -> str:
        return (self.root / "workspace" / f"{name}.py").read_text()


@pytest.fixture
def place(project: Path, tmp_path: Path) -> Place:
    outside = tmp_path / "outside"
    outside.mkdir()
    (project / ".gitignore").write_text("workspace/*\nresults.tsv\n__pycache__/\n")
    found = Place(project, outside)
    found.git("init", "-q", "-b", "main")
    found.git("add", "-A")
    found.git("commit", "-qm", "the project")
    return found


def values(output: str) -> dict[str, str]:
    return dict(re.findall(r"^([\w-]+): (.*)$", output, flags=re.MULTILINE))


K, R, REP, REF = Outcome.KEPT, Outcome.REVERTED, Outcome.REPEATED, Outcome.REFUSED
UN, HANG, DIED = Outcome.UNCHANGED, Outcome.AGENT_TIMEOUT, Outcome.AGENT_FAILED
# What the agent does in each of 29 experiments, and what comes of it.
SCRIPT: list[tuple[str, Outcome, Status | None]] = [
    ("speed 1.2", K, Status.PASS),
    ("speed 1.1", R, Status.PASS),
    ("wrong", R, Status.FAIL),
    ("syntax", R, Status.CRASH),
    ("cheat", R, Status.INVALID),
    ("speed 1.1", REP, Status.PASS),
    ("nothing", UN, None),
    ("speed 1.3 dies", K, Status.PASS),
    ("exit 4", DIED, None),
    ("speed 1.4", K, Status.PASS),
    ("other bench.py", REF, None),
    ("other notes/new.txt", REF, None),
    ("hang", HANG, None),
    ("speed 1.405", R, Status.PASS),
    ("hang edited", HANG, None),
    ("commit 1.6", K, Status.PASS),
    ("branch 1.7", K, Status.PASS),
    ("forge", REF, None),
    ("other workspace/kernel_rmsnorm_1.py", REF, None),
    ("other workspace/plan.json", REF, None),
    ("delete", REF, None),
    ("wrong", R, Status.FAIL),
    ("speed 0.5", R, Status.PASS),
    ("speed 0.5", REP, Status.PASS),
    ("commit 0.6", R, Status.PASS),
    ("other kernels/softmax.py", REF, None),
    ("exit 0", UN, None),
    ("speed 2.0", K, Status.PASS),
    ("speed 2.5", K, Status.PASS),
]


def test_every_outcome_is_as_it_should_be(place: Place) -> None:
    place.plan(rmsnorm())
    agent = place.agent("\n".join(action for action, _, _ in SCRIPT))
    request = ("run", "--agent", agent, "--experiments", "30", "--agent-minutes", "0.05", "--tag", "night")
    done = place.orchestrate(*request, mode="real")
    assert done.returncode == 0, done.stderr
    found = place.experiments()
    assert [e.number for e in found] == list(range(1, 31))
    assert (found[0].outcome, found[0].verdict) == (Outcome.STARTED, Status.PASS)
    for experiment, (action, outcome, verdict) in zip(found[1:], SCRIPT, strict=True):
        assert (experiment.outcome, experiment.verdict) == (outcome, verdict), (action, experiment.reason)
        if outcome is not Outcome.AGENT_TIMEOUT and not action.startswith("exit"):
            assert experiment.description == action
        folder = place.root / "workspace" / "experiments" / str(experiment.number)
        assert "# One experiment on kernel_rmsnorm_1" in (folder / "prompt.md").read_text()
        assert experiment.kernel_sha256 == "" or (folder / "change.diff").read_text().startswith(
            "--- a/kernel.py\n+++ b/kernel.py\n"
        )

    # a row for each that was judged, under its number, and none that the agent wrote
    judged = [e.number for e in found if e.outcome in (Outcome.STARTED, Outcome.KEPT, Outcome.REVERTED)]
    assert [int(row[0]) for row in place.rows()] == judged
    assert {row[1] for row in place.rows()} == {"night"}

    # git: one commit for the start and for each that was kept, of kernel.py alone, on the branch that was there
    assert place.git("status", "--porcelain") == ""
    assert place.git("branch", "--show-current") == "main\n"
    kept = [e for e in found if e.outcome is Outcome.KEPT]
    commits = place.git("log", "--format=%H", "--reverse").split()[1:]
    assert [e.commit for e in kept] == commits[-len(kept) :]
    assert len(commits) - len(kept) <= 1  # nothing to commit at the start: kernel.py is this starter
    for commit in commits:
        assert place.git("show", "--format=", "--name-only", commit).split() == ["kernel.py"]
    assert "# speed 2.5" in place.home()
    assert (place.root / "kernel.py").read_text() == place.home()

    # what was refused is named, kept for people to see, and undone
    refused = {e.number: e.reason for e in found if e.outcome is Outcome.REFUSED}
    assert "bench.py" in refused[12]
    folder = place.root / "workspace" / "experiments"
    assert (folder / "12" / "refused" / "bench.py").read_text().endswith("# tampered\n")
    assert not (place.root / "notes" / "new.txt").exists()
    assert "results.tsv" in refused[19]
    assert "workspace/kernel_rmsnorm_1.py" in refused[20]
    assert "kernel.py, which is no regular file" in refused[22]
    assert place.git("rev-parse", "refs/autokernel/experiment-17")  # the agent's own commit
    assert "speed 9.9 half done" in (folder / "16" / "kernel.py").read_text()

    # the same request again is a new night; nothing is said of what the first one did
    said = values(done.stdout)
    assert said["ended"] == "all 30 experiments are done"
    assert said["night_experiments"].startswith("30 (")
    assert said["kernel_rmsnorm_1"] == "PASS"


def left_over(place: Place) -> list[str]:
    """Command lines of processes that were started in the project and still run."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and Path(entry / "cwd").resolve().is_relative_to(place.root):
                found.append((entry / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


def test_nothing_is_lost_or_doubled_when_it_is_killed_at_any_moment(place: Place) -> None:
    place.plan(rmsnorm(), softmax())
    agent = place.agent("faster\nslow 0.1 0.9\nother bench.py\nfaster\nwrong\nnothing\ncommit 1.01\nsyntax\n")
    request = ("run", "--agent", agent, "--experiments", "60", "--tag", "night")
    draw = random.Random(7)
    kills = 0
    while kills < 10:
        process = place.start(*request)
        began = len(list((place.root / "workspace").glob("experiments/*")))
        deadline = time.monotonic() + 120
        while len(list((place.root / "workspace").glob("experiments/*"))) < began + 2:  # it is at work
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(draw.uniform(0.0, 0.8))
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            kills += 1
        process.wait()
    done = place.orchestrate(*request)
    assert done.returncode == 0, done.stderr

    deadline = time.monotonic() + 10
    while left_over(place) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left_over(place) == []
    found = place.experiments()
    numbers = [e.number for e in found]
    assert numbers == list(range(1, 61))  # each ended once
    outcomes = Counter(e.outcome for e in found)
    assert 1 <= outcomes[Outcome.INTERRUPTED] <= 10
    judged = [e.number for e in found if e.outcome in (Outcome.STARTED, Outcome.KEPT, Outcome.REVERTED)]
    assert sorted(int(row[0]) for row in place.rows()) == judged
    assert place.git("status", "--porcelain") == ""
    assert place.git("fsck", "--no-dangling") == ""
    assert place.git("branch", "--show-current") == "main\n"
    for one in (rmsnorm(), softmax()):
        kept = [e for e in found if e.outcome is Outcome.KEPT and e.target == one.name]
        assert kept
        assert (
            place.home(one.name) == (place.root / "workspace" / "experiments" / str(kept[-1].number) / "kernel.py").read_text()
        )
        assert all(place.git("show", "--format=", "--name-only", e.commit).split() == ["kernel.py"] for e in kept)
    assert "tampered" not in (place.root / "bench.py").read_text()


def test_ctrl_c_ends_the_experiment_under_way_and_the_same_command_goes_on(place: Place) -> None:
    place.plan(rmsnorm())
    agent = place.agent("faster\nhang edited\nfaster\n")
    request = ("run", "--agent", agent, "--experiments", "4")
    process = place.start(*request)
    deadline = time.monotonic() + 60
    while not (place.root / "workspace" / "experiments" / "3" / "agent.log").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130
    assert left_over(place) == []
    found = place.experiments()
    assert [e.outcome for e in found] == [Outcome.STARTED, Outcome.KEPT, Outcome.INTERRUPTED]
    assert (place.root / "kernel.py").read_text() == place.home()
    assert place.git("status", "--porcelain") == ""
    done = place.orchestrate(*request)
    assert done.returncode == 0, done.stderr
    assert [e.outcome for e in place.experiments()] == [Outcome.STARTED, Outcome.KEPT, Outcome.INTERRUPTED, Outcome.KEPT]


def test_two_gpus_have_different_targets_and_one_log(place: Place) -> None:
    place.plan(rmsnorm(), softmax())
    agent = place.agent("faster\nslow 0.2 0.9\n")
    done = place.orchestrate("run", "--agent", agent, "--experiments", "16", "--gpus", "0,1", "--tag", "pair")
    assert done.returncode == 0, done.stderr
    found = place.experiments()
    assert 16 <= len(found) <= 17
    begun = [(place.root / "workspace" / "experiments" / str(e.number) / "begun.json").read_text() for e in found]
    trees = [re.findall(r'"kernel": "(.*?)"', text)[0].split("/")[-2] for text in begun]
    assert set(trees) == {"gpu0", "gpu1"}
    assert {(tree, e.target) for tree, e in zip(trees, found, strict=True) if e.outcome is not Outcome.STARTED}
    for branch in ("pair-gpu0", "pair-gpu1"):
        assert place.git("log", "--format=%s", f"main..{branch}")
    assert place.git("status", "--porcelain") == ""
    assert place.git("log", "--format=%s") == "the project\n"
    numbers = [int(row[0]) for row in place.rows()]
    assert len(numbers) == len(set(numbers))
    for one in (rmsnorm(), softmax()):
        kept = [e for e in found if e.outcome is Outcome.KEPT and e.target == one.name]
        assert f"speed {kept[-1].speedup_vs_pytorch:.1f}" in place.home(one.name)


def test_the_tuner_tries_what_a_kernel_declares_and_says_when_nothing_is_left(place: Place) -> None:
    place.plan(rmsnorm())
    home = place.root / "workspace" / "kernel_rmsnorm_1.py"
    home.write_text(
        re.sub(r"  # tune: .*", "", home.read_text()).replace("TILE = 4096", "TILE = 4096  # tune: [2048, 4096, 8192]")
    )
    done = place.orchestrate("run", "--agent", "tuner")
    assert done.returncode == 0, done.stderr
    found = place.experiments()
    assert [e.outcome for e in found] == [Outcome.STARTED, Outcome.REVERTED, Outcome.REVERTED, Outcome.UNCHANGED]
    assert [e.description for e in found[1:3]] == ["TILE 4096 -> 2048", "TILE 4096 -> 8192"]
    assert values(done.stdout)["ended"] == "all 1 targets are out of ideas"
    assert place.git("status", "--porcelain") == ""


@pytest.mark.parametrize(
    ("spoil", "arguments", "clause"),
    [
        ("", ["--agent", "no-such-program -p"], "names the program 'no-such-program', which is not there"),
        ("", ["--agent", "sh -c 'x"], "cannot be split into words"),
        ("bench.py", ["--agent", "tuner"], "commit or put back bench.py"),
        ("kernel.py", ["--agent", "tuner"], "commit or put back kernel.py"),
    ],
)
def test_bad_input(place: Place, spoil: str, arguments: list[str], clause: str) -> None:
    place.plan(rmsnorm())
    if spoil:
        (place.root / spoil).open("a").write("# mine\n")
    done = place.orchestrate("run", *arguments)
    assert done.returncode == 2
    assert re.search(rf"^error: .*{re.escape(clause)}", done.stderr, flags=re.MULTILINE)
    assert place.experiments() == []


@pytest.mark.parametrize("arguments", [["--experiments", "0"], ["--hours", "-1"], ["--gpus", "0,0"], ["--per-kernel", "x"]])
def test_a_wrong_budget(place: Place, arguments: list[str]) -> None:
    done = place.orchestrate("run", *arguments)
    assert done.returncode == 2
    assert "error: " in done.stderr


def test_a_kernel_has_its_own_time_and_no_more(place: Place) -> None:
    """The first version of each takes longer than a thousandth of a second, so both targets are out of their time at once."""
    place.plan(rmsnorm(), softmax())
    done = place.orchestrate("run", "--agent", place.agent("faster\n"), "--per-kernel", "0.000001")
    assert done.returncode == 0, done.stderr
    assert [e.outcome for e in place.experiments()] == [Outcome.STARTED, Outcome.STARTED]
    assert values(done.stdout)["ended"] == "all 2 targets are out of their time"
