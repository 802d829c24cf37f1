"""Tests of modeling_tinytfm.translation: lines in, lines out, in the same order."""

import io
import logging
import math
import os
import random
import re
import stat

import pytest
import torch
import torch.nn.functional as F
from tiny import tiny_model
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    MarianConfig,
    MarianMTModel,
    PreTrainedTokenizerFast,
)

from modeling_tinytfm.decoding import EXTRA_TOKENS
from modeling_tinytfm.tokenization import save_tokenizer, train_tokenizer
from modeling_tinytfm.translation import (
    Hypothesis,
    ModelTranslator,
    TokenScores,
    budget_batches,
    encode,
    read_lines,
    row,
    same_vocabulary,
    score_targets,
    translate,
    translate_n_best,
    whole_file,
)

SYMBOLS = "0123456789"  # ids 3..12 of the reverser
MULTILINGUAL = ["a b c", "Zürich ist schön", "東京 は 大きい", "👩‍👩‍👧 family", "e\u0301a \u200dx"]


@pytest.fixture(scope="session")
def digits() -> PreTrainedTokenizerFast:
    """The tokenizer that fits the reverser: a digit is a token, everything else is unknown."""
    vocabulary = {"<s>": 0, "<pad>": 1, "</s>": 2}
    vocabulary |= {symbol: number for number, symbol in enumerate(SYMBOLS, start=3)}
    vocabulary["<unk>"] = len(vocabulary)
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 2)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,
    )


def random_lines(count: int) -> list[str]:
    generator = random.Random(count)
    return [" ".join(generator.choices(SYMBOLS, k=generator.randint(1, 12))) for _ in range(count)]


def translate_alone(model, tokenizer, line: str, **generation) -> str:
    ids = torch.tensor([tokenizer(line)["input_ids"]])
    (sequence,) = model.generate(ids, **generation)
    return tokenizer.decode(sequence, skip_special_tokens=True)


def total_log_probability(model, source: list[int], target: list[int]) -> float:
    """Of target ids, one forward pass for each of them."""
    total = 0.0
    prefix = [model.config.decoder_start_token_id]
    for token in target:
        with torch.no_grad():
            logits = model(torch.tensor([source]), decoder_input_ids=torch.tensor([prefix])).logits
        total += torch.log_softmax(logits[0, -1].double(), -1)[token].item()
        prefix.append(token)
    return total


@pytest.mark.parametrize("generation", [{}, {"num_beams": 3}], ids=str)
def test_every_line_is_translated_as_if_alone(reverser, digits, generation):
    lines = random_lines(40)
    generation = {"max_new_tokens": 14, **generation}
    expected = [translate_alone(reverser, digits, line, **generation) for line in lines]
    # The order is told by the text: most lines come back reversed, all different.
    assert sum(line[::-1] == text for line, text in zip(lines, expected, strict=True)) > 30
    for batch_tokens in (1, 17, 10_000):
        assert expected == translate(
            reverser, digits, lines, batch_tokens=batch_tokens, **generation
        )


@pytest.mark.parametrize("length_penalty", [0.0, 0.6, 1.0, 2.0])
@pytest.mark.parametrize("n_best", [1, 3])
def test_scores_are_log_probabilities_by_length(reverser, digits, n_best, length_penalty):
    lines = random_lines(6)
    hypotheses = translate_n_best(
        reverser,
        digits,
        lines,
        n_best,
        length_penalty=length_penalty,
        max_new_tokens=20,
        # Digits and the end alone, so that the text tells all ids.
        suppress_tokens=[0, 1, *range(13, 50)],
    )
    for line, best in zip(lines, hypotheses, strict=True):
        assert len(best) == n_best
        assert len({hypothesis.text for hypothesis in best}) == n_best
        assert [hypothesis.score for hypothesis in best] == sorted(
            (hypothesis.score for hypothesis in best), reverse=True
        )
        for text, score, *_ in best:
            target = digits(text)["input_ids"]
            total = total_log_probability(reverser, digits(line)["input_ids"], target)
            assert score == pytest.approx(total / len(target) ** length_penalty, abs=1e-4)


