"""A Marian folder becomes a model of ours: the same ids, the same tokens, ready to fine-tune."""

import json
import random
import shutil
import sys
from pathlib import Path

import pytest
import sentencepiece
import torch
from datasets import Dataset
from huggingface_hub import HfApi
from safetensors.torch import load_file
from test_publishing import hub  # noqa: F401 - a fixture
from test_scripts import script
from transformers import (
    MarianConfig,
    MarianMTModel,
    MarianTokenizer,
    PreTrainedTokenizerFast,
    T5Config,
)

from modeling_tinytfm import TinyTFMConfig, TinyTFMForConditionalGeneration
from modeling_tinytfm.checkpoints import save_average
from modeling_tinytfm.data import encode_pairs
from modeling_tinytfm.encoding import PairEncoder
from modeling_tinytfm.experiment import run_recipe
from modeling_tinytfm.exporting import export_model
from modeling_tinytfm.importing import import_marian, reason_to_keep
from modeling_tinytfm.loading import load_tokenizer, load_translator
from modeling_tinytfm.publishing import files_to_publish
from modeling_tinytfm.recipes import load_recipe
from modeling_tinytfm.tokenization import (
    TOKENIZER_FILES,
    save_tokenizer,
    train_tokenizer,
    with_bpe_dropout,
)
from modeling_tinytfm.translation import translate

ROOT = Path(__file__).parents[1]
importing = script("import_model")

pytestmark = pytest.mark.filterwarnings(
    # Marian's tokenizer would normalise punctuation, in a method that it never calls.
    "ignore:Recommended. pip install sacremoses:UserWarning"
)
ENGLISH = ["the small dog sees a house", "a green bird sings", "two horses run to the old river"]
GERMAN = ["der kleine Hund sieht ein Haus", "ein grüner Vogel singt", "zwei Pferde laufen weit"]
ODD = (
    *("", " ", "  the  dog ", " dog", "dog ", "日本 語 語語 the", "é é ﬁ ½ Å", "🎉🎉dog🎉"),
    *("</s> in text", "a</s>b", "<unk> x <pad>", "▁the ▁", "a\tb\nc", "a" * 300, "dog▁dog"),
)


def lines(texts: list[str], number: int, seed: int = 0) -> list[str]:
    """Words of some sentences, shuffled."""
    words = " ".join(texts).split()
    chosen = random.Random(seed)
    return [" ".join(chosen.choices(words, k=chosen.randint(3, 9))) for _ in range(number)]


@pytest.fixture(scope="module")
def pieces(tmp_path_factory):
    """SentencePiece model files: of both languages together, of each, and of other kinds."""
    folder = tmp_path_factory.mktemp("pieces")
    both = lines(ENGLISH, 200) + lines(GERMAN, 200)

    def train(name: str, texts: list[str], **options) -> Path:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_prefix=str(folder / name),
            vocab_size=options.pop("vocab_size", 90),
            minloglevel=2,
            hard_vocab_limit=False,
            **options,
        )
        return folder / f"{name}.model"

    return {
        "both": train("both", both),
        "english": train("english", both[:200], vocab_size=60),
        "german": train("german", both[200:], vocab_size=60),
        "bpe": train("bpe", both, model_type="bpe"),
        "bytes": train("bytes", both, byte_fallback=True, vocab_size=400),
    }


