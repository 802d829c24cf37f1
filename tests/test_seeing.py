"""Tests of modeling_tinytfm.seeing and explorer: a trace's numbers against the model itself."""

import base64
import copy
import hashlib
import html
import json
import math
import re
import sys

import numpy as np
import pytest
import torch
import yaml
from huggingface_hub import HfApi
from test_publishing import finished_run, hub, run_folder, runpy_script  # noqa: F401 - fixtures
from test_translation import digits  # noqa: F401 - a fixture
from tiny import redraw, tiny_config, tiny_model
from transformers import MarianConfig, MarianMTModel, T5Config, T5ForConditionalGeneration

from modeling_tinytfm import TinyTFMForCausalLM, conversion, explorer, modeling_tinytfm
from modeling_tinytfm.explorer import Trace, pack, unpack, visible
from modeling_tinytfm.search import keep_penalty_form
from modeling_tinytfm.seeing import look
from modeling_tinytfm.sight import head_parts, position_layout
from modeling_tinytfm.translation import translate_n_best

TEMPERATURES = (0.25, 0.5, 1, 2, 4)
KINDS = ("cross", "encoder", "decoder")
TEXT = "3 7 5 9 0 0 8"


def ours(**settings):
    """A random model whose attention is sharp enough that heads and tokens matter."""
    torch.manual_seed(0)
    return redraw(tiny_model(**settings), std=0.5)


def marian():
    torch.manual_seed(0)
    ids = {"pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "bos_token_id": 0}
    size = {"vocab_size": 50, "d_model": 32, "encoder_layers": 2, "decoder_layers": 3}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 2}
    width = {"encoder_ffn_dim": 48, "decoder_ffn_dim": 64, "max_position_embeddings": 80}
    model = MarianMTModel(MarianConfig(**ids, **size, **heads, **width, forced_eos_token_id=2))
    tables = {
        name: value.clone() for name, value in model.state_dict().items() if "position" in name
    }
    redraw(model, std=0.5).load_state_dict(tables, strict=False)
    model.final_logits_bias.normal_()
    return model.eval()


LEARNED = {"norm_first": True, "position_embedding_type": "learned", "output_bias": True}
SIZES = {"encoder_attention_heads": 2, "encoder_layers": 3, "max_position_embeddings": 40}
MODELS = {
    "reverser": None,
    "pre-norm": lambda: ours(norm_first=True, activation_function="gelu"),
    "pre-norm, learned positions": lambda: ours(**LEARNED, **SIZES),
    "post-norm and final norm": lambda: ours(add_final_layer_norm=True),
    "marian": marian,
    "marian, converted": lambda: conversion.from_marian(marian()),
}


class Case:
    """A model, its trace, and what the model itself gives, computed without the code under test."""

    def __init__(self, model, tokenizer):
        self.model = model
        self.trace = look(model, tokenizer, TEXT, max_new_tokens=9)
        header = self.trace.header
        ids = {
            name: [token["id"] for token in header[name]] for name in ("source", "read", "write")
        }
        self.inputs = {
            "input_ids": torch.tensor([ids["source"]]),
            "decoder_input_ids": torch.tensor([ids["read"]]),
        }
        self.labels = torch.tensor(ids["write"])
        self.seen = {}
        handles = [
            module.register_forward_hook(
                lambda _, inputs, output, name=name: self.seen.__setitem__(
                    name, (inputs[0], output)
                )
            )
            for name, module in model.named_modules()
            if name and not list(module.children())
        ]
        was = model.config._attn_implementation
        model.set_attn_implementation("eager")
        with torch.no_grad():
            self.outputs = model(
                **self.inputs, output_attentions=True, output_hidden_states=True, use_cache=False
            )
        model.set_attn_implementation(was)
        for handle in handles:
            handle.remove()

    def weights(self, kind):
        name = {"cross": "cross_attentions"}.get(kind, f"{kind}_attentions")
        return torch.stack(getattr(self.outputs, name))[:, 0].double()

    def scores(self, kind):
        """q.k / sqrt(d_k) [layers, heads, queries, keys], from what the projections gave."""
        stack, attention = {"cross": ("decoder", "encoder_attn")}.get(kind, (kind, "self_attn"))
        layers, heads = self.weights(kind).shape[:2]
        found = []
        for layer in range(layers):
            q, k = (
                self.seen[f"model.{stack}.layers.{layer}.{attention}.{name}"][1][0].double()
                for name in ("q_proj", "k_proj")
            )
            q, k = (x.unflatten(-1, (heads, -1)).transpose(0, 1) for x in (q, k))
            found.append(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]))
        scores = torch.stack(found)
        if kind == "decoder":
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(hidden, -math.inf)
        return scores

    def log_p(self, logits):
        return logits.log_softmax(-1).gather(-1, self.labels[:, None])[..., 0]