@pytest.mark.parametrize("do_sample", [False, True])
def test_scores_end_where_the_call_says(reverser, digits, do_sample):
    lines, ends = random_lines(6), [2, *range(8, 13)]
    torch.manual_seed(0)
    outputs = translate_n_best(
        reverser, digits, lines, 1, eos_token_id=ends, do_sample=do_sample, max_new_tokens=20
    )
    assert len({len(best.tokens) for (best,) in outputs}) > 1
    for line, (best,) in zip(lines, outputs, strict=True):
        assert not set(best.tokens) & set(ends)
        source = digits(line)["input_ids"]
        totals = [total_log_probability(reverser, source, [*best.tokens, end]) for end in ends]
        length = len(best.tokens) + 1
        assert any(best.score == pytest.approx(total / length, abs=1e-4) for total in totals)


def test_the_beam_is_as_wide_as_the_list(reverser, digits):
    lines = random_lines(5)
    narrow = translate_n_best(reverser, digits, lines, 4, max_new_tokens=14)
    wide = translate_n_best(reverser, digits, lines, 4, num_beams=4, max_new_tokens=14)
    assert [[one.text for one in best] for best in narrow] == [
        [one.text for one in best] for best in wide
    ]
    assert [best[0].text for best in wide] == translate(
        reverser, digits, lines, num_beams=4, max_new_tokens=14
    )


@pytest.mark.parametrize("length_penalty_form", ["length", "gnmt"])
@pytest.mark.parametrize("n_best", [1, 3])
def test_scores_of_either_form(reverser, digits, n_best, length_penalty_form):
    lines = random_lines(4)
    hypotheses = translate_n_best(
        reverser,
        digits,
        lines,
        n_best,
        length_penalty=0.6,
        length_penalty_form=length_penalty_form,
        max_new_tokens=20,
        suppress_tokens=[0, 1, *range(13, 50)],
    )
    for line, best in zip(lines, hypotheses, strict=True):
        for text, score, tokens, _ in best:
            target = digits(text)["input_ids"]
            assert tokens == tuple(target[:-1])
            length = len(target)
            divisor = length**0.6 if length_penalty_form == "length" else ((5 + length) / 6) ** 0.6
            total = total_log_probability(reverser, digits(line)["input_ids"], target)
            assert score == pytest.approx(total / divisor, abs=1e-4)


def test_several_models_translate_together(reverser, digits):
    lines = [*random_lines(12), ""]
    expected = translate(reverser, digits, lines, num_beams=3, max_new_tokens=14)
    together = [reverser, reverser]
    for model in (together, tuple(together), ModelTranslator(together, digits)):
        assert translate(model, digits, lines, num_beams=3, max_new_tokens=14) == expected
    short = tiny_model(max_position_embeddings=5)
    assert ModelTranslator([reverser, short], digits).longest_input == 5


PREFIXES = ["9 9", "", "  1 ", "0 0 0 0"]


@pytest.mark.parametrize("n_models", [1, 2])
@pytest.mark.parametrize("num_beams", [1, 4])
def test_b17_outputs_begin_with_their_prefixes(reverser, digits, num_beams, n_models):
    lines = ["1 2 3 4", "5 6 7", "8 9 0 1 2 3", "4 4"]
    models = [reverser] * n_models
    settings = {"num_beams": num_beams, "max_new_tokens": 14}
    texts = translate(models, digits, lines, prefixes=PREFIXES, **settings)
    for line, prefix, text in zip(lines, PREFIXES, texts, strict=True):
        assert text.startswith(prefix.strip())
        assert [text] == translate(models, digits, [line], prefixes=[prefix], **settings)
        if num_beams == 1:  # and goes on with the most likely tokens
            ids = [0, *digits(prefix)["input_ids"][:-1]]
            source = torch.tensor([digits(line)["input_ids"]])
            while ids[-1] != 2 and len(ids) < 15:
                with torch.no_grad():
                    logits = reverser(source, decoder_input_ids=torch.tensor([ids])).logits
                ids.append(int(logits[0, -1].argmax()))
            assert text == digits.decode(ids, skip_special_tokens=True)
    assert texts[1] == translate(reverser, digits, [lines[1]], **settings)[0]


