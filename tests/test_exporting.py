"""Folders for other engines: what is in them, who can load them, and what is refused."""

import copy
import json
import sys
from pathlib import Path

import pytest
import torch
from test_ctranslate2_model import sources, word_tokenizer
from test_scripts import run_translate, script
from tiny import tiny_model

from modeling_tinytfm import TinyTFMForCausalLM
from modeling_tinytfm.exporting import export_model
from modeling_tinytfm.search import keep_penalty_form
from modeling_tinytfm.tokenization import save_tokenizer
from modeling_tinytfm.translation import new_folder

exporting = script("export")


@pytest.fixture(scope="module")
def saved(reverser, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "model"
    reverser.save_pretrained(folder)
    save_tokenizer(word_tokenizer(), folder)
    return folder


def save(model, folder: Path) -> Path:
    model.save_pretrained(folder)
    save_tokenizer(word_tokenizer(model.config.vocab_size), folder)
    return folder


def test_a_marian_folder_needs_no_code_of_ours(saved, reverser, tmp_path, elsewhere):
    export_model(saved, "marian", tmp_path / "marian")
    assert {path.suffix for path in (tmp_path / "marian").iterdir()} == {".json", ".safetensors"}
    rows = sources(40)
    lines = [" ".join(f"w{token}" for token in row[:-1]) for row in rows]
    code = """
import json, sys
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

torch.set_num_threads(1)
folder, lines = sys.argv[1], json.loads(sys.argv[2])
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForSeq2SeqLM.from_pretrained(folder)
inputs = tokenizer(lines, return_tensors="pt", padding=True)
outputs = [model.generate(**inputs, num_beams=n, max_new_tokens=14).tolist() for n in (1, 4)]
texts = tokenizer.batch_decode(outputs[0], skip_special_tokens=True)
print(json.dumps([type(model).__name__, inputs["input_ids"].tolist(), outputs, texts]))
"""
    output = elsewhere(code, str(tmp_path / "marian"), json.dumps(lines)).splitlines()[-1]
    name, input_ids, outputs, texts = json.loads(output)
    assert name == "MarianMTModel"
    tokenizer = word_tokenizer()
    inputs = tokenizer.pad({"input_ids": rows}, return_tensors="pt")
    assert input_ids == inputs["input_ids"].tolist()
    for num_beams, found in zip((1, 4), outputs, strict=True):
        expected = reverser.generate(**inputs, num_beams=num_beams, max_new_tokens=14)
        assert found == expected.tolist()
        assert len({tuple(row) for row in found}) > 30, "too easy a test"
    assert texts == tokenizer.batch_decode(outputs[0], skip_special_tokens=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm_first": True}, "norm_first=True cannot be carried over to MarianMTModel"),
        ({"position_embedding_type": "learned"}, "position_embedding_type='learned' cannot"),
        ({"add_final_layer_norm": True}, "add_final_layer_norm=True cannot"),
        ({"layer_norm_eps": 1e-6}, "layer_norm_eps=1e-06 cannot"),
    ],
    ids=str,
)
def test_what_marian_has_not_is_refused_and_leaves_nothing(changes, message, tmp_path):
    folder = save(tiny_model(**changes), tmp_path / "model")
    with pytest.raises(ValueError, match=message):
        export_model(folder, "marian", tmp_path / "marian")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_what_is_no_encoder_decoder_is_refused(tmp_path):
    decoder = tiny_model(TinyTFMForCausalLM, is_encoder_decoder=False, is_decoder=True)
    folder = save(decoder, tmp_path / "model")
    for engine in ("ctranslate2", "marian", "onnx"):
        with pytest.raises(ValueError, match="not a TinyTFMForCausalLM"):
            export_model(folder, engine, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_ctranslate2_folder_says_what_it_was_made_of(saved, reverser, tmp_path):
    output = export_model(saved, "ctranslate2", tmp_path / "new", quantization="int8")
    record = json.loads((output / "export.json").read_text())
    assert (record["engine"], record["model"], record["quantization"]) == (
        "ctranslate2",
        "model",
        "int8",
    )
    assert record["config"]["d_model"] == reverser.config.d_model
    assert "auto_map" not in record["config"]
    assert str(saved.parent) not in (output / "export.json").read_text()
    files = {path.name for path in output.iterdir()}
    assert files == {
        "model.bin",  # CTranslate2's own format
        "config.json",
        "shared_vocabulary.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "export.json",
    }
    assert (output / "model.bin").read_bytes()[:24].find(b"TransformerSpec") > 0
    assert output.stat().st_mode & 0o055, "others may not even look"


def test_no_folder_is_overwritten(saved, tmp_path):
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "notes.txt").write_text("mine")
    for output in (tmp_path / "used", tmp_path / "used" / "notes.txt"):
        with pytest.raises(ValueError, match="exists and is no empty folder: choose another"):
            export_model(saved, "marian", output)
    assert (tmp_path / "used" / "notes.txt").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    export_model(saved, "marian", tmp_path / "empty")
    assert (tmp_path / "empty" / "model.safetensors").exists()