@pytest.fixture(scope="session")
def cases(reverser, digits):  # noqa: F811
    torch.manual_seed(0)
    return {
        name: Case(reverser if make is None else make(), digits) for name, make in MODELS.items()
    }


@pytest.fixture(params=MODELS)
def case(request, cases):
    return cases[request.param]


def close(found, wanted, tolerance=1e-5, relative=0.0):
    torch.testing.assert_close(
        torch.as_tensor(found, dtype=torch.float64),
        torch.as_tensor(wanted).double(),
        rtol=relative,
        atol=tolerance,
    )


def test_nothing_is_missing(case):
    assert case.trace.header["missing"] == {}
    assert all(np.isfinite(array).all() for array in case.trace.arrays.values())


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_temperature_is_that_of_the_softmax(case, temperature):
    """w^(1/t), normalised, is softmax(s/t): at every temperature, from codes of 16 bits."""
    for kind in KINDS:
        exact = (case.scores(kind) / temperature).softmax(-1)
        close(case.trace.attention(kind, temperature), exact, 5e-4)


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_codes_hold_very_small_weights(temperature):
    """A linear or 4-decimal code is 0.1 off at temperature 4; plain -ln(w) / 32 ends at e^-32."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(200, 64, generator=generator, dtype=torch.float64) * torch.logspace(
        -1, 1.3, 200, dtype=torch.float64
    ).view(-1, 1)
    weights = scores.float().softmax(-1).numpy()
    assert weights.min() < math.exp(-40)
    found = explorer.decode_attention(
        explorer.encode_attention(weights, np.array(True)), temperature
    )
    close(found / found.sum(-1, keepdims=True), (scores / temperature).softmax(-1), 5e-4)


def test_rows_add_up_to_one(case):
    for kind in KINDS:
        stored = explorer.decode_attention(case.trace.arrays[f"attention.{kind}"])
        close(stored.sum(-1), np.ones(stored.shape[:-1]), 3e-4)
        close(stored, case.weights(kind), 3e-4)


def test_masked_stays_zero(case):
    codes = case.trace.arrays["attention.decoder"]
    above = np.triu(np.ones(codes.shape[-2:], bool), 1)
    assert ((codes == explorer.MASKED) == above).all()
    for temperature in TEMPERATURES:
        assert (case.trace.attention("decoder", temperature)[..., above] == 0).all()
    for kind in ("cross", "encoder"):
        assert (case.trace.arrays[f"attention.{kind}"] != explorer.MASKED).all()


def test_query_and_key_give_the_weight(case):
    for kind in KINDS:
        query, key, value = (
            case.trace.vectors(f"{name}.{kind}") for name in ("query", "key", "value")
        )
        scores = np.einsum("lqhe,lkhe->lhqk", query, key) / math.sqrt(query.shape[-1])
        if kind == "decoder":
            scores[..., np.triu(np.ones(scores.shape[-2:], bool), 1)] = -np.inf
        # Random models have scores of some hundred, of which a code's step is a larger part.
        usual = np.abs(scores[np.isfinite(scores)]).max() < 40
        close(torch.tensor(scores).softmax(-1), case.weights(kind), 5e-4 if usual else 4e-3)
        stack, attention = {"cross": ("decoder", "encoder_attn")}.get(kind, (kind, "self_attn"))
        exact = case.seen[f"model.{stack}.layers.0.{attention}.v_proj"][1][0]
        half_a_step = exact.abs().max() / explorer.SHARP_VECTORS / 2
        close(value[0].reshape(exact.shape), exact, 1.01 * half_a_step.item())


def test_heads_add_up_to_the_sublayer(case):
    for kind in KINDS:
        stack, attention = {"cross": ("decoder", "encoder_attn")}.get(kind, (kind, "self_attn"))
        for layer, lengths in enumerate(case.trace.arrays[f"part.{kind}"]):
            name = f"model.{stack}.layers.{layer}.{attention}.out_proj"
            (context,), (output,) = case.seen[name]
            out_proj = case.model.get_submodule(name)
            parts = head_parts(out_proj, context, len(lengths))
            close(parts.sum(0) + out_proj.bias, output, relative=1e-5)
            close(lengths, parts.norm(dim=-1))
            head = parts.shape[-1] // len(lengths)
            only_first = torch.cat((context[:, :head], torch.zeros_like(context[:, head:])), -1)
            close(parts[0], out_proj(only_first) - out_proj.bias)


def test_switching_off_equals_a_rerun(case):
    """In a copy of the model whose W_O lacks the head's columns."""
    usual = case.log_p(case.outputs.logits[0])
    for kind in KINDS:
        stack, attention = {"cross": ("decoder", "encoder_attn")}.get(kind, (kind, "self_attn"))
        falls = case.trace.arrays[f"off.{kind}"]
        for layer, head in np.ndindex(falls.shape[:2]):
            without = copy.deepcopy(case.model)
            out_proj = without.get_submodule(f"model.{stack}.layers.{layer}.{attention}.out_proj")
            with torch.no_grad():
                out_proj.weight.unflatten(1, (falls.shape[1], -1))[:, head] = 0
                logits = without(**case.inputs).logits[0]
            close(falls[layer, head], usual - case.log_p(logits), 1e-5, relative=2e-5)
    assert np.abs(falls).max() > 1e-3, "heads that do nothing would pass, too"


