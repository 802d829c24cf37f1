import importlib.util
import json
import random
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_translation import digits  # noqa: F401 - a fixture
from tiny import tiny_model
from torch import nn

from modeling_tinytfm import benchmarking, end_to_end
from modeling_tinytfm.benchmarking import (
    MARIAN,
    OURS,
    TORCH,
    Curve,
    Size,
    Step,
    compared,
    exponent,
    in_turns,
    quartiles,
)
from modeling_tinytfm.tokenization import save_tokenizer

ROOT = Path(__file__).parents[1]
TINY = Size(d_model=16, layers=1, ffn_dim=32, heads=2, vocab_size=20, rows=3, length=6)


def script():
    path = ROOT / "scripts/benchmark.py"
    specification = importlib.util.spec_from_file_location("script_benchmark", path)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


benchmark = script()


@pytest.fixture(autouse=True)
def _keep_threads(monkeypatch):
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)


def test_contenders_take_turns_and_the_first_round_does_not_count():
    calls = []
    # The clock jumps by what each call takes: the first round, of warming up, takes longest.
    seconds = iter([50, 70, 3, 2, 2, 5, 6, 4])
    now = [0.0]

    def contender(name):
        def run():
            calls.append(name)
            now[0] += next(seconds)

        return run

    contenders = {name: contender(name) for name in ("a", "b")}
    first, second = in_turns(contenders, 3, clock=lambda: now[0])
    assert calls == ["a", "b", "b", "a"] * 2
    assert (first.seconds, first.ratio, first.low, first.high) == (2, 1, 1, 1)
    assert (second.seconds, second.ratio) == (5, 1.5)  # of 3/2, 5/2 and 6/4
    assert (second.low, second.high) == (1.5, 2.0)


def test_ratios_are_those_within_a_round():
    """A machine that slows down meanwhile changes no ratio."""
    ours, other = compared({"ours": [1.0, 2.0, 10.0], "other": [1.5, 3.0, 15.0]})
    assert (ours.ratio, other.ratio, other.low, other.high) == (1.0, 1.5, 1.5, 1.5)


@pytest.mark.parametrize("values", [[3.0], [1.0, 2.0], [1.0, 2.0, 3.0, 4.0, 5.0]])
def test_quartiles(values):
    low, middle, high = quartiles(values)
    expected = torch.tensor(values).quantile(torch.tensor([0.25, 0.5, 0.75])).tolist()
    assert [low, middle, high] == pytest.approx(expected)


@pytest.mark.parametrize("power", [0.0, 1.0, 1.7])
def test_exponents_are_found(power):
    sizes = [64, 128, 256, 1024]
    assert exponent(sizes, [3 * size**power for size in sizes]) == pytest.approx(power)
    curve = Curve("length", sizes, [size**power for size in sizes], [size**2 for size in sizes])
    assert curve.exponents() == pytest.approx((power, 2))


def test_a_batch_is_ragged_and_padded_on_the_right():
    batch = replace(TINY, rows=50).batch()
    assert batch["input_ids"].shape == batch["labels"].shape == (50, 6)
    assert batch["attention_mask"].eq(batch["input_ids"] != 0).all()
    real = batch["labels"] != -100
    assert real[0].all()
    assert real[:, :3].all()
    assert 0.7 < real.float().mean() < 0.85
    assert (real.int().diff(dim=1) <= 0).all()
    assert all(batch[name].equal(value) for name, value in replace(TINY, rows=50).batch().items())


@pytest.mark.parametrize("bf16", [False, True])
def test_the_contenders_of_a_step_learn_the_same(bf16):
    """One weight, before and after three updates without dropout."""
    steps = benchmarking.training_steps(replace(TINY, dropout=0.0), bf16=bf16)
    assert list(steps) == [OURS, MARIAN, TORCH]
    moved = []
    for step in steps.values():
        first = step.loss_now().item()
        for _ in range(3):
            step()
        moved.append(first - step.loss_now().item())
    assert moved[0] > 0
    assert moved[1:] == pytest.approx([moved[0]] * 2, rel=0.1 if bf16 else 1e-3)


