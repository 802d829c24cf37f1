"""The beam search: against exhaustive search, against generate(), and what only it can do."""

import copy
import itertools
import math
import re
from functools import cache, partial

import pytest
import torch
from test_generation import EOS, PAD, START, greedy, stripped, talkative
from test_translation import digits  # noqa: F401 - a fixture
from tiny import reversal_batch, tiny_model
from transformers import DynamicCache, GenerationConfig, MarianConfig, MarianMTModel

from modeling_tinytfm import TinyTFMForConditionalGeneration
from modeling_tinytfm import search as search_module
from modeling_tinytfm.decoding import ModelTranslator, generate_batch
from modeling_tinytfm.search import beam_search, keep_penalty_form, length_penalty, penalty_form

STEPS = 4  # tokens of an output at most, in exhaustive search
WORDS = [token for token in range(6) if token != EOS]
FORMS = ["length", "gnmt"]


def divisor(length: int, exponent: float, form: str) -> float:
    return {"length": float(length), "gnmt": (5 + length) / 6}[form] ** exponent


class Reference:
    """Probabilities of a six-word vocabulary by full passes, one for each beginning."""

    def __init__(self, *models):
        self.models = models
        self.source = {"input_ids": torch.tensor([[3, 5, 4, 4, 2]])}
        self.next = cache(self.next)
        self.total = cache(self.total)

    def next(self, beginning: tuple[int, ...]) -> list[float]:
        ids = torch.tensor([[START, *beginning]])
        with torch.no_grad():
            probabilities = [
                model(**self.source, decoder_input_ids=ids, use_cache=False)
                .logits[0, -1]
                .double()
                .softmax(-1)
                for model in self.models
            ]
        return torch.stack(probabilities).mean(0).log().tolist()

    def total(self, output: tuple[int, ...]) -> float:
        return sum(self.next(output[:place])[token] for place, token in enumerate(output))

    def exhaustive(self, exponent: float, form: str) -> list[tuple[float, tuple[int, ...]]]:
        """All outputs and their scores, best first."""
        outputs = [
            (*words, EOS)
            for length in range(STEPS)
            for words in itertools.product(WORDS, repeat=length)
        ]
        outputs += itertools.product(WORDS, repeat=STEPS)
        ranked = [
            (self.total(output) / divisor(len(output), exponent, form), output)
            for output in outputs
        ]
        return sorted(ranked, reverse=True)

    def beam(self, num_beams: int, exponent: float, form: str, early: bool | str) -> list:
        """A beam search in plain words: lists of (score, output)."""
        live: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
        finished: list[tuple[float, tuple[int, ...]]] = []
        for length in range(1, STEPS + 1):
            grown = [
                (total + more, (*output, token))
                for total, output in live
                for token, more in enumerate(self.next(output))
            ]
            best = sorted(grown, reverse=True)[: 2 * num_beams]
            ended = [length == STEPS or output[-1] == EOS for _, output in best]
            finished += [
                (total / divisor(length, exponent, form), output)
                for (total, output), end in zip(best[:num_beams], ended, strict=False)
                if end
            ]
            finished = sorted(finished, reverse=True)[:num_beams]
            live = [one for one, end in zip(best, ended, strict=True) if not end][:num_beams]
            if len(finished) == num_beams and live:
                longest = STEPS if early == "never" and exponent > 0 else length
                hope = live[0][0] / divisor(longest, exponent, form)
                if early is True or hope <= finished[-1][0]:
                    break
        return finished


@pytest.fixture(scope="module")
def references() -> dict[str, Reference]:
    """Two models that differ in weights, depth and heads: each of them, and both together."""
    torch.manual_seed(0)
    first = talkative("encoder-decoder", vocab_size=6)
    second = talkative("encoder-decoder", vocab_size=6, decoder_layers=1, encoder_layers=2)
    for model in (first, second):
        with torch.no_grad():
            model.lm_head.weight.mul_(0.4)  # so that no output stands out
    return {
        "first": Reference(first),
        "second": Reference(second),
        "both": Reference(first, second),
    }