def test_erasing_equals_a_rerun(case, monkeypatch):
    """With the token's scores masked where weights are made, and nothing else touched."""
    usual = case.log_p(case.outputs.logits[0])
    falls = case.trace.arrays["erase"]
    assert falls.shape == (len(case.labels), case.inputs["input_ids"].shape[1])
    was = case.model.config._attn_implementation
    case.model.set_attn_implementation("eager")
    for token in range(falls.shape[1]):
        mask = torch.ones_like(case.inputs["input_ids"])
        arguments = dict(case.inputs)
        if isinstance(case.model, MarianMTModel):
            arguments["attention_mask"] = mask.index_fill(1, torch.tensor([token]), 0)
        else:
            mask = mask.index_fill(1, torch.tensor([token]), 0).bool()

            def attend(*inputs, mask=None, is_causal=False, hide=mask, **settings):
                mask = mask if is_causal else hide[None, None]
                return modeling_tinytfm.eager_attention(
                    *inputs, mask=mask, is_causal=is_causal, **settings
                )

            monkeypatch.setitem(modeling_tinytfm.ATTENTION, "eager", attend)
        with torch.no_grad():
            logits = case.model(**arguments).logits[0]
        close(falls[:, token], usual - case.log_p(logits), 1e-5, relative=2e-5)
    case.model.set_attn_implementation(was)
    assert np.abs(falls).max() > 1e-3


def test_the_last_row_of_the_lens_is_the_models_own(case):
    exact = case.outputs.logits[0].softmax(-1)
    arrays = case.trace.arrays
    best = exact.topk(5, dim=-1)
    assert (arrays["lens.id"][-1] == best.indices.numpy()).all()
    close(arrays["lens.p"][-1], best.values, 1e-6)
    written = exact.gather(-1, case.labels[:, None])
    close(arrays["lens.written"][-1], written[:, 0], 1e-6)
    assert (arrays["lens.rank"][-1] == (exact > written).sum(-1).numpy() + 1).all()
    close(arrays["lens.entropy"][-1], -(exact * exact.log2()).sum(-1), 1e-4)
    close(arrays["written"], written[:, 0].log(), 1e-5)


def test_earlier_rows_of_the_lens_pass_the_final_norm_once(case):
    states = case.outputs.decoder_hidden_states
    norm = getattr(case.model.model.decoder, "layer_norm", torch.nn.Identity())
    bias = getattr(case.model, "final_logits_bias", 0)
    assert case.trace.header["final_norm"] == isinstance(norm, torch.nn.LayerNorm)
    assert len(states) == len(case.trace.arrays["lens.p"])
    for depth, state in enumerate(states[:-1]):
        with torch.no_grad():
            logits = case.model.get_output_embeddings()(norm(state[0])) + bias
        best = logits.softmax(-1).max(-1)
        assert (case.trace.arrays["lens.id"][depth, :, 0] == best.indices.numpy()).all()
        close(case.trace.arrays["lens.p"][depth, :, 0], best.values, 1e-5)


def test_a_lens_that_is_not_the_models_is_refused(digits, monkeypatch):  # noqa: F811
    model = tiny_model()
    other = torch.nn.Linear(32, 50)
    monkeypatch.setattr(model, "get_output_embeddings", lambda: other)
    trace = look(model, digits, TEXT, max_new_tokens=3)
    assert "would not equal" in trace.header["missing"]["lens"]
    assert "lens.p" not in trace.arrays