def marian_folder(folder: Path, source: Path, target: Path, extra: tuple[str, ...] = ()) -> Path:
    """A small random Marian model with the tokenizer of two SentencePiece models."""
    folder.mkdir(parents=True)
    shutil.copy(source, folder / "source.spm")
    shutil.copy(target, folder / "target.spm")
    found: dict[str, None] = {}
    for file in (source, target):
        model = sentencepiece.SentencePieceProcessor(model_file=str(file))
        found |= dict.fromkeys(model.id_to_piece(i) for i in range(model.get_piece_size()))
    ordered = ["</s>", "<unk>", *extra, *(x for x in found if x not in ("<unk>", "<s>", "</s>"))]
    vocab = {piece: number for number, piece in enumerate([*ordered, "<pad>"])}
    (folder / "vocab.json").write_text(json.dumps(vocab))
    settings = {"tokenizer_class": "MarianTokenizer", "source_lang": "en", "target_lang": "de"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    sizes = {"encoder_layers": 1, "decoder_layers": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 48}
    sizes |= {"d_model": 16, "encoder_attention_heads": 2, "decoder_attention_heads": 4}
    pad = len(vocab) - 1
    ids = {"pad_token_id": pad, "decoder_start_token_id": pad, "eos_token_id": 0}
    config = MarianConfig(
        vocab_size=len(vocab), forced_eos_token_id=0, scale_embedding=True, **sizes, **ids
    )
    model = MarianMTModel(config)
    torch.manual_seed(5)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and "norm" not in name:
            parameter.data.normal_(std=0.3)
    model.final_logits_bias.normal_()
    model.generation_config.bad_words_ids = [[pad]]
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def marian(pieces, tmp_path_factory):
    """Folders: one model for both languages, and one for each."""
    root = tmp_path_factory.mktemp("marian")
    return {
        "one": marian_folder(root / "one", pieces["both"], pieces["both"]),
        "two": marian_folder(root / "two", pieces["english"], pieces["german"]),
    }


def test_one_sentencepiece_model_becomes_a_fast_tokenizer(marian, tmp_path, elsewhere):
    message = import_marian(marian["one"], tmp_path / "ours")
    assert message == "the tokenizer became a fast one that gives the same ids"
    slow = MarianTokenizer.from_pretrained(marian["one"])
    fast = load_tokenizer(tmp_path / "ours")
    assert isinstance(fast, PreTrainedTokenizerFast)
    assert (tmp_path / "ours" / "tokenizer.json").exists()
    assert (fast.pad_token_id, fast.eos_token_id, fast.unk_token_id) == (
        slow.pad_token_id,
        slow.eos_token_id,
        slow.unk_token_id,
    )
    for text in (*lines(ENGLISH, 200, 1), *lines(GERMAN, 200, 2), *ODD):
        ids = slow(text)["input_ids"]
        assert fast(text)["input_ids"] == ids, text
        assert fast(text_target=text)["input_ids"] == slow(text_target=text)["input_ids"]
        assert fast.decode(ids, skip_special_tokens=True) == slow.decode(
            ids, skip_special_tokens=True
        )
    code = """
import sys
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=False)
print(tokenizer(["a green dog"])["input_ids"])
"""
    (printed,) = elsewhere(code, str(tmp_path / "ours")).splitlines()
    assert json.loads(printed) == slow(["a green dog"])["input_ids"]


def test_two_sentencepiece_models_stay_marians(marian, tmp_path):
    message = import_marian(marian["two"], tmp_path / "ours")
    assert "stays Marian's (needs sentencepiece)" in message
    assert "cut by different SentencePiece models" in message
    theirs = MarianTokenizer.from_pretrained(marian["two"])
    ours = load_tokenizer(tmp_path / "ours")
    text = "ein kleiner Hund"
    assert ours(text_target=text)["input_ids"] == theirs(text_target=text)["input_ids"]
    assert ours(text)["input_ids"] == theirs(text)["input_ids"]
    assert ours(text)["input_ids"] != ours(text_target=text)["input_ids"]

    # What trains from a stream, and what an output begins with, are targets, too.
    pairs = Dataset.from_dict({"source": lines(ENGLISH, 9), "target": lines(GERMAN, 9)})
    limits = {"max_source_length": None, "max_target_length": None}
    encoded, _ = encode_pairs(pairs, ours, **limits, drop_too_long=True)
    rows = PairEncoder(ours, **limits)(pairs["source"][:], pairs["target"][:])
    assert rows == [[row["input_ids"], row["labels"]] for row in encoded]
    model = TinyTFMForConditionalGeneration.from_pretrained(tmp_path / "ours")
    for output in translate(model, ours, lines(ENGLISH, 3), prefixes=[text] * 3):
        assert output.startswith(text)
    with pytest.raises(ValueError, match="needs a tokenizer of kind bpe, not Marian"):
        with_bpe_dropout(ours, 0.1)


@pytest.mark.parametrize(
    ("source", "extra", "reason"),
    [
        ("bpe", (), "no unigram model"),
        ("bytes", (), "byte, unused or user-defined pieces"),
        ("both", (">>de<<",), "language codes"),
        ("both", ("▁unheard",), "other pieces than its SentencePiece model"),
        ("both", (), None),
    ],
)
def test_why_a_tokenizer_stays_marians(pieces, tmp_path, source, extra, reason):
    folder = marian_folder(tmp_path / "marian", pieces[source], pieces[source], extra)
    found = reason_to_keep(load_tokenizer(folder))
    assert found is None if reason is None else reason in found


@pytest.mark.parametrize("name", ["one", "two"])
def test_the_model_says_what_marian_says(marian, tmp_path, name):
    import_marian(marian[name], tmp_path / "ours")
    theirs = MarianMTModel.from_pretrained(marian[name])
    ours = TinyTFMForConditionalGeneration.from_pretrained(tmp_path / "ours")
    inputs = load_tokenizer(marian[name])(lines(ENGLISH, 8), return_tensors="pt", padding=True)
    for num_beams in (1, 4):
        options = {"num_beams": num_beams, "max_length": 20, "no_repeat_ngram_size": 2}
        expected = theirs.generate(**inputs, **options)
        assert ours.generate(**inputs, **options).tolist() == expected.tolist()
        assert len({tuple(row) for row in expected.tolist()}) > 4, "too easy a test"
    assert ours.generation_config.bad_words_ids == theirs.generation_config.bad_words_ids


def test_there_and_back(marian, tmp_path):
    import_marian(marian["one"], tmp_path / "ours")
    export_model(tmp_path / "ours", "marian", tmp_path / "marian")
    message = import_marian(tmp_path / "marian", tmp_path / "again")
    assert message == "the tokenizer is the model's own fast one"
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "again"))
    assert first.keys() == second.keys()
    for key, tensor in first.items():
        assert torch.equal(tensor, second[key]), key