def search(models, batch, form="length", prefixes=(), **settings):
    """The search as `generate_batch` calls it: sequences and scores."""
    source = {name: batch[name] for name in ("input_ids", "attention_mask") if name in batch}
    inside = partial(
        beam_search, models=models, source=source, prefixes=prefixes, form=form, filler=PAD
    )
    return models[0].generate(**source, custom_generate=inside, **settings)


# Against exhaustive search


@pytest.mark.parametrize("models", ["second", "both"])
@pytest.mark.parametrize("exponent", [0.0, 0.6, 1.0, 2.0, -1.0])
@pytest.mark.parametrize("form", FORMS)
def test_a_full_beam_equals_exhaustive_search(references, form, exponent, models):
    reference = references[models]
    ranked = reference.exhaustive(exponent, form)
    assert len(ranked) == 781
    found = search(
        reference.models,
        reference.source,
        form,
        num_beams=781,
        num_return_sequences=781,
        max_new_tokens=STEPS,
        length_penalty=exponent,
    )
    scores = torch.tensor([score for score, _ in ranked])
    torch.testing.assert_close(found.sequences_scores, scores, atol=1e-5, rtol=1e-5)
    outputs = [tuple(stripped(row[1:])) for row in found.sequences]
    assert sorted(outputs) == sorted(output for _, output in ranked)
    by_output = {output: score for score, output in ranked}
    own = torch.tensor([by_output[output] for output in outputs])
    torch.testing.assert_close(found.sequences_scores, own, atol=1e-5, rtol=1e-5)
    assert outputs[0] == ranked[0][1]


def test_the_forms_and_the_models_choose_differently(references):
    """Otherwise the exhaustive searches above could not tell them apart."""

    def best(models: str, exponent: float, form: str) -> tuple[int, ...]:
        return references[models].exhaustive(exponent, form)[0][1]

    assert best("second", 2.0, "length") != best("second", 2.0, "gnmt")
    assert best("both", 1.0, "length") != best("both", 1.0, "gnmt")
    assert len({best(models, 2.0, "gnmt") for models in references}) == 3


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("num_beams", [1, 2, 3, 5])
@pytest.mark.parametrize("form", FORMS)
def test_a_narrow_beam_equals_one_in_plain_words(references, form, num_beams, early_stopping):
    for models, exponent in (("both", 0.6), ("first", 3.0), ("second", 5.0), ("second", -1.0)):
        reference = references[models]
        early = early_stopping if num_beams > 1 else True  # greedy: the first end is the end
        expected = reference.beam(num_beams, exponent, form, early)
        found = search(
            reference.models,
            reference.source,
            form,
            num_beams=num_beams,
            num_return_sequences=num_beams,
            max_new_tokens=STEPS,
            length_penalty=exponent,
            early_stopping=early_stopping,
        )
        assert [tuple(stripped(row[1:])) for row in found.sequences] == [
            output for _, output in expected
        ]
        scores = torch.tensor([score for score, _ in expected])
        torch.testing.assert_close(found.sequences_scores, scores, atol=1e-5, rtol=1e-5)


def test_the_penalties_are_those_of_the_papers():
    lengths = torch.tensor([1, 7, 19])
    expected = torch.tensor([1.0, 2.0**0.6, 4.0**0.6])
    torch.testing.assert_close(length_penalty(lengths, 0.6, "gnmt"), expected)
    torch.testing.assert_close(length_penalty(lengths, 0.5), lengths.sqrt())
    assert length_penalty(7, 0.0, "gnmt") == length_penalty(7, 0.0) == 1.0


# Against generate()

