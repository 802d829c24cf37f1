"""A model run by CTranslate2 says what generate() says; what it cannot do, it refuses by name."""

import copy
import gzip
import json
import os
from pathlib import Path

import pytest
import torch
from test_conversion import tiny_model
from tiny import reversal_batch, token_ids
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from modeling_tinytfm import TinyTFMConfig, TinyTFMForCausalLM, TinyTFMForConditionalGeneration
from modeling_tinytfm.ctranslate2_model import (
    CTranslate2Translator,
    TinyTFMLoader,
    choose_products,
    ctranslate2,  # not imported before ours: it reads a variable that ours sets
)
from modeling_tinytfm.decoding import ModelTranslator
from modeling_tinytfm.exporting import export_model
from modeling_tinytfm.tokenization import save_tokenizer, train_tokenizer
from modeling_tinytfm.translation import budget_batches, translate_n_best

MULTI30K = Path(__file__).parents[2] / "shared" / "data" / "multi30k"


def word_tokenizer(size: int = 50) -> PreTrainedTokenizerFast:
    """One word for each id of `tiny`'s models: w3, w4, ..."""
    vocab = {"<s>": 0, "<pad>": 1, "</s>": 2} | {f"w{number}": number for number in range(3, size)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 2)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", pad_token="<pad>", eos_token="</s>"
    )


def exported(model, folder: Path, quantization: str | None = None) -> CTranslate2Translator:
    """A model, saved, exported and loaded again."""
    tokenizer = word_tokenizer(model.config.vocab_size)
    model.save_pretrained(folder / "model")
    save_tokenizer(tokenizer, folder / "model")
    output = folder / f"exported-{quantization}"
    export_model(folder / "model", "ctranslate2", output, quantization=quantization)
    return CTranslate2Translator(output, tokenizer)


def sources(number: int = 200) -> list[list[int]]:
    """Strings of 1-12 symbols, each ending in </s>."""
    batch = reversal_batch(number, torch.Generator().manual_seed(7))
    lengths = batch["attention_mask"].sum(1).tolist()
    return [row[:length] for row, length in zip(batch["input_ids"].tolist(), lengths, strict=True)]


def both(model, translator, rows, **options):
    """What the model and what its export makes of sources."""
    options.setdefault("max_new_tokens", 14)
    ours = ModelTranslator([model], translator.tokenizer)
    return [x.generate(rows, with_scores=True, **options) for x in (ours, translator)]


@pytest.fixture(scope="module")
def translator(reverser, tmp_path_factory) -> CTranslate2Translator:
    return exported(reverser, tmp_path_factory.mktemp("float32"))


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 1},
        {"num_beams": 4},
        {"num_beams": 4, "length_penalty": 0.0},
        {"num_beams": 4, "length_penalty": 0.0, "n_best": 4},
        {"num_beams": 4, "length_penalty": -1.0, "n_best": 2},
        {"num_beams": 5, "length_penalty": 2.0, "n_best": 5},
        {"num_beams": 4, "max_new_tokens": 4},
        {"num_beams": 1, "max_new_tokens": 1},
        {"num_beams": 1, "min_new_tokens": 9, "no_repeat_ngram_size": 2},
        {"num_beams": 4, "min_new_tokens": 9, "no_repeat_ngram_size": 2},
        {"num_beams": 1, "suppress_tokens": [5, 6]},
        {"num_beams": 4, "bad_words_ids": [[5], [6]]},
        {"num_beams": 1, "forced_eos_token_id": 2, "max_new_tokens": 5},
        {"num_beams": 4, "forced_eos_token_id": 2, "max_new_tokens": 5},
    ],
    ids=str,
)
def test_all_of_200_outputs_are_the_same(reverser, translator, options, early_stopping):
    if options["num_beams"] > 1:
        options = {**options, "early_stopping": early_stopping, "renormalize_logits": True}
        if early_stopping is not True:  # the best is the same, but others may have been let go
            options["n_best"] = 1
    expected, found = both(reverser, translator, sources(), **options)
    for row, (wanted, got) in enumerate(zip(expected, found, strict=True)):
        assert [x.tokens for x in got] == [x.tokens for x in wanted], row
        assert [x.text for x in got] == [x.text for x in wanted], row
        for a, b in zip(wanted, got, strict=True):
            assert b.score == pytest.approx(a.score, rel=1e-4, abs=1e-4), row
    assert len({best[0].tokens for best in expected}) > 5, "too easy a test"