def test_a_fast_tokenizer_on_the_hub_needs_no_sentencepiece(marian, hub, tmp_path, monkeypatch):  # noqa: F811
    import_marian(marian["one"], tmp_path / "ours")
    export_model(tmp_path / "ours", "marian", tmp_path / "marian")
    HfApi().create_repo("ada/marian")
    files = {path.name: path.read_bytes() for path in (tmp_path / "marian").iterdir()}
    hub.repositories["ada/marian"].commit("main", files, "a Marian")
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    message = import_marian("ada/marian", tmp_path / "again")
    assert message == "the tokenizer is the model's own fast one"
    text = "a green dog"
    first, second = (load_tokenizer(tmp_path / name)(text) for name in ("ours", "again"))
    assert first["input_ids"] == second["input_ids"]


def test_vocabularies_of_their_own_are_published_both(marian, tmp_path):
    shutil.copytree(marian["two"], tmp_path / "marian")
    settings = json.loads((tmp_path / "marian" / "tokenizer_config.json").read_text())
    settings["separate_vocabs"] = True
    (tmp_path / "marian" / "tokenizer_config.json").write_text(json.dumps(settings))
    shutil.copy(tmp_path / "marian" / "vocab.json", tmp_path / "marian" / "target_vocab.json")
    message = import_marian(tmp_path / "marian", tmp_path / "ours")
    assert "source and target have vocabularies of their own" in message
    assert {"vocab.json", "target_vocab.json"} < files_to_publish(tmp_path / "ours").keys()


