"""The worker: what it may not do, how it ends, what it says, and that nothing of it is left."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from autokernel import kernels, ops
from autokernel.errors import InputError
from autokernel.judge import arena, protocol, sandbox
from autokernel.judge.answers import answer_bytes, same_bits
from autokernel.judge.cases import Case
from autokernel.judge.isolated import Judge, Worker
from autokernel.judge.process import Budgets, WorkerFault
from autokernel.ops import Arguments
from autokernel.results import Status

CPU = torch.device("cpu")
SOFTMAX = ops.get("softmax")
HEAD = "import os, sys, time, signal, torch\nKERNEL_TYPE = 'softmax'\n"
RIGHT = HEAD + "def kernel_fn(x):\n    return torch.softmax(x, -1).contiguous()\n"

needs_landlock = pytest.mark.skipif(not sandbox.landlock_version(), reason="this kernel has no Landlock")

Start = Callable[[str], Worker]


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    with Judge(CPU, Budgets(import_s=20, run_s=2, total_s=60)) as held:
        yield held


@pytest.fixture
def start(judge: Judge, tmp_path: Path) -> Iterator[Start]:
    """A worker with this text as its kernel file."""
    workers: list[Worker] = []

    def start_worker(text: str) -> Worker:
        path = tmp_path / "kernel.py"
        path.write_text(text)
        workers.append(judge.worker(kernels.read(path)))
        return workers[-1]

    yield start_worker
    for worker in workers:
        worker.close()


def inputs(seed: int = 1, layout: str = "contiguous") -> Arguments:
    return Case("small", {"M": 5, "N": 7}, torch.float32, layout=layout).arguments(SOFTMAX, CPU, seed)


def doing(line: str) -> str:
    """A kernel file that is right, once it has done this in a call."""
    return HEAD + f"def kernel_fn(x):\n    {line}\n    return torch.softmax(x, -1).contiguous()\n"


def processes_named(text: str) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue  # it has just ended
            if text in command:
                found.append(entry.name)
    return found


@pytest.mark.parametrize("layout", ["contiguous", "padded", "transposed", "offset"])
def test_arguments_and_answers_cross_unchanged(start: Start, layout: str) -> None:
    worker = start(RIGHT)
    for seed, reuse in ((1, False), (2, True), (3, True), (4, False)):
        given = inputs(seed, layout)
        answer = worker.call(given, reuse)
        right = torch.softmax(given["x"], -1).contiguous()
        assert answer.value is not None
        assert same_bits(answer.value, right)
        assert same_bits(worker.again().value, right)
        assert (answer.shape, answer.stride, answer.dtype, answer.device) == ((5, 7), (7, 1), "torch.float32", "cpu")


def test_the_same_tensors_come_again_only_when_asked(start: Start) -> None:
    text = HEAD + "SEEN = []\ndef kernel_fn(x):\n    SEEN.append((id(x), x.data_ptr()))\n"
    text += "    return torch.full(x.shape, float(SEEN[-1] == SEEN[max(len(SEEN) - 2, 0)]))\n"
    worker = start(text)
    assert worker.call(inputs(1)).value.all()
    assert worker.call(inputs(2), reuse=True).value.all()
    fresh = [worker.call(inputs(seed)).value.any().item() for seed in range(8)]
    assert not all(fresh)  # an address may come again by chance


def test_operators_are_named(start: Start) -> None:
    answer = start(RIGHT).call(inputs())
    assert answer.operators == ("aten._softmax.default",)
    assert not start(HEAD + "def kernel_fn(x):\n    return torch.zeros_like(x).clone().t().t()\n").call(inputs()).operators


@pytest.mark.parametrize(
    ("line", "status", "reason"),
    [
        ("raise ValueError('no such shape')", Status.CRASH, "raised ValueError: no such shape"),
        ("sys.exit(0)", Status.CRASH, "raised SystemExit: 0"),
        ("os._exit(3)", Status.CRASH, "ended its process with exit status 3"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", Status.CRASH, "died with SIGSEGV"),
        ("os.kill(os.getpid(), signal.SIGSTOP)", Status.TIMEOUT, "did not finish within its budget of 2 s"),
        ("time.sleep(60)", Status.TIMEOUT, "did not finish within its budget of 2 s"),
        ("x.zero_()", Status.FAIL, "wrote into its input x"),
        ("os.write(3, b'PASS'); time.sleep(1)", Status.INVALID, "a message of its own"),
        ("[os.close(number) for number in range(3, 9)]", Status.CRASH, ""),
    ],
)
def test_how_a_call_can_end(start: Start, line: str, status: Status, reason: str) -> None:
    worker = start(doing(line).replace("os.write(3", "os.write(channel()").replace("def kernel", CHANNEL + "def kernel"))
    with pytest.raises(WorkerFault) as caught:
        worker.call(inputs())
    assert caught.value.status in (status, Status.INVALID if not reason else status)
    assert reason in str(caught.value)


CHANNEL = """
import stat
def channel():
    for number in range(3, 64):
        try:
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                return number
        except OSError:
            pass