SETTINGS = [
    {"num_beams": num_beams, "num_return_sequences": n_best, "length_penalty": exponent, **more}
    for num_beams, n_best in ((2, 1), (4, 4), (7, 3))
    for exponent, more in (
        (0.0, {"early_stopping": "never"}),
        (0.6, {"early_stopping": "never"}),
        (0.6, {"early_stopping": True, "suppress_tokens": [5, 6], "min_new_tokens": 3}),
        (1.0, {"no_repeat_ngram_size": 2, "repetition_penalty": 1.3}),
        (2.0, {"forced_eos_token_id": EOS, "min_length": 4, "max_new_tokens": 7}),
        (-1.0, {"begin_suppress_tokens": [4], "forced_bos_token_id": 12}),
        (1.0, {"eos_token_id": [EOS, 7], "bad_words_ids": [[5, 6], [8]]}),
    )
]


@pytest.mark.parametrize("settings", [{}, {"max_length": 4}, *SETTINGS], ids=str)
def test_the_form_length_is_generates_own(reverser, settings):
    batch = reversal_batch(16, torch.Generator().manual_seed(5))
    del batch["labels"]
    if "max_length" not in settings:
        settings = {"max_new_tokens": 14, **settings}
    settings = {**settings, "return_dict_in_generate": True, "output_scores": True}
    expected = reverser.generate(**batch, **settings)
    found = search([reverser], batch, **settings)
    ends = settings.get("eos_token_id", [EOS])

    def outputs(sequences):
        rows = sequences.tolist()
        ended = [next((i for i, t in enumerate(row) if t in ends), len(row)) for row in rows]
        return [row[: end + 1] for row, end in zip(rows, ended, strict=True)]

    assert outputs(found.sequences) == outputs(expected.sequences)
    if "num_beams" in settings:
        torch.testing.assert_close(
            found.sequences_scores, expected.sequences_scores, atol=1e-5, rtol=1e-5
        )


def test_beams_that_can_all_end_in_two_ways_still_go_on():
    model = talkative("encoder-decoder", output_bias=True)
    with torch.no_grad():
        model.lm_head.bias[[EOS, 7]] += 9.0
    batch = {"input_ids": torch.tensor([[5, 6, 2], [9, 3, 2]])}
    settings = {"num_beams": 2, "eos_token_id": [EOS, 7], "early_stopping": "never"}
    settings |= {"length_penalty": 6.0, "max_new_tokens": 5, "num_return_sequences": 2}
    expected = model.generate(**batch, **settings)
    found = search([model], batch, **settings)
    assert found.sequences.tolist() == expected.tolist()
    assert expected.shape[1] > 3  # or they would never go on


@pytest.mark.parametrize("num_beams", [1, 4])
def test_without_a_cache_the_tokens_are_the_same(reverser, num_beams):
    batch = reversal_batch(8, torch.Generator().manual_seed(6))
    settings = {"num_beams": num_beams, "max_new_tokens": 14}
    cached = search([reverser], batch, "gnmt", **settings)
    full = search([reverser], batch, "gnmt", use_cache=False, **settings)
    assert cached.sequences.tolist() == full.sequences.tolist()


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("count", [1, 2], ids=["one model", "two models"])
@pytest.mark.parametrize("num_beams", [1, 4])
def test_sources_that_are_done_leave_and_nothing_else_changes(
    reverser, monkeypatch, num_beams, count, use_cache
):
    batch = reversal_batch(24, torch.Generator().manual_seed(7))
    settings = {"num_beams": num_beams, "num_return_sequences": num_beams, "max_new_tokens": 14}
    settings["use_cache"] = use_cache
    rows = []
    hook = reverser.lm_head.register_forward_hook(lambda *args: rows.append(len(args[2])))
    found = []
    for crowded in (0.0, 0.75, 1.0):
        monkeypatch.setattr(search_module, "CROWDED", crowded)
        rows.append(0)
        found.append(search([reverser] * count, batch, **settings))
    hook.remove()
    assert set(rows[: rows.index(0, 1)]) == {0, 24 * num_beams}  # nobody may leave
    assert len(set(rows[rows.index(0, 1) :])) > 4
    for other in found[1:]:
        assert other.sequences.tolist() == found[0].sequences.tolist()
        torch.testing.assert_close(other.sequences_scores, found[0].sequences_scores)