def test_a_new_folder_appears_when_all_is_written(tmp_path):
    def stop_halfway():
        with new_folder(tmp_path / "deep" / "new") as folder:
            (folder / "file").write_text("half")
            assert not (tmp_path / "deep" / "new").exists()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        stop_halfway()
    assert not any((tmp_path / "deep").iterdir())
    with new_folder(tmp_path / "deep" / "new") as folder:
        (folder / "file").write_text("whole")
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["new"]


@pytest.mark.parametrize(
    ("engine", "module", "missing"),
    [
        ("ctranslate2", "modeling_tinytfm.ctranslate2_model", "ctranslate2"),
        ("onnx", "modeling_tinytfm.onnx_export", "onnx"),
        ("onnx", "modeling_tinytfm.onnx_export", "onnxscript"),
    ],
)
def test_a_missing_package_is_named_in_one_line(
    engine, module, missing, saved, tmp_path, monkeypatch, capsys
):
    monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, missing, None)
    arguments = [str(saved), "--to", engine, "--output", str(tmp_path / "new")]
    assert exporting.main(arguments) == 2
    output, errors = capsys.readouterr()
    assert output == ""
    extra = f"pip install 'modeling-tinytfm[{engine}]'"
    assert errors.splitlines()[-1] == f"export.py: {missing} is not installed: {extra}"
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(("form", "told"), [("gnmt", 1), ("length", 0)])
def test_a_penalty_that_others_do_not_know_is_told(reverser, tmp_path, caplog, form, told):
    model = copy.deepcopy(reverser)
    keep_penalty_form(model, form)
    export_model(save(model, tmp_path / "ours"), "marian", tmp_path / "marian")
    assert caplog.text.count("'gnmt' is known to modeling_tinytfm alone") == told


def test_a_penalty_that_ctranslate2_does_not_know_is_told(reverser, tmp_path, caplog):
    model = copy.deepcopy(reverser)
    keep_penalty_form(model, "gnmt")
    export_model(save(model, tmp_path / "ours"), "ctranslate2", tmp_path / "ct2")
    assert "translate with num_beams=1 or length_penalty_form='length'" in caplog.text


def test_what_translating_would_refuse_is_not_exported(reverser, tmp_path):
    model = copy.deepcopy(reverser)
    model.generation_config.repetition_penalty = 1.2
    folder = save(model, tmp_path / "ours")
    with pytest.raises(ValueError, match=r"repetition_penalty=1\.2 cannot be carried over"):
        export_model(folder, "ctranslate2", tmp_path / "ct2")
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


