"""Vocabularies of every kind: what a token is, what decoding gives back, what a save keeps."""

import json
import logging
import multiprocessing
import os
import random
import re
import string
import subprocess
import sys
import tracemalloc
import unicodedata
from collections import Counter
from pathlib import Path

import pytest
from transformers import AutoTokenizer, DataCollatorForSeq2Seq, PreTrainedTokenizerFast

from modeling_tinytfm.tokenization import (
    SPECIAL_TOKENS,
    mend_tokenizer_class,
    save_tokenizer,
    train_tokenizer,
    with_bpe_dropout,
)

PAD, BOS, EOS, UNK = range(4)
KINDS = ("bpe", "unigram", "word", "character", "regex")
EXACT_KINDS = ("bpe", "unigram", "character")
LETTERS_AND_PHONEMES = "[A-Z]+|[a-z']"

ODD_LINES = [
    "The quick brown fox, it jumps over 12 dogs!",
    "  two in front and three behind   ",
    "tab\tand\t\ttwo tabs\t",
    "日本語のテキスト、中文文本。",
    "café naïve Ångström",
    "cafe\u0301 nai\u0308ve A\u030angstro\u0308m x\u0323\u0301",
    "👨‍👩‍👧‍👦 👩🏽‍🚀 ❤️ 1️⃣ 🇩🇪",
    "می‌خواهم हिन्दी क्‍ष ไทย",
    "CR\rand CRLF\r\nand LF\n and\x85and\u2028and\u3000and\xa0end",
    "\ufeffBOM and NUL \x00 and \x1f and \ufdd1",
    "▁Metaspace ĠByteLevel ##WordPiece </w> @@",
    "\"quotes\" 'NA' NA nan null \\n \\",
    "a </s> b <pad> c <s> d <unk> e",
    "x</s>y <</s>> <pad><pad> </S> <PAD> </pad>",
    "z" + string.ascii_letters + string.digits + string.punctuation,
]


def settings_of(kind: str) -> dict:
    settings = {"kind": kind, "vocab_size": 600, "show_progress": False}
    return {**settings, "pattern": LETTERS_AND_PHONEMES} if kind == "regex" else settings


def round_trip(tokenizer: PreTrainedTokenizerFast, text: str) -> str:
    return tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True)


@pytest.fixture(scope="module")
def trained() -> dict[str, PreTrainedTokenizerFast]:
    return {kind: train_tokenizer(ODD_LINES, **settings_of(kind)) for kind in KINDS}


@pytest.fixture(scope="module")
def folders(trained, tmp_path_factory) -> dict[str, Path]:
    """Each tokenizer saved after a use with padding and truncation, as a Trainer leaves it."""
    folders = {}
    for kind, tokenizer in trained.items():
        folders[kind] = tmp_path_factory.mktemp("tokenizers") / kind
        tokenizer("a b c d e f g h", padding="max_length", max_length=5, truncation=True)
        save_tokenizer(tokenizer, folders[kind])
    return folders


@pytest.fixture(scope="module")
def reloaded(folders) -> dict[str, PreTrainedTokenizerFast]:
    return {kind: AutoTokenizer.from_pretrained(folder) for kind, folder in folders.items()}


@pytest.fixture(params=["as trained", "reloaded"])
def tokenizers(request, trained, reloaded) -> dict[str, PreTrainedTokenizerFast]:
    return trained if request.param == "as trained" else reloaded


# What a token is


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_have_their_ids(tokenizers, kind):
    tokenizer = tokenizers[kind]
    assert list(SPECIAL_TOKENS.values()) == ["<pad>", "<s>", "</s>", "<unk>"]
    assert tokenizer.convert_ids_to_tokens([PAD, BOS, EOS, UNK]) == list(SPECIAL_TOKENS.values())
    named = (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id)
    assert (*named, tokenizer.unk_token_id) == (PAD, BOS, EOS, UNK)
    assert sorted(tokenizer.get_vocab().values()) == list(range(len(tokenizer)))


def test_words_are_the_most_frequent_ones():
    rng = random.Random(1)
    words = ["".join(rng.choices("abcdé.,<>/s", k=rng.randint(1, 4))) for _ in range(300)]
    words = [word for word in words if not re.search("<(?=/?s>)", word)]
    lines = ["  ".join(rng.choices(words, k=9)) for _ in range(200)]
    tokenizer = train_tokenizer(lines, kind="word", vocab_size=104, show_progress=False)

    counts = Counter(word for line in lines for word in line.split())
    expected = sorted(counts, key=lambda word: (-counts[word], word))[:100]
    assert tokenizer.convert_ids_to_tokens(range(4, 104)) == expected
    assert len(tokenizer) == 104
    for line in lines:
        known = [word if word in expected else "<unk>" for word in line.split()]
        assert tokenizer(line).tokens() == [*known, "</s>"]