def test_layer_norm_has_the_biased_deviation(case):
    """(x - mean) / sqrt(std^2 + eps) * gain + bias is LayerNorm, with the deviation stored."""
    for stack in ("encoder", "decoder"):
        norms = ["self_attn_layer_norm", "final_layer_norm"]
        if stack == "decoder":
            norms.insert(1, "encoder_attn_layer_norm")
        for row, statistics in enumerate(case.trace.arrays[f"stream.{stack}"]):
            name = f"model.{stack}.layers.{row // len(norms)}.{norms[row % len(norms)]}"
            ((x,), (y,)), norm = case.seen[name], case.model.get_submodule(name)
            mean, std, out_mean, out_std = (torch.tensor(row)[:, None] for row in statistics[3:])
            by_hand = (x - mean) / (std**2 + norm.eps).sqrt() * norm.weight + norm.bias
            close(by_hand, y, 1e-4)
            close(out_mean[:, 0], y.mean(-1), 1e-5)
            close(out_std[:, 0], ((y - y.mean(-1, keepdim=True)) ** 2).mean(-1).sqrt(), 1e-5)


def test_the_stream_adds_up(case):
    """|x|^2 + |f|^2 + 2 |x| |f| cos is the squared length of the sum, which the next norm sees."""
    pre = case.trace.header["norm"] == "pre"
    assert pre == bool(getattr(case.model.config, "norm_first", False))
    for stack in ("encoder", "decoder"):
        x, f, cosine, mean, std = (
            case.trace.arrays[f"stream.{stack}"].astype(float)[:, :5].swapaxes(0, 1)
        )
        total = np.sqrt(x**2 + f**2 + 2 * x * f * cosine)
        width = case.model.config.d_model
        normed = np.sqrt(width * (mean**2 + std**2))
        if pre:
            close(x, normed, 1e-3)
            close(total[:-1], x[1:], 1e-3)
        else:
            close(total, normed, 1e-3)


def test_histograms_count_every_dimension(case):
    for stack in ("encoder", "decoder"):
        for name in ("before", "after"):
            counts = case.trace.arrays[f"{name}.{stack}"]
            assert (counts.sum(-1) == case.model.config.d_model).all()
        norm = f"model.{stack}.layers.0.self_attn_layer_norm"
        (x,), (y,) = case.seen[norm]
        limit = max(x[0].abs().max(), y[0].abs().max()).item()
        wanted = np.histogram(x[0].numpy(), bins=33, range=(-limit, limit))[0]
        found = case.trace.arrays[f"before.{stack}"][0, 0].astype(int)
        assert np.abs(wanted - found).sum() <= 2, "a value on the border of two bins may differ"


def test_units_are_those_after_the_activation(case):
    for stack in ("encoder", "decoder"):
        for layer, share in enumerate(case.trace.arrays[f"active.{stack}"]):
            name = f"model.{stack}.layers.{layer}"
            activation = case.model.get_submodule(name).activation_fn
            hidden = activation(case.seen[f"{name}.fc1"][1][0])
            close(share, (hidden > 0).double().mean(-1), 1e-6)
            best = hidden.max(-1)
            assert (case.trace.arrays[f"unit.{stack}"][layer, :, 0] == best.indices.numpy()).all()
            close(case.trace.arrays[f"strength.{stack}"][layer, :, 0], best.values)


def test_the_path_is_in_principal_directions(case):
    """Against the eigenvalues of the covariance, by another library's routine."""
    norm = getattr(case.model.model.decoder, "layer_norm", None)
    states = [state[0] for state in case.outputs.decoder_hidden_states]
    if isinstance(norm, torch.nn.LayerNorm):
        states[-1] = case.seen["model.decoder.layer_norm"][0][0]
    stream = torch.stack(states).double().flatten(0, 1).numpy()
    eigenvalues = np.linalg.eigvalsh(np.cov(stream.T))[::-1]
    shares = case.trace.header["variance"]["decoder"]
    close(shares, eigenvalues[:2].copy() / eigenvalues.sum(), 1e-4)
    plane = case.trace.arrays["path.decoder"].reshape(-1, 2).astype(float)
    close(plane.var(0, ddof=1), eigenvalues[:2].copy(), 1e-3 * eigenvalues[0])