def never(ids, scores, **options):
    return torch.zeros(len(ids), dtype=torch.bool)


@pytest.mark.parametrize(
    "settings",
    [{"encoder_no_repeat_ngram_size": 2}, {"stopping_criteria": [never]}],
    ids=["processor", "criterion"],
)
def test_nobody_leaves_where_a_place_in_the_batch_may_count(reverser, settings):
    batch = reversal_batch(8, torch.Generator().manual_seed(7))
    del batch["labels"]
    rows = set()
    hook = reverser.lm_head.register_forward_hook(lambda *args: rows.add(len(args[2])))
    found = search([reverser], batch, num_beams=2, max_new_tokens=14, **settings)
    hook.remove()
    assert rows == {16}
    expected = reverser.generate(**batch, num_beams=2, max_new_tokens=14, **settings)
    assert list(map(stripped, found.sequences)) == list(map(stripped, expected))


@pytest.mark.parametrize(
    ("settings", "leaves"),
    [
        ({}, True),
        ({"num_beams": 1}, True),
        ({"num_beams": 4, "early_stopping": "never"}, True),
        ({"num_beams": 1, "streamer": None, "repetition_penalty": None}, True),
        ({"num_beams": 1, "repetition_penalty": 1.3}, False),
        ({"cache_implementation": "static"}, False),
        ({"prefix_allowed_tokens_fn": lambda row, ids: list(range(13))}, False),
        ({"generation_config": GenerationConfig(do_sample=True, max_new_tokens=14)}, False),
        ({"do_sample": True, "top_k": 1}, False),
        ({"num_beams": 3, "do_sample": True}, False),
        ({"prompt_lookup_num_tokens": 2, "num_beams": 1}, False),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_a_batch_shrinks_in_the_usual_searches(reverser, digits, settings, leaves):  # noqa: F811
    generator = torch.Generator().manual_seed(7)
    sources = ids_of(generator, 1 if "prompt_lookup_num_tokens" in settings else 12)
    rows = []
    hook = reverser.lm_head.register_forward_hook(lambda *args: rows.append(len(args[2])))
    generate_batch(reverser, digits, sources, **{"num_beams": 2, "max_new_tokens": 14, **settings})
    hook.remove()
    assert (len(set(rows)) > 1) == leaves


def test_an_encoder_reads_once_and_source_keys_are_never_moved(reverser, monkeypatch):
    reads, moves = [], []
    hook = reverser.get_encoder().register_forward_hook(lambda *_: reads.append(1))
    original = DynamicCache.reorder_cache
    monkeypatch.setattr(
        DynamicCache,
        "reorder_cache",
        lambda self, rows: (moves.append(self.layers[0].keys.shape[2]), original(self, rows)),
    )
    monkeypatch.setattr(search_module, "CROWDED", 0.0)  # unless a source leaves
    batch = reversal_batch(3, torch.Generator().manual_seed(6))
    search([reverser], batch, "gnmt", num_beams=3, max_new_tokens=6)
    hook.remove()
    assert len(reads) == 1
    assert moves == list(range(1, len(moves) + 1))  # the target's, which grow; the source's do not


# Several models


def ids_of(generator: torch.Generator, count: int) -> list[list[int]]:
    batch = reversal_batch(count, generator)
    return [
        row[mask.bool()].tolist()
        for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]


@pytest.mark.parametrize("n_best", [1, 4])
def test_a_model_together_with_itself_is_the_model(reverser, digits, n_best):  # noqa: F811
    sources = ids_of(torch.Generator().manual_seed(2), 12)
    settings = {"n_best": n_best, "num_beams": n_best, "with_scores": True, "max_new_tokens": 14}
    alone = generate_batch(reverser, digits, sources, **settings)
    together = generate_batch([reverser] * 3, digits, sources, **settings)
    for first, second in zip(alone, together, strict=True):
        assert [one.tokens for one in first] == [one.tokens for one in second]
        assert [one.score for one in first] == pytest.approx(
            [one.score for one in second], abs=1e-4
        )


def test_the_order_of_models_decides_nothing(digits):  # noqa: F811
    models = [talkative("encoder-decoder", vocab_size=50) for _ in range(2)]
    sources = ids_of(torch.Generator().manual_seed(2), 6)
    settings = {"num_beams": 3, "max_new_tokens": 9}
    first = generate_batch(models, digits, sources, **settings)
    second = generate_batch(models[::-1], digits, sources, **settings)
    assert [best[0].tokens for best in first] == [best[0].tokens for best in second]
    for model in models:  # and each of them counts
        alone = generate_batch(model, digits, sources, **settings)
        assert [best[0].tokens for best in first] != [best[0].tokens for best in alone]


@pytest.mark.parametrize("num_beams", [1, 3])
def test_other_models_join_in(digits, num_beams):  # noqa: F811
    torch.manual_seed(1)
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2}
    marian = MarianMTModel(
        MarianConfig(
            vocab_size=50,
            d_model=16,
            decoder_attention_heads=2,
            encoder_ffn_dim=16,
            decoder_ffn_dim=16,
            pad_token_id=PAD,
            eos_token_id=EOS,
            decoder_start_token_id=START,
            forced_eos_token_id=None,
            init_std=0.5,
            **sizes,
        )
    ).eval()
    sources = ids_of(torch.Generator().manual_seed(3), 5)
    models = [marian, talkative("encoder-decoder", vocab_size=50)]
    settings = {"num_beams": num_beams, "max_new_tokens": 6, "suppress_tokens": [PAD]}
    together = generate_batch(models, digits, sources, **settings)
    alone = [generate_batch(models, digits, [ids], **settings)[0] for ids in sources]
    assert [best[0].tokens for best in together] == [best[0].tokens for best in alone]
    if num_beams == 1:  # greedy: the most likely token of full passes
        for ids, (best,) in zip(sources, together, strict=True):
            so_far = [START]
            while len(so_far) < 7 and so_far[-1] != EOS:
                mean = sum(
                    model(torch.tensor([ids]), decoder_input_ids=torch.tensor([so_far]))
                    .logits[0, -1]
                    .softmax(-1)
                    for model in models
                )
                mean[PAD] = 0
                so_far.append(int(mean.argmax()))
            assert best.tokens == tuple(token for token in so_far[1:] if token != EOS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 51}, "vocab_size is 50 in one, and 51 in two"),
        ({"eos_token_id": 5}, "eos_token_id is 2 in one, and 5 in two"),
        ({"decoder_start_token_id": 1}, "decoder_start_token_id is 0 in one, and 1 in two"),
    ],
)
def test_models_of_different_ids_are_refused(digits, changes, message):  # noqa: F811
    models = [tiny_model(), tiny_model(**changes)]
    for model, name in zip(models, ("one", "two"), strict=True):
        model.name_or_path = name
    with pytest.raises(ValueError, match=message):
        ModelTranslator(models, digits)