def test_characters_are_code_points_in_order_of_frequency():
    tokenizer = train_tokenizer(
        ["12345", "23", "3 4"], kind="character", vocab_size=10, show_progress=False
    )
    assert tokenizer.convert_ids_to_tokens(range(4, 10)) == ["3", "2", "4", " ", "1", "5"]
    assert tokenizer("1 2").tokens() == ["1", " ", "2", "</s>"]
    assert tokenizer("19").input_ids == [8, UNK, EOS]


def test_bpe_merges_within_words_and_fills_the_vocabulary():
    lines = ["the cat sat on the mat. the end", "the cat, the hat; 2026 2026 2026"] * 5
    tokenizer = train_tokenizer(lines, vocab_size=34, show_progress=False)
    assert len(tokenizer) == 34
    # The first word of a line is the same token as in its middle; digits and signs stay single.
    expected = [" the", " cat", ",", " the", " cat", ".", " 2", "0", "2", "6", "</s>"]
    assert tokenizer("the cat, the cat. 2026").tokens() == expected


def test_bpe_learns_no_merge_rarer_than_min_frequency():
    lines = ["once", "twice twice", "thrice thrice thrice"]
    sizes = [
        len(train_tokenizer(lines, vocab_size=99, min_frequency=least, show_progress=False))
        for least in (1, 2, 3, 100)
    ]
    alphabet = len(set(" ".join(lines))) + len(SPECIAL_TOKENS)
    assert sizes[0] > sizes[1] > sizes[2] > sizes[3] == alphabet
    assert len(train_tokenizer(lines, vocab_size=99, show_progress=False)) == sizes[1]


def likeliest_pieces(word: str, scores: dict[str, float]) -> float:
    """The best sum of scores of all ways to cut a word."""
    cuts = range(1, len(word) + 1)
    return max(
        (
            scores[word[:cut]] + (likeliest_pieces(word[cut:], scores) if word[cut:] else 0)
            for cut in cuts
            if word[:cut] in scores
        ),
        default=-1e9,
    )


def test_unigram_cuts_a_word_into_its_likeliest_pieces():
    rng = random.Random(6)
    stems, endings = ["walk", "talk", "jump", "häng", "sing"], ["", "ed", "ing", "s", "er"]
    words = [rng.choice(stems) + rng.choice(endings) for _ in range(2_000)]
    lines = [" ".join(words[start : start + 8]) for start in range(0, 2_000, 8)]
    tokenizer = train_tokenizer(lines, kind="unigram", vocab_size=40, show_progress=False)
    assert len(tokenizer) == 40
    assert " sing" in tokenizer.get_vocab()
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    scores = dict(map(tuple, model["vocab"][4:]))
    for word in {*words, "singer", "sings", "erhangs"}:
        tokens = tokenizer(word).tokens()[:-1]
        assert "".join(tokens) == f" {word}"
        best = likeliest_pieces(f" {word}", scores)
        assert sum(scores[token] for token in tokens) == pytest.approx(best)


def test_unigram_treats_characters_seen_once_alike_in_every_training():
    """The library scores them in the order of a hash table, which is another one each time."""
    # Characters that stand in one word each are no pieces of their own until the last moment.
    words = ["".join(map(chr, range(n, n + 8))) for n in range(0x4E00, 0x4E50, 8)]
    trained = [
        train_tokenizer([" ".join(words)] * 50, kind="unigram", vocab_size=99, show_progress=False)
        for _ in range(3)
    ]
    assert len({tokenizer.backend_tokenizer.to_str() for tokenizer in trained}) == 1


# Sub-word regularisation


def test_bpe_dropout_cuts_anew_each_time_and_loses_nothing(trained):
    bpe = trained["bpe"]
    before = bpe.backend_tokenizer.to_str()
    random_cuts = with_bpe_dropout(bpe, 0.5)
    line = "The quick brown fox, it jumps over 12 dogs!"
    cuts = [random_cuts(line).input_ids for _ in range(50)]
    assert len({tuple(ids) for ids in cuts}) > 25
    for text in [line, *ODD_LINES]:
        ids = random_cuts(text).input_ids
        assert random_cuts.decode(ids, skip_special_tokens=True) == (
            unicodedata.normalize("NFC", text)
        )
        assert ids.count(EOS) == 1
        assert not {PAD, BOS, UNK} & set(ids)
    assert bpe.backend_tokenizer.to_str() == before
    assert bpe(line).input_ids == bpe(line).input_ids