def test_positions_are_the_models_own(cases):
    for name, case in cases.items():
        layout = {"marian": "halves", "pre-norm, learned positions": "learned"}
        wanted = layout.get(name, "interleaved")
        assert case.trace.header["positions"] == {"encoder": wanted, "decoder": wanted}, name
        for stack in ("encoder", "decoder"):
            module = case.model.get_submodule(f"model.{stack}.embed_positions")
            table = getattr(module, "table", getattr(module, "weight", None))
            found = case.trace.vectors(f"positions.{stack}")
            assert len(found) == min(64, len(table))
            close(found, table[:64], 1e-3)


def test_layouts_are_told_apart():
    table = modeling_tinytfm.sinusoids(torch.arange(30), 16)
    assert position_layout(table) == "interleaved"
    assert position_layout(torch.cat((table[:, 0::2], table[:, 1::2]), -1)) == "halves"
    assert position_layout(table.flip(-1)) == position_layout(torch.randn(30, 15)) == "learned"


def test_generation_comes_first_and_is_read_once(reverser, digits):  # noqa: F811
    ids = digits([TEXT], return_tensors="pt")
    for beams in (1, 4):
        trace = look(reverser, digits, TEXT, num_beams=beams)
        (wanted,) = reverser.generate(**ids, num_beams=beams, max_new_tokens=30).tolist()
        assert [token["id"] for token in trace.header["write"]] == wanted[1:]
        assert [token["id"] for token in trace.header["read"]] == wanted[:-1]
        assert trace.header["target_text"] == digits.decode(wanted, skip_special_tokens=True)
        assert not trace.header["target_given"]


@pytest.mark.parametrize("form", ["length", "gnmt"])
def test_the_page_is_about_the_best_output(reverser, digits, form):  # noqa: F811
    model = copy.deepcopy(reverser)
    model.generation_config.length_penalty = 3.0
    model.generation_config.num_beams = 4
    keep_penalty_form(model, form)
    for text in ("1 2 3", "9 8 7 6 5 4", TEXT):
        ((best,),) = translate_n_best(model, digits, [text], 1, max_new_tokens=9)
        trace = look(model, digits, text, max_new_tokens=9)
        assert trace.header["target_text"] == best.text


def test_settings_for_several_outputs_do_not_matter(reverser, digits):  # noqa: F811
    model = copy.deepcopy(reverser)
    model.generation_config.update(num_beams=4, num_return_sequences=3)
    assert look(model, digits, TEXT).header["target_text"]


def test_half_a_character_is_no_target(reverser, digits):  # noqa: F811
    with pytest.raises(ValueError, match=r"target='\\udcff' holds half a surrogate pair"):
        look(reverser, digits, TEXT, "\udcff")


def test_the_demo_looks_at_its_first_output(reverser, digits):  # noqa: F811
    model = copy.deepcopy(reverser)
    model.generation_config.num_beams = 4
    demo = runpy_script("demo")
    for number in (1, 2, 6):
        best, trace = demo.translate_and_look(model, digits, TEXT, number)
        assert len(best) == number
        assert trace.header["target_text"] == best[0].text


def test_a_target_is_read_as_given(reverser, digits):  # noqa: F811
    trace = look(reverser, digits, TEXT, "8 8")
    assert [token["shown"] for token in trace.header["read"]] == ["<s>", "8", "8"]
    assert [token["shown"] for token in trace.header["write"]] == ["8", "8", "</s>"]
    assert trace.header["target_given"]
    with pytest.raises(ValueError, match="num_beams"):
        look(reverser, digits, TEXT, "8 8", num_beams=2)


def test_the_model_is_left_as_it_was(digits):  # noqa: F811
    model = tiny_model(dropout=0.5)
    model.set_attn_implementation("sdpa")
    model.train()
    first, second = (look(model, digits, TEXT, "1 2").arrays["written"] for _ in range(2))
    assert (first == second).all(), "dropout was on"
    assert model.training
    assert model.config._attn_implementation == "sdpa"
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_what_is_read_back_equals_the_trace(case, tmp_path):
    case.trace.save_json(tmp_path / "trace.json")
    again = Trace.from_json((tmp_path / "trace.json").read_text(encoding="utf-8"))
    assert again.header == json.loads(json.dumps(case.trace.header))
    assert again.arrays.keys() == case.trace.arrays.keys()
    for name, array in case.trace.arrays.items():
        assert again.arrays[name].dtype == array.dtype
        assert (again.arrays[name] == array).all()
    assert again.json() == case.trace.json()


@pytest.mark.parametrize("text", ["{}", "[]", '{"format": "tinytfm-trace", "version": 2}'])
def test_something_else_is_no_trace(text):
    with pytest.raises(ValueError, match="no trace"):
        Trace.from_json(text)


