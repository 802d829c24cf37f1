import itertools
import math
import random
import socket
import unicodedata

import evaluate.config
import numpy as np
import pytest
import sacrebleu
import torch
from sacrebleu.metrics import CHRF, TER
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from modeling_tinytfm import metrics
from modeling_tinytfm.metrics import METRICS, compute_metrics, decode_predictions, perplexity
from modeling_tinytfm.settings import METRIC_DESCRIPTIONS

WORDS = [
    "the",
    "a",
    "cat",
    "dog",
    "sat",
    "on",
    "mat",
    ".",
    "don't",
    "Tür",
    "猫",
    "👩‍👩‍👧",
    '"',
    "NA",
]


def random_line(rng, low=0, high=12):
    return " ".join(rng.choices(WORDS, k=rng.randint(low, high)))


def noisy(rng, line):
    """A line with about a third of its words replaced, dropped or doubled."""
    words = []
    for word in line.split():
        words += rng.choice([[word], [word], [word], [rng.choice(WORDS)], [], [word, word]])
    return " ".join(words)


def random_rows(seed, rows=40, most_references=1, same_number=True):
    rng = random.Random(seed)
    references = []
    for _ in range(rows):
        number = most_references if same_number else rng.randint(1, most_references)
        first = random_line(rng, low=1)
        references.append([first, *(noisy(rng, first) for _ in range(number - 1))])
    predictions = [noisy(rng, rng.choice(row)) for row in references]
    return predictions, references


def score(name, predictions, references):
    return compute_metrics([name], predictions, references)[0][name]


def edit_distance(source, target):
    """Levenshtein's distance by the textbook's table."""
    table = np.zeros((len(source) + 1, len(target) + 1), dtype=int)
    table[:, 0], table[0] = range(len(source) + 1), range(len(target) + 1)
    for i, left in enumerate(source, start=1):
        for j, right in enumerate(target, start=1):
            table[i, j] = min(
                table[i - 1, j] + 1, table[i, j - 1] + 1, table[i - 1, j - 1] + (left != right)
            )
    return int(table[-1, -1])


@pytest.fixture
def tokenizer():
    words = ["<pad>", "<s>", "</s>", "<unk>", "one", "two", "three"]
    backend = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    )


