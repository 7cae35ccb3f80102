"""The files in models/: sizes, dtypes, capture, and what each model may and may not see."""

import importlib

import pytest
import torch
from model_cases import FILES, each_class, outputs, tiny
from torch import Tensor

from autokernel import hardware, models
from autokernel.errors import InputError

DECODERS = ("GPT2", "LlamaModel")


@each_class
def test_the_default_configuration_has_the_published_parameter_count(name: str) -> None:
    cls = getattr(importlib.import_module(FILES[name].removesuffix(".py").replace("/", ".")), name)
    with torch.device("meta"):
        model = cls()
    assert sum(parameter.numel() for parameter in model.parameters()) == cls.PARAMETERS


@each_class
def test_tiny_models_compute_the_same_in_every_dtype(name: str) -> None:
    exact = tiny(name)
    reference = outputs(exact)
    for dtype, tolerance in ((torch.float16, 0.01), (torch.bfloat16, 0.06)):
        half = tiny(name, dtype=hardware.dtype_name(dtype))
        assert {tensor.dtype for tensor in (*half.model.parameters(), *half.model.buffers())} == {dtype}
        half.model.load_state_dict(exact.model.state_dict())
        for got, expected in zip(outputs(half), reference, strict=True):
            assert got.dtype == dtype
            assert (got.float() - expected).norm() <= tolerance * expected.norm()


@each_class
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_export_captures_the_model_to_the_bit(name: str, dtype: str) -> None:
    loaded = tiny(name, dtype=dtype)
    args, kwargs = models.inputs(loaded, seed=1)
    exported = torch.export.export(loaded.model, args, kwargs, strict=False).module()
    expected = models.output_tensors(models.run(loaded, args, kwargs))
    with torch.no_grad():
        got = models.output_tensors(exported(*args, **kwargs))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("name", DECODERS)
def test_decoders_do_not_look_ahead(name: str) -> None:
    loaded = tiny(name)
    (ids,), _ = models.inputs(loaded, seed=0)
    changed = ids.clone()
    changed[:, -1] = (ids[:, -1] + 1) % loaded.model.vocab_size
    before, after = (models.run(loaded, (x,), {}) for x in (ids, changed))
    torch.testing.assert_close(before[:, :-1], after[:, :-1])
    assert not torch.allclose(before[:, -1], after[:, -1])


@pytest.mark.parametrize("name", [*DECODERS, "BertModel"])
def test_positions_matter(name: str) -> None:
    # In a single layer the causal mask alone does not tell the last token in which order the earlier ones came.
    loaded = tiny(name, "n_layers=1", shape="1,16")
    (ids,), _ = models.inputs(loaded, seed=0)
    reversed_ids = torch.cat((ids[:, :-1].flip(1), ids[:, -1:]), dim=1)
    first, second = (models.output_tensors(models.run(loaded, (x,), {}))[0][:, -1] for x in (ids, reversed_ids))
    rounding = 1e-6
    assert (first - second).norm() > 20 * rounding * first.norm()


@pytest.mark.parametrize("name", [*DECODERS, "BertModel"])
def test_a_sequence_that_is_too_long_is_refused(name: str) -> None:
    with pytest.raises(InputError, match=r"129.*longer than max_seq_len 128.*give an --input-shape that fits"):
        outputs(tiny(name, shape="1,129"))


def test_gpt2_shares_its_output_projection() -> None:
    model = tiny("GPT2").model
    assert model.lm_head.weight is model.wte.weight


def test_llama_shares_key_value_heads_in_groups() -> None:
    grouped = tiny("LlamaModel", "n_kv_heads=2")
    full = tiny("LlamaModel")
    state = grouped.model.state_dict()
    assert state["layers.0.attention.wk.weight"].shape == (32, 64)
    for name in state:
        if name.endswith(("wk.weight", "wv.weight")):  # each key-value head, once for each query head of its group
            state[name] = state[name].view(2, 16, 64).repeat_interleave(2, dim=0).reshape(64, 64)
    full.model.load_state_dict(state)
    torch.testing.assert_close(outputs(grouped)[0], outputs(full)[0])


def test_llama_positions_are_relative() -> None:
    llama = importlib.import_module("models.llama_7b")
    cos, sin = llama.rotary_tables(16, 40, 10000.0)
    q, k = torch.randn(2, 1, 1, 1, 16)

    def score(i: int, j: int) -> Tensor:
        return (llama.rotate(q, cos[i : i + 1], sin[i : i + 1]) * llama.rotate(k, cos[j : j + 1], sin[j : j + 1])).sum()

    torch.testing.assert_close(score(9, 4), score(35, 30))
    torch.testing.assert_close(llama.rotate(q, cos[:1], sin[:1]), q)


def test_llama_angles_are_float32_even_when_built_in_half_precision() -> None:
    half = tiny("LlamaModel", "max_seq_len=4000", dtype="float16").model
    exact = torch.cos(torch.arange(4000, dtype=torch.float64)[:, None] * 10000.0 ** -(torch.arange(0, 16, 2).double() / 16))
    assert (half.cos.double() - exact).abs().max() < 1e-3


def test_bert_does_not_see_padding() -> None:
    loaded = tiny("BertModel", shape="2,32")
    (ids,), _ = models.inputs(loaded, seed=0)
    mask = torch.ones(2, 32, dtype=torch.int64)
    mask[:, 20:] = 0
    other = ids.clone()
    other[:, 20:] = 7
    masked, repeated = (models.run(loaded, (x,), {"attention_mask": mask})[0] for x in (ids, other))
    torch.testing.assert_close(masked[:, :20], repeated[:, :20])
    torch.testing.assert_close(masked[:, :20], models.run(loaded, (ids[:, :20],), {})[0])
    no_mask, all_ones = models.run(loaded, (ids,), {}), models.run(loaded, (ids,), {"attention_mask": torch.ones_like(mask)})
    torch.testing.assert_close(no_mask, all_ones)
    types = torch.zeros_like(ids)
    torch.testing.assert_close(no_mask, models.run(loaded, (ids, types), {}))
    assert not torch.equal(no_mask[0], models.run(loaded, (ids, types + 1), {})[0])
