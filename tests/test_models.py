"""Loading a model from a command line, and making its inputs."""

import argparse
import json
from pathlib import Path

import msgspec
import pytest
import torch
from model_cases import FILES, HUGGING_FACE, LLAMA, cpu_source, each_class, outputs, source, tiny, written
from torch import nn

from autokernel import hardware, memory, models
from autokernel.state import ModelSource


def test_a_source_survives_its_file() -> None:
    values = ("depth=2", "ratio=1.5", "name=abc", "sizes=(1,2)", "bias=false", "extra=None", "quoted='3'")
    given = cpu_source(
        "--module", "m", "--class-name", "C", "--input-shape", "2,3", "--dtype", "bfloat16", "--model-args", *values
    )
    expected = {"depth": 2, "ratio": 1.5, "name": "abc", "sizes": [1, 2], "bias": False, "extra": None, "quoted": "3"}
    assert given.model_args == expected
    assert msgspec.json.decode(msgspec.json.encode(given), type=ModelSource) == given


def test_defaults_and_whether_a_model_is_given() -> None:
    parser = argparse.ArgumentParser()
    models.add_model_arguments(parser, required=False)
    assert not models.given(parser.parse_args([]))
    assert models.given(parser.parse_args(["--dtype", "float32"]))
    plain = source("--model", "models/custom.py", "--class-name", "CustomModel")
    assert plain == ModelSource(
        model="models/custom.py", class_name="CustomModel", input_shape=(), dtype="float16", device=hardware.device().type
    )


def test_tiny_can_be_overridden() -> None:
    arguments = ("--model", FILES["GPT2"], "--class-name", "GPT2", "--model-args", "n_layers=1", "tiny", "vocab_size=77")
    given = cpu_source(*arguments).model_args
    assert given["dim"] == 64
    assert (given["n_layers"], given["vocab_size"]) == (1, 77)


# Loading, inputs and outputs


@each_class
def test_weights_and_inputs_follow_their_seeds(name: str) -> None:
    first = tiny(name, dtype="float16")
    drawn = torch.random.get_rng_state()
    again, other = (models.load(first.source, seed) for seed in (0, 1))
    assert torch.equal(torch.random.get_rng_state(), drawn)
    assert torch.get_default_dtype() == torch.float32
    assert all(torch.equal(a, b) for a, b in zip(first.model.parameters(), again.model.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first.model.parameters(), other.model.parameters(), strict=True))
    assert first.parameters == sum(parameter.numel() for parameter in first.model.parameters())
    assert not first.model.training
    assert not any(parameter.requires_grad for parameter in first.model.parameters())

    (ids, *_), _ = models.inputs(first, seed=0)
    assert torch.equal(ids, models.inputs(again, seed=0)[0][0])
    assert not torch.equal(ids, models.inputs(first, seed=1)[0][0])
    assert ids.dtype == torch.int64
    assert ids.min() >= 0
    assert ids.max() < first.model.vocab_size


def test_example_inputs_are_used_and_cast(tmp_path: Path) -> None:
    text = """
class Two(nn.Module):
    def __init__(self): super().__init__(); self.linear = nn.Linear(4, 4)
    def example_inputs(self): return (torch.randn(2, 4), torch.arange(2)), {"scale": torch.rand(1), "name": "x"}
    def forward(self, x, i, scale, name): return {"y": [self.linear(x) * scale], "i": i, "name": name}
class One(Two):
    def example_inputs(self): return torch.randn(2, 4)
    def forward(self, x): return self.linear(x)
"""
    options = written(tmp_path, text)
    loaded = models.load(cpu_source(*options, "--class-name", "Two"))
    (x, i), kwargs = models.inputs(loaded, 3)
    assert (x.dtype, i.dtype, kwargs["scale"].dtype, kwargs["name"]) == (torch.float16, torch.int64, torch.float16, "x")
    assert torch.equal(x, models.inputs(loaded, 3)[0][0])
    assert not torch.equal(x, models.inputs(loaded, 4)[0][0])
    assert [tensor.shape for tensor in outputs(loaded)] == [(2, 4)]
    assert len(outputs(models.load(cpu_source(*options, "--class-name", "One")))) == 1


@pytest.mark.parametrize("order", ["positions words", "words positions"])
def test_the_vocabulary_is_that_of_the_embedding_that_is_given_the_ids(tmp_path: Path, order: str) -> None:
    text = f"""
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        for name in "{order}".split():
            setattr(self, name, nn.Embedding(dict(words=11, positions=300)[name], 8))
    def forward(self, ids): return self.words(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
"""
    loaded = models.load(cpu_source(*written(tmp_path, text), "--class-name", "Model", "--input-shape", "4,200"))
    (ids,), _ = models.inputs(loaded, seed=0)
    assert ids.max() == 10
    assert outputs(loaded)[0].shape == (4, 200, 8)