def test_contenders_whose_losses_differ_are_refused(monkeypatch):
    monkeypatch.setattr(
        benchmarking.TorchTransformer, "forward", lambda self, **_: torch.tensor(1.0)
    )
    with pytest.raises(RuntimeError, match=r"losses differ.*nn.Transformer': 1.0"):
        benchmarking.training_steps(TINY)


def test_contenders_whose_tokens_differ_are_refused(monkeypatch):
    monkeypatch.setattr(benchmarking, "to_marian", lambda model: replace(TINY).model(seed=1).eval())
    with pytest.raises(RuntimeError, match="tokens differ"):
        benchmarking.generators(TINY, 1, 5)


@pytest.mark.parametrize("num_beams", [1, 3])
def test_contenders_generate_as_many_tokens_as_told(num_beams):
    contenders = benchmarking.generators(TINY, num_beams, 7)
    assert {name: run().shape for name, run in contenders.items()} == {OURS: (3, 8), MARIAN: (3, 8)}


@pytest.mark.filterwarnings("ignore:.*profiler.*")
def test_common_share():
    """A step that is nothing but one large product, and one that is nothing but sines."""
    batch = {"labels": torch.zeros(1)}
    factor = nn.Linear(700, 700, bias=False)
    product = Step(factor, lambda _: factor(torch.ones(700, 700)).sum(), batch)
    angles = nn.Linear(1, 1)
    numbers = torch.rand(500_000)
    sines = Step(angles, lambda _: (numbers * angles.weight).sin().sum(), batch)
    assert benchmarking.common_share(product) > 0.6
    assert benchmarking.common_share(sines) < 0.2


def test_throughput_counts_real_targets():
    batch = TINY.batch()
    real = int((batch["labels"] != -100).sum())
    speed = benchmarking.throughput(TINY, batch, 2.0, False)
    assert speed["target_tokens_per_second"] == real / 2
    assert 0 < speed["mfu"] < 1
    assert benchmarking.throughput(TINY, batch, 1.0, False)["mfu"] == pytest.approx(
        2 * speed["mfu"], rel=1e-6
    )


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux tells memory")
def test_peak_memory_is_that_of_weights_gradients_and_moments_at_least():
    size = replace(TINY, vocab_size=250_000)  # 16 MB of embeddings
    peak = benchmarking.alone(benchmarking.peak_memory, OURS, size)
    weights = 4 * 250_000 * 16
    assert 4 * weights < peak < 12 * weights


def test_a_cached_step_costs_what_it_costs():
    timing = benchmarking.cached_step_ratio(TINY, 2, 4, rounds=1)
    assert timing.name == "4"
    assert 0 < timing.ratio < 100


def test_curves_are_drawn(tmp_path):
    curve = Curve("source length", [1, 2, 4], [0.1, 0.2, 0.4], [2**20, 2**21, 2**23])
    for count in (1, 4):
        path = tmp_path / f"{count}.png"
        benchmarking.draw_growth([curve] * count, path)
        assert path.read_bytes().startswith(b"\x89PNG")


def pairs(count):
    rows = [[str((7 * row + place) % 10) for place in range(2 + row % 5)] for row in range(count)]
    return [" ".join(row) for row in rows], [" ".join(row[::-1]) for row in rows]


def test_training_is_measured_end_to_end():
    tokenizer, rows = end_to_end.encoded(*pairs(60), vocab_size=40)
    size = replace(TINY, vocab_size=len(tokenizer))
    timings = end_to_end.training_speed(
        tokenizer, rows, size, max_tokens=64, updates=6, rounds=2, bf16=[False]
    )
    assert [timing.name for timing in timings] == [f"{OURS}, fp32", MARIAN]
    assert all(timing.seconds > 0 for timing in timings)
    assert timings[0].ratio == 1


