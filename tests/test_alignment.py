"""Alignments against spelled-out sums, the tokenizer's offsets, and a task with a known answer."""

import re

import pytest
import torch
from test_translation import MULTILINGUAL, digits, random_lines  # noqa: F401 - digits is a fixture
from tiny import tiny_config, tiny_model
from transformers import MarianConfig, MarianMTModel

from modeling_tinytfm import TinyTFMForConditionalGeneration
from modeling_tinytfm.alignment import align, check_unit, pharaoh
from modeling_tinytfm.decoding import ModelTranslator, cross_attention
from modeling_tinytfm.tokenization import train_tokenizer
from modeling_tinytfm.translation import translate_n_best

TEXT = ["the cat sat on the mat", "der hund lief schnell davon", "a man , a plan", *MULTILINGUAL]


def reversed_share(hypotheses, lines) -> float:
    """The share of tokens of right reversals whose pair is the right one."""
    right = total = 0
    for line, (best,) in zip(lines, hypotheses, strict=True):
        if best.text == line[::-1]:
            count = len(line.split())
            right += len(set(best.alignment) & {(count - 1 - t, t) for t in range(count)})
            total += count
    assert total > 100
    return right / total


@pytest.mark.parametrize("unit", ["token", "word"])
def test_a_reverser_looks_from_the_other_end(reverser, digits, unit):  # noqa: F811
    """A quick training leaves some looks at a neighbour: by chance 1 in 6 would be right."""
    lines = random_lines(60)
    for settings in ({}, {"num_beams": 4}):
        found = translate_n_best(
            reverser, digits, lines, 1, alignments=unit, max_new_tokens=14, **settings
        )
        for (best,) in found:
            assert [target for _, target in best.alignment] == list(range(len(best.text.split())))
        assert reversed_share(found, lines) > 0.85


@pytest.mark.slow
def test_a_trained_reverser_nearly_always_looks_from_the_other_end(digits):  # noqa: F811
    """As configs/reverse.yaml trains: 1,000 steps of 64 strings of 3 to 7 digits."""
    generator = torch.Generator().manual_seed(1)

    def batch(count: int) -> dict[str, torch.Tensor]:
        rows = [
            torch.randint(3, 13, (int(length),), generator=generator)
            for length in torch.randint(3, 8, (count,), generator=generator)
        ]
        end, pad = torch.tensor([2]), torch.nn.utils.rnn.pad_sequence
        ids = pad([torch.cat((row, end)) for row in rows], batch_first=True, padding_value=1)
        labels = [torch.cat((row.flip(0), end)) for row in rows]
        labels = pad(labels, batch_first=True, padding_value=-100)
        return {"input_ids": ids, "attention_mask": (ids != 1).long(), "labels": labels}

    sizes = {"d_model": 64, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "dropout": 0.1}
    model = TinyTFMForConditionalGeneration(tiny_config(vocab_size=14, **sizes)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=1000)
    for _ in range(1000):
        model(**batch(64)).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    lines = [line for line in random_lines(400) if 3 <= len(line.split()) <= 7]
    found = translate_n_best(model, digits, lines, 1, alignments="token")
    assert reversed_share(found, lines) > 0.97


@pytest.mark.parametrize("n_best", [1, 3])
def test_alignments_are_those_of_the_line_alone_and_of_the_hypothesis(reverser, digits, n_best):  # noqa: F811
    lines = [*random_lines(12), "", "5 x 7"]
    settings = {"alignments": "token", "max_new_tokens": 14}
    together = translate_n_best(reverser, digits, lines, n_best, **settings)
    one_by_one = translate_n_best(reverser, digits, lines, n_best, batch_tokens=1, **settings)
    for line, best, alone in zip(lines, together, one_by_one, strict=True):
        assert [one.alignment for one in best] == [one.alignment for one in alone]
        for one in best:
            source = digits(line)["input_ids"]
            if len(source) == 1:
                assert one.alignment == ()
                continue
            with torch.no_grad():  # greedily: the last layer's mean over heads, </s> aside
                weights = reverser(
                    torch.tensor([source]),
                    decoder_input_ids=torch.tensor([[0, *one.tokens]]),
                    output_attentions=True,
                ).cross_attentions[-1][0]
            looks = weights.mean(0)[: len(one.tokens), : len(source) - 1].argmax(1)
            specials = {0, 1, 2}
            kept = [
                look for look, token in zip(looks, one.tokens, strict=True) if token not in specials
            ]
            assert one.alignment == tuple((int(look), t) for t, look in enumerate(kept))