def test_a_model_without_a_vocabulary_gets_numbers() -> None:
    options = (
        "--module",
        "torch.nn",
        "--class-name",
        "Conv2d",
        "--model-args",
        "in_channels=3",
        "out_channels=5",
        "kernel_size=3",
    )
    loaded = models.load(cpu_source(*options, "--input-shape", "2,3,9,9"))
    (x,), _ = models.inputs(loaded, seed=0)
    assert (x.shape, x.dtype) == ((2, 3, 9, 9), torch.float16)
    assert outputs(loaded)[0].shape == (2, 5, 7, 7)


def test_a_constructor_that_needs_float32_is_still_built(tmp_path: Path) -> None:
    # Half precision has no orthogonal_; and the table of complex numbers must not lose its imaginary part.
    text = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        nn.init.orthogonal_(self.linear.weight)
        self.register_buffer("turn", torch.polar(torch.ones(4), torch.arange(4.0)))
    def forward(self, x): return self.linear(x)
"""
    loaded = models.load(cpu_source(*written(tmp_path, text), "--class-name", "Model", "--input-shape", "2,8"))
    weight = loaded.model.linear.weight
    assert weight.dtype == torch.float16
    torch.testing.assert_close(weight.float() @ weight.float().T, torch.eye(8), atol=2e-3, rtol=0)
    assert loaded.model.turn.dtype == torch.complex64
    assert loaded.model.turn.imag.abs().max() > 0.5


def test_output_tensors_keeps_the_order_and_leaves_out_what_is_no_number() -> None:
    a, b, c = torch.zeros(1), torch.ones(2), torch.ones(3).half()
    nested = {"z": (a, None, "text"), "a": [{"x": b}, torch.arange(3)], "last": c}
    assert [id(tensor) for tensor in models.output_tensors(nested)] == [id(a), id(b), id(c)]
    assert models.output_tensors(torch.arange(3)) == []


def test_the_memory_of_a_forward_pass_is_foreseen() -> None:
    loaded = tiny("GPT2", shape="256,128")
    args, kwargs = models.inputs(loaded, seed=0)
    logits = 256 * 128 * 503 * 4
    assert logits < memory.of_forward(loaded.model, args, kwargs) < 2 * logits
    assert memory.of_forward(nn.Linear(4, 4), (torch.zeros(2, 4),), {}) == 0  # too small to look


# Hugging Face


@pytest.mark.parametrize("name", ["AutoModelForCausalLM", "LlamaForCausalLM"])
def test_hugging_face_from_a_configuration_and_from_a_directory(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    config_json = tmp_path / "config.json"
    config_json.write_text(json.dumps(LLAMA))
    loaded = models.load(
        cpu_source(*HUGGING_FACE, name, "--config-json", str(config_json), "--model-args", "num_hidden_layers=1")
    )
    model = loaded.model
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float16}
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32  # as Hugging Face itself keeps it
    assert len(model.model.layers) == 1
    (ids,), kwargs = models.inputs(loaded, seed=0)
    assert ids.max() < LLAMA["vocab_size"]
    output = models.run(loaded, (ids,), kwargs)
    assert list(output) == ["logits"]  # and no cache

    folder = tmp_path / "saved"
    model.save_pretrained(folder)
    again = models.load(cpu_source(*HUGGING_FACE, name, "--pretrained", str(folder)))
    assert torch.equal(models.run(again, (ids,), {}).logits, output.logits)
    assert list(models.run(again, (ids,), {})) == ["logits"]


@pytest.mark.parametrize(
    ("name", "shape", "config"),
    [
        ("AutoModel", "2,3,32,32", {"model_type": "vit", "image_size": 32, "patch_size": 8}),
        ("AutoModelForSeq2SeqLM", "2,16", {"model_type": "t5", "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 1}),
    ],
)
def test_hugging_face_models_of_other_inputs(name: str, shape: str, config: dict[str, object], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA, **config}))
    options = ("--module", "transformers", "--class-name", name, "--config-json", str(path), "--input-shape", shape)
    loaded = models.load(cpu_source(*options, "--dtype", "float32"))
    for tensor in outputs(loaded):
        assert tensor.isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["GPT2", "LlamaModel", "BertModel"])
def test_on_a_gpu_weights_are_made_there_in_half_precision(name: str) -> None:
    given = source("--model", FILES[name], "--class-name", name, "--input-shape", "1,128")
    torch.cuda.reset_peak_memory_stats()
    loaded = models.load(given)
    assert {(tensor.device.type, tensor.dtype) for tensor in loaded.model.parameters()} == {("cuda", torch.float16)}
    assert torch.cuda.max_memory_allocated() < 2.5 * 2 * loaded.parameters
    for tensor in outputs(loaded):
        assert tensor.isfinite().all()
        assert tensor.float().std() > 1e-3
