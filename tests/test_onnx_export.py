"""B46: an exported graph takes any batch and length, and honours masks; ONNX says what we say."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnxruntime import InferenceSession
from test_conversion import tiny_model
from test_ctranslate2_model import word_tokenizer
from tiny import token_ids
from torch.export import Dim

from modeling_tinytfm import TinyTFMForCausalLM, onnx_export
from modeling_tinytfm.exporting import export_model
from modeling_tinytfm.onnx_export import cache_names, write_onnx
from modeling_tinytfm.tokenization import save_tokenizer


def batch(rows: int, source: int, target: int) -> dict[str, torch.Tensor]:
    """The last row is padded on the right, and where there are three, the second on the left."""
    mask = torch.ones(rows, source, dtype=torch.long)
    mask[-1, source - 2 :] = 0
    if rows > 2:
        mask[1, :3] = 0
    return {
        "input_ids": token_ids(rows, source),
        "attention_mask": mask,
        "decoder_input_ids": token_ids(rows, target),
    }


class Logits(torch.nn.Module):
    """A forward pass without cache, as tensors in and a tensor out."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask, decoder_input_ids):
        masked = {"input_ids": input_ids, "attention_mask": attention_mask}
        return self.model(**masked, decoder_input_ids=decoder_input_ids, use_cache=False).logits


@pytest.mark.filterwarnings(
    # torch's own, of its own use of a class that it has deprecated
    "ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning"
)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_B46_exported_at_one_shape_run_at_another(attention):
    model = tiny_model()
    model.set_attn_implementation(attention)
    rows, source, target = Dim("rows"), Dim("source", max=1024), Dim("target", max=1024)
    axes = {name: {0: rows, 1: source} for name in ("input_ids", "attention_mask")}
    axes["decoder_input_ids"] = {0: rows, 1: target}
    with torch.no_grad():
        exported = torch.export.export(Logits(model), (), batch(2, 7, 5), dynamic_shapes=axes)
        program = exported.module()
        for shape in ((3, 11, 4), (1, 300, 2), (5, 2, 40)):
            inputs = batch(*shape)
            expected, found = model(**inputs, use_cache=False).logits, program(**inputs)
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
        inputs = batch(3, 11, 4)
        ids, found = inputs["input_ids"], program(**inputs)
        hidden = inputs["attention_mask"] == 0
        inputs["input_ids"] = ids.masked_fill(hidden, 7)
        torch.testing.assert_close(program(**inputs), found, rtol=0, atol=1e-6)
        inputs["input_ids"] = ids.masked_fill(~hidden, 7)
        assert (program(**inputs) - found).abs().max() > 0.1


def test_names_are_optimums():
    names = cache_names("past_key_values", 2, ["decoder", "encoder"])
    assert names[:5] == [
        "past_key_values.0.decoder.key",
        "past_key_values.0.decoder.value",
        "past_key_values.0.encoder.key",
        "past_key_values.0.encoder.value",
        "past_key_values.1.decoder.key",
    ]


def test_what_is_no_encoder_decoder_of_tokens_is_refused(tmp_path):
    decoder = tiny_model(TinyTFMForCausalLM, is_encoder_decoder=False, is_decoder=True)
    with pytest.raises(ValueError, match="must be a TinyTFMForConditionalGeneration"):
        write_onnx(decoder, tmp_path)
    with pytest.raises(ValueError, match="input_feature_size=6 cannot be carried over to ONNX"):
        write_onnx(tiny_model(input_feature_size=6), tmp_path)


