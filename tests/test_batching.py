"""Tests of modeling_tinytfm.batching: budgets, ranks, epochs, resuming."""

import gzip
import sys
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from modeling_tinytfm.batching import PairBatchSampler
from modeling_tinytfm.encoding import PairEncoder, TokenRows
from modeling_tinytfm.tokenization import train_tokenizer

MULTI30K = Path(__file__).parents[2] / "shared" / "data" / "multi30k"


def random_lengths(generator: np.random.Generator, rows: int) -> tuple[np.ndarray, np.ndarray]:
    source = np.exp(generator.normal(2.6, 0.5, rows)).clip(2, 80).astype(int)
    target = (source * np.exp(generator.normal(0, 0.25, rows))).clip(2, 80).astype(int)
    return source, target


def all_ranks(lengths, replicas: int, epoch: int = 0, **options) -> list[list[list[int]]]:
    samplers = [
        PairBatchSampler(*lengths, num_replicas=replicas, rank=rank, **options)
        for rank in range(replicas)
    ]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    batches = [list(sampler) for sampler in samplers]
    assert {len(sampler) for sampler in samplers} == {len(own) for own in batches}
    return batches


def padded_tokens(lengths, batch: list[int]) -> int:
    source, target = lengths
    return len(batch) * (max(source[row] for row in batch) + max(target[row] for row in batch))


@pytest.mark.parametrize("replicas", [1, 2, 3, 8])
@pytest.mark.parametrize("max_tokens", [170, 500, 4_000, 10**9])
@pytest.mark.parametrize("rows", [20, 997])
def test_token_budget_holds_and_each_row_occurs_once(rows, max_tokens, replicas):
    lengths = random_lengths(np.random.default_rng([rows, max_tokens, replicas]), rows)
    counts, orders = set(), []
    for epoch in range(3):
        batches = all_ranks(lengths, replicas, epoch, max_tokens=max_tokens, seed=7)
        flat = [batch for own in batches for batch in own]
        assert all(padded_tokens(lengths, batch) <= max_tokens for batch in flat)
        assert sorted(row for batch in flat for row in batch) == list(range(rows))
        counts.add(len(batches[0]))
        orders.append(batches)
    assert len(counts) == 1
    assert orders[0] != orders[1]
    assert orders[1] != orders[2]


def test_budget_batches_differ_in_company_between_epochs():
    lengths = random_lengths(np.random.default_rng(1), 5_000)
    partners = []
    for epoch in range(2):
        (batches,) = all_ranks(lengths, 1, epoch, max_tokens=1_000)
        partners.append({frozenset(batch) for batch in batches if len(batch) > 1})
    assert len(partners[0] & partners[1]) < 0.05 * len(partners[0])


def test_batches_depend_on_seed_and_epoch_only():
    lengths = random_lengths(np.random.default_rng(2), 300)
    for options in ({"max_tokens": 600}, {"batch_size": 8}):
        first = all_ranks(lengths, 2, 3, seed=5, **options)
        assert all_ranks(lengths, 2, 3, seed=5, **options) == first
        assert all_ranks(lengths, 2, 4, seed=5, **options) != first
        assert all_ranks(lengths, 2, 3, seed=6, **options) != first
        sampler = PairBatchSampler(*lengths, num_replicas=2, rank=1, seed=5, **options)
        list(sampler)
        sampler.set_epoch(3)
        assert list(sampler) == list(sampler) == first[1]


@pytest.mark.parametrize("options", [{"max_tokens": 600}, {"batch_size": 8}])
def test_skip_starts_one_iteration_later(options):
    lengths = random_lengths(np.random.default_rng(3), 300)
    sampler = PairBatchSampler(*lengths, num_replicas=2, rank=1, **options)
    sampler.set_epoch(2)
    whole = list(sampler)
    for batches in (0, 1, len(whole) - 1, len(whole)):
        sampler.skip(batches)
        sampler.set_epoch(2)
        assert len(sampler) == len(whole)
        assert list(sampler) == whole[batches:]
        assert list(sampler) == whole
    for batches in (-1, len(whole) + 1):
        with pytest.raises(ValueError, match=f"batches={batches}"):
            sampler.skip(batches)


def test_padding_waste_is_what_the_batches_pad_and_small():
    lengths = random_lengths(np.random.default_rng(4), 29_000)
    sampler = PairBatchSampler(*lengths, max_tokens=8_192)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        padded = sum(padded_tokens(lengths, batch) for batch in sampler)
        waste = 1 - (lengths[0].sum() + lengths[1].sum()) / padded
        assert sampler.padding_waste() == pytest.approx(waste, abs=1e-12)
        assert waste < 0.1
    assert PairBatchSampler(*lengths, batch_size=256).padding_waste() > 0.4


@pytest.mark.slow
@pytest.mark.skipif(not MULTI30K.exists(), reason="its licence keeps the data out of the project")
@pytest.mark.parametrize("text", ["", ".lc.norm.tok"], ids=["raw", "tokenised"])
@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_padding_waste_on_multi30k_is_under_a_tenth(kind, text):
    english, german = (
        gzip.decompress((MULTI30K / f"train{text}.{language}.gz").read_bytes()).decode().split("\n")
        for language in ("en", "de")
    )
    lines = [*english, *german]
    tokenizer = train_tokenizer(lines, kind=kind, vocab_size=8000, show_progress=False)
    encoder = PairEncoder(tokenizer, max_source_length=None, max_target_length=None)
    lengths = TokenRows([(english[:-1], german[:-1])], encoder).lengths.T
    assert len(lengths[0]) == 29_000
    sampler = PairBatchSampler(*lengths, max_tokens=4096)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        assert sampler.padding_waste() < 0.1
    assert PairBatchSampler(*lengths, batch_size=128).padding_waste() > 0.5