def test_packing_keeps_every_type():
    arrays = {kind: np.arange(3).astype(dtype) for kind, dtype in explorer.TYPES.items()}
    directory, block = pack(arrays)
    assert all(first % 4 == 0 for _, _, first in directory.values())
    assert all((unpack(directory, block)[name] == array).all() for name, array in arrays.items())


def test_long_sentences(digits):  # noqa: F811
    model = tiny_model(encoder_layers=1, decoder_layers=2)
    middle = look(model, digits, "1 " * 64, "2 3")
    assert "64 tokens, and here are 65" in middle.header["missing"]["vectors"]
    assert set(middle.header["missing"]) == {"vectors"}
    assert "query.cross" not in middle.arrays
    for text, target in (("1 " * 128, "2"), ("1", "2 " * 128)):
        with pytest.raises(ValueError, match=r"129 tokens.*--layers"):
            look(model, digits, text, target)
    trace = look(model, digits, "1 " * 128, "2", layers=[1], detail="attention")
    assert trace.arrays["attention.encoder"].shape == (1, 4, 129, 129)
    with pytest.raises(ValueError, match=r"source and .* tokens in 1 layers .*--layers"):
        look(model, digits, "1 " * 800, "2", layers=[1], detail="attention")


def test_layers_are_chosen_by_number(cases, digits):  # noqa: F811
    case = cases["marian"]  # 2 + 3 layers
    trace = look(case.model, digits, TEXT, layers=[2, 3], max_new_tokens=9)
    assert trace.header["layers"] == {"encoder": [2], "decoder": [2, 3]}
    for name in ("attention.cross", "off.decoder", "query.cross", "active.decoder"):
        assert (trace.arrays[name] == case.trace.arrays[name][1:]).all()
    assert (trace.arrays["stream.encoder"] == case.trace.arrays["stream.encoder"][2:]).all()
    assert len(trace.arrays["lens.p"]) == 4, "the lens always shows all layers"
    for wrong in ([0], [4], []):
        with pytest.raises(ValueError, match="layers="):
            look(case.model, digits, TEXT, layers=wrong)


def test_attention_alone(reverser, digits):  # noqa: F811
    trace = look(reverser, digits, TEXT, detail="attention")
    assert set(trace.arrays) == {*(f"attention.{kind}" for kind in KINDS), "written"}
    assert all("detail: attention" in reason for reason in trace.header["missing"].values())
    with pytest.raises(ValueError, match=r"detail='some'.*attention, full"):
        look(reverser, digits, TEXT, detail="some")