def test_further_special_tokens_are_named_as_every_version_reads_them(marian, tmp_path):
    tokenizer = MarianTokenizer.from_pretrained(marian["two"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<x>"]})
    save_tokenizer(tokenizer, tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert "extra_special_tokens" not in settings
    assert settings["additional_special_tokens"] == ["<x>"]
    again = load_tokenizer(tmp_path)
    assert again.decode(again("<x> a")["input_ids"], skip_special_tokens=True).strip() == "a"


def test_what_was_imported_goes_on_to_ctranslate2(marian, tmp_path):
    import_marian(marian["one"], tmp_path / "ours")
    export_model(tmp_path / "ours", "ctranslate2", tmp_path / "ct2")
    outputs = [
        translate(*load_translator([tmp_path / name]), lines(ENGLISH, 8), max_new_tokens=12)
        for name in ("ours", "ct2")
    ]
    assert outputs[0] == outputs[1]
    assert len(set(outputs[0])) > 2, "too easy a test"


def test_what_is_no_marian_model_is_refused(marian, tmp_path):
    T5Config().save_pretrained(tmp_path / "t5")
    with pytest.raises(ValueError, match="t5 is no Marian model: its model_type is 't5'"):
        import_marian(tmp_path / "t5", tmp_path / "ours")
    with pytest.raises(ValueError, match="exists and is no empty folder"):
        import_marian(marian["one"], tmp_path / "t5")
    shutil.copytree(marian["one"], tmp_path / "longer")
    vocab = json.loads((tmp_path / "longer" / "vocab.json").read_text())
    (tmp_path / "longer" / "vocab.json").write_text(json.dumps(vocab | {"more": len(vocab)}))
    with pytest.raises(ValueError, match=f"has {len(vocab) + 1} tokens, the model vocab_size="):
        import_marian(tmp_path / "longer", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_the_command_line(marian, tmp_path, monkeypatch, capsys):
    arguments = [str(marian["two"]), "--output", str(tmp_path / "ours")]
    assert importing.main(arguments) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith(f"{marian['two']} -> {tmp_path / 'ours'}: the tokenizer stays")
    assert printed[1].endswith(f"model.from_pretrained={tmp_path / 'ours'}")
    assert importing.main(arguments) == 2
    assert capsys.readouterr().err.startswith("import_model.py: ")
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    assert importing.main([*arguments[:-1], str(tmp_path / "new")]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        "import_model.py: sentencepiece is not installed: pip install 'modeling-tinytfm[marian]'"
    )


def finetune(start: Path, *overrides: str):
    rows = zip(lines(ENGLISH, 40), lines(GERMAN, 40), strict=True)
    Path("pairs.tsv").write_text("".join(f"{source}\t{target}\n" for source, target in rows))
    return load_recipe(
        ROOT / "configs" / "finetune.yaml",
        [
            *("data.train_file=pairs.tsv", f"model.from_pretrained={start}", *overrides),
            *("threads=1", "training.max_steps=2", "training.use_cpu=true"),
            *("training.disable_tqdm=true", "generation.max_new_tokens=5"),
        ],
    )


@pytest.mark.parametrize("name", ["one", "two"])
def test_a_recipe_goes_on_from_it(marian, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    import_marian(marian[name], "ours")
    # Far enough to show, in two updates.
    scores = run_recipe(finetune(Path("ours"), "training.learning_rate=0.01", "model.dropout=0.25"))
    assert scores["test_loss"] > 0
    run = Path("outputs/finetune")
    before, after = (load_file(folder / "model.safetensors") for folder in (Path("ours"), run))
    assert before.keys() == after.keys()
    changes = [float((after[key] - before[key]).abs().max()) for key in before]
    assert 0 < max(changes) < 0.05, "not where it began, and not anew"
    config = json.loads((run / "config.json").read_text())
    assert (config["dropout"], config["d_model"]) == (0.25, 16)
    text = "ein kleiner Hund"
    first, second = (load_tokenizer(folder)(text_target=text) for folder in ("ours", run))
    assert first["input_ids"] == second["input_ids"]
    save_average(run, Path("mean"), last=1)
    assert load_tokenizer("mean")(text_target=text)["input_ids"] == first["input_ids"]
    assert set(TOKENIZER_FILES) & {path.name for path in run.iterdir()} <= set(
        files_to_publish(run)
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.d_model=64"], "model.d_model=64 contradicts model.from_pretrained='ours', where"),
        (["tokenizer.vocab_size=500"], "tokenizer.vocab_size=500 contradicts model.from_pre"),
        (["tokenizer.kind=word"], "tokenizer.kind='word' contradicts model.from_pretrained"),
        (["model.from_pretrained=elsewhere"], "elsewhere"),
        (["model.from_pretrained=marian"], "of type marian: make it one of ours by scripts/import"),
    ],
    ids=str,
)
def test_what_contradicts_a_start_is_refused(marian, tmp_path, monkeypatch, overrides, message):
    monkeypatch.chdir(tmp_path)
    import_marian(marian["one"], "ours")
    shutil.copytree(marian["one"], "marian")
    with pytest.raises((ValueError, OSError), match=message):
        run_recipe(finetune(Path("ours"), *overrides))


def test_other_tasks_refuse_a_start(tmp_path):
    with pytest.raises(ValueError, match=r"from_pretrained='ours' is for task=seq2seq"):
        load_recipe(
            ROOT / "configs" / "language_model.yaml", ["model=null", "model.from_pretrained=ours"]
        )


def test_a_start_with_fewer_positions_than_tokens_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    both = lines(ENGLISH, 40) + lines(GERMAN, 40)
    tokenizer = train_tokenizer(both, vocab_size=90, show_progress=False)
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1}
    positions = {"position_embedding_type": "learned", "max_position_embeddings": 64}
    config = TinyTFMConfig(len(tokenizer), **sizes, **positions)
    TinyTFMForConditionalGeneration(config).save_pretrained("ours")
    save_tokenizer(tokenizer, "ours")
    message = "max_source_length=256 is above the learned positions, model.max_position_embed.*=64"
    with pytest.raises(ValueError, match=message):
        run_recipe(finetune(Path("ours")))