def test_translation_is_measured_and_compared(tmp_path, digits):  # noqa: F811
    tiny_model(vocab_size=len(digits)).save_pretrained(tmp_path)
    save_tokenizer(digits, tmp_path)
    timings = end_to_end.translation_speed(tmp_path, ["1 2 3", "5", "4 4 1 0"], 2, rounds=1)
    names = [timing.name for timing in timings]
    assert names[:2] == [OURS, MARIAN]
    if importlib.util.find_spec("ctranslate2"):
        exported = [end_to_end.EXPORTED, end_to_end.CTRANSLATE2]
        assert names[2:] == exported
        timings = end_to_end.translation_speed(tmp_path, ["1 2"], 2, rounds=1, exported_only=True)
        assert [timing.name for timing in timings] == exported


@pytest.mark.skipif(
    importlib.util.find_spec("phonetisaurus") is None, reason="made for Linux on x86_64"
)
def test_phonetisaurus_learns_to_pronounce(tmp_path, capsys):
    phonemes = {"a": "AH", "b": "B", "i": "IH", "k": "K", "s": "S", "t": "T"}
    draw = random.Random(0)
    words = {"".join(draw.choices("abikst", k=draw.randint(4, 12))) for _ in range(400)}
    lexicon = [(word, " ".join(phonemes[letter] for letter in word)) for word in sorted(words)]
    words, references = zip(*(lexicon.pop() for _ in range(4)), strict=True)
    found = end_to_end.phonetisaurus(lexicon, [*words, "zz"], [*([r] for r in references), ["Z"]])
    assert found["wer"] == 1 / 5  # it cannot read the last one
    assert found["per"] == 1 / (sum(map(len, words)) + 1)
    assert found["seconds"] > 0

    (tmp_path / "all_results.json").write_text(
        json.dumps({"test_loss": 1.0, "test_wer": 0.205, "test_per": 0.05, "train_runtime": 60})
    )
    (tmp_path / "run.json").write_text(json.dumps({"training_seconds": 7200}))
    shutil.copy(ROOT / "configs/cmudict_g2p.yaml", tmp_path / "recipe.yaml")
    assert benchmark.main(["pronounce", "--quick", "--model", str(tmp_path)]) == 0
    ours, peer = capsys.readouterr().out.splitlines()
    assert ours == "50 words: TinyTFM WER 20.50 %, PER 5.00 %, trained in 7,200 s"
    assert re.fullmatch(r"50 words: Phonetisaurus WER \S+ %, PER \S+ %, trained in \d+ s", peer)
    assert benchmark.main(["pronounce", "--model", str(tmp_path / "none")]) == 2
    assert "is no finished run of cmudict_g2p.yaml" in capsys.readouterr().err
    shutil.copy(ROOT / "configs/reverse.yaml", tmp_path / "recipe.yaml")
    assert benchmark.main(["pronounce", "--model", str(tmp_path)]) == 2


def test_translations_that_differ_are_refused():
    same, other = ["a"] * 200, ["a"] * 198 + ["b"] * 2
    end_to_end.agreement({"x": same, "y": other}, "x", "y")
    outputs = {"x": same, "y": ["b", *other[1:]]}
    with pytest.raises(RuntimeError, match="3 of 200 lines of x and y differ"):
        end_to_end.agreement(outputs, "x", "y")
    end_to_end.agreement(outputs, "y", "x", tolerated=0.015)


def test_an_export_that_computes_otherwise_is_not_measured(tmp_path, digits, monkeypatch):  # noqa: F811
    tiny_model(vocab_size=len(digits)).save_pretrained(tmp_path)
    save_tokenizer(digits, tmp_path)
    monkeypatch.setattr(end_to_end, "installed", lambda package: True)
    ours, exported, direct = OURS, end_to_end.EXPORTED, end_to_end.CTRANSLATE2
    for right, pair in ("1", (exported, direct)), ("wrong", (ours, exported)):
        peers = {exported: lambda: ["wrong"] * 3, direct: lambda line=right: [line] * 3}
        monkeypatch.setattr(end_to_end, "_exported", lambda *_, of=peers: of)
        with pytest.raises(RuntimeError, match="3 of 3 lines of {} and {} differ".format(*pair)):
            end_to_end.translation_speed(tmp_path, ["1", "2", "3"], 2, rounds=1)