@pytest.mark.parametrize("kind", ["bpe", "word", "character"])
def test_b17_prefixes_in_every_vocabulary(kind):
    tokenizer = train_tokenizer(MULTILINGUAL, kind=kind, vocab_size=90, show_progress=False)
    model = tiny_model(
        vocab_size=len(tokenizer), pad_token_id=0, bos_token_id=1, decoder_start_token_id=1
    )
    prefixes = ["Zürich", "東京 は", "a b", "ist schön"]
    settings = {"max_new_tokens": 20, "suppress_tokens": [0, 1, 2, 3]}
    texts = translate(model, tokenizer, ["a b"] * 4, prefixes=prefixes, **settings)
    for prefix, text in zip(prefixes, texts, strict=True):
        assert text.startswith(prefix)
        assert len(text) > len(prefix)


def test_a_prefix_that_leaves_no_room_is_told_by_its_line(reverser, digits, monkeypatch):
    monkeypatch.setattr(reverser, "generate", None)  # nothing is translated before
    prefixes = ["1", "2", "3 4 5 6 7"]
    with pytest.raises(ValueError, match=r"line 13: a prefix of 5 tokens leaves no room .* of 4"):
        translate_n_best(
            *(reverser, digits, ["1"] * 3, 1),
            prefixes=prefixes,
            batch_tokens=2,
            first_line=11,
            max_new_tokens=4,
        )


def test_a_line_without_text_has_its_prefix(reverser, digits):
    lines, prefixes = ["", "1 2", " "], ["3 4", "2", ""]
    assert translate(reverser, digits, lines, prefixes=prefixes) == ["3 4", "2 1", ""]


