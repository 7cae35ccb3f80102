"""Plans made by hand for tests of verify.py: tiny models, a target for each of their calls, kernels good and bad."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from conftest import ROOT

from autokernel import models, state
from autokernel.capture import call_of, capture, site_names
from autokernel.graph import Region
from autokernel.state import ModelSource, Plan, Target

TINY_LLAMA = {"vocab_size": 512, "dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 192, "max_seq_len": 128}
TINY_GPT2 = {"vocab_size": 503, "dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 256, "max_seq_len": 128}
TINY_BERT = {"vocab_size": 499, "dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 256, "max_seq_len": 128}
MODELS = {
    "gpt2": ("gpt2.py", "GPT2", TINY_GPT2),
    "llama": ("llama_7b.py", "LlamaModel", TINY_LLAMA),
    "bert": ("bert_base.py", "BertModel", TINY_BERT),
}

REFERENCE = (
    "from reference import {operation}\n\nKERNEL_TYPE = {operation!r}\n\n\ndef kernel_fn(*args, **kwargs):\n    {body}\n"
)
EXACT = "return {operation}(*args, **kwargs)"
ONE_PERCENT = "return {operation}(*args, **kwargs) * 1.01"
NAN = "return {operation}(*args, **kwargs) * float('nan')"
WRONG_SHAPE = "return {operation}(*args, **kwargs)[:-1]"
WRONG_DTYPE = "return {operation}(*args, **kwargs).double()"
WRITES = "kwargs['b'].mul_(1); kwargs['b'][0, 0] = 3; return {operation}(*args, **kwargs)"


def source(name: str = "gpt2", dtype: str = "float16", length: int = 16) -> ModelSource:
    file, class_name, arguments = MODELS[name]
    return ModelSource(
        model=str(ROOT / "models" / file),
        class_name=class_name,
        model_args=arguments,
        input_shape=(1, length),
        dtype=dtype,
        device="cpu",
    )


def targets_of(of: ModelSource) -> tuple[Target, ...]:
    """A target for every call that the model makes, as extract.py would write them; times are of no matter here."""
    return _targets_of(msgspec.json.encode(of))


@cache
def _targets_of(encoded: bytes) -> tuple[Target, ...]:
    of = msgspec.json.decode(encoded, type=ModelSource)
    loaded = models.load(of)
    regions = capture(loaded.model, *models.inputs(loaded, 0)).regions
    names = site_names(regions)
    groups: dict[Any, list[Region]] = {}
    for region in regions:
        groups.setdefault(call_of(region).key, []).append(region)
    targets = []
    for rank, members in enumerate(groups.values(), start=1):
        call = call_of(members[0])
        targets.append(
            Target(
                name=f"kernel_{call.operation}_{rank}",
                rank=rank,
                operation=call.operation,
                sites=tuple(names[region] for region in members),
                count=len(members),
                shape=call.shape,
                tensors=call.tensors,
                dtype=call.dtype,
                time_us=1.0,
                share=1 / len(groups),
                roofline_us=None,
                saved_us=None,
                bound="unmeasured",
            )
        )
    return tuple(targets)


def write_kernel(path: Path, operation: str, body: str = EXACT) -> Path:
    path.write_text(REFERENCE.format(operation=operation, body=body.format(operation=operation)))
    return path


def plan_for(of: ModelSource, chosen: Callable[[Target], bool] = lambda _: True, **bodies: str) -> Plan:
    """plan.json and a kernel file for each target; `bodies` gives the body of kernel_fn by target, the reference by default."""
    targets = tuple(target for target in targets_of(of) if chosen(target))
    # the json round trip is what the stage will see
    plan = Plan(source=of, gpu="cpu", total_us=1.0, targets=targets)
    state.save(plan)
    for target in targets:
        write_kernel(state.WORKSPACE / f"{target.name}.py", target.operation, bodies.get(target.name, EXACT))
    return state.load(Plan)


def first(of: ModelSource, operation: str) -> str:
    return next(target.name for target in targets_of(of) if target.operation == operation)
