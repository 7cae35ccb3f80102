"""Load a model and make its inputs, one way for every stage.

A stage calls `add_model_arguments`, `source_of`, `load`, `inputs`, and `run` once before it measures anything. Whatever is
wrong with a user's model or its shape becomes an InputError of one sentence.
"""

import argparse
import ast
import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from autokernel import cli, hardware, memory, sources
from autokernel.errors import InputError
from autokernel.state import ModelSource

Args = tuple[Any, ...]
Kwargs = dict[str, Any]

DTYPES = ("float16", "bfloat16", "float32")
# Words that a user may expect from JSON or YAML, and that Python would take for strings.
_WORDS = {"true": True, "false": False, "null": None, "none": None}


@dataclass(frozen=True)
class LoadedModel:
    """A model in eval mode, on `source.device` in `source.dtype`, that records no gradients."""

    model: nn.Module
    source: ModelSource
    parameters: int  # a shared weight counts once


def add_model_arguments(parser: argparse.ArgumentParser, required: bool = True) -> None:
    """The options that name a model. With `required` false the stage has a default model: ask `given` before `source_of`."""
    title = "model" if required else "model (leave these options out for the stage's default)"
    group = parser.add_argument_group(title)
    group.add_argument("--model", metavar="FILE", help="Python file that defines the model, e.g. models/gpt2.py")
    group.add_argument("--module", metavar="NAME", help="importable module instead of a file, e.g. transformers")
    group.add_argument("--class-name", metavar="CLASS", help="class of the model in the file or module")
    group.add_argument("--pretrained", metavar="NAME_OR_DIR", help="weights for CLASS.from_pretrained (Hugging Face)")
    group.add_argument("--config-json", metavar="FILE", help="Hugging Face config.json instead: random weights, no download")
    group.add_argument(
        "--model-args",
        nargs="*",
        metavar="NAME=VALUE",
        help="constructor arguments, e.g. n_layers=2 (values as in Python); the word `tiny` stands for the TINY dictionary of "
        "the model's file, and arguments beside it override it: --model-args tiny n_layers=1. With --pretrained or "
        "--config-json they override the configuration",
    )
    group.add_argument(
        "--input-shape",
        type=cli.integers,
        metavar="SIZES",
        help="batch and sequence length, e.g. 1,512; without a vocabulary, the shape of the model's input, e.g. 8,3,224,224; "
        "not needed if the model defines example_inputs()",
    )
    group.add_argument("--dtype", choices=DTYPES, help="of weights and activations (default: float16)")
    group.add_argument("--device", choices=("cuda", "cpu"), help="default: the GPU if there is one")


def given(namespace: argparse.Namespace) -> bool:
    """Whether the command line has any of the options of `add_model_arguments`."""
    options = ("model", "module", "class_name", "pretrained", "config_json", "model_args", "input_shape", "dtype", "device")
    return any(getattr(namespace, option) is not None for option in options)


def arguments_of(namespace: argparse.Namespace) -> list[str]:
    """The options of `add_model_arguments` that were given, as they stand on a command line."""
    words = []
    for option in (
        "model",
        "module",
        "class_name",
        "pretrained",
        "config_json",
        "input_shape",
        "dtype",
        "device",
        "model_args",
    ):
        value = getattr(namespace, option)
        if value is not None:
            texts = [",".join(map(str, value))] if option == "input_shape" else value if option == "model_args" else [value]
            words += [f"--{option.replace('_', '-')}", *texts]
    return words


def source_of(namespace: argparse.Namespace) -> ModelSource:
    """The model that the command line names. The word `tiny` is already replaced by what it stands for."""
    if (namespace.model is None) == (namespace.module is None):
        raise InputError(
            "give either --model FILE or --module NAME: the Python file of the model, or a module such as transformers"
        )
    if namespace.class_name is None:
        raise InputError("give --class-name too: the class of the model in that file or module, e.g. --class-name GPT2")
    if namespace.pretrained is not None and namespace.config_json is not None:
        raise InputError("give --pretrained or --config-json, not both: trained weights, or random ones of that configuration")
    device = namespace.device or hardware.device().type
    _require(device)
    return ModelSource(
        model=namespace.model,
        module=namespace.module,
        class_name=namespace.class_name,
        pretrained=namespace.pretrained,
        config_json=namespace.config_json,
        model_args=_model_args(namespace),
        input_shape=namespace.input_shape or (),
        dtype=namespace.dtype or "float16",
        device=device,
    )