def test_what_the_readme_does_not_honour_is_told_by_name(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(onnx_export, "_write", lambda *_: None)
    model = tiny_model()
    honoured = {"suppress_tokens": [7], "bad_words_ids": [[5]], "num_beams": 4, "min_length": 0}
    model.generation_config.update(**honoured)
    write_onnx(model, tmp_path)
    assert caplog.text == ""
    model.generation_config.update(no_repeat_ngram_size=3, forced_eos_token_id=0)
    model.generation_config.bad_words_ids.append([5, 6])
    write_onnx(model, tmp_path)
    (told,) = caplog.messages
    assert told == (
        "the greedy search in the folder's README.md does not know no_repeat_ngram_size=3, "
        "forced_eos_token_id=0, bad_words_ids of several tokens"
    )


@pytest.fixture(scope="module")
def folder(reverser, tmp_path_factory):
    root = tmp_path_factory.mktemp("onnx")
    reverser.save_pretrained(root / "model")
    save_tokenizer(word_tokenizer(), root / "model")
    return export_model(root / "model", "onnx", root / "exported")


@pytest.mark.slow  # three graphs to trace and to optimise
def test_the_folder_holds_graphs_and_no_pickle(folder):
    files = {path.name for path in folder.iterdir()}
    graphs = {"encoder_model.onnx", "decoder_model.onnx", "decoder_with_past_model.onnx"}
    others = {"tokenizer.json", "tokenizer_config.json", "generation_config.json", "export.json"}
    assert files == graphs | others | {"README.md"}
    for name in graphs:
        onnx.checker.check_model(str(folder / name))
    record = json.loads((folder / "export.json").read_text())
    assert (record["engine"], record["model"]) == ("onnx", "model")
    sizes = {
        axis.dim_param or axis.dim_value
        for value in onnx.load(folder / "decoder_with_past_model.onnx").graph.input
        for axis in value.type.tensor_type.shape.dim
    }
    assert sizes == {"batch", "length", "past", 1, 4, 8}


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"suppress_tokens": [5], "bad_words_ids": [[6], [8]]}])
def test_greedy_search_of_the_readme_finds_the_same_tokens(
    folder, reverser, elsewhere, settings, tmp_path
):
    """Verbatim, but for its lines, in a process without this package."""
    folder = Path(shutil.copytree(folder, tmp_path / "copy"))
    file = folder / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    generator = torch.Generator().manual_seed(3)
    lines = [
        " ".join(f"w{number}" for number in torch.randint(3, 13, (length,), generator=generator))
        for length in torch.randint(1, 13, (40,), generator=generator).tolist()
    ]
    assert '["..."]' in code
    code = code.replace('["..."]', repr(lines)).replace("print(", "print(tokens.tolist()); print(")
    found, texts = elsewhere(f"import os; os.chdir({str(folder)!r})\n{code}").splitlines()
    tokenizer = word_tokenizer()
    inputs = tokenizer(lines, padding=True, return_tensors="pt")
    assert (inputs["attention_mask"] == 0).any()
    expected = reverser.generate(**inputs, max_new_tokens=50, **settings)
    assert json.loads(found) == expected.tolist()
    assert eval(texts) == tokenizer.batch_decode(expected, skip_special_tokens=True)


@pytest.mark.slow
def test_masks_are_honoured_by_the_graphs(folder, reverser):
    inputs = batch(3, 11, 1)
    inputs = {name: value.numpy() for name, value in inputs.items()}
    encoder = InferenceSession(folder / "encoder_model.onnx")
    decoder = InferenceSession(folder / "decoder_model.onnx")

    def logits(input_ids):
        mask = inputs["attention_mask"]
        (states,) = encoder.run(None, {"input_ids": input_ids, "attention_mask": mask})
        step = {"input_ids": inputs["decoder_input_ids"], "encoder_attention_mask": mask}
        return decoder.run(["logits"], {**step, "encoder_hidden_states": states})[0]

    hidden = inputs["attention_mask"] == 0
    found = logits(inputs["input_ids"])
    np.testing.assert_allclose(logits(np.where(hidden, 7, inputs["input_ids"])), found, atol=1e-5)
    with torch.no_grad():
        expected = reverser(**{name: torch.tensor(x) for name, x in inputs.items()}).logits
    np.testing.assert_allclose(found, expected, atol=1e-4)