def test_what_cannot_translate_is_refused(digits):  # noqa: F811
    with pytest.raises(ValueError, match="models is empty"):
        ModelTranslator([], digits)
    decoder = talkative("decoder")
    decoder.name_or_path = "speaker"
    with pytest.raises(ValueError, match="speaker cannot translate: it has no encoder"):
        ModelTranslator([decoder], digits)
    model = tiny_model(input_feature_size=3)
    with pytest.raises(ValueError, match="reads no text"):
        ModelTranslator([model], None)


# Prefixes


@pytest.mark.parametrize("count", [1, 2], ids=["one model", "two models"])
@pytest.mark.parametrize("num_beams", [1, 4])
def test_b17_prefixes_of_a_batch_go_on_as_alone(reverser, digits, num_beams, count):  # noqa: F811
    torch.manual_seed(0)
    models = [reverser, talkative("encoder-decoder", vocab_size=50)][:count]
    sources = ids_of(torch.Generator().manual_seed(7), 5)
    prefixes = [[12, 3], [], [5], [9, 9, 9, 8], [4, 12, 7]]
    settings = {"num_beams": num_beams, "n_best": num_beams, "with_scores": True}
    settings |= {"max_new_tokens": 12}
    together = generate_batch(models, digits, sources, prefixes=prefixes, **settings)
    for ids, prefix, best in zip(sources, prefixes, together, strict=True):
        (alone,) = generate_batch(models, digits, [ids], prefixes=[prefix], **settings)
        assert [one.tokens for one in best] == [one.tokens for one in alone]
        assert [one.score for one in best] == pytest.approx([one.score for one in alone], abs=1e-4)
        assert all(one.tokens[: len(prefix)] == tuple(prefix) for one in best)
        assert len({one.tokens for one in best}) == num_beams
    (free,) = generate_batch(models, digits, sources[1:2], **settings)
    assert [one.tokens for one in together[1]] == [one.tokens for one in free]