@pytest.mark.parametrize(
    ("has_bf16", "options", "expected"),
    [
        (True, [], ["fp32", "bf16"]),
        (None, [], ["fp32", "bf16"]),
        (False, [], ["fp32"]),
        (False, ["--device", "cuda"], ["fp32", "bf16"]),
        (False, ["--precision", "bf16"], ["bf16"]),
        (True, ["--precision", "fp32"], ["fp32"]),
    ],
)
def test_bf16_is_measured_where_it_is_no_imitation(
    monkeypatch, capsys, has_bf16, options, expected
):
    monkeypatch.setattr(benchmark, "cpu_multiplies_bf16", lambda: has_bf16)
    assert benchmark.precisions(benchmark.parse(["train-step", *options])) == expected
    assert ("only imitates" in capsys.readouterr().err) == (expected == ["fp32"] and not options)


@pytest.mark.filterwarnings("ignore:.*profiler.*")
@pytest.mark.parametrize(("work", "rows"), [("train-step", 6), ("generate", 4)])
def test_the_command_prints_a_row_for_each_contender(work, rows, tmp_path, capsys):
    file = tmp_path / "figures.json"
    assert benchmark.main([work, "--quick", "--rounds", "1", "--json", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    figures = json.loads(file.read_text(encoding="utf-8"))
    assert len(lines) == len(figures["rows"]) == rows
    assert figures["work"] == work
    assert set(figures["versions"]) == {"Python", "torch", "transformers"}
    for line, row in zip(lines, figures["rows"], strict=True):
        assert f": {row['name']} " in line
        assert row["low"] <= row["ratio"] <= row["high"]
        assert f"ratio {row['ratio']:.2f}" in line


@pytest.mark.slow
@pytest.mark.parametrize("work", ["memory", "scaling", "import"])
def test_the_other_works(work, tmp_path, capsys):
    command = [work, "--quick", "--rounds", "1", "--picture", str(tmp_path / "a.png")]
    assert benchmark.main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == (5 if work == "scaling" else 2)
    assert (tmp_path / "a.png").exists() == (work == "scaling")


def test_the_command_trains_on_files(tmp_path, capsys):
    for name, lines in zip(("a", "b"), pairs(60), strict=True):
        (tmp_path / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    files = [str(tmp_path / "a"), str(tmp_path / "b")]
    command = ["train", "--quick", "--rounds", "1", "--updates", "6", "--pairs", *files]
    assert benchmark.main(command) == 0
    captured = capsys.readouterr()
    assert f"60 pairs: {OURS}, bf16" in captured.out
    if importlib.util.find_spec("joeynmt") is None:
        assert captured.err.startswith("without joeynmt: pip install joeynmt==2.3.0 ")


@pytest.mark.parametrize("work", ["train", "translate"])
def test_what_is_missing_is_named(work, capsys):
    assert benchmark.main([work]) == 2
    assert capsys.readouterr().err.startswith(f"benchmark.py: {work}: name ")


def test_help_names_every_work(capsys):
    with pytest.raises(SystemExit):
        benchmark.main(["--help"])
    text = capsys.readouterr().out
    for work in benchmark.WORKS:
        assert f"\n  {work} " in text


def test_sizes_are_those_of_the_paper():
    base, big = benchmarking.SIZES["base"].config(), benchmarking.SIZES["big"].config()
    assert (base.d_model, base.encoder_ffn_dim, base.decoder_layers) == (512, 2048, 6)
    assert (big.d_model, big.encoder_ffn_dim, big.decoder_attention_heads) == (1024, 4096, 16)