def test_more_batches_may_be_asked_for():
    lengths = random_lengths(np.random.default_rng(7), 100)
    for options in ({"max_tokens": 900}, {"batch_size": 9}):
        fewest = len(PairBatchSampler(*lengths, **options))
        for batches in (fewest + 1, 60, 100):
            sampler = PairBatchSampler(*lengths, min_batches=batches, **options)
            made = list(sampler)
            assert len(made) == len(sampler) == batches
            assert sorted(chain(*made)) == list(range(100))
            assert min(map(len, made)) > 0
            if batches == 60:
                assert max(map(len, made)) <= 4  # the largest are split first
        assert len(PairBatchSampler(*lengths, min_batches=fewest - 1, **options)) == fewest
        with pytest.raises(ValueError, match="100 rows do not make min_batches=101"):
            PairBatchSampler(*lengths, min_batches=101, **options)


def test_ranks_get_batches_of_similar_size_at_one_step():
    lengths = random_lengths(np.random.default_rng(5), 8_000)
    batches = all_ranks(lengths, 4, max_tokens=1_500)
    spread = [
        max(sizes) / min(sizes)
        for step in zip(*batches, strict=True)
        for sizes in [[padded_tokens(lengths, batch) for batch in step]]
    ]
    assert np.mean(spread) < 1.05


def test_outliers_do_not_take_the_others_with_them():
    source, target = random_lengths(np.random.default_rng(6), 2_000)
    without = len(PairBatchSampler(source, target, max_tokens=1_000))
    source[17], target[17] = 990, 5
    source[18], target[18] = 5, 990
    (batches,) = all_ranks((source, target), 1, max_tokens=1_000)
    assert all(padded_tokens((source, target), batch) <= 1_000 for batch in batches)
    assert len(batches) < without + 15


@pytest.mark.parametrize("rows", [8, 16, 20, 21, 64, 1_000])
def test_fixed_batches_hold_the_same_rows_on_any_split_of_a_step(rows):
    lengths = random_lengths(np.random.default_rng(rows), rows)
    for epoch in range(2):
        (whole,) = all_ranks(lengths, 1, epoch, batch_size=8)
        (halves,) = all_ranks(lengths, 1, epoch, batch_size=4)
        ranks = all_ranks(lengths, 2, epoch, batch_size=4)
        (quarters,) = all_ranks(lengths, 1, epoch, batch_size=2)
        accumulated = [chain.from_iterable(halves[n : n + 2]) for n in range(0, len(halves), 2)]
        assert [sorted(batch) for batch in accumulated] == [sorted(batch) for batch in whole]
        accumulated = [chain.from_iterable(quarters[n : n + 4]) for n in range(0, len(quarters), 4)]
        assert [sorted(batch) for batch in accumulated] == [sorted(batch) for batch in whole]
        steps = [sorted(chain.from_iterable(step)) for step in zip(*ranks, strict=True)]
        full = rows // 8 - (rows % 8 == 1)
        assert steps[:full] == [sorted(batch) for batch in whole][:full]
        if rows % 8 != 1:
            assert steps == [sorted(batch) for batch in whole]


@pytest.mark.parametrize("replicas", [1, 2, 3, 7])
@pytest.mark.parametrize("batch_size", [1, 2, 3, 8, 100])
def test_fixed_batches_lose_and_repeat_no_row(batch_size, replicas):
    for rows in (7, 8, 13, 20, 57):
        lengths = random_lengths(np.random.default_rng(rows), rows)
        for epoch in range(2):
            batches = all_ranks(lengths, replicas, epoch, batch_size=batch_size)
            flat = [batch for own in batches for batch in own]
            assert sorted(row for batch in flat for row in batch) == list(range(rows))
            assert min(map(len, flat)) >= 1
            assert max(map(len, flat)) <= max(batch_size, 2 if replicas > 1 else 1)


def test_b29_fewer_rows_than_ranks_is_refused():
    lengths = random_lengths(np.random.default_rng(0), 3)
    for options in ({"max_tokens": 600}, {"batch_size": 8}):
        with pytest.raises(ValueError, match="3 rows for 4 processes"):
            PairBatchSampler(*lengths, num_replicas=4, rank=0, **options)
        assert all_ranks(lengths, 3, **options) != []


def test_sampler_refuses_what_it_cannot_do():
    lengths = (np.array([5, 60, 7]), np.array([5, 50, 7]))
    with pytest.raises(ValueError, match=r"max_tokens=100.*longest row: 60 source and 50 target"):
        PairBatchSampler(*lengths, max_tokens=100)
    with pytest.raises(ValueError, match="one row, and 3 rows do not divide by 2"):
        PairBatchSampler(np.full(3, 50), np.full(3, 50), max_tokens=100, num_replicas=2)
    for options in ({}, {"max_tokens": 500, "batch_size": 2}):
        with pytest.raises(ValueError, match="exactly one"):
            PairBatchSampler(*lengths, **options)
    with pytest.raises(ValueError, match="batch_size=0"):
        PairBatchSampler(*lengths, batch_size=0)
    with pytest.raises(ValueError, match="rank=2"):
        PairBatchSampler(*lengths, batch_size=1, num_replicas=2, rank=2)
    with pytest.raises(ValueError, match="3 source_lengths and 2 target_lengths"):
        PairBatchSampler(lengths[0], lengths[1][:2], batch_size=1)


def test_planning_makes_no_python_call_for_each_row():
    lengths = random_lengths(np.random.default_rng(8), 200_000)
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += 1

    sys.setprofile(count)
    try:
        batches = iter(PairBatchSampler(*lengths, max_tokens=100_000))
        next(batches)
    finally:
        sys.setprofile(None)
    assert calls < 20_000