def test_other_names_hide_views_and_say_why(digits):  # noqa: F811
    """T5 names its modules otherwise, and adds no positions; its attention is shown."""
    config = T5Config(vocab_size=50, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    config.decoder_start_token_id = config.pad_token_id = 1
    trace = look(T5ForConditionalGeneration(config).eval(), digits, TEXT, max_new_tokens=4)
    missing = trace.header["missing"]
    assert missing["vectors"] == "the decoder's layer 1 has no encoder_attn.q_proj"
    assert "embed_positions" in missing["positions"]
    assert {"heads", "stream", "units"} <= missing.keys()
    assert "erase" in trace.arrays
    assert trace.arrays["attention.cross"].shape[:2] == (2, 4)


def test_settings_and_texts_that_cannot_be_seen(reverser, digits):  # noqa: F811
    with pytest.raises(ValueError, match="is_encoder_decoder=False"):
        look(
            TinyTFMForCausalLM(tiny_config(is_encoder_decoder=False, is_decoder=True)), digits, TEXT
        )
    with pytest.raises(ValueError, match="surrogate"):
        look(reverser, digits, "\ud800")
    only_end = look(reverser, digits, "", max_new_tokens=3)
    assert len(only_end.header["source"]) == 1
    assert "single token" in only_end.header["missing"]["erase"]


@pytest.mark.parametrize(
    ("token", "shown"),
    [
        ("a", "a"),
        ("", "∅"),
        (" ", "␣"),
        ("▁the", "␣the"),
        ("a\nb\tc\r", "a⏎b⇥c␍"),
        ("\u200b", "⟨U+200B⟩"),
        ("\u202eabc", "⟨U+202E⟩abc"),
        ("\x00", "⟨U+0000⟩"),
        ("\u3000", "⟨U+3000⟩"),
        ("<0xe3>", "0xE3"),
        ("e\u0301", "e\u0301"),
        ("\u0301", "◌\u0301"),
        ("👩\u200d👧", "👩\u200d👧"),
        ("می\u200cخواهم", "می\u200cخواهم"),
        ("\u200dx", "⟨U+200D⟩x"),
        ("a\u200db", "a⟨U+200D⟩b"),
        ("אבג", "אבג"),
        ("Ġx", "Ġx"),
    ],
)
def test_what_cannot_be_seen_is_shown(token, shown):
    assert visible(token) == shown


@pytest.mark.parametrize(
    ("token", "shown"),
    [("Ġthe", "␣the"), ("Ã©", "é"), ("Ã", "0xC3"), ("Ċ", "⏎"), ("ãģ", "0xE3 0x81")],
)
def test_byte_level_tokens_are_decoded(token, shown):
    assert visible(token, byte_level=True) == shown


HOSTILE = ["</script><img src=x onerror=alert(1)>", "{{data}}", "\"'`<!--", "\u2028"]


def test_a_page_holds_text_as_text(reverser, digits):  # noqa: F811
    trace = look(reverser, digits, TEXT)
    trace.header["source_text"] = HOSTILE[0]
    for token, text in zip(trace.header["source"], HOSTILE, strict=False):
        token["text"] = token["shown"] = text
    page = trace.html()
    assert "<img" not in page
    assert "\u2028" not in page
    (header,) = re.findall(r'<script type="application/json" id="trace">(.*?)</script>', page)
    assert json.loads(header)["source"] == trace.header["source"]
    assert page.count(trace.json()[-60:-2]) == 1, (
        "the block stands where it belongs, and only there"
    )


def test_the_policy_allows_the_pages_own_script_alone(reverser, digits):  # noqa: F811
    page = look(reverser, digits, TEXT).html()
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]+)"', page)
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    for element in ("style", "script"):
        (text,) = re.findall(rf"<{element}>(.*?)</{element}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{element}-src 'sha256-{digest}'" in policy
        page = page.replace(text, "")
    assert not re.findall(r"(?:src|href)=", page), "nothing is loaded"


def test_a_notebook_gets_the_page_in_a_frame(reverser, digits):  # noqa: F811
    trace = look(reverser, digits, TEXT)
    frame = trace._repr_html_()
    assert 'sandbox="allow-scripts allow-downloads"' in frame
    (page,) = re.findall(r'srcdoc="([^"]*)"', frame)
    assert html.unescape(page) == trace.html()


def page_in(page: str) -> dict:
    (header,) = re.findall(r'<script type="application/json" id="trace">(.*?)</script>', page)
    return json.loads(header)


@pytest.fixture
def see():
    return runpy_script("see")


def test_the_command_writes_a_page_or_numbers(run_folder, see, tmp_path, capsys):  # noqa: F811
    output = tmp_path / "page.html"
    assert see.main([str(run_folder), TEXT, "-o", str(output), "--beams", "2"]) == 0
    header = page_in(output.read_text(encoding="utf-8"))
    assert header["model"]["name"] == run_folder.name
    printed = capsys.readouterr().out
    assert printed.startswith(f"{TEXT} -> {' '.join(reversed(TEXT.split()))}\n")
    assert f"{output} (0.1 MB): open it in a browser" in printed
    saved = tmp_path / "trace.json"
    options = ["--target", "1 2", "--detail", "attention", "--layers", "2", "-o", str(saved)]
    assert see.main([str(run_folder), TEXT, *options]) == 0
    trace = Trace.from_json(saved.read_text(encoding="utf-8"))
    assert trace.header["layers"] == {"encoder": [2], "decoder": [2]}
    assert trace.header["target_text"] == "1 2"
    assert "not shown" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["FOLDER", "1 " * 200], "the source has 201 tokens"),
        (["FOLDER", "1 2", "--layers", "3"], "layers=[3]: 3 is not from 1 to 2"),
        (["FOLDER", "1 2", "-o", "no/such/folder.html"], "no/such/folder.html"),
        (["/tmp/no-such-model", "1 2"], "no-such-model: no such folder"),
    ],
)
def test_the_command_tells_in_one_line_what_is_wrong(run_folder, see, arguments, told, capsys):  # noqa: F811
    arguments = [str(run_folder) if word == "FOLDER" else word for word in arguments]
    assert see.main(arguments) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.startswith("see.py: ")
    assert error.count("\n") == 1


def test_the_demo_names_what_to_install(run_folder, monkeypatch, capsys):  # noqa: F811
    monkeypatch.setitem(sys.modules, "gradio", None)
    assert runpy_script("demo").main([str(run_folder)]) == 2
    error = capsys.readouterr().err
    assert error == "demo.py: gradio is missing: pip install -e '.[demo]'\n"