def test_bpe_dropout_of_0_changes_nothing_and_of_1_leaves_characters(trained):
    for line in ODD_LINES:
        expected = trained["bpe"](line).input_ids
        assert with_bpe_dropout(trained["bpe"], 0.0)(line).input_ids == expected
        characters = with_bpe_dropout(trained["bpe"], 1.0)(line).tokens()[:-1]
        assert "".join(characters) == " " + unicodedata.normalize("NFC", line)
        assert all(len(token) == 1 for token in characters)


def test_dropout_reaches_no_saved_tokenizer(trained, tmp_path):
    random_cuts = with_bpe_dropout(trained["bpe"], 0.5)
    save_tokenizer(random_cuts, tmp_path)
    saved = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    assert saved["model"]["dropout"] is None
    assert random_cuts.backend_tokenizer.model.dropout == 0.5


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"bpe"}))
def test_dropout_is_for_bpe(trained, kind):
    with pytest.raises(ValueError, match=r"bpe_dropout=0.1 needs .* kind bpe, not"):
        with_bpe_dropout(trained[kind], 0.1)


@pytest.mark.parametrize("kind", ["word", "regex"])
def test_tokens_rarer_than_min_frequency_are_unknown(kind):
    settings = {**settings_of(kind), "min_frequency": 2}
    tokenizer = train_tokenizer(["A A B", "C C B D"], **settings)
    assert sorted(tokenizer.get_vocab()) == sorted([*SPECIAL_TOKENS.values(), "A", "B", "C"])
    assert train_tokenizer(["A B"], **settings_of(kind)).convert_tokens_to_ids("B") != UNK


def test_letters_and_phonemes_share_a_vocabulary():
    pairs = [("cat", "K AE T"), ("a", "AH"), ("o'clock", "AH K L AA K"), ("kiki", "K IY K IY")]
    lines = [side for pair in pairs for side in pair]
    tokenizer = train_tokenizer(
        lines, kind="regex", pattern=LETTERS_AND_PHONEMES, vocab_size=100, show_progress=False
    )
    assert tokenizer("cat").tokens() == ["c", "a", "t", "</s>"]
    assert tokenizer(text_target="K AE T").tokens() == ["K", "AE", "T", "</s>"]
    for line in lines:
        assert round_trip(tokenizer, line) == line
        assert UNK not in tokenizer(line).input_ids
    assert len(tokenizer) == 4 + len(set("cato'clockiki")) + len(
        ["K", "AE", "T", "AH", "L", "AA", "IY"]
    )
    assert tokenizer.decode(tokenizer("K AE T").input_ids) == "K AE T </s>"


def test_regex_tokens_are_the_matches_and_nothing_else_is_lost():
    pattern = r"[a-z]+[0-2]?|\d\d"
    rng = random.Random(2)
    lines = ["".join(rng.choices("ab01 \t,é🙂A", k=rng.randint(0, 30))) for _ in range(300)]
    tokenizer = train_tokenizer(
        lines, kind="regex", pattern=pattern, vocab_size=9999, show_progress=False
    )
    for line in lines:
        assert tokenizer(line).tokens() == [*re.findall(rf"{pattern}|\S", line), "</s>"]


def test_regex_decoding_restores_the_usual_spacing():
    lines = ["Hello, world! How are you?", "I am fine, thank you. Bye!", "(well) you are (fine)"]
    tokenizer = train_tokenizer(
        lines, kind="regex", pattern=r"\w+|[^\w\s]", vocab_size=99, show_progress=False
    )
    assert round_trip(tokenizer, "How are you , world ? fine .") == "How are you, world? fine."


@pytest.mark.parametrize(
    ("pattern", "lines"),
    [
        (r" ?\S+|\s+", ["the cat  sat\t", " a dog", "K AE T", "   "]),
        (r"[A-Z]+|[a-z']| (?=[a-z'])", ["the cat sat", " a dog", "K AE T"]),
    ],
)
def test_regex_that_matches_spaces_round_trips(pattern, lines):
    tokenizer = train_tokenizer(
        lines, kind="regex", pattern=pattern, vocab_size=99, show_progress=False
    )
    for line in lines:
        assert round_trip(tokenizer, line) == line