def test_models_together_look_where_they_do_on_average(reverser, digits):  # noqa: F811
    models = [reverser, tiny_model(decoder_layers=1)]
    sources, targets = [[3, 4, 5, 2], [7, 2]], [[5, 4, 3], [7, 7]]
    mean = ModelTranslator(models, digits).attend(sources, targets)
    each = [cross_attention(model, sources, targets) for model in models]
    for row, weights in enumerate(mean):
        assert weights.shape == (len(targets[row]), len(sources[row]))
        torch.testing.assert_close(weights, (each[0][row] + each[1][row]) / 2)
        torch.testing.assert_close(weights.sum(1), torch.ones(len(targets[row])))
    assert not torch.allclose(each[0][0], each[1][0])


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_other_models_tell_their_attention_or_how_to_make_them(attention):
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2}
    sizes |= {"decoder_attention_heads": 2, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}
    config = MarianConfig(
        vocab_size=20, d_model=8, pad_token_id=1, decoder_start_token_id=1, **sizes
    )
    model = MarianMTModel._from_config(config, attn_implementation=attention).eval()
    if attention == "eager":
        (weights,) = cross_attention(model, [[5, 6, 2]], [[7, 8]])
        assert weights.shape == (2, 3)
    else:
        with pytest.raises(ValueError, match=r"MarianMTModel .*attn_implementation='eager'"):
            cross_attention(model, [[5, 6, 2]], [[7, 8]])


def test_token_positions_pass_over_special_tokens(digits):  # noqa: F811
    source, target = [0, 5, 13, 6, 2], [7, 0, 13, 8]  # 13 is <unk>, which stands for a token
    attention = torch.tensor(
        [
            [0.9, 0.0, 0.0, 0.1, 0.0],
            [0.0, 1.0, 0.0, 0.0, 0.0],
            [0.0, 0.3, 0.4, 0.0, 0.3],
            [0.0, 0.2, 0.1, 0.1, 0.6],
        ]
    )
    assert align(attention, digits, source, target) == ((2, 0), (1, 1), (0, 2))
    assert align(attention[:0], digits, source, []) == ()
    assert align(attention[:, 4:], digits, [2], target) == ()


@pytest.mark.parametrize("kind", ["bpe", "word", "character"])
def test_words_are_those_between_white_space(kind):
    """The words that the tokenizer's own offsets tell, and sums over their tokens."""
    tokenizer = train_tokenizer(TEXT * 3, kind=kind, vocab_size=90, show_progress=False)
    torch.manual_seed(0)

    def words(line: str) -> list[int | None]:
        starts = [match.span() for match in re.finditer(r"\S+", line)]
        offsets = tokenizer(line, return_offsets_mapping=True)["offset_mapping"]
        found: list[int | None] = []
        for start, end in offsets[:-1]:
            inside = [n for n, (first, last) in enumerate(starts) if first < end and start < last]
            found.append(inside[-1] if inside else None)
        return found

    for line, other in zip(TEXT, [*TEXT[1:], TEXT[0]], strict=True):
        source, target = (tokenizer(text)["input_ids"] for text in (line, other))
        attention = torch.rand(len(target), len(source))
        expected = []
        source_words, target_words = words(line), words(other)
        for word in range(len(other.split())):
            sums = [0.0] * len(line.split())
            for row, of in enumerate(target_words):
                for column, looked_at in enumerate(source_words):
                    if of == word and looked_at is not None:
                        sums[looked_at] += float(attention[row, column])
            expected.append((sums.index(max(sums)), word))
        assert align(attention, tokenizer, source, target, "word") == tuple(expected)


def test_a_word_is_looked_at_by_all_its_tokens():
    """Two weak looks at one word outweigh a strong one at another."""
    tokenizer = train_tokenizer(["ab c"], kind="character", vocab_size=20, show_progress=False)
    source = tokenizer("ab c")["input_ids"]
    attention = torch.tensor([[0.3, 0.3, 0.0, 0.4, 0.0]])
    assert align(attention, tokenizer, source, source[:1]) == ((3, 0),)
    assert align(attention, tokenizer, source, source[:1], "word") == ((0, 0),)


def test_pharaoh_format_and_units():
    assert pharaoh(((1, 0), (0, 1))) == "1-0 0-1"
    assert pharaoh(()) == ""
    check_unit(None)
    with pytest.raises(ValueError, match="alignments='letter' is unknown: use token or word"):
        check_unit("letter")