@pytest.mark.parametrize(
    ("prefixes", "message"),
    [
        (["1"], "prefixes is a list of 1: pass a list with one for each of 2 lines"),
        ("12", "prefixes is one string"),
        (["1", "2  x"], "line 2: the vocabulary cannot write the prefix '2  x', but '2'"),
        (["1", "2  3"], "line 2: the vocabulary cannot write the prefix '2  3', but '2 3'"),
        (["1 " * 12, "2"], "a prefix of 12 tokens leaves no room in outputs of 12"),
    ],
)
def test_unusable_prefixes(reverser, digits, prefixes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        translate(reverser, digits, ["1 2", "3"], prefixes=prefixes, max_new_tokens=12)


def test_where_nothing_limits_outputs_a_prefix_has_room():
    model, tokenizer = without_end()
    (text,) = translate(model, tokenizer, ["a"], prefixes=["a b c " * 30])
    assert len(text.split()) == 90 + EXTRA_TOKENS


def test_lines_of_unknown_tokens_are_told_once(reverser, digits, caplog):
    translate(reverser, digits, ["1", "2"])
    assert caplog.records == []
    translate_n_best(reverser, digits, ["1 2", "x y z 1", "x", ""], 1, first_line=101)
    (record,) = caplog.records
    assert record.getMessage() == (
        "line 103: the model's vocabulary does not know 1 of its 1 tokens (other lines with "
        "unknown tokens: 1)"
    )


def test_outputs_that_were_cut_are_told_once(reverser, digits, caplog):
    lines = ["1 2", "1 2 3 4 5 6", "", "6 5 4 3 2 1"]
    translate(reverser, digits, lines, max_new_tokens=3)  # as was asked for
    assert caplog.records == []
    model, tokenizer = without_end()
    model.generation_config.max_new_tokens = 5
    for forced, length in ((None, 5), (tokenizer.eos_token_id, 4)):
        model.generation_config.forced_eos_token_id = forced
        caplog.clear()
        translate_n_best(model, tokenizer, ["", "a", "a b", "a"], 1, first_line=101)
        (record,) = caplog.records
        assert record.getMessage() == (
            f"line 102: the output was cut at {length} tokens, before its end (so were others: 2): "
            "raise max_new_tokens, or give shorter lines"
        )


def test_outputs_with_the_unknown_token_are_told_once(caplog):
    model, tokenizer = without_end()
    lines = ["", "a", "a b"]
    translate(model, tokenizer, lines, max_new_tokens=3)
    assert caplog.records == []
    with torch.no_grad():
        model.lm_head.bias[tokenizer.unk_token_id] = 1e9
    assert translate(model, tokenizer, lines, max_new_tokens=3) == ["", "", ""]
    (record,) = caplog.records
    assert record.getMessage() == (
        "line 2: the output holds the unknown token, which its text leaves out (so do others: 1): "
        "suppress_tokens=[3], a setting of generation, forbids it"
    )
    caplog.clear()
    assert all(translate(model, tokenizer, lines[1:], max_new_tokens=3, suppress_tokens=[3]))
    assert caplog.records == []


def test_tokenizers_that_differ_are_told_by_name(digits, tmp_path):
    same = []
    for name in ("one", "two"):
        save_tokenizer(digits, tmp_path / name)
        same.append(AutoTokenizer.from_pretrained(tmp_path / name))
    same[1](["1", "2 3"], padding=True, truncation=True, max_length=2)
    assert same_vocabulary(same) is same[0]
    other = train_tokenizer(MULTILINGUAL, kind="word", vocab_size=90, show_progress=False)
    save_tokenizer(other, tmp_path / "other")
    other = AutoTokenizer.from_pretrained(tmp_path / "other")
    message = f"{tmp_path / 'one'} and {tmp_path / 'other'} have different vocabularies"
    with pytest.raises(ValueError, match=re.escape(message)):
        same_vocabulary([*same, other])
    # The same words, cut out of text differently.
    changed = AutoTokenizer.from_pretrained(tmp_path / "two")
    changed.backend_tokenizer.normalizer = normalizers.Lowercase()
    with pytest.raises(ValueError, match="different vocabularies"):
        same_vocabulary([same[0], changed])


def test_a_hypothesis_is_one_row():
    hypothesis = Hypothesis("a\r\nb\tc\u2028d", -0.5, (), ((1, 0), (0, 1)))
    assert row(hypothesis) == "a b\tc d"
    assert row(hypothesis, with_score=True) == "-0.500000\ta b c d"
    assert row(hypothesis, with_alignment=True) == "a b c d\t1-0 0-1"
    assert row(hypothesis, True, True) == "-0.500000\ta b c d\t1-0 0-1"


def test_scores_that_nobody_wants_are_nan(reverser, digits):
    ((best,),) = translate_n_best(reverser, digits, ["1 2"], 1, with_scores=False)
    assert best.text == "2 1"
    assert math.isnan(best.score)


def test_lines_without_text(reverser, digits):
    odd = ["", " ", "\t \x0b", "\0", "\0 \0", "\u3000\u2028", "\r"]
    lines = [*odd, "1 2 3", *odd]
    texts = translate(reverser, digits, lines, max_new_tokens=9)
    assert texts == [""] * len(odd) + ["3 2 1"] + [""] * len(odd)
    assert translate(reverser, digits, []) == []
    assert translate_n_best(reverser, digits, [""], 2) == [[Hypothesis("", 0.0)] * 2]


@pytest.mark.parametrize("kind", ["bpe", "word", "character"])
def test_white_space_is_no_text_for_any_vocabulary(kind):
    tokenizer = train_tokenizer(MULTILINGUAL, kind=kind, vocab_size=90, show_progress=False)
    assert encode(tokenizer, ["", "   ", "\0\t"], None) == [[2]] * 3


def test_nul_characters_are_left_out(reverser, digits):
    assert translate(reverser, digits, ["1\0 2 \0\0", "\0001 2"]) == ["2 1", "2 1"]


def test_lines_may_come_from_a_generator(reverser, digits):
    assert translate(reverser, digits, (line for line in ["1 2", "3"])) == ["2 1", "3"]


def test_long_lines_are_cut_with_a_warning(reverser, digits, caplog):
    line = "1 2 3 4 5 6 7 8 9 0"
    with caplog.at_level(logging.WARNING):
        texts = translate(reverser, digits, ["0 1", line, "5", line], max_source_length=5)
    assert texts == ["1 0", "4 3 2 1", "5", "4 3 2 1"]
    (record,) = caplog.records
    assert "2 of 4 lines are longer than 5 tokens and were cut" in record.message
    assert line in record.message
    assert encode(digits, [line], 5) == [[4, 5, 6, 7, 2]]


@pytest.mark.parametrize("kind", ["bpe", "word", "character"])
def test_b07_lines_of_100_000_characters_are_cut(kind, caplog):
    tokenizer = train_tokenizer(MULTILINGUAL, kind=kind, vocab_size=90, show_progress=False)
    model = tiny_model(
        vocab_size=len(tokenizer),
        max_position_embeddings=16,
        position_embedding_type="learned",
        pad_token_id=0,
        bos_token_id=1,
        decoder_start_token_id=1,
    )
    lines = ["a" * 100_000, "a " * 50_000, "好" * 100_000, "👩‍👩‍👧" * 12_500, "\r" * 99_999 + "a"]
    texts = translate(model, tokenizer, [*lines, "a b"])
    assert len(texts) == len(lines) + 1
    assert texts[-1] == translate(model, tokenizer, ["a b"])[0]
    assert "were cut" in caplog.text


def test_b35_literal_special_tokens():
    tokenizer = train_tokenizer(MULTILINGUAL, kind="word", vocab_size=90, show_progress=False)
    lines = ["a </s> b <pad> c", "<s>", "</s>", "<unk> a"]
    for ids in encode(tokenizer, lines, None):
        assert ids.index(2) == len(ids) - 1
        assert not {0, 1} & set(ids)
    model = tiny_model(
        vocab_size=len(tokenizer), pad_token_id=0, bos_token_id=1, decoder_start_token_id=1
    )
    assert len(translate(model, tokenizer, lines, max_new_tokens=5)) == 4


@pytest.mark.parametrize(
    ("lines", "settings", "message"),
    [
        ("1 2", {}, "lines is one string"),
        (["1", None], {}, "lines[1]=None is no text"),
        (["1", b"2"], {}, "lines[1]=b'2' is no text"),
        (["1", "\ud800"], {}, "lines[1]='\\ud800' holds half a surrogate pair"),
        (["1"], {"generation_config": GenerationConfig()}, "generation_config cannot be given"),
        (["1"], {"n_best": 0}, "n_best=0 is not at least 1"),
        (["1"], {"batch_tokens": 0}, "batch_tokens=0 is not at least 1"),
        (["1"], {"num_beams": 0}, "num_beams=0 is not at least 1"),
        (["1"], {"max_new_tokens": -1}, "max_new_tokens=-1 is not at least 1"),
        (["1"], {"max_source_length": 0}, "max_source_length=0"),
        (["1"], {"max_source_length": 1}, "max_source_length=1"),
        (["1"], {"num_return_sequences": 2}, "num_return_sequences=2 cannot be set"),
        (["1"], {"beams": 2}, "beams"),
        (["1"], {"alignments": "letter"}, "alignments='letter' is unknown"),
        (["1"], {"length_penalty_form": "wu"}, "length_penalty_form='wu' is unknown"),
    ],
)
def test_unusable_arguments(reverser, digits, lines, settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        translate_n_best(reverser, digits, lines, **{"n_best": 1, **settings})


def test_a_model_in_training_is_used_without_dropout_and_left_in_training():
    tokenizer = train_tokenizer(MULTILINGUAL, kind="word", vocab_size=90, show_progress=False)
    model = tiny_model(
        vocab_size=len(tokenizer),
        dropout=0.5,
        pad_token_id=0,
        bos_token_id=1,
        decoder_start_token_id=1,
    )
    expected = translate_n_best(model, tokenizer, MULTILINGUAL, 2, max_new_tokens=8)
    sources = [tokenizer(line)["input_ids"] for line in MULTILINGUAL]
    loss = score_targets(model, sources, sources)
    model.train()
    assert translate_n_best(model, tokenizer, MULTILINGUAL, 2, max_new_tokens=8) == expected
    assert score_targets(model, sources, sources) == loss
    assert model.training


def without_end(**changes):
    """A model that never ends by itself, and its tokenizer."""
    tokenizer = train_tokenizer(MULTILINGUAL, kind="word", vocab_size=90, show_progress=False)
    model = tiny_model(
        vocab_size=len(tokenizer),
        output_bias=True,
        pad_token_id=0,
        bos_token_id=1,
        decoder_start_token_id=1,
        **changes,
    )
    with torch.no_grad():
        model.lm_head.bias[[0, 1, 2, 3]] = -1e9
    return model, tokenizer


@pytest.mark.parametrize("batch_tokens", [1, 1000])
def test_outputs_are_as_long_as_the_longest_line_and_50_where_nothing_limits_them(batch_tokens):
    model, tokenizer = without_end()
    texts = translate(model, tokenizer, ["a b c a b c a", "a"], batch_tokens=batch_tokens)
    assert [len(text.split()) for text in texts] == [8 + EXTRA_TOKENS] * 2


def test_outputs_keep_to_the_limits_of_call_and_model():
    model, tokenizer = without_end()
    (text,) = translate(model, tokenizer, ["a b c"], max_new_tokens=5)
    assert len(text.split()) == 5
    model.generation_config.max_new_tokens = 7
    (text,) = translate(model, tokenizer, ["a b c"])
    assert len(text.split()) == 7
    model, tokenizer = without_end(max_position_embeddings=12, position_embedding_type="learned")
    (text,) = translate(model, tokenizer, ["a b c"])
    assert len(text.split()) == 12


def test_other_models_are_translated_with_too():
    tokenizer = train_tokenizer(MULTILINGUAL, kind="word", vocab_size=90, show_progress=False)
    torch.manual_seed(1)
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2}
    config = MarianConfig(
        vocab_size=len(tokenizer),
        d_model=16,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        max_position_embeddings=24,
        pad_token_id=0,
        eos_token_id=2,
        forced_eos_token_id=2,
        decoder_start_token_id=1,
        init_std=0.5,
        **sizes,
    )
    model = MarianMTModel(config).eval()
    lines = [*MULTILINGUAL, "a b c " * 30]
    alone = [translate(model, tokenizer, [line], max_new_tokens=9)[0] for line in lines]
    assert translate(model, tokenizer, lines, max_new_tokens=9) == alone
    assert len(set(alone)) > 1


def test_targets_are_scored_by_the_token(reverser):
    generator = random.Random(0)
    sources = [
        [generator.randrange(3, 13) for _ in range(generator.randint(1, 9))] + [2]
        for _ in range(23)
    ]
    targets = [
        [generator.randrange(3, 13) for _ in range(generator.randint(0, 9))] + [2] for _ in sources
    ]
    loss, correct, tokens = 0.0, 0, 0
    for source, target in zip(sources, targets, strict=True):
        with torch.no_grad():
            logits = reverser(
                torch.tensor([source]), decoder_input_ids=torch.tensor([[0, *target[:-1]]])
            ).logits[0]
        loss += F.cross_entropy(logits.double(), torch.tensor(target), reduction="sum").item()
        correct += int((logits.argmax(-1) == torch.tensor(target)).sum())
        tokens += len(target)
    for batch_tokens in (1, 40, 10_000):
        scores = score_targets(reverser, sources, targets, batch_tokens=batch_tokens)
        assert scores.loss == pytest.approx(loss, rel=1e-5)
        assert (scores.correct, scores.tokens) == (correct, tokens)
    assert score_targets(reverser, [], []) == TokenScores()
    half = score_targets(reverser, sources[:9], targets[:9])
    rest = score_targets(reverser, sources[9:], targets[9:])
    assert (half + rest).loss == pytest.approx(loss, rel=1e-5)
    assert (half + rest).tokens == tokens


def test_targets_that_do_not_match_their_sources_are_refused(reverser):
    with pytest.raises(ValueError, match="zip"):
        score_targets(reverser, [[3, 2]], [[3, 2], [4, 2]])


@pytest.mark.parametrize("seed", range(5))
def test_batches_keep_their_budget(seed):
    generator = random.Random(seed)
    lengths = [generator.randint(1, 60) for _ in range(generator.randint(0, 300))]
    budget = generator.choice([1, 50, 400, 10**9])
    batches = list(budget_batches(lengths, budget))
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    for batch in batches:
        longest = max(lengths[row] for row in batch)
        assert len(batch) == 1 or len(batch) * longest <= budget
    longest_first = [lengths[row] for batch in batches for row in batch]
    assert longest_first == sorted(lengths, reverse=True)


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        (b"", []),
        (b"\n", [""]),
        (b"a", ["a"]),
        (b"a\n", ["a"]),
        (b"a\n\nb", ["a", "", "b"]),
        (b"a\r\nb\r\n", ["a", "b"]),
        (b"a\rb\n\r", ["a\rb", "\r"]),
        (b"a\r\r\n", ["a\r"]),
        (b"\xef\xbb\xbfa\n\xef\xbb\xbfb\n", ["a", "\ufeffb"]),
        (b"\xef\xbb\xbf", [""]),
        (b"a\x00b\x0b\x0c\x1c\n", ["a\0b\x0b\x0c\x1c"]),
        ("ä\u2028好\x85\n👩‍👩‍👧".encode(), ["ä\u2028好\x85", "👩‍👩‍👧"]),
    ],
)
def test_only_line_feeds_end_lines(content, lines):
    assert list(read_lines(io.BytesIO(content), "standard input")) == lines


