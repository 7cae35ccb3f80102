"""Find a model's class in a file or module, and say how to build it. `autokernel.models` is what stages use."""

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from autokernel.errors import InputError
from autokernel.state import ROOT, ModelSource

LONGEST_LINE = 240


def first_line(fault: BaseException) -> str:
    """The first line of an exception's message, cut to a length that fits into a sentence."""
    line = (str(fault).strip() or "no message").splitlines()[0].rstrip(".:")
    return line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]} ..."


def tiny(model: str | None, module: str | None) -> dict[str, Any]:
    """The dictionary TINY of a model's file or module; InputError if it has none."""
    found = getattr(_module(model, module), "TINY", None)
    if not isinstance(found, dict):
        raise InputError(
            f"{model or module} defines no dictionary TINY: give the arguments themselves, --model-args NAME=VALUE"
        )
    return dict(found)


def builder(source: ModelSource, dtype: torch.dtype) -> Callable[[], nn.Module]:
    """A function that makes the model; what can be checked without making it is checked here (InputError)."""
    cls = _class(_module(source.model, source.module), source)
    if source.pretrained is not None:
        return lambda: _pretrained(cls, source, dtype)
    if source.config_json is not None:
        config = _config(cls, source)
        # Auto classes have the public method, the classes of models the private one.
        make = getattr(cls, "from_config", None) or getattr(cls, "_from_config", None)
        return (lambda: make(config, dtype=dtype)) if make is not None else (lambda: cls(config))
    if not issubclass(cls, nn.Module):
        if hasattr(cls, "from_pretrained"):
            raise InputError(f"{source.class_name} needs a configuration: give --pretrained NAME_OR_DIR or --config-json FILE")
        raise InputError(f"{source.class_name} is no nn.Module: name the class of the model itself")
    _check_arguments(cls, source)
    return lambda: cls(**source.model_args)


def _module(model: str | None, module: str | None) -> ModuleType:
    if model is not None:
        return _from_file(model)
    assert module is not None
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as fault:
        if fault.name is None or not f"{module}.".startswith(f"{fault.name}."):
            raise InputError(f"{module} cannot be imported without the module {fault.name}: install it") from fault
        if fault.name == "transformers":
            raise InputError("transformers is not installed: run `uv sync --extra models`") from None
        raise InputError(f"there is no module {module}: install it, or give the model's file with --model") from None
    except Exception as fault:  # whatever a module raises while it is imported is its own fault
        raise InputError(f"{module} cannot be imported ({type(fault).__name__}: {first_line(fault)}): correct it") from fault


def _from_file(name: str) -> ModuleType:
    path = _existing(name, f"there is no model file {name}: name an existing one, e.g. --model models/gpt2.py").resolve()
    if path.suffix != ".py":
        raise InputError(f"{name} is no Python file: --model takes a .py file, --module the name of an importable module")
    # Two files may have one name, and a class is looked up in the module that it was defined in.
    module_name = f"autokernel_model_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    specification = importlib.util.spec_from_file_location(module_name, path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[module_name] = module
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # a model in several files imports its neighbours; last, so as to hide nothing
    try:
        specification.loader.exec_module(module)
    except SyntaxError as fault:
        raise InputError(f"{name} has a syntax error in line {fault.lineno} ({fault.msg}): correct it") from None
    except (Exception, SystemExit) as fault:  # whatever the file raises while it is imported is the file's fault
        raise InputError(f"{name} cannot be imported ({type(fault).__name__}: {first_line(fault)}): correct it") from fault
    return module


def _existing(name: str, complaint: str) -> Path:
    # As given, or from the project's folder: a plan made there can be verified from anywhere.
    for path in (Path(name), ROOT / name):
        if path.is_file():
            return path
    raise InputError(complaint)