@pytest.mark.parametrize("name", METRICS)
def test_every_metric_works_alone_offline_and_without_files(name, tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a metric opened a socket")

    cache = tmp_path / "cache"
    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(evaluate.config, "HF_METRICS_CACHE", cache)
    result = METRICS[name]().compute(predictions=["a b c d"], references=[["a b c d", "e"]])
    assert set(result) == {name, "signature"}
    assert isinstance(result[name], float)
    assert result["signature"].startswith("nrefs:2|")
    assert not cache.exists()


def test_metrics_leave_every_random_state_alone():
    states = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
    predictions, references = random_rows(0)
    compute_metrics(METRICS, predictions, references)
    METRICS["bleu"]().compute(predictions=predictions, references=references)
    assert random.getstate() == states[0]
    np.testing.assert_array_equal(np.random.get_state()[1], states[1])
    assert torch.equal(torch.get_rng_state(), states[2])


def test_registry_and_recipes_name_the_same_metrics():
    assert set(METRICS) == set(METRIC_DESCRIPTIONS)


@pytest.mark.parametrize("name", METRICS)
def test_direction_is_that_of_the_description(name):
    references = [["the cat sat on the mat"], ["a dog sat on a mat"]]
    perfect = score(name, [row[0] for row in references], references)
    useless = score(name, ["x y z", "x"], references)
    assert (perfect > useless) == METRIC_DESCRIPTIONS[name].higher_is_better


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize(
    ("name", "peer"),
    [
        ("bleu", sacrebleu.corpus_bleu),
        ("tokenized_bleu", lambda *rows: sacrebleu.corpus_bleu(*rows, tokenize="none")),
        ("chrf", sacrebleu.corpus_chrf),
        ("ter", sacrebleu.corpus_ter),
    ],
)
def test_equal_numbers_of_references_score_as_plain_sacrebleu(name, peer, number, seed):
    predictions, references = random_rows(seed, most_references=number)
    streams = [list(stream) for stream in zip(*references, strict=True)]
    expected = peer(predictions, streams).score
    assert score(name, predictions, references) == pytest.approx(expected, abs=1e-9)
    assert 0 < expected < 100


@pytest.mark.parametrize("seed", range(3))
def test_different_numbers_of_references_score_as_plain_sacrebleu(seed):
    predictions, references = random_rows(seed, most_references=4, same_number=False)
    assert len({len(row) for row in references}) > 1
    # For BLEU and chrF a repeated reference is no further reference.
    padded = [(row * 4)[:4] if len(row) == 1 else (row + [row[0]] * 4)[:4] for row in references]
    streams = [list(stream) for stream in zip(*padded, strict=True)]
    for name, peer in (("bleu", sacrebleu.corpus_bleu), ("chrf", sacrebleu.corpus_chrf)):
        expected = peer(predictions, streams).score
        assert score(name, predictions, references) == pytest.approx(expected, abs=1e-9)
    # TER is the sum of the sentences' edits by the sum of their average reference lengths.
    sentences = [
        TER().sentence_score(text, row) for text, row in zip(predictions, references, strict=True)
    ]
    expected = 100 * (
        sum(sentence.num_edits for sentence in sentences)
        / sum(sentence.ref_length for sentence in sentences)
    )
    assert score("ter", predictions, references) == pytest.approx(expected, abs=1e-9)


def test_signatures_say_what_was_computed():
    same, different = [["a b", "c"]], [["a b", "c"], ["d"]]
    _, signatures = compute_metrics(METRICS, ["a"], same)
    peer = CHRF()
    peer.corpus_score(["a"], [["a b"], ["c"]])
    assert signatures["chrf"] == str(peer.get_signature())
    assert "tok:13a" in signatures["bleu"]
    assert "tok:none" in signatures["tokenized_bleu"]
    assert len(set(signatures.values())) == len(METRICS) - 1  # word_edit_rate is computed as per
    _, signatures = compute_metrics(METRICS, ["a", "d"], different)
    assert all(signature.startswith("nrefs:var|") for signature in signatures.values())


def test_tokenized_bleu_takes_tokens_as_they_stand():
    predictions, references = ["ein mann , der (lacht)"], [["ein mann , der ( lacht )"]]
    assert score("bleu", predictions, references) == pytest.approx(100)
    assert score("tokenized_bleu", predictions, references) < 60


def test_tokenized_bleu_does_not_warn_about_tokenised_text(caplog):
    lines = ["das ist ein satz ."] * 120
    with caplog.at_level("WARNING", logger="sacrebleu"):
        compute_metrics(["tokenized_bleu"], lines, lines)
        assert not caplog.records
        compute_metrics(["bleu"], lines, lines)
        assert caplog.records


@pytest.mark.parametrize(
    ("names", "texts", "message"),
    [
        (("bleu", "tokenized_bleu"), ["Zürich", "San José"], "no reference has 4 tokens"),
        (
            ("bleu", "tokenized_bleu"),
            ["今天天气很好，我们去公园", "你好吗"],
            "use chrf or exact_match",
        ),
        (("per",), ["bɛt", "ti"], "counts as one phoneme: write spaces between phonemes"),
        (("word_edit_rate",), ["今天天气很好", "你好吗"], "one word: use chrf or exact_match"),
    ],
)
def test_metrics_that_mean_nothing_for_such_texts_say_so_once(names, texts, message, caplog):
    for name in names:
        metrics._warn_once.cache_clear()
        caplog.clear()
        for predictions in (texts, [""] * len(texts)):
            compute_metrics([name], predictions, texts)
        (record,) = caplog.records
        assert record.getMessage().startswith(f"{name}: ")
        assert message in record.getMessage()
        # One line that is long enough is all that it takes.
        metrics._warn_once.cache_clear()
        caplog.clear()
        compute_metrics([name], [*texts, "a b c d"], [[text, "a"] for text in [*texts, "a b c d"]])
        assert not caplog.records


@pytest.mark.parametrize("name", ["bleu", "tokenized_bleu"])
def test_b41_bleu_of_empty_predictions(name):
    references = [["a b c d e"], ["x y z w v"]]
    assert score(name, ["", ""], references) == 0.0
    assert score(name, ["", "x y z w v"], references) == pytest.approx(36.788, abs=1e-3)


@pytest.mark.parametrize("name", METRICS)
def test_b41_empty_and_blank_texts_have_finite_scores(name):
    texts = ["", " ", "\x0c", "\x0c\x0c \x0b", "\x00", "a", "a b c d e"]
    for prediction, *references in itertools.product(texts, repeat=3):
        assert math.isfinite(score(name, [prediction], [references]))


@pytest.mark.parametrize("name", METRICS)
def test_b41_empty_predictions_score_worst(name):
    worst = {"ter": 100.0, "wer": 1.0, "per": 1.0, "word_edit_rate": 1.0}
    assert score(name, ["", ""], [["a b c"], ["d e"]]) == worst.get(name, 0.0)


@pytest.mark.parametrize("name", METRICS)
def test_b41_zero_rows_give_a_message(name):
    metric = METRICS[name]()
    with pytest.raises(ValueError, match=rf"{name}: .*0 rows"):
        metric.compute(predictions=[], references=[])
    with pytest.raises(ValueError, match=rf"{name}: .*0 rows"):
        metric.compute()
    metric.add_batch(predictions=[], references=[])
    with pytest.raises(ValueError, match=rf"{name}: .*0 rows"):
        metric.compute()
    with pytest.raises(ValueError, match="0 rows"):
        compute_metrics([name], [], [])


@pytest.mark.parametrize("name", METRICS)
def test_long_and_odd_lines(name):
    lines = [
        "five words and " + "x" * 100_000 + " more",
        "🏳️‍🌈" * 50,
        "e\u0301 é",
        '""" \' \\t',
        "\ufeffNA\r",
        "l\u2028m\u0085n",
    ]
    perfect = score(name, lines, [[line] for line in lines])
    spoilt = score(name, ["", *lines[1:]], [[line] for line in lines])
    assert math.isfinite(perfect)
    assert perfect != spoilt


@pytest.mark.parametrize("form", ["NFC", "NFD"])
@pytest.mark.parametrize("name", METRICS)
def test_composed_and_decomposed_characters_are_the_same_text(name, form):
    texts = ["tiếng Việt đẹp lắm .", "한국어 문장 하나 .", "Zażółć gęślą jaźń !"]
    other = {"NFC": "NFD", "NFD": "NFC"}[form]
    predictions = [unicodedata.normalize(form, text) for text in texts]
    references = [[unicodedata.normalize(other, text)] for text in texts]
    assert predictions != [reference for [reference] in references]
    scores, _ = compute_metrics([name], predictions, references)
    same, _ = compute_metrics([name], texts, texts)
    assert scores == same


def test_exact_match_is_equality_with_any_reference():
    predictions = ["a b", "a  b", "A b", "", "c"]
    references = [["x", "a b"], ["a b"], ["a b"], [""], ["d", "e", "c"]]
    assert score("exact_match", predictions, references) == 3 / 5


@pytest.mark.parametrize("seed", range(5))
def test_error_rates_equal_their_definitions(seed):
    predictions, references = random_rows(seed, most_references=4, same_number=False)
    edits = tokens = wrong = 0
    for text, row in zip(predictions, references, strict=True):
        candidates = [
            (edit_distance(text.split(), reference.split()), len(reference.split()))
            for reference in row
        ]
        # An empty reference is met by an empty prediction, and by nothing else.
        row_edits, length = min(
            (pair for pair in candidates if pair[1] or not pair[0]),
            key=lambda pair: (pair[0] / max(pair[1], 1), pair[0]),
        )
        edits, tokens, wrong = edits + row_edits, tokens + length, wrong + (row_edits > 0)
    assert score("per", predictions, references) == pytest.approx(edits / tokens, abs=1e-12)
    assert score("word_edit_rate", predictions, references) == score("per", predictions, references)
    assert score("wer", predictions, references) == wrong / len(predictions)
    assert 0 < wrong < len(predictions)


def test_wer_counts_wrong_words_and_per_wrong_phonemes():
    # Three words as phonemes: right by the second reference, one phoneme off, all wrong.
    predictions = ["T AH M EY T OW", "K AE T", "B"]
    references = [["T AH M AA T OW", "T AH M EY T OW"], ["K AE T S"], ["D AO G"]]
    assert score("wer", predictions, references) == 2 / 3
    assert score("per", predictions, references) == (0 + 1 + 3) / (6 + 4 + 3)
    assert score("exact_match", predictions, references) == 1 / 3


def test_per_chooses_by_edits_per_length_not_by_edits():
    # One edit in two phonemes against two edits in six.
    assert score("per", ["a b c d x y"], [["a b c d x", "a b c d e f g h"]]) == 1 / 5
    assert score("per", ["a b x y e f"], [["a", "a b c d e f"]]) == 2 / 6
    assert score("per", ["a x"], [["a b", "a b c d"]]) == 1 / 2


@pytest.mark.parametrize("name", ["exact_match", "wer", "per", "word_edit_rate"])
def test_order_of_references_does_not_matter(name):
    rng = random.Random(5)
    predictions, references = random_rows(5, rows=200, most_references=4, same_number=False)
    references = [[*row, "", "a b c d"] for row in references]
    before = score(name, predictions, references)
    for row in references:
        rng.shuffle(row)
    assert score(name, predictions, references) == pytest.approx(before, abs=1e-12)


def test_per_of_empty_texts():
    assert score("per", [""], [[""]]) == 0
    assert score("per", ["a b"], [[""]]) == 1
    assert score("per", ["a b"], [["", "a c"]]) == 1 / 2
    assert score("per", ["", "a b c d"], [["a", ""], ["a b"]]) == 2 / 2


def test_wer_ignores_the_amount_of_white_space():
    assert score("wer", [" a  b", "a b"], [["a b"], ["a\tb "]]) == 0


def test_a_reference_may_be_a_plain_text():
    predictions, references = random_rows(7)
    plain = [row[0] for row in references]
    for name, metric in METRICS.items():
        expected = metric().compute(predictions=predictions, references=references)
        assert metric().compute(predictions=predictions, references=plain) == expected
        assert metric().compute(predictions=tuple(predictions), references=plain) == expected
        array = np.array(predictions)
        assert score(name, array, [np.array(row) for row in references]) == expected[name]


@pytest.mark.parametrize("name", METRICS)
def test_rows_may_be_added_one_by_one_and_in_batches(name):
    predictions, references = random_rows(8, rows=12, most_references=3, same_number=False)
    metric, other = METRICS[name](), METRICS[name]()
    metric.add(prediction=predictions[0], reference=references[0])
    other.add(prediction="another", reference="metric at work")
    metric.add_batch(predictions=predictions[1:5], references=references[1:5])
    result = metric.compute(predictions=predictions[5:], references=references[5:])
    assert result[name] == score(name, predictions, references)
    # What was computed is gone.
    assert metric.compute(predictions=["a"], references=["a"])[name] == score(name, ["a"], ["a"])


def test_files_instead_of_memory(tmp_path):
    predictions, references = random_rows(9)
    metric = metrics.BLEU(keep_in_memory=False, cache_dir=str(tmp_path))
    metric.add_batch(predictions=predictions, references=references)
    assert list(tmp_path.rglob("*.arrow"))
    assert metric.compute()["bleu"] == score("bleu", predictions, references)
    assert not list(tmp_path.rglob("*.arrow"))


@pytest.mark.parametrize(
    ("predictions", "references", "message"),
    [
        (["a", "b"], [["a"]], "2 predictions cannot be scored by 1 references"),
        (["a"], [["a"], ["b"]], "1 predictions cannot be scored by 2 references"),
        (["a", None], ["a", "b"], r"predictions\[1\]=None is no text"),
        ([["a"]], ["a"], r"predictions\[0\]=\['a'\] is no text"),
        (["a", "b"], [["a"], []], r"references\[1\] is empty"),
        (["a", "b"], [["a"], None], r"references\[1\] is empty"),
        (["a"], [["a", 3]], r"references\[0\] has 3"),
        ("a", ["a"], "predictions='a' is one text"),
        (["a"], "a", "references='a' is one text"),
    ],
)
def test_unusable_rows_are_refused(predictions, references, message):
    with pytest.raises(ValueError, match=message):
        compute_metrics(["bleu"], predictions, references)
    metric = metrics.ExactMatch()
    with pytest.raises(ValueError, match=message):
        metric.compute(predictions=predictions, references=references)
    # Nothing of what was refused stays behind.
    assert metric.compute(predictions=["a"], references=["a"])["exact_match"] == 1


def test_half_given_rows_are_refused():
    with pytest.raises(ValueError, match="bleu needs references"):
        metrics.BLEU().compute(predictions=["a"])
    with pytest.raises(ValueError, match="bleu needs predictions"):
        metrics.BLEU().compute(references=["a"])


def test_unknown_metrics_are_refused_with_the_nearest():
    with pytest.raises(ValueError, match=r"'blue' is none of .*; the nearest is bleu"):
        compute_metrics(["blue"], ["a"], ["a"])


def test_scores_stand_in_the_order_of_their_names():
    names = ["wer", "bleu", "per"]
    scores, signatures = compute_metrics(names, ["a"], ["a"])
    assert list(scores) == list(signatures) == names
    assert compute_metrics([], ["a"], ["a"]) == ({}, {})


def test_perplexity():
    assert perplexity(0.0) == 1
    assert perplexity(math.log(37_000)) == pytest.approx(37_000)
    assert perplexity(1e4) == math.inf
    assert perplexity(math.inf) == math.inf
    assert math.isnan(perplexity(math.nan))


def test_b23_ignored_ids_are_no_text(tokenizer):
    rows = [[1, 4, 5, 2, -100, -100], [1, 6, 2, 0, 0, -100], [-100] * 6, [1, 4, 5, 6, 4, 2]]
    texts = ["one two", "three", "", "one two three one"]
    assert decode_predictions(tokenizer, rows) == texts
    assert decode_predictions(tokenizer, np.array(rows)) == texts
    assert decode_predictions(tokenizer, torch.tensor(rows)) == texts
    ragged = [[token_id for token_id in row if token_id >= 0] for row in rows]
    assert decode_predictions(tokenizer, ragged) == texts
    assert decode_predictions(tokenizer, []) == []