def test_invalid_utf8_loses_no_line_and_is_told_once(caplog):
    content = b"\xef\xbb\xbfgood\nb\xe4d\n\xff\xfe\n" + "\ufffd\n".encode()
    lines = list(read_lines(io.BytesIO(content), "x.txt"))
    assert lines == ["good", "b\ufffdd", "\ufffd\ufffd", "\ufffd"]
    (record,) = caplog.records
    assert record.getMessage().startswith("x.txt, line 2: not UTF-8")


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "out.txt"
    path.write_text("old")
    path.chmod(0o640)
    with whole_file(path) as stream:
        stream.write("ä\r\n")
        stream.flush()
        assert path.read_text() == "old"
    assert path.read_bytes() == "ä\r\n".encode()
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    broken = whole_file(path)
    broken.__enter__().write("new")
    assert len(os.listdir(tmp_path)) == 2
    broken.__exit__(RuntimeError, RuntimeError(), None)
    assert path.read_bytes() == "ä\r\n".encode()
    assert os.listdir(tmp_path) == ["out.txt"]


def test_a_new_file_has_the_usual_mode(tmp_path):
    (tmp_path / "usual").touch()
    with whole_file(tmp_path / "new") as stream:
        stream.write("x")
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_links_and_special_files_stay_what_they_are(tmp_path):
    path, link = tmp_path / "file", tmp_path / "link"
    link.symlink_to(path)
    with whole_file(link) as stream:
        stream.write("x")
    assert link.is_symlink()
    assert path.read_text() == "x"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with whole_file(pipe) as stream:
            stream.write("y")
        assert os.read(reader, 10) == b"y"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_unwritable_files_are_refused(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="Not a directory"), whole_file(tmp_path / "file" / "x"):
        pass
    with pytest.raises(OSError, match="Is a directory"), whole_file(tmp_path):
        pass
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(PermissionError, match="cannot be written"), whole_file(tmp_path / "file"):
        pass