def _class(module: ModuleType, source: ModelSource) -> type:
    name, where = source.class_name, source.model or source.module
    try:
        found = getattr(module, name, None)
    except Exception as fault:  # transformers imports a class when it is asked for, with all that the class needs
        raise InputError(
            f"{name} cannot be imported from {where} ({type(fault).__name__}: {first_line(fault)}): correct it"
        ) from fault
    if isinstance(found, type):
        return found
    if found is not None:
        raise InputError(f"{name} in {where} is no class: name a class that is an nn.Module")
    if source.model is not None:
        near = [key for key, value in vars(module).items() if _is_model(value) and value.__module__ == module.__name__]
    else:
        near = difflib.get_close_matches(name, dir(module), n=5)
    raise InputError(
        f"{where} has no class {name}: " + (f"it has {', '.join(near)}" if near else "name one that is an nn.Module")
    )


def _is_model(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, nn.Module)


def _check_arguments(cls: type, source: ModelSource) -> None:
    """Compare --model-args with the constructor's signature."""
    parameters = dict(inspect.signature(cls).parameters)
    kinds = inspect.Parameter
    named = {name: p for name, p in parameters.items() if p.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)}
    missing = [name for name, p in named.items() if p.default is kinds.empty and name not in source.model_args]
    if missing:
        example = " ".join(f"{name}=..." for name in missing)
        if hasattr(cls, "from_pretrained"):
            raise InputError(f"{source.class_name} needs a configuration: give --pretrained NAME_OR_DIR or --config-json FILE")
        raise InputError(f"the constructor of {source.class_name} needs {', '.join(missing)}: give --model-args {example}")
    takes_any = any(p.kind is kinds.VAR_KEYWORD for p in parameters.values())
    unknown = [name for name in source.model_args if name not in named]
    if unknown and not takes_any:
        takes = ", ".join(named) or "none"
        raise InputError(f"the constructor of {source.class_name} takes no argument {', '.join(unknown)}: it takes {takes}")


def _pretrained(cls: Any, source: ModelSource, dtype: torch.dtype) -> nn.Module:
    name = str(source.pretrained)
    if not hasattr(cls, "from_pretrained"):
        raise InputError(f"{source.class_name} has no method from_pretrained: leave --pretrained out")
    path = Path(name)
    if not path.is_dir() and (path.is_absolute() or len(path.parts) > 2 or name.startswith(".")):
        raise InputError(f"there is no directory {name}: --pretrained takes a directory or the name of a model")
    try:
        model = cls.from_pretrained(name, dtype=dtype, **source.model_args)
    except (OSError, ValueError, ImportError) as fault:  # not found, not reachable, not a model of this class
        line = first_line(fault)
        raise InputError(f"{source.class_name} cannot be loaded from {name} ({line}): check the name or directory") from fault
    _without_cache(getattr(model, "config", None))
    return model


def _config(cls: Any, source: ModelSource) -> Any:
    """The Hugging Face configuration in --config-json, with --model-args in it."""
    name = str(source.config_json)
    path = _existing(name, f"there is no configuration {name}: --config-json takes a Hugging Face config.json")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as fault:
        raise InputError(f"{name} is no JSON ({fault}): correct it") from None
    if not isinstance(values, dict):
        raise InputError(f"{name} holds no JSON object: --config-json takes a Hugging Face config.json")
    values |= source.model_args
    if "model_type" not in values:
        raise InputError(f'{name} has no "model_type", such as "llama": --config-json takes a Hugging Face config.json')
    if not hasattr(cls, "from_pretrained"):
        raise InputError(f"{source.class_name} is no Hugging Face class: leave --config-json out, and give --model-args")
    try:
        from transformers import AutoConfig  # an extra, and slow to import
    except ModuleNotFoundError:
        raise InputError("transformers is not installed: run `uv sync --extra models`") from None
    try:
        config = AutoConfig.for_model(**values)
    except Exception as fault:  # each configuration checks its own values, with exceptions of its own
        line = first_line(fault)
        raise InputError(f"{name} is no configuration that transformers knows ({line}): correct it") from fault
    _without_cache(config)
    return config


def _without_cache(config: Any) -> None:
    """Have the model return no key-value cache: one forward pass has no use for it, and it is no tensor."""
    parts = [config, config.get_text_config()] if hasattr(config, "get_text_config") else [config]
    for part in parts:
        if hasattr(part, "use_cache"):
            part.use_cache = False