def load(source: ModelSource, seed: int = 0) -> LoadedModel:
    """Build the model where and as it is wanted. Random weights are the same for the same seed, device and dtype."""
    _require(source.device)
    device, dtype = torch.device(source.device), hardware.dtype(source.dtype)
    build = sources.builder(source, dtype)
    with _seeded(seed, device), _blamed(f"{source.class_name} cannot be built", "correct it, or give other --model-args"):
        # A checkpoint is read in its own way; building everything else twice over would only cost memory.
        model = build() if source.pretrained is not None else _construct(build, device, dtype)
        if not isinstance(model, nn.Module):
            raise InputError(f"{source.class_name} makes a {type(model).__name__}, which is no nn.Module: name a model's class")
        if hasattr(model, "config") and hasattr(model, "from_pretrained"):
            # Hugging Face builds each weight in the dtype asked for, and keeps in float32 what must be (RoPE's frequencies).
            model = model.to(device)
        else:
            # Not `model.to(dtype)`, which would cut complex buffers down to their real part.
            model = model._apply(lambda x: x.to(device, dtype) if x.is_floating_point() else x.to(device))
    model.eval().requires_grad_(False)
    return LoadedModel(model, source, sum(parameter.numel() for parameter in model.parameters()))


def inputs(loaded: LoadedModel, seed: int) -> tuple[Args, Kwargs]:
    """Arguments and keyword arguments of one forward pass, on the model's device, fresh for each seed.

    A model that defines `example_inputs()` makes them itself; floating-point tensors are cast to the model's dtype. Else the
    input has the shape `input_shape`: int64 token ids if the model has a `vocabulary`, or N(0, 1) in the model's dtype.
    """
    model, source = loaded.model, loaded.source
    device, dtype = torch.device(source.device), hardware.dtype(source.dtype)
    if callable(getattr(model, "example_inputs", None)):
        with _seeded(seed, device), _blamed(f"example_inputs() of {source.class_name} fails", "correct it"):
            args, kwargs = _example(model.example_inputs())  # type: ignore[operator]
            return tree_map(lambda x: _moved(x, device, dtype), (args, kwargs))
    shape = source.input_shape
    if not shape:
        raise InputError(f"{source.class_name} defines no example_inputs(): give --input-shape, e.g. --input-shape 1,512")
    generator = torch.Generator(device).manual_seed(seed)
    with _blamed(f"an input of shape {_text(shape)} cannot be made", "give another --input-shape"):
        memory.require(torch.int64.itemsize * math.prod(shape), device)
        vocab_size = vocabulary(model, shape, device)
        if vocab_size is None:
            return (torch.randn(shape, device=device, generator=generator).to(dtype),), {}
        ids = torch.randint(vocab_size, shape, device=device, generator=generator)
        if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
            return (ids,), {"decoder_input_ids": torch.randint(vocab_size, shape, device=device, generator=generator)}
        return (ids,), {}


def vocabulary(model: nn.Module, shape: Sequence[int], device: torch.device) -> int | None:
    """How many token ids the model knows; None for one that takes numbers.

    In this order: its attribute `vocab_size`; that of its Hugging Face config; and, for an input of at most two dimensions, the
    size of the `nn.Embedding` that is given the ids in a forward pass, or of the first one where that cannot be seen.
    """
    if getattr(model, "main_input_name", "input_ids") != "input_ids":
        return None  # a Hugging Face model of images or sound; its vocabulary, if any, is for its output
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    for holder in (model, config):
        size = getattr(holder, "vocab_size", None)
        if isinstance(size, int) and size > 0:
            return size
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    if not embeddings or len(shape) > 2:
        return None
    fed = _fed_with_ids(model, embeddings, shape, device)
    return min(embedding.num_embeddings for embedding in fed) if fed else embeddings[0].num_embeddings


def run(loaded: LoadedModel, args: Args, kwargs: Kwargs) -> Any:
    """The model's output, without gradients. Call it once before measuring: InputError says why the inputs do not fit.

    On a CPU the memory that a large input needs is worked out first, since the system may end a process that asks for too much.
    """
    model, source = loaded.model, loaded.source
    device = torch.device(source.device)
    if callable(getattr(model, "example_inputs", None)):
        what, remedy = "its example_inputs()", "correct the model or its example_inputs()"
    else:
        what = f"an input of shape {_text(source.input_shape)}"
        remedy = "give an --input-shape that fits, or define example_inputs() in the model"
    with torch.no_grad(), _blamed(f"{source.class_name} cannot run on {what}", remedy):
        if device.type == "cpu":
            memory.require(memory.of_forward(model, args, kwargs), device)
        output = model(*args, **kwargs)
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # a fault inside a GPU kernel shows only now
        return output


