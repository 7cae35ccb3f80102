"""What the tests of models share: the model files, and a model from a command line."""

import argparse
from pathlib import Path

import pytest
from torch import Tensor

from autokernel import models
from autokernel.state import ModelSource

FILES = {
    "GPT2": "models/gpt2.py",
    "LlamaModel": "models/llama_7b.py",
    "LlamaModel7B": "models/llama_7b.py",
    "BertModel": "models/bert_base.py",
    "CustomModel": "models/custom.py",
}
GPT2 = ("--model", FILES["GPT2"], "--class-name", "GPT2")
each_class = pytest.mark.parametrize("name", FILES)


def source(*arguments: str) -> ModelSource:
    parser = argparse.ArgumentParser(exit_on_error=False)
    models.add_model_arguments(parser)
    return models.source_of(parser.parse_args(arguments))


def cpu_source(*arguments: str) -> ModelSource:
    return source("--device", "cpu", *arguments)


def tiny(name: str, *arguments: str, shape: str = "2,48", dtype: str = "float32") -> models.LoadedModel:
    options = ("--model", FILES[name], "--class-name", name, "--input-shape", shape, "--dtype", dtype)
    return models.load(cpu_source(*options, "--model-args", "tiny", *arguments))


def outputs(loaded: models.LoadedModel, seed: int = 0) -> list[Tensor]:
    args, kwargs = models.inputs(loaded, seed)
    return models.output_tensors(models.run(loaded, args, kwargs))


def written(folder: Path, text: str) -> tuple[str, str]:
    """A model file of one's own, as the options that name it."""
    path = folder / "mine.py"
    path.write_text("import torch\nfrom torch import nn\n" + text)
    return "--model", str(path)


# A Hugging Face configuration, and the options in front of a class name.
LLAMA = {
    "model_type": "llama",
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
HUGGING_FACE = ("--module", "transformers", "--input-shape", "2,32", "--class-name")