def test_prefixes_and_alignments_are_the_same(reverser, translator):
    rows = sources(40)
    prefixes = [[3 + row % 9, 4][: row % 3] for row in range(len(rows))]
    expected, found = both(reverser, translator, rows, prefixes=prefixes, num_beams=1)
    assert [best[0].tokens for best in found] == [best[0].tokens for best in expected]
    for (wanted,), (got,) in zip(expected, found, strict=True):
        assert got.score == pytest.approx(wanted.score, abs=1e-4)
    targets = [best[0].tokens for best in found]
    ours = ModelTranslator([reverser], translator.tokenizer)
    for wanted, got in zip(
        ours.attend(rows, targets), translator.attend(rows, targets), strict=True
    ):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)


def test_int8_differs_on_5_percent_at_most(reverser, tmp_path):
    translator = exported(reverser, tmp_path, "int8")
    assert translator.translator.compute_type.startswith("int8")
    for options in ({"num_beams": 1}, {"num_beams": 4, "early_stopping": True}):
        expected, found = both(reverser, translator, sources(), **options)
        same = [a[0].tokens == b[0].tokens for a, b in zip(expected, found, strict=True)]
        assert sum(same) >= 190


@pytest.mark.parametrize(
    ("known", "already", "expected"),
    [
        ({"avx512_vnni": False, "avx_vnni": False}, None, "1"),
        ({"avx512_vnni": False, "avx_vnni": False}, "0", "0"),
        ({"avx512_vnni": True, "avx_vnni": False}, None, None),
        ({"avx512_vnni": False, "avx_vnni": True}, None, None),
        ({"neon": True}, None, None),
    ],
)
def test_products_that_saturate_are_avoided(monkeypatch, known, already, expected):
    monkeypatch.delenv("CT2_USE_MKL", raising=False)
    if already is not None:
        monkeypatch.setenv("CT2_USE_MKL", already)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: known, raising=False)
    choose_products()
    assert os.environ.get("CT2_USE_MKL") == expected
    monkeypatch.delenv("CT2_USE_MKL", raising=False)


@pytest.mark.parametrize(
    "changes",
    [
        {"norm_first": True},
        {"add_final_layer_norm": True},
        {"position_embedding_type": "learned"},
        {"output_bias": True, "tie_word_embeddings": False},
        {"share_encoder_decoder_embeddings": False},
        {"scale_embedding": False, "layer_norm_eps": 0.1},
        {"encoder_layers": 1, "decoder_layers": 3, "encoder_attention_heads": 8},
        {"decoder_attention_heads": 2, "encoder_ffn_dim": 48, "activation_function": "gelu"},
        {"activation_function": "swish", "decoder_start_token_id": 1},
    ],
    ids=str,
)
def test_every_switch_is_carried_over(changes, tmp_path):
    """Scores of forced outputs, as the words of untrained models prove little."""
    model = tiny_model(**changes)
    tokenizer = word_tokenizer()
    translator = exported(model, tmp_path)
    rows = [[*token_ids(length).tolist(), 2] for length in (3, 7, 1, 12)]
    targets = token_ids(4, 9)
    scored = translator.translator.score_batch(
        [tokenizer.convert_ids_to_tokens(row) for row in rows],
        [tokenizer.convert_ids_to_tokens(row) for row in targets.tolist()],
    )
    start = torch.full((4, 1), model.config.decoder_start_token_id)
    for row, target, found in zip(rows, targets, scored, strict=True):
        decoder_input_ids = torch.cat((start[0], target))[None]
        with torch.no_grad():
            logits = model(torch.tensor([row]), decoder_input_ids=decoder_input_ids).logits[0]
        ends = torch.cat((target, torch.tensor([2])))
        expected = logits.log_softmax(-1).gather(1, ends[:, None])[:, 0]
        assert logits.std() > 0.5
        torch.testing.assert_close(torch.tensor(found.log_probs), expected, rtol=0, atol=1e-4)


