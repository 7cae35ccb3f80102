"""Models that cannot be loaded or run: each is refused with one sentence that says what to do."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from model_cases import FILES, GPT2, HUGGING_FACE, LLAMA, cpu_source, outputs, source, written

from autokernel import hardware, models
from autokernel.errors import InputError


def refused(*arguments: str) -> str:
    """The sentence with which a command line is refused, at whatever step."""
    with pytest.raises(InputError) as caught:
        outputs(models.load(cpu_source(*arguments)))
    return str(caught.value)


BAD_COMMANDS = {
    "no model": ((), r"either --model FILE or --module NAME"),
    "two models": ((*GPT2, "--module", "transformers"), r"either --model FILE or --module NAME"),
    "no class name": (("--model", FILES["GPT2"]), r"give --class-name too"),
    "no such file": (("--model", "models/none.py", "--class-name", "A"), r"no model file models/none.py"),
    "no Python file": (("--model", "pyproject.toml", "--class-name", "A"), r"pyproject.toml is no Python file"),
    "no such class": (("--model", FILES["GPT2"], "--class-name", "GPT3"), r"no class GPT3: it has Attention, MLP, Block, GPT2"),
    "no class at all": (("--model", FILES["GPT2"], "--class-name", "TINY"), r"TINY in models/gpt2.py is no class"),
    "no nn.Module": (("--module", "collections", "--class-name", "OrderedDict"), r"OrderedDict is no nn.Module"),
    "no such module": (("--module", "no_such", "--class-name", "A"), r"no module no_such"),
    "a class nearly of that name": (("--module", "torch.nn", "--class-name", "Linaer"), r"no class Linaer: it has Linear"),
    "arguments needed": (
        ("--module", "torch.nn", "--class-name", "Linear"),
        r"constructor of Linear needs in_features, out_features: give --model-args in_features=... out_features=...",
    ),
    "unknown argument": ((*GPT2, "--model-args", "depth=2"), r"GPT2 takes no argument depth: it takes vocab_size, dim,"),
    "arguments that do not fit": ((*GPT2, "--model-args", "dim=10", "n_heads=3"), r"GPT2 cannot be built \(ValueError: dim 10"),
    "arguments of a wrong type": ((*GPT2, "--model-args", "tiny", "dim=wide"), r"GPT2 cannot be built \(TypeError: "),
    "no equals sign": ((*GPT2, "--model-args", "small"), r"takes NAME=VALUE or the word tiny, not 'small'"),
    "a value for no file": ((*GPT2, "--model-args", "dim={1,2}"), r"cannot pass 'dim=\{1,2\}'"),
    "no TINY": (
        ("--module", "torch.nn", "--class-name", "Linear", "--model-args", "tiny"),
        r"torch.nn defines no dictionary TINY",
    ),
    "no shape": ((*GPT2, "--model-args", "tiny"), r"defines no example_inputs\(\): give --input-shape"),
    "one dimension": ((*GPT2, "--model-args", "tiny", "--input-shape", "8"), r"cannot run on an input of shape 8 \(IndexError"),
    "input too large": (
        (*GPT2, "--model-args", "tiny", "--input-shape", "1000000000,1000000"),
        r"shape 1000000000,1000000 cannot be made: it needs 8000000.0 GB",
    ),
    "weights too large": (
        (*GPT2, "--model-args", "tiny", "vocab_size=1000000000000", "dim=1", "n_heads=1", "--input-shape", "1,8"),
        r"GPT2 cannot be built: it needs 2000.0 GB, and this machine has",
    ),
    "pretrained without that": ((*GPT2, "--pretrained", "x"), r"GPT2 has no method from_pretrained"),
    "configuration without that": ((*GPT2, "--config-json", "{config}"), r"GPT2 is no Hugging Face class"),
    "both weights": (
        (*HUGGING_FACE, "AutoModel", "--pretrained", "x", "--config-json", "y"),
        r"--pretrained or --config-json, not",
    ),
    "neither weights": ((*HUGGING_FACE, "AutoModel"), r"AutoModel needs a configuration: give --pretrained"),
    "neither weights, one class": ((*HUGGING_FACE, "LlamaModel"), r"LlamaModel needs a configuration: give --pretrained"),
    "no such directory": ((*HUGGING_FACE, "AutoModel", "--pretrained", "/no/such"), r"no directory /no/such"),
    "an empty directory": ((*HUGGING_FACE, "AutoModel", "--pretrained", "{folder}"), r"AutoModel cannot be loaded from "),
    "no configuration": ((*HUGGING_FACE, "AutoModel", "--config-json", "none.json"), r"no configuration none.json"),
}


@pytest.mark.parametrize(("arguments", "sentence"), BAD_COMMANDS.values(), ids=BAD_COMMANDS.keys())
def test_bad_commands(arguments: tuple[str, ...], sentence: str, tmp_path: Path) -> None:
    if "transformers" in arguments:
        pytest.importorskip("transformers")
    config = tmp_path / "llama.json"
    config.write_text(json.dumps(LLAMA))
    places = {"{config}": str(config), "{folder}": str(tmp_path)}
    said = refused(*(places.get(argument, argument) for argument in arguments))
    assert re.search(sentence, said), said
    assert "\n" not in said


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "is no JSON"),
        ("[]", "holds no JSON object"),
        ("{}", 'has no "model_type"'),
        ('{"model_type": "no_such"}', "is no configuration that transformers knows"),
        (json.dumps({**LLAMA, "num_key_value_heads": 3}), "AutoModelForCausalLM cannot run on an input of shape 2,32"),
    ],
)
def test_bad_configurations(text: str, sentence: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    path.write_text(text)
    assert sentence in refused(*HUGGING_FACE, "AutoModelForCausalLM", "--config-json", str(path))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("class (", "mine.py has a syntax error in line 3"),
        ("1 / 0", "mine.py cannot be imported (ZeroDivisionError: division by zero)"),
        ("raise SystemExit(1)", "mine.py cannot be imported (SystemExit: 1)"),
        ("import no_such_dependency", "mine.py cannot be imported (ModuleNotFoundError: No module named 'no_such_dependency')"),
        ("class M(nn.Module):\n  def __init__(self): 1 / 0", "M cannot be built (ZeroDivisionError: division by zero)"),
        (
            "class M(nn.Linear):\n  def __init__(self): super().__init__(3, 3)",
            "cannot run on an input of shape 2,8 (RuntimeError: ",
        ),
        (
            "class M(nn.Module):\n  def forward(self, x): raise KeyError('k')",
            "cannot run on an input of shape 2,8 (KeyError: 'k')",
        ),
        ("class M(nn.Module):\n  def forward(self, x): return x.new_empty(1 << 50)", "it needs more memory than there is"),
        ("class M(nn.Module):\n  def example_inputs(self): return self.x", "example_inputs() of M fails (AttributeError"),
        ("class M(nn.Module):\n  def example_inputs(self): return [1]", "it returned a list, not a tuple of arguments"),
    ],
)
def test_bad_files(text: str, sentence: str, tmp_path: Path) -> None:
    assert sentence in refused(*written(tmp_path, text), "--class-name", "M", "--input-shape", "2,8")


def test_a_forward_pass_too_large_for_this_machine_is_not_tried(tmp_path: Path) -> None:
    # 2^18 numbers in, as many squared out: 137 GB in half precision, which the system might promise and not keep.
    if hardware.memory_bytes(torch.device("cpu")) > 137e9:
        pytest.skip("this machine has more memory than the test asks for")
    text = "class M(nn.Module):\n  def forward(self, x): return x[:, None] * x[None, :]"
    said = refused(*written(tmp_path, text), "--class-name", "M", "--input-shape", "262144")
    assert "M cannot run on an input of shape 262144: it needs 137.4 GB, and this machine has" in said


def test_a_gpu_that_is_not_there() -> None:
    if torch.cuda.device_count():
        pytest.skip("this machine has a GPU")
    with pytest.raises(InputError, match="no GPU that PyTorch can use"):
        source(*GPT2, "--device", "cuda")


def test_transformers_is_an_extra() -> None:
    # In a process of its own, where the import is made to fail as it does without the package.
    code = f"""
import argparse, sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name == "transformers": raise ModuleNotFoundError("No module named 'transformers'", name="transformers")
sys.meta_path.insert(0, Absent())
from autokernel import models
from autokernel.errors import InputError
parser = argparse.ArgumentParser()
models.add_model_arguments(parser)
try:
    models.load(models.source_of(parser.parse_args({[*HUGGING_FACE, "AutoModel", "--pretrained", "x"]!r})))
except InputError as fault:
    print(fault)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parent.parent)
    assert result.stdout.strip() == "transformers is not installed: run `uv sync --extra models`", result.stderr


@pytest.mark.gpu
def test_on_a_gpu_an_input_too_large_is_refused() -> None:
    loaded = models.load(source(*GPT2, "--input-shape", "100000,1024"))
    args, kwargs = models.inputs(loaded, seed=0)
    with pytest.raises(InputError, match="it needs more memory than there is"):
        models.run(loaded, args, kwargs)