def test_the_command_line(saved, tmp_path, capsys):
    def command_line(*arguments):
        return exporting.main(list(map(str, arguments)))

    output = tmp_path / "new folder"
    assert command_line(saved, "--to", "marian", "--output", output) == 0
    assert f"{saved} -> {output}\n" in capsys.readouterr().out
    for arguments, message in (
        (["--to", "marian", "--output", output], "exists and is no empty folder"),
        (["--to", "marian", "--output", tmp_path / "x", "--quantization", "int8"], "only"),
        (["--to", "ctranslate2", "--output", tmp_path / "x", "--quantization", "int3"], "int3"),
    ):
        assert command_line(saved, *arguments) == 2
        errors = capsys.readouterr().err.splitlines()
        assert message in errors[-1]
        assert errors[-1].startswith("export.py: ")
    assert command_line(tmp_path / "nowhere", "--to", "marian", "--output", tmp_path / "x") == 2
    assert "nowhere: no such folder" in capsys.readouterr().err


def test_half_precision_is_exported_exactly(reverser, tmp_path):
    """Without a quantisation an export computes in float32, with the numbers that were saved."""
    folder = tmp_path / "model"
    reverser.save_pretrained(folder)
    model = type(reverser).from_pretrained(folder, dtype=torch.bfloat16)
    save(model, tmp_path / "half")
    output = export_model(tmp_path / "half", "ctranslate2", tmp_path / "new")
    from modeling_tinytfm.ctranslate2_model import CTranslate2Translator
    from modeling_tinytfm.decoding import ModelTranslator

    translator = CTranslate2Translator(output, word_tokenizer())
    assert translator.translator.compute_type == "float32"
    ours = ModelTranslator([model.float()], word_tokenizer())
    for first, second in zip(
        ours.generate(sources(40), max_new_tokens=14),
        translator.generate(sources(40), max_new_tokens=14),
        strict=True,
    ):
        assert first[0].tokens == second[0].tokens


def test_translate_takes_the_folder_with_the_same_options(
    reverser, tmp_path, monkeypatch, capsysbinary
):
    model = copy.deepcopy(reverser)
    model.generation_config.update(num_beams=3, early_stopping=True)  # as CTranslate2 ends
    saved = save(model, tmp_path / "model")
    output = str(export_model(saved, "ctranslate2", tmp_path / "new"))
    rows = [*sources(30), [2], *sources(3)]
    text = "".join(" ".join(f"w{token}" for token in row[:-1]) + "\n" for row in rows).encode()

    def run(folder, *options):
        return run_translate(monkeypatch, capsysbinary, str(folder), *options, stdin=text)

    for options in (
        [],
        ["--scores", "--batch-tokens", "20"],
        ["--max-new-tokens", "5", "--num-beams", "1"],
        ["--num-beams", "1", "--prefix", "w4 w5", "--alignments"],
        ["--length-penalty", "0.5", "--n-best", "3"],
        ["--num-beams", "1", "--length-penalty-form", "gnmt", "--length-penalty", "2", "--scores"],
    ):
        status, expected, _ = run(saved, *options)
        assert status == 0
        found = run(output, *options)
        assert found[0] == 0, found
        assert len(expected.splitlines()) == len(found[1].splitlines())
        for first, second in zip(expected.splitlines(), found[1].splitlines(), strict=True):
            for a, b in zip(first.split("\t"), second.split("\t"), strict=True):
                same = a == b or float(a) == pytest.approx(float(b), abs=1e-4)
                assert same, (options, first, second)
    for arguments, message in (
        ([output, str(saved)], "new was exported to CTranslate2: it decodes alone"),
        ([output, "--prefix", "w4"], "a prefix with num_beams=3 cannot"),
        ([output, "--length-penalty-form", "gnmt"], "form='gnmt' with"),
        ([output, "--max-new-tokens", "5000"], "max_new_tokens of 5000 tokens exceeds"),
    ):
        status, _, errors = run(*arguments)
        assert status == 2
        assert message in errors.splitlines()[-1]
    (tmp_path / "onnx").mkdir()
    (tmp_path / "onnx" / "export.json").write_text('{"engine": "onnx"}')
    status, _, errors = run(tmp_path / "onnx")
    assert (status, "its README.md shows how" in errors) == (2, True)
    monkeypatch.delitem(sys.modules, "modeling_tinytfm.ctranslate2_model")
    monkeypatch.setitem(sys.modules, "ctranslate2", None)
    assert "pip install 'modeling-tinytfm[ctranslate2]'" in run(output)[2]