@pytest.mark.parametrize("num_beams", [1, 4])
def test_b17_a_prefix_goes_on_as_generate_goes_on(reverser, digits, num_beams):  # noqa: F811
    """The same tokens and scores as with the prefix as decoder_input_ids."""
    for seed, prefix in enumerate(([12, 3], [5], [9, 9, 9, 8])):
        (ids,) = ids_of(torch.Generator().manual_seed(seed), 1)
        source = {"input_ids": torch.tensor([ids])}
        expected = reverser.generate(
            **source,
            decoder_input_ids=torch.tensor([[START, *prefix]]),
            num_beams=num_beams,
            num_return_sequences=num_beams,
            max_new_tokens=12 - len(prefix),
            length_penalty=0.6,
            return_dict_in_generate=True,
            output_scores=True,
        )
        found = search(
            [reverser],
            source,
            prefixes=[prefix],
            num_beams=num_beams,
            num_return_sequences=num_beams,
            max_new_tokens=12,
            length_penalty=0.6,
        )
        assert list(map(stripped, found.sequences)) == list(map(stripped, expected.sequences))
        if num_beams == 1:  # teacher-forced argmax
            start = torch.tensor([[START, *prefix]])
            continued = greedy(reverser, start, 12 - len(prefix), **source)
            assert found.sequences[:, : continued.shape[1]].tolist() == continued.tolist()
        else:
            torch.testing.assert_close(
                found.sequences_scores, expected.sequences_scores, atol=1e-5, rtol=1e-5
            )


def test_an_output_has_room_after_its_prefix(reverser, digits):  # noqa: F811
    sources, prefixes = [[3, 4, 2]] * 2, [[5], [5, 6, 7]]
    for row in generate_batch(reverser, digits, sources, prefixes=prefixes, max_new_tokens=4):
        assert len(row[0].tokens) <= 4
    with pytest.raises(ValueError, match="a prefix of 3 tokens leaves no room in outputs of 3"):
        generate_batch(reverser, digits, sources, prefixes=prefixes, max_new_tokens=3)


# Settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"length_penalty_form": "wu"}, "length_penalty_form='wu' is unknown: use length or gnmt"),
        ({"do_sample": True}, "sample cannot be used with several models, a prefix or"),
        ({"do_sample": True, "num_beams": 3}, "beam_sample cannot be used with"),
        ({"assistant_model": tiny_model()}, "assistant_model cannot be used with"),
        ({"prompt_lookup_num_tokens": 3}, "assisted_generation cannot be used with"),
    ],
    ids=str,
)
def test_other_ways_to_generate_are_refused_by_name(reverser, digits, settings, message):  # noqa: F811
    settings = {"length_penalty_form": "gnmt", **settings}
    with pytest.raises(ValueError, match=re.escape(message)):
        generate_batch(reverser, digits, [[3, 4, 2]], **settings)


def test_the_form_is_the_models_where_none_is_given(reverser, digits, tmp_path):  # noqa: F811
    """A saved generation config keeps it; generate() reads the file and passes the key over."""
    sources = ids_of(torch.Generator().manual_seed(4), 8)
    settings = {"num_beams": 4, "n_best": 4, "with_scores": True, "length_penalty": 2.0}
    settings |= {"max_new_tokens": 14}
    plain = generate_batch(reverser, digits, sources, **settings)
    asked = generate_batch(reverser, digits, sources, length_penalty_form="gnmt", **settings)
    assert plain != asked
    assert penalty_form(reverser.generation_config) == "length"
    model = copy.deepcopy(reverser)
    keep_penalty_form(model, "gnmt")
    model.save_pretrained(tmp_path)
    loaded = TinyTFMForConditionalGeneration.from_pretrained(tmp_path)
    assert penalty_form(loaded.generation_config) == "gnmt"
    assert generate_batch(loaded, digits, sources, **settings) == asked
    overridden = generate_batch(loaded, digits, sources, length_penalty_form="length", **settings)
    assert overridden == plain
    ids, options = torch.tensor(sources[:1]), {"num_beams": 2, "max_new_tokens": 14}
    assert loaded.generate(ids, **options).tolist() == reverser.generate(ids, **options).tolist()


def test_where_fewer_outputs_are_possible_the_others_are_none(reverser, digits):  # noqa: F811
    (best,) = generate_batch(
        reverser,
        digits,
        [[3, 4, 2]],
        n_best=3,
        num_beams=3,
        with_scores=True,
        max_new_tokens=1,
        suppress_tokens=[token for token in range(50) if token != 7],
        length_penalty_form="gnmt",
    )
    assert best[0].tokens == (7,)
    assert [one.score for one in best[1:]] == [-math.inf] * 2
    assert [one.text for one in best[1:]] == [""] * 2


def test_what_is_forbidden_is_no_output(reverser, digits):  # noqa: F811
    (found,) = generate_batch(
        reverser,
        digits,
        [[3, 4, 5, 2]],
        prefixes=[[5]],
        n_best=4,
        num_beams=4,
        with_scores=True,
        max_new_tokens=6,
        prefix_allowed_tokens_fn=lambda row, ids: [4] if len(ids) < 4 else [2],
    )
    assert found[0].tokens == (5, 4, 4)
    assert math.isfinite(found[0].score)
    for other in found[1:]:
        assert (other.text, other.tokens, other.score) == ("", (), -math.inf)


def test_rows_of_a_batch_are_searched_as_alone(reverser):
    """Rows that are done wait for the others, and padding changes nothing."""
    batch = reversal_batch(6, torch.Generator().manual_seed(8))
    settings = {"num_beams": 4, "num_return_sequences": 4, "max_new_tokens": 14}
    together = search([reverser], batch, "gnmt", **settings)
    for row in range(6):
        real = batch["attention_mask"][row].bool()
        single = {"input_ids": batch["input_ids"][row : row + 1, real]}
        alone = search([reverser], single, "gnmt", **settings)
        rows = slice(4 * row, 4 * row + 4)
        assert list(map(stripped, together.sequences[rows])) == list(map(stripped, alone.sequences))
        torch.testing.assert_close(
            together.sequences_scores[rows], alone.sequences_scores, atol=1e-5, rtol=1e-5
        )
    assert len({len(stripped(row)) for row in together.sequences}) > 3