def test_the_model_stays_as_it_is(reverser, tmp_path):
    """Quantisation writes into what it is given."""
    model = copy.deepcopy(reverser)
    spec = TinyTFMLoader()(model, word_tokenizer())
    spec.validate()
    spec.optimize("int8")
    for name, tensor in reverser.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


def test_ctranslate2s_own_converter_knows_the_model(reverser, tmp_path):
    reverser.save_pretrained(tmp_path / "model")
    save_tokenizer(word_tokenizer(), tmp_path / "model")
    converter = ctranslate2.converters.TransformersConverter(str(tmp_path / "model"))
    converter.convert(str(tmp_path / "converted"))
    config = json.loads((tmp_path / "converted" / "config.json").read_text())
    assert (config["decoder_start_token"], config["eos_token"]) == ("<s>", "</s>")
    assert not config["add_source_eos"]
    translator = ctranslate2.Translator(str(tmp_path / "converted"))
    (result,) = translator.translate_batch([["w5", "w9", "w7", "</s>"]], beam_size=1)
    assert result.hypotheses == [["w7", "w9", "w5"]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation_function": "mish"}, "activation_function='mish'.*has gelu"),
        ({"decoder_start_token_id": None}, "decoder_start_token_id=None"),
        ({"eos_token_id": None}, "eos_token_id=None"),
        ({"input_feature_size": 6}, "input_feature_size=6 cannot be carried over to CTranslate2"),
    ],
    ids=str,
)
def test_what_ctranslate2_has_not_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        TinyTFMLoader()(tiny_model(**changes), word_tokenizer())


def test_other_shapes_and_tokenizers_are_refused():
    decoder = tiny_model(TinyTFMForCausalLM, is_encoder_decoder=False, is_decoder=True)
    with pytest.raises(ValueError, match="must be a TinyTFMForConditionalGeneration"):
        TinyTFMLoader()(decoder, word_tokenizer())
    with pytest.raises(ValueError, match="the tokenizer has id 59, the model only vocab_size=50"):
        TinyTFMLoader()(tiny_model(), word_tokenizer(60))


def test_ids_without_a_token_get_one():
    tokens = TinyTFMLoader().get_vocabulary(tiny_model(), word_tokenizer(48))
    assert tokens[46:] == ["w46", "w47", "<no token 48>", "<no token 49>"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"do_sample": True}, "do_sample=True cannot be carried over"),
        ({"repetition_penalty": 1.2}, "repetition_penalty=1.2 cannot"),
        ({"length_penalty_form": "gnmt", "num_beams": 2}, "length_penalty_form='gnmt' with"),
        ({"no_repeat_ngram_size": 2, "num_beams": 2}, "no_repeat_ngram_size=2 with num_beams=2"),
        ({"forced_eos_token_id": 5}, "forced_eos_token_id=5 cannot.*not among eos_token_id=2"),
        ({"forced_eos_token_id": 2, "max_new_tokens": 1}, "max_new_tokens=1 leaves no room"),
        ({"prefixes": [[5]], "num_beams": 2}, "a prefix with num_beams=2"),
        ({"prefixes": [[5, 6, 7]], "max_new_tokens": 3}, "a prefix of 3 tokens leaves no room"),
        ({"max_new_tokens": 2000}, "max_new_tokens of 2000 tokens exceeds max_position_emb.*1024"),
        ({"made_up": 1}, "made_up=1 cannot"),
    ],
    ids=str,
)
def test_what_it_cannot_do_is_refused(translator, options, message):
    with pytest.raises(ValueError, match=message):
        translator.generate([[5, 6, 2]], **options)


def test_settings_of_the_models_own_count(reverser, tmp_path):
    model = copy.deepcopy(reverser)
    model.generation_config.update(num_beams=3, max_length=6, length_penalty=0.5)
    translator = exported(model, tmp_path)
    given = {"num_beams": 3, "max_new_tokens": 5, "length_penalty": 0.5}
    ours = ModelTranslator([reverser], translator.tokenizer).generate(
        sources(20), with_scores=True, **given
    )
    found = translator.generate(sources(20), with_scores=True)
    assert [x[0].tokens for x in found] == [x[0].tokens for x in ours]
    assert found[3][0].score == pytest.approx(ours[3][0].score, abs=1e-4)


