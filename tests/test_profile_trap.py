"""profile.py has the name of a module of the standard library, which cProfile and torch.compile import: it must give way."""

import cProfile
import pickle
import profile
import pstats
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent

PROFILED = """
import cProfile, io, pstats
profiler = cProfile.Profile()
assert profiler.runcall(sorted, [2, 1]) == [1, 2]
text = io.StringIO()
pstats.Stats(profiler, stream=text).print_stats()
assert "sorted" in text.getvalue()
"""

COMPILED = """
import torch
assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2)).tolist() == [2, 2]
"""

LIGHT = """
import sys
import cProfile
import profile
assert profile.run and profile.__spec__.name == "profile", profile
assert sys.modules["profile"] is profile
assert not {"torch", "autokernel", "msgspec"} & set(sys.modules)
"""

SPAWNED = """
import multiprocessing

def child(queue):
    import cProfile, torch
    cProfile.Profile().runcall(sorted, [2, 1])
    queue.put(torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2)).tolist())

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    assert queue.get(timeout=120) == [2, 2]
    process.join()
    assert process.exitcode == 0
"""


@pytest.mark.parametrize("script", [PROFILED, COMPILED, LIGHT, SPAWNED], ids=["cProfile", "compile", "light", "spawn"])
def test_a_script_in_the_root(stage, project, script):
    (project / "script.py").write_text(script)
    result = stage("script.py")
    assert result.returncode == 0, result.stderr


def test_in_this_process():
    assert str(ROOT) in sys.path  # so our file is the one that `import profile` found
    assert Path(profile.__file__) == Path(sysconfig.get_path("stdlib")) / "profile.py"
    profiler = cProfile.Profile()
    assert profiler.runcall(sum, [1, 2]) == 3
    assert pstats.Stats(profiler).total_calls > 0
    function = torch.compile(lambda x: x * 2, backend="eager")
    assert function(torch.ones(2)).tolist() == [2, 2]


def test_the_standard_library_module_is_whole():
    assert sys.modules["profile"] is profile
    assert pickle.loads(pickle.dumps(profile.Profile)) is profile.Profile
    measured = profile.Profile()
    assert measured.runcall(sum, [1, 2]) == 3
    assert profile.Profile.__module__ == "profile"


def test_as_a_script_it_is_the_stage():
    command = [sys.executable, ROOT / "profile.py", "--help"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert "--class-name" in result.stdout
    assert "uv run profile.py --model models/gpt2.py" in result.stdout