def test_regex_spacing_of_tokens_seen_only_at_line_starts():
    tokenizer = train_tokenizer(
        ["cat", "K AE T"],
        kind="regex",
        pattern=LETTERS_AND_PHONEMES,
        vocab_size=99,
        show_progress=False,
    )
    assert tokenizer.decode(tokenizer("a c t").input_ids, skip_special_tokens=True) == "act"
    assert round_trip(tokenizer, "T K AE K") == "T K AE K"


@pytest.mark.parametrize("pattern", [r"\w+|,", r"\w+ ?|,"], ids=["spaced", "abutting"])
def test_regex_decoders_stay_small(pattern):
    """They list signs among words that follow spaces, and nothing where all tokens abut."""
    line = " ".join(f"word{number}" for number in range(2000)) + ", end"
    tokenizer = train_tokenizer(
        [line], kind="regex", pattern=pattern, vocab_size=9999, show_progress=False
    )
    assert round_trip(tokenizer, line).replace(", ", ",") == line.replace(", ", ",")
    decoder = json.loads(tokenizer.backend_tokenizer.to_str())["decoder"]
    assert len(json.dumps(decoder)) < 1000


@pytest.mark.parametrize("spaced_tokens", [1, 200])
def test_regex_spacing_holds_for_every_character(spaced_tokens):
    """Both ways of listing tokens in the decoder, with everything that needs escaping."""
    signs = string.punctuation.replace("<", "") + "⟨日\u0301\u200d🙂"
    words = [f"W{number}" for number in range(spaced_tokens)]
    lines = [word + "".join(signs) for word in words]
    lines += [" ".join(words)]
    tokenizer = train_tokenizer(
        lines, kind="regex", pattern=r"W\d+", vocab_size=999, show_progress=False
    )
    for line in lines:
        assert round_trip(tokenizer, line) == unicodedata.normalize("NFC", line)


# What decoding gives back


@pytest.mark.parametrize("kind", EXACT_KINDS)
def test_decoding_gives_the_normalised_line_back(tokenizers, kind):
    tokenizer = tokenizers[kind]
    alphabet = sorted({c for line in ODD_LINES for c in unicodedata.normalize("NFC", line)})
    rng = random.Random(3)
    fresh = ["".join(rng.choices([*alphabet, "   ", "</s>"], k=30)) for _ in range(300)]
    fresh += [unicodedata.normalize("NFD", line) for line in ODD_LINES]
    fresh += ["", " ", "  ", "\t", " a", "a ", "  a  b  ", "\n", " \n ", "\u0301", " \u0301"]
    for line in [*ODD_LINES, *fresh]:
        if all(c in alphabet for c in unicodedata.normalize("NFC", line)):
            assert round_trip(tokenizer, line) == unicodedata.normalize("NFC", line)
            assert UNK not in tokenizer(line).input_ids


@pytest.mark.parametrize("kind", EXACT_KINDS)
def test_characters_seen_once_are_never_unknown(kind):
    rare = "ŽŸ字🙂\u200d\x00\u0378"
    lines = ["frequent words " * 50] * 50 + list(rare)
    tokenizer = train_tokenizer(lines, kind=kind, vocab_size=40, show_progress=False)
    assert UNK not in tokenizer(rare + "frequent").input_ids
    assert round_trip(tokenizer, rare) == rare
    assert tokenizer("Q").input_ids[-2:] == [UNK, EOS]


def test_words_come_back_with_single_spaces(tokenizers):
    for line in ODD_LINES:
        words = re.split(r"[^\S\x1c-\x1f]+", unicodedata.normalize("NFC", line))
        assert round_trip(tokenizers["word"], line) == " ".join(filter(None, words))


@pytest.mark.parametrize("form", ["nfc", "nfkc", "nfd", "nfkd", "none"])
@pytest.mark.parametrize("lowercase", [False, True])
def test_normalisation_forms(form, lowercase):
    line = "Ａﬁ ① é e\u0301 Å \u212b ΐ \u03aa\u0301 K"

    def normalized(text: str) -> str:
        text = text if form == "none" else unicodedata.normalize(form.upper(), text)
        if lowercase:
            text = text.lower()
            text = text if form == "none" else unicodedata.normalize(form.upper(), text)
        return text

    for kind in EXACT_KINDS:
        tokenizer = train_tokenizer(
            [line],
            kind=kind,
            vocab_size=99,
            normalization=form,
            lowercase=lowercase,
            show_progress=False,
        )
        assert round_trip(tokenizer, line) == normalized(line)
        assert round_trip(tokenizer, normalized(line)) == normalized(line)