def test_a_source_longer_than_the_positions_is_refused(translator):
    with pytest.raises(ValueError, match="a source of 1025 tokens exceeds max_position_embeddings"):
        translator.generate([[5] * 1024 + [2]], max_new_tokens=5)


@pytest.mark.parametrize("kind", ["sinusoidal", "learned"])
def test_outputs_as_long_as_the_positions_have_scores_and_alignments(tmp_path, kind):
    model = tiny_model(max_position_embeddings=12, position_embedding_type=kind)
    model.generation_config.eos_token_id = 49  # they hardly ever end
    translator = exported(model, tmp_path)
    for num_beams in (1, 2):
        options = {"max_new_tokens": 12, "num_beams": num_beams, "alignments": "token"}
        ours, theirs = (
            translate_n_best(either, translator.tokenizer, ["w5 w6", "w7"], 1, **options)
            for either in (model, translator)
        )
        for (found,), (expected,) in zip(theirs, ours, strict=True):
            assert len(found.tokens) == 12
            assert found.tokens == expected.tokens
            assert found.score == pytest.approx(expected.score, abs=1e-4)
            assert found.alignment == expected.alignment


def test_a_damaged_folder_is_refused(reverser, tmp_path):
    exported(reverser, tmp_path)
    (tmp_path / "exported-None" / "model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match="CTranslate2 cannot load this model"):
        CTranslate2Translator(tmp_path / "exported-None", word_tokenizer())


def read(name: str) -> list[str]:
    with gzip.open(MULTI30K / name, "rt", encoding="utf-8") as stream:
        return [line.rstrip("\n") for line in stream]


@pytest.mark.slow
@pytest.mark.skipif(not MULTI30K.exists(), reason="the Multi30k files are not here")
def test_real_sentences(tmp_path):
    """A model that has learnt some German: its beams differ, and it is often unsure."""
    texts = {
        split: [read(f"{split}.lc.norm.tok.{language}.gz") for language in ("en", "de")]
        for split in ("train", "test_2016_flickr")
    }
    english, german = texts["train"]
    tokenizer = train_tokenizer(english + german, vocab_size=2000, show_progress=False)
    sizes = {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 128}
    sizes |= {"decoder_ffn_dim": 128, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    config = TinyTFMConfig(vocab_size=len(tokenizer), dropout=0.0, **sizes)
    model = TinyTFMForConditionalGeneration(config).train()
    rows = [tokenizer(english)["input_ids"], tokenizer(german)["input_ids"]]
    lengths = [len(source) + len(target) for source, target in zip(*rows, strict=True)]
    batches = list(budget_batches(lengths, 2000))
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(batches), generator=generator)[:400].tolist()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=len(order))
    for number in order:
        inputs = tokenizer.pad(
            {"input_ids": [rows[0][i] for i in batches[number]]}, return_tensors="pt"
        )
        labels = [torch.tensor(rows[1][i]) for i in batches[number]]
        padded = torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100)
        model(**inputs, labels=padded).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    model.eval().save_pretrained(tmp_path / "model")
    save_tokenizer(tokenizer, tmp_path / "model")
    lines = texts["test_2016_flickr"][0][:200]
    for quantization in (None, "int8"):
        folder = tmp_path / f"{quantization}"
        export_model(tmp_path / "model", "ctranslate2", folder, quantization=quantization)
        translator = CTranslate2Translator(folder, tokenizer)
        for early_stopping, num_beams in ((False, 1), (True, 4), ("never", 4)):
            options = {"num_beams": num_beams, "early_stopping": early_stopping}
            options["max_new_tokens"] = 60
            expected, found = (
                translate_n_best(x, tokenizer, lines, 1, **options) for x in (model, translator)
            )
            same = [a[0].tokens == b[0].tokens for a, b in zip(expected, found, strict=True)]
            # int8 turns a word where two are about as likely, more often the less was learnt. With
            # "never", CTranslate2 ends after twice as many hypotheses as beams: seldom too soon
            # (1 and 4 of 200 on two machines, whose training adds up in other orders).
            fewest = 120 if quantization else 190 if early_stopping == "never" else 200
            assert sum(same) >= fewest
            if quantization is None:  # ended too soon: never something better
                assert all(
                    b[0].score <= a[0].score + 1e-3 for a, b in zip(expected, found, strict=True)
                )