@pytest.mark.filterwarnings(
    "ignore:Use 'content=<...>':DeprecationWarning"
)  # as in test_publishing
def test_a_space_shows_the_page(hub, run_folder, capsys):  # noqa: F811
    push = runpy_script("push_to_hub")
    assert push.main([str(run_folder), "ada/mine", "--space", TEXT, "--private"]) == 0
    assert f"{hub.url}/spaces/ada/mine" in capsys.readouterr().out
    assert hub.repositories["spaces/ada/mine"].private
    files = hub.files("spaces/ada/mine")
    assert set(files) == {".gitattributes", "README.md", "index.html"}
    card = yaml.safe_load(files["README.md"].decode().split("---")[1])
    backwards = " ".join(reversed(TEXT.split()))
    title = f"{TEXT} → {backwards}"
    sdk = {"sdk": "static", "app_file": "index.html", "tags": ["tinytfm"]}
    assert card == {"title": title, **sdk}
    header = page_in(files["index.html"].decode())
    assert (header["source_text"], header["target_text"]) == (TEXT, backwards)
    assert "model.safetensors" in hub.files("ada/mine")
    # A second time is a new commit; what cannot be seen stops before anything is published.
    assert push.main([str(run_folder), "ada/mine", "--space", "1 2"]) == 0
    assert len(hub.repositories["spaces/ada/mine"].messages) == 3
    assert push.main([str(run_folder), "ada/other", "--space", "1 " * 200]) == 2
    assert "ada/other" not in hub.repositories


@pytest.mark.filterwarnings(
    "ignore:Use 'content=<...>':DeprecationWarning"
)  # as in test_publishing
def test_a_space_is_as_private_as_its_model_and_takes_nobodys_place(hub, run_folder, capsys):  # noqa: F811
    push = runpy_script("push_to_hub")
    assert push.main([str(run_folder), "ada/hidden", "--private"]) == 0
    assert push.main([str(run_folder), "ada/hidden", "--space", "1 2"]) == 0
    assert hub.repositories["spaces/ada/hidden"].private
    api = HfApi()
    api.create_repo("ada/app", repo_type="space", space_sdk="gradio")
    before = len(hub.repositories["spaces/ada/app"].messages)
    assert push.main([str(run_folder), "ada/app", "--space", "1 2", "--private"]) == 2
    assert "the Space ada/app exists, and everybody can see it" in capsys.readouterr().err
    assert push.main([str(run_folder), "ada/app2", "--space", "1 2"]) == 0
    api.create_repo("ada/app3", repo_type="space", space_sdk="gradio")
    assert push.main([str(run_folder), "ada/app3", "--space", "1 2"]) == 2
    assert "the Space ada/app3 exists and holds something else" in capsys.readouterr().err
    assert len(hub.repositories["spaces/ada/app"].messages) == before


@pytest.mark.filterwarnings(
    "ignore:Use 'content=<...>':DeprecationWarning"
)  # as in test_publishing
def test_only_our_space_or_the_hubs_empty_one_is_replaced(hub, run_folder, capsys):  # noqa: F811
    push = runpy_script("push_to_hub")
    text = "Reference at https://huggingface.co/docs/hub/spaces-config-reference"
    new = {
        "README.md": f"---\nsdk: static\n---\n{text}\n".encode(),
        "index.html": b"<h1>Welcome to your static Space!</h1>",
        "style.css": b"",
    }
    own = b"---\nsdk: static\n---\nWhat I think of tinytfm\n"
    gradio = b"---\nsdk: gradio\ntags: [tinytfm]\n---\n"
    for name, files, status in (
        ("ada/new", new, 0),
        ("ada/gradio", {**new, "README.md": gradio}, 2),
        ("ada/words", {**new, "README.md": own}, 2),
        ("ada/page", {**new, "index.html": b"<h1>My page</h1>"}, 2),
        ("ada/more", {**new, "script.js": b""}, 2),
    ):
        HfApi().create_repo(name, repo_type="space", space_sdk="static")
        hub.repositories[f"spaces/{name}"].commit("main", files, "mine")
        assert push.main([str(run_folder), name, "--space", "1 2"]) == status, name
        assert ("holds something else" in capsys.readouterr().err) == (status == 2), name
        assert (name in hub.repositories) == (status == 0), "the model is published first"
        assert (hub.files(f"spaces/{name}") == files) == (status == 2)