def test_nfc_is_the_default():
    tokenizer = train_tokenizer(["e\u0301"], kind="character", vocab_size=9, show_progress=False)
    assert tokenizer("\u00e9").input_ids == tokenizer("e\u0301").input_ids == [4, EOS]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("unit", ["a", " ", "ab ", "日本", "</s>", "é", "e\u0301", "🙂", "9", "- "])
def test_a_line_of_100000_characters_is_safe(kind, unit):
    line = unit * (100_000 // len(unit))
    tokenizer = train_tokenizer([line, "a b"], **settings_of(kind))
    ids = tokenizer(line).input_ids
    assert ids.count(EOS) == 1
    assert UNK not in ids
    decoded = tokenizer.decode(ids, skip_special_tokens=True)
    if kind in EXACT_KINDS:
        assert decoded == unicodedata.normalize("NFC", line)


# Special tokens


@pytest.mark.parametrize("kind", KINDS)
def test_b31_exactly_one_eos_at_the_end(tokenizers, kind):
    tokenizer = tokenizers[kind]
    for text in ("a b", "", "   ", "unseen: Ж"):
        ids = tokenizer(text).input_ids
        assert ids[-1] == EOS
        assert not {PAD, BOS, EOS} & set(ids[:-1])
        assert tokenizer(text_target=text).input_ids == ids
        assert tokenizer(text, add_special_tokens=False).input_ids == ids[:-1]
    cut = tokenizer("a b c d e f g h", max_length=4, truncation=True).input_ids
    assert len(cut) == 4
    assert cut[-1] == EOS
    again = tokenizer(tokenizer.decode(tokenizer("a b").input_ids)).input_ids
    assert again.count(EOS) == 1
    assert tokenizer("a b", "c").input_ids == tokenizer("a b").input_ids + tokenizer("c").input_ids


@pytest.mark.parametrize("kind", KINDS)
def test_b31_collated_labels_ignore_padding_only(tokenizers, kind):
    tokenizer = tokenizers[kind]
    texts = ["a b c d", "a", "a b"]
    features = [
        {"input_ids": tokenizer(text).input_ids, "labels": tokenizer(text_target=text).input_ids}
        for text in texts
    ]
    batch = DataCollatorForSeq2Seq(tokenizer)(features)
    assert set(batch) == {"input_ids", "attention_mask", "labels"}
    for row, feature in enumerate(features):
        length = len(feature["labels"])
        assert batch["labels"][row, :length].tolist() == feature["labels"]
        assert batch["labels"][row, length - 1] == EOS
        assert batch["labels"][row, length:].eq(-100).all()
        assert batch["input_ids"][row, length:].eq(PAD).all()
        assert batch["attention_mask"][row].sum() == length


@pytest.mark.parametrize("kind", KINDS)
def test_b35_literal_special_tokens_stay_text(tokenizers, kind):
    tokenizer = tokenizers[kind]
    rng = random.Random(4)
    pieces = [*SPECIAL_TOKENS.values(), " ", "a", "<", ">", "/", "s", "pad"]
    lines = ["".join(rng.choices(pieces, k=12)) for _ in range(300)]
    for line in ["a </s> b <pad> c", *ODD_LINES, *SPECIAL_TOKENS.values(), *lines]:
        ids = tokenizer(line).input_ids
        assert ids[-1] == EOS
        assert not {PAD, BOS, EOS} & set(ids[:-1])
        assert tokenizer(text_target=line).input_ids == ids
        batch = tokenizer([line, "a " * 99], padding=True)
        assert batch.input_ids[0][: len(ids)] == ids
        if kind in EXACT_KINDS:
            assert UNK not in ids
            assert tokenizer.decode(ids, skip_special_tokens=True) == (
                unicodedata.normalize("NFC", line)
            )


def test_b35_words_that_spell_special_tokens_come_back(tokenizers):
    line = "x</s>y </s> a <pad> d <s> <unk> </S>"
    assert round_trip(tokenizers["word"], line) == line


@pytest.mark.parametrize("kind", KINDS)
def test_b35_frequent_literal_special_tokens_are_never_learnt(kind):
    lines = ["</s>", "<pad> <s>", "x<unk>", "</s></s> </s>"] * 100
    settings = settings_of(kind)
    if kind == "regex":
        settings["pattern"] = r"</?\w+>|\S"
    tokenizer = train_tokenizer(lines, **settings)
    for line in lines[:4]:
        ids = tokenizer(line, add_special_tokens=False).input_ids
        assert not {PAD, BOS, EOS, UNK} & set(ids)
        if kind == "regex":
            assert round_trip(tokenizer, line).replace(" ", "") == line.replace(" ", "")
        else:
            assert round_trip(tokenizer, line) == line


# Saving


PROBES = [
    *ODD_LINES,
    "a </s> b <pad> c",
    "three   spaces",
    "\t\ttabs",
    "word " * 600,
    "",
    "  ",
    "unseen: Ж",
    "This is a test",
]

FRESH_PROCESS = """
import json, sys
sys.modules["modeling_tinytfm"] = None  # as if it were not installed
from transformers import AutoTokenizer

job = json.load(sys.stdin)
answers = []
for folder in job["folders"]:
    for trust in (False, True):
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust)
        encoded = [tokenizer(probe) for probe in job["probes"]]
        ids = [row["input_ids"] for row in encoded]
        answers.append({
            "keys": sorted(encoded[0]),
            "ids": ids,
            "decoded": [tokenizer.decode(row, skip_special_tokens=True) for row in ids],
            "cut": tokenizer("a b c d e f g h", max_length=4, truncation=True)["input_ids"],
            "padded": tokenizer(["a b", "a"], padding=True)["input_ids"],
            "specials": [tokenizer.pad_token_id, tokenizer.bos_token_id,
                         tokenizer.eos_token_id, tokenizer.unk_token_id],
            "model_max_length": tokenizer.model_max_length,
            "sides": [tokenizer.padding_side, tokenizer.truncation_side],
            "clean_up": tokenizer.clean_up_tokenization_spaces,
        })
json.dump(answers, sys.stdout)
"""


def test_b32_a_fresh_process_without_the_package_loads_the_same_tokenizer(trained, folders):
    finished = subprocess.run(
        [sys.executable, "-I", "-c", FRESH_PROCESS],
        input=json.dumps({"folders": list(map(str, folders.values())), "probes": PROBES}),
        capture_output=True,
        text=True,
        encoding="utf-8",
        cwd=folders["bpe"].parent,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUTF8": "1"},
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    answers = json.loads(finished.stdout)
    assert len(answers) == 2 * len(KINDS)
    for number, answer in enumerate(answers):
        tokenizer = trained[KINDS[number // 2]]
        ids = [tokenizer(probe).input_ids for probe in PROBES]
        assert answer == {
            "keys": ["attention_mask", "input_ids"],
            "ids": ids,
            "decoded": [tokenizer.decode(row, skip_special_tokens=True) for row in ids],
            "cut": tokenizer("a b c d e f g h", max_length=4, truncation=True).input_ids,
            "padded": tokenizer(["a b", "a"], padding=True).input_ids,
            "specials": [PAD, BOS, EOS, UNK],
            "model_max_length": tokenizer.model_max_length,
            "sides": ["right", "right"],
            "clean_up": False,
        }
        assert answer["padded"][1][-1] == PAD


@pytest.mark.parametrize("kind", KINDS)
def test_b32_use_leaves_nothing_in_what_is_saved(kind, folders, reloaded, tmp_path):
    fresh = train_tokenizer(ODD_LINES, **settings_of(kind))
    save_tokenizer(fresh, tmp_path / "fresh")
    reloaded[kind](["a b", "c"], padding="longest", truncation=True, max_length=3)
    save_tokenizer(reloaded[kind], tmp_path / "again")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        unused = (tmp_path / "fresh" / name).read_bytes()
        assert (folders[kind] / name).read_bytes() == unused
        if name == "tokenizer.json":
            assert (tmp_path / "again" / name).read_bytes() == unused
        assert str(tmp_path).encode() not in (tmp_path / "again" / name).read_bytes()
        assert str(folders[kind]).encode() not in (tmp_path / "again" / name).read_bytes()
    saved = json.loads((folders[kind] / "tokenizer.json").read_text(encoding="utf-8"))
    assert saved["padding"] is None
    assert saved["truncation"] is None


@pytest.mark.parametrize("kind", KINDS)
def test_b32_no_length_limit(tokenizers, kind):
    tokenizer = tokenizers[kind]
    assert tokenizer.model_max_length > 10**9
    tokenizer("a b c d", padding="max_length", max_length=5, truncation=True)
    ids = tokenizer("a " * 600).input_ids
    assert len(ids) >= 601
    assert PAD not in ids
    assert tokenizer("a " * 600, truncation=True).input_ids == ids


def test_b32_wrappers_of_one_backend_are_independent(trained):
    backend = trained["bpe"].backend_tokenizer
    first, second = (
        PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIAL_TOKENS) for _ in range(2)
    )
    before = second.backend_tokenizer.to_str()
    first.padding_side = "left"
    first(["a b", "a"], padding="max_length", max_length=7, truncation=True)
    first.add_tokens(["brandnew"])
    assert second.backend_tokenizer.to_str() == before
    assert second.padding_side == "right"
    assert "brandnew" not in trained["bpe"].get_vocab()


def test_b32_this_is_a_test():
    for kind in ("bpe", "unigram", "word", "character"):
        tokenizer = train_tokenizer(["This is a test"], **settings_of(kind))
        assert round_trip(tokenizer, "This is a test") == "This is a test"


def test_mend_names_the_class_that_every_version_knows(trained, tmp_path):
    tokenizer = train_tokenizer(ODD_LINES, **settings_of("bpe"))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<2de>"]})
    tokenizer("a b", padding="max_length", max_length=5, truncation=True)
    tokenizer.save_pretrained(tmp_path)
    config_file = tmp_path / "tokenizer_config.json"
    mend_tokenizer_class(tmp_path)
    config = json.loads(config_file.read_text(encoding="utf-8"))
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert "extra_special_tokens" not in config
    assert config["additional_special_tokens"] == ["<2de>"]
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert "<2de>" in loaded.all_special_tokens
    assert loaded.backend_tokenizer.padding is None
    mended = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    mend_tokenizer_class(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == mended


def test_mend_leaves_other_classes_alone(tmp_path):
    config = tmp_path / "tokenizer_config.json"
    config.write_text('{"tokenizer_class": "MarianTokenizer",  "extra_special_tokens": {}}')
    mend_tokenizer_class(tmp_path)
    assert config.read_text() == (
        '{"tokenizer_class": "MarianTokenizer",  "extra_special_tokens": {}}'
    )


def test_mend_without_a_tokenizer_says_which_file_is_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"tokenizer_config\.json"):
        mend_tokenizer_class(tmp_path)


# Training


TRAIN_AGAIN = """
import json, sys
from modeling_tinytfm.tokenization import train_tokenizer

job = json.load(sys.stdin)
tokenizers = [train_tokenizer(job["lines"], **settings) for settings in job["kinds"]]
json.dump([tokenizer.backend_tokenizer.to_str() for tokenizer in tokenizers], sys.stdout)
"""


def test_the_same_lines_give_the_same_bytes():
    """In another process, with another hash seed and one thread."""
    rng = random.Random(5)
    lines = [
        " ".join(rng.choices(["ab", "ba", "aab", "bba", "é", "日本", ","], k=20))
        for _ in range(500)
    ]
    kinds = [{**settings_of(kind), "vocab_size": 60} for kind in KINDS]
    here = [train_tokenizer(lines, **settings).backend_tokenizer.to_str() for settings in kinds]
    assert here == [
        train_tokenizer(iter(lines), **settings).backend_tokenizer.to_str() for settings in kinds
    ]
    variables = {"PYTHONHASHSEED": "7", "TOKENIZERS_PARALLELISM": "false", "PYTHONUTF8": "1"}
    finished = subprocess.run(
        [sys.executable, "-c", TRAIN_AGAIN],
        input=json.dumps({"lines": lines, "kinds": kinds}),
        capture_output=True,
        text=True,
        encoding="utf-8",
        cwd=Path(__file__).parents[1],
        env={**os.environ, **variables},
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert json.loads(finished.stdout) == here


@pytest.mark.parametrize("kind", KINDS)
def test_lines_are_not_collected(kind):
    def lines():
        for number in range(2_000):
            yield f"{number % 10} " * 200

    tracemalloc.start()
    try:
        train_tokenizer(lines(), **settings_of(kind))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 400_000  # half of what the text itself holds


def test_an_error_in_the_lines_comes_through():
    def lines():
        yield "a"
        raise OSError("disk on fire")

    with pytest.raises(OSError, match="disk on fire"):
        train_tokenizer(lines(), vocab_size=99, show_progress=False)


def test_words_that_do_not_fit_are_counted(caplog):
    with caplog.at_level(logging.WARNING):
        train_tokenizer(["a b c d"], kind="word", vocab_size=6, show_progress=False)
    assert "2 most frequent of 4 different tokens" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        train_tokenizer(["a b c d"], kind="word", vocab_size=8, show_progress=False)
    assert not caplog.text


def test_silent_without_progress(capfd, trained):
    train_tokenizer(ODD_LINES, **settings_of("bpe"))
    assert capfd.readouterr() == ("", "")


FORKING = """
import multiprocessing, os
from modeling_tinytfm.tokenization import train_tokenizer

tokenizer = train_tokenizer(["a b c"] * 1000, vocab_size=20, show_progress=False)

def encode(line):
    return tokenizer([line] * 50).input_ids[-1]

if __name__ == "__main__":
    lines = ["a b", "c", "a c b"]
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(encode, lines) == [encode(line) for line in lines]
"""


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs fork")
def test_b50_workers_forked_after_training_neither_warn_nor_hang():
    variables = {k: v for k, v in os.environ.items() if k != "TOKENIZERS_PARALLELISM"}
    finished = subprocess.run(
        [sys.executable, "-c", FORKING],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
        env=variables,
        timeout=120,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert "forked" not in finished.stderr


# Refusals


@pytest.mark.parametrize("kind", EXACT_KINDS)
def test_a_vocabulary_smaller_than_the_alphabet_is_refused(kind):
    line = "abcdefghij "
    exact = train_tokenizer([line], kind=kind, vocab_size=15, show_progress=False)
    assert len(exact) == 15
    message = r"vocab_size=14 .* 11 different .* 4 special .* 15 or more"
    with pytest.raises(ValueError, match=message):
        train_tokenizer([line], kind=kind, vocab_size=14, show_progress=False)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lines", [[], [""], ["", ""], iter([])])
def test_an_empty_training_text_is_refused(kind, lines):
    with pytest.raises(ValueError, match="training text holds no token"):
        train_tokenizer(lines, **settings_of(kind))


@pytest.mark.parametrize("kind", ["word", "regex"])
def test_white_space_alone_is_no_training_text_for_words(kind):
    with pytest.raises(ValueError, match="training text holds no token"):
        train_tokenizer([" ", "\t\n"], **settings_of(kind))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "unigramm"}, "kind='unigramm'.*bpe, unigram, word, character, regex"),
        ({"kind": None}, "kind=None.*bpe, unigram, word, character, regex"),
        ({"normalization": "NFC"}, "normalization='NFC'.*nfc, nfkc, nfd, nfkd, none"),
        ({"vocab_size": 4}, "vocab_size=4 .* 4 special tokens"),
        ({"vocab_size": -1}, "vocab_size=-1"),
        ({"vocab_size": 10**12}, "vocab_size=1000000000000 is above"),
        ({"pattern": "a"}, "pattern='a' .* kind is 'bpe'"),
        ({"kind": "word", "pattern": ""}, "pattern='' .* kind is 'word'"),
        ({"kind": "regex"}, "kind='regex' needs a pattern"),
        ({"kind": "regex", "pattern": ""}, "kind='regex' needs a pattern"),
        ({"kind": "regex", "pattern": "(a"}, r"pattern='\(a' is no regular expression"),
        ({"kind": "regex", "pattern": "a)"}, r"pattern='a\)' is no regular expression"),
        ({"kind": "regex", "pattern": "a)|(?:b"}, r"pattern='a\)\|\(\?:b' is no regular"),
        ({"kind": "regex", "pattern": "[a"}, r"pattern='\[a' is no regular expression"),
        (
            {"kind": "regex", "pattern": "a*"},
            "pattern matches the empty string, so ' b' would be lost",
        ),
        ({"kind": "regex", "pattern": "(?=b)"}, "pattern matches the empty string"),
        ({"kind": "character", "min_frequency": 2}, "min_frequency=2 is not for kind='character'"),
        ({"kind": "unigram", "min_frequency": 2}, "min_frequency=2 is not for kind='unigram'"),
        ({"min_frequency": 0}, "min_frequency=0 must be 1 or more"),
    ],
)
def test_bad_settings_are_refused_by_name(settings, message):
    with pytest.raises(ValueError, match=message):
        train_tokenizer(["a b"], **{"vocab_size": 99, "show_progress": False, **settings})


@pytest.mark.parametrize("kind", ["bpe", "unigram", "word"])
@pytest.mark.parametrize("lines", ["a b", b"a b", ["a", None], [["a", "b"]], [b"a"], 7, None])
def test_what_is_no_line_is_refused(lines, kind):
    with pytest.raises(TypeError):
        train_tokenizer(lines, kind=kind, vocab_size=99, show_progress=False)