def output_tensors(output: Any) -> list[Tensor]:
    """The floating-point tensors in what a model returns, in their order there.

    It may be a tensor, or a sequence, mapping or dataclass of such, nested at will. Anything else is left out.
    """
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, Mapping):
        return output_tensors(tuple(output.values()))
    if dataclasses.is_dataclass(output):
        return output_tensors([getattr(output, field.name) for field in dataclasses.fields(output)])
    if isinstance(output, Sequence) and not isinstance(output, str):
        return [tensor for item in output for tensor in output_tensors(item)]
    return []


def _require(device: str) -> None:
    if device == "cuda" and not torch.cuda.device_count():
        raise InputError("there is no GPU that PyTorch can use here: give --device cpu, or leave --device out")


def _model_args(namespace: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {}
    words: list[str] = namespace.model_args or []
    if "tiny" in words:
        result |= sources.tiny(namespace.model, namespace.module)
    for word in words:
        if word == "tiny":
            continue
        name, equals, text = word.partition("=")
        if not equals or not name.isidentifier():
            raise InputError(
                f"--model-args takes NAME=VALUE or the word tiny, not {word!r}: write e.g. --model-args n_layers=2"
            )
        try:
            value = _WORDS[text.lower()] if text.lower() in _WORDS else ast.literal_eval(text)
        except (ValueError, SyntaxError):
            value = text
        try:
            # As it will be read again from profile.json: the constructor gets the same in every stage, e.g. a list for a tuple.
            result[name] = json.loads(json.dumps(value))
        except TypeError:
            raise InputError(
                f"--model-args cannot pass {word!r}: use numbers, strings, true, false, none, lists and dicts"
            ) from None
    return result


def _construct(build: Callable[[], nn.Module], device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Create the weights at once on the device in the dtype: neither a float32 copy nor one in host memory is made."""
    if device.type == "cpu":
        memory.require(memory.of_weights(build, dtype), device)
    try:
        with _default_dtype(dtype), device:
            return build()
    except Exception as fault:
        if isinstance(fault, InputError) or memory.is_shortage(fault):
            raise
        # Some constructors need float32 or the CPU: orthogonal_ has no half precision, .numpy() no GPU. One that is itself at
        # fault fails here again, in the conditions that it was written for, and with the message that its author expects.
        with _default_dtype(torch.float32):
            return build()


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """torch's own generators start from `seed` inside, and are as before afterwards."""
    with torch.random.fork_rng([torch.cuda.current_device()] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


@contextmanager
def _blamed(what: str, remedy: str) -> Iterator[None]:
    """Whatever a user's code raises inside becomes one sentence; it may be any exception at all."""
    try:
        yield
    except InputError:
        raise
    except memory.Shortage as fault:
        raise InputError(f"{what}: {fault}: give a smaller one") from None
    except Exception as fault:
        line = sources.first_line(fault)
        if memory.is_shortage(fault):
            raise InputError(f"{what}: it needs more memory than there is ({line}): give a smaller one") from None
        raise InputError(f"{what} ({type(fault).__name__}: {line}): {remedy}") from fault


def _example(value: Any) -> tuple[Args, Kwargs]:
    """What example_inputs() returned, as arguments and keyword arguments."""
    if isinstance(value, Tensor):
        return (value,), {}
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], tuple) and isinstance(value[1], dict):
        return value
    if isinstance(value, tuple):
        return value, {}
    raise TypeError(f"it returned a {type(value).__name__}, not a tuple of arguments or (arguments, keyword arguments)")


def _moved(x: Any, device: torch.device, dtype: torch.dtype) -> Any:
    if not isinstance(x, Tensor):
        return x
    return x.to(device, dtype) if x.is_floating_point() else x.to(device)


def _fed_with_ids(
    model: nn.Module, embeddings: Sequence[nn.Embedding], shape: Sequence[int], device: torch.device
) -> list[nn.Embedding]:
    """The embeddings that are called with the model's input, seen in a forward pass with every id 0, which all of them know."""
    ids = torch.zeros(tuple(shape), dtype=torch.int64, device=device)
    fed: list[nn.Embedding] = []

    def note(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        if arguments and isinstance(arguments[0], Tensor) and arguments[0].data_ptr() == ids.data_ptr():
            fed.append(cast(nn.Embedding, module))

    handles = [embedding.register_forward_pre_hook(note) for embedding in embeddings]
    try:
        with torch.no_grad():
            model(ids)
    except Exception as fault:
        # `run` makes the same call with the ids that are drawn now, and says what is wrong with it.
        cli.note(f"the model's vocabulary is taken from its embedding, as a trial of the model failed ({type(fault).__name__})")
    finally:
        for handle in handles:
            handle.remove()
    return fed


def _text(shape: Sequence[int]) -> str:
    return ",".join(map(str, shape))