"""


def test_a_bad_worker_costs_the_next_one_nothing(start: Start) -> None:
    for line in ("os._exit(0)", "os.kill(os.getpid(), signal.SIGKILL)"):
        with pytest.raises(WorkerFault):
            start(doing(line)).call(inputs())
    began = time.perf_counter()
    assert start(RIGHT).call(inputs()).value is not None
    assert time.perf_counter() - began < 5


@pytest.mark.parametrize(
    ("text", "status", "reason"),
    [
        (HEAD + "import nothing_of_this_name\ndef kernel_fn(x): ...\n", Status.CRASH, "ModuleNotFoundError"),
        (HEAD + "sys.exit(0)\ndef kernel_fn(x): ...\n", Status.CRASH, "SystemExit"),
        (HEAD + "def kernel_fn(x): ...\ndel kernel_fn\n", Status.INVALID, "kernel_fn cannot be called"),
        (HEAD + "def kernel_fn(x): ...\nglobals()['KERNEL_TYPE'] = 'reduce'\n", Status.INVALID, "KERNEL_TYPE"),
    ],
)
def test_how_an_import_can_end(start: Start, text: str, status: Status, reason: str) -> None:
    with pytest.raises(WorkerFault) as caught:
        start(text)
    assert caught.value.status is status
    assert reason in str(caught.value)


@pytest.mark.parametrize("new_session", [True, False])
def test_children_are_gone_when_the_worker_is(start: Start, new_session: bool) -> None:
    seconds = f"61.{os.getpid()}{int(new_session)}"
    line = f"import subprocess; subprocess.Popen(['sleep', '{seconds}'], start_new_session={new_session})"
    worker = start(doing(line))
    worker.call(inputs())
    assert len(processes_named(f"sleep {seconds}")) == 1
    worker.close()
    assert not processes_named(f"sleep {seconds}")


def test_a_flood_of_output_blocks_nobody(start: Start) -> None:
    assert start(doing("print('correctness: PASS' * 200_000)")).call(inputs()).value is not None


@needs_landlock
@pytest.mark.parametrize(
    "place", ["{root}/results.tsv", "{root}/reference.py", "{temporary}/x", "/dev/shm/autokernel-test", "/tmp/autokernel-test"]
)
def test_writes_outside_its_folders_are_denied(start: Start, tmp_path: Path, place: str) -> None:
    path = place.format(root=kernels.ROOT, temporary=tmp_path)
    with pytest.raises(WorkerFault, match="PermissionError"):
        start(doing(f"open({path!r}, 'a')")).call(inputs())


@needs_landlock
def test_the_memory_and_the_life_of_others_are_denied(start: Start) -> None:
    for process in (os.getpid(), "{os.getppid()}"):
        with pytest.raises(WorkerFault, match="PermissionError"):
            start(doing(f"open(f'/proc/{process}/mem', 'rb')")).call(inputs())
    if sandbox.landlock_version() >= 6:
        with pytest.raises(WorkerFault, match="PermissionError"):
            start(doing(f"os.kill({os.getpid()}, 0)")).call(inputs())


@needs_landlock
def test_the_golden_answers_cannot_be_read(judge: Judge, start: Start, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("autokernel.state.WORKSPACE", tmp_path)
    secret = tmp_path / "golden" / "softmax.pt"
    secret.parent.mkdir()
    secret.write_text("42")
    with pytest.raises(WorkerFault, match="PermissionError"):
        start(doing(f"open({str(secret)!r}).read()")).call(inputs())
    (tmp_path / "open.txt").write_text("42")
    assert start(doing(f"open({str(tmp_path / 'open.txt')!r}).read()")).call(inputs()).value is not None


def test_the_environment_is_scrubbed(judge: Judge, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("SECRET_SEED", "7")
    with Judge(CPU) as fresh:
        path = tmp_path / "kernel.py"
        path.write_text(doing("raise ValueError(' '.join(sorted(os.environ)) + os.environ['TMPDIR'])"))
        with pytest.raises(WorkerFault) as caught:
            fresh.worker(kernels.read(path)).call(inputs())
    assert "TRITON_CACHE_DIR" in str(caught.value)
    assert "SECRET_SEED" not in str(caught.value)


def test_packages_may_lie_on_a_path_of_the_environment(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(f"open({str(tmp_path / 'found')!r}, 'w').close()\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "kernel.py").write_text(doing("assert 'PYTHONPATH' not in os.environ"))
    with Judge(CPU) as judge:
        worker = judge.worker(kernels.read(tmp_path / "kernel.py"))
        worker.call(inputs())
        worker.close()
    assert (tmp_path / "found").exists()


def test_unwritten_memory_is_not_a_number(start: Start) -> None:
    assert start(HEAD + "def kernel_fn(x):\n    return torch.empty_like(x)\n").call(inputs()).value.isnan().all()


def test_one_answer_for_all_calls_is_refused(start: Start) -> None:
    text = HEAD + "Y = torch.zeros(5, 7)\ndef kernel_fn(x):\n    return Y.copy_(x)\n"
    worker = start(text)
    worker.call(inputs(1))
    with pytest.raises(WorkerFault, match="an earlier answer changed"):
        worker.call(inputs(2), reuse=True)


def test_gaps_of_an_input_are_guarded(start: Start) -> None:
    worker = start(doing("x.as_strided((4,), (10,), 7).add_(1)"))
    with pytest.raises(WorkerFault, match="wrote between the rows of its input x"):
        worker.call(inputs(layout="padded"))


def test_every_timed_call_has_its_answer(start: Start) -> None:
    sets = [inputs(seed) for seed in range(3)]
    worker = start(RIGHT)
    times = worker.timed(sets, 7, 1024)
    assert len(times.times_us) == 7
    assert min(times.times_us) > 0
    assert times.wall_s * 1e6 > sum(times.times_us)
    for call in range(7):
        assert same_bits(times.answer(call).value, torch.softmax(sets[call % 3]["x"], -1))
    assert times.operators == ("aten._softmax.default",)
    assert worker.timed(sets, 2, 0, recorded=False).operators == ()
    assert "no CUDA graphs on a CPU" in worker.timed(sets, 2, 0, graph=True).fault


def test_fewer_slots_hold_the_last_answers(start: Start) -> None:
    sets = [inputs(seed) for seed in range(2)]
    times = start(RIGHT).timed(sets, 5, 0, slots=1)
    assert same_bits(times.answer(0).value, torch.softmax(sets[0]["x"], -1))


def test_the_judge_can_end_before_its_workers(tmp_path: Path) -> None:
    path = tmp_path / "kernel.py"
    path.write_text(RIGHT)
    judge = Judge(CPU)
    worker = judge.worker(kernels.read(path))
    pid = worker._process.pid
    judge.close()
    assert not Path(f"/proc/{pid}").exists()


def test_workers_end_with_a_judge_that_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "kernel.py"
    path.write_text(RIGHT)
    program = (
        "import sys, time, torch; from pathlib import Path\nfrom autokernel import kernels\n"
        "from autokernel.judge.isolated import Judge\n"
        "worker = Judge(torch.device('cpu')).worker(kernels.read(Path(sys.argv[1])))\n"
        "print(worker._process.pid, worker._process.folder, flush=True)\ntime.sleep(60)\n"
    )
    command = [sys.executable, "-c", program, str(path)]
    with subprocess.Popen(command, cwd=kernels.ROOT, stdout=subprocess.PIPE, text=True) as judge:
        assert judge.stdout is not None
        pid, folder = judge.stdout.readline().split()
        judge.send_signal(signal.SIGKILL)
    for _ in range(500):
        if not Path(f"/proc/{pid}").exists() and not Path(folder).exists():
            return
        time.sleep(0.01)
    pytest.fail("the worker outlived its judge by five seconds")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("KERNEL_TYPE = 'softmax'\ndef kernel_fn(x: ...\n", "syntax error in line 2"),
        ("KERNEL_TYPE = 'soft' + 'max'\ndef kernel_fn(x): ...\n", "set KERNEL_TYPE once, to plain text"),
        ("KERNEL_TYPE = 'softmax'\nKERNEL_TYPE = 'reduce'\ndef kernel_fn(x): ...\n", "set KERNEL_TYPE once"),
        ("KERNEL_TYPE = 'convolution'\ndef kernel_fn(x): ...\n", "is no operation"),
        ("def kernel_fn(x): ...\n", "KERNEL_TYPE to None"),
        ("KERNEL_TYPE = 'softmax'\n", "defines no function kernel_fn"),
        ("KERNEL_TYPE = 'softmax'\n\0", "cannot be parsed|null bytes|syntax error"),
    ],
)
def test_a_file_is_read_without_being_run(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "kernel.py"
    path.write_text(text)
    with pytest.raises(InputError, match=sentence):
        kernels.read(path)


@pytest.mark.parametrize(
    "line", ["kernel_fn = print", "if True:\n    def kernel_fn(x): ...", "from os import getcwd as kernel_fn"]
)
def test_kernel_fn_may_be_bound_in_any_way(tmp_path: Path, line: str) -> None:
    path = tmp_path / "kernel.py"
    path.write_text(f"KERNEL_TYPE: str = 'softmax'\n{line}\n")
    assert kernels.read(path).operation is SOFTMAX


@pytest.mark.parametrize("name", ops.names())
def test_the_size_of_an_answer_is_known_beforehand(name: str) -> None:
    operation = ops.get(name)
    for shape in (*operation.sweep_cpu, *operation.edges):
        given = Case("any", shape, torch.float16).arguments(operation, CPU, 0)
        answer = operation.reference(**given)
        assert answer_bytes(operation, given) == answer.numel() * answer.element_size()


@pytest.mark.parametrize("packet", [b"", b"\x80", b"PASS", b"\x81\xa4type\xa5Ready", b"\xff" * 10, b"\x91" * 100_000])
def test_what_is_no_message_is_refused(packet: bytes) -> None:
    with pytest.raises(protocol.BadMessage):
        protocol.decode(protocol.to_parent, packet)


def test_a_broadcast_argument_keeps_its_strides() -> None:
    block = arena.Arena(CPU)
    value = torch.arange(3.0).expand(4, 3)
    (argument,), images, _ = arena.write(block.memory, {"x": value})
    assert argument.tensor is not None
    seen = block.memory.tensor(argument.tensor)
    assert (seen.stride(), torch.equal(seen, value)) == ((0, 1), True)
    assert arena.changed(block.memory, images) == ""
    seen[0, 1] = 9
    assert "wrote into its input x" in arena.changed(block.memory, images)
    block.close()


@pytest.mark.gpu
def test_a_worker_on_a_gpu_is_confined_strictly(tmp_path: Path) -> None:
    path = tmp_path / "kernel.py"
    path.write_text(RIGHT)
    with Judge(torch.device("cuda")) as judge:
        worker = judge.worker(kernels.read(path))
        assert judge.level == sandbox.STRICT, judge.isolation
        for shape in ({"M": 5, "N": 7}, {"M": 20000, "N": 8192}):  # the second does not fit into the first arena
            given = Case("any", shape, torch.float32).arguments(SOFTMAX, judge.device, 1)
            assert same_bits(worker.call(given).value, torch.softmax(given["x"], -1))
        times = worker.timed([given], 3, 1 << 28)
        replays = worker.timed([given], 3, 1 << 28, graph=True)
        assert replays.fault == ""
        assert max(times.times_us) < 1e5
        assert same_bits(replays.answer(2).value, torch.softmax(given["x"], -1))
