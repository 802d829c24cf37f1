import dataclasses
import inspect
import re
import typing

import pytest
import yaml
from transformers import GenerationConfig, Seq2SeqTrainingArguments

from modeling_tinytfm import TinyTFMConfig, data, recipe_keys, tokenization
from modeling_tinytfm.recipes import describe_keys, load_recipe
from modeling_tinytfm.settings import (
    LOSS_METRICS,
    METRIC_DESCRIPTIONS,
    TASK_FIGURES,
    TEXT_METRICS,
    DataSettings,
    TokenizerSettings,
)

PAIRS = "data: {train_file: pairs.tsv}\n"
FULL = """
task: seq2seq
threads: 2
model: {d_model: 64, encoder_layers: 2, dropout: 0, norm_first: true}
tokenizer: {kind: regex, pattern: "[A-Z]+|[a-z']", vocab_size: 120, normalization: none}
data:
  train_source_file: train.de
  train_target_file: train.en
  max_tokens: 4096
  max_source_length: null
training:
  lr_scheduler_type: noam
  warmup_steps: 4000
  adam_beta2: .98
  adam_epsilon: 1e-9
  label_smoothing_factor: 0.1
  eval_strategy: steps
  eval_steps: 500
  save_steps: 1000
  average_best: 5
  early_stopping_patience: 10
  metric_for_best_model: wer
generation: {num_beams: 4, length_penalty: 0.6, max_new_tokens: 40}
evaluation: {metrics: [wer, per], num_sample_predictions: 0}
"""


@pytest.fixture
def load(tmp_path):
    """Writes a recipe's text and reads it with overrides."""

    def write_and_load(text=PAIRS, *overrides, name="pairs"):
        path = tmp_path / f"{name}.yaml"
        if isinstance(text, bytes):
            path.write_bytes(text)
        else:
            path.write_text(text, encoding="utf-8", newline="")
        return load_recipe(path, overrides)

    return write_and_load


def test_defaults(load):
    recipe = load()
    assert recipe.name == "pairs"
    assert recipe.task == "seq2seq"
    assert recipe.threads is None
    assert recipe.model == recipe.generation == recipe.training.arguments == {}
    assert recipe.data == DataSettings(train_file="pairs.tsv")
    assert recipe.tokenizer == TokenizerSettings()
    assert recipe.training.output_dir == "outputs/pairs"
    assert recipe.evaluation.metrics == ["bleu", "chrf", "exact_match"]
    assert recipe.evaluation.num_sample_predictions == 5


def test_values_arrive_typed(load):
    recipe = load(FULL)
    assert recipe.threads == 2
    assert recipe.model == {"d_model": 64, "encoder_layers": 2, "dropout": 0, "norm_first": True}
    assert recipe.tokenizer.pattern == "[A-Z]+|[a-z']"
    assert recipe.tokenizer.normalization == "none"
    assert recipe.data.max_source_length is None
    assert recipe.training.is_noam
    assert recipe.training.average_best == 5
    assert recipe.training.arguments["adam_epsilon"] == 1e-9
    assert recipe.generation == {"num_beams": 4, "length_penalty": 0.6, "max_new_tokens": 40}
    assert recipe.evaluation.metrics == ["wer", "per"]


def test_overrides_win_the_later_over_the_earlier(load):
    recipe = load(
        FULL,
        "training.warmup_steps=10",
        "training.warmup_steps=20",
        "model.d_model=128",
        "evaluation.metrics=[wer,bleu]",
        "threads=null",
        "data.max_tokens=null",
        "training.per_device_train_batch_size=8",
        "training.seed=3",
    )
    assert recipe.training.arguments["warmup_steps"] == 20
    assert recipe.model["d_model"] == 128
    assert recipe.model["encoder_layers"] == 2
    assert recipe.evaluation.metrics == ["wer", "bleu"]
    assert recipe.threads is None
    assert recipe.data.max_tokens is None
    assert recipe.training.arguments["seed"] == 3


def test_overrides_make_missing_sections_and_nested_mappings(load):
    recipe = load(
        "",
        "data.train_file=pairs.tsv",
        "training.lr_scheduler_type=cosine_with_min_lr",
        "training.lr_scheduler_kwargs.min_lr=1e-6",
        "training.lr_scheduler_kwargs.num_cycles=1",
    )
    assert recipe.data.train_file == "pairs.tsv"
    assert recipe.training.arguments["lr_scheduler_kwargs"] == {"min_lr": 1e-6, "num_cycles": 1}


@pytest.mark.parametrize("key", ["data.source_column", "tokenizer.kind", "model.d_model"])
def test_null_means_the_default_where_it_is_no_value(load, key):
    section, name = key.split(".")
    text = PAIRS + "model: {d_model: 64}\ntokenizer: {kind: word}"
    assert load(text, f"{key}=null").to_dict()[section].get(name) == load().to_dict()[section].get(
        name
    )


@pytest.mark.parametrize(
    "text", ["2024", "1e3", "no", "true", "2024-01-01", "[a-z']+|[A-Z]+", "[ab]", "a: b", "{", "~x"]
)
def test_an_override_of_a_text_stays_text(load, text):
    assert load(PAIRS, f"data.source_column={text}").data.source_column == text
    quoted = f'"{text}"'
    assert load(PAIRS, f"data.source_column={quoted}").data.source_column == text


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1e-3", 1e-3),
        ("1E-3", 1e-3),
        ("+1e-3", 1e-3),
        ("1.e-3", 1e-3),
        (".001", 1e-3),
        ("0.001", 1e-3),
        ("3", 3),
        ("010", 10),
        ("0x10", 16),
        ("0o17", 15),
    ],
)
def test_numbers(load, text, number):
    for recipe in (
        load(PAIRS + f"training: {{learning_rate: {text}}}"),
        load(PAIRS, f"training.learning_rate={text}"),
    ):
        assert recipe.training.arguments["learning_rate"] == number


def test_whole_numbers_may_be_written_as_floats(load):
    recipe = load(PAIRS, "training.max_steps=1e3", "model.d_model=64.0")
    assert (recipe.training.arguments["max_steps"], recipe.model["d_model"]) == (1000, 64)
    assert isinstance(recipe.training.arguments["max_steps"], int)
    assert isinstance(recipe.model["d_model"], int)


def test_no_is_a_word(load):
    text = PAIRS + "training: {eval_strategy: no, save_strategy: no}"
    assert load(text).training.arguments == {"eval_strategy": "no", "save_strategy": "no"}
    assert load(PAIRS, "training.eval_strategy=no").training.arguments["eval_strategy"] == "no"


def test_one_metric_needs_no_list(load):
    assert load(PAIRS, "evaluation.metrics=chrf").evaluation.metrics == ["chrf"]


def test_paths_may_start_at_home(load, monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    recipe = load(PAIRS, "data.train_file=~/pairs.tsv", "training.output_dir=~/run")
    assert recipe.data.train_file == "/home/someone/pairs.tsv"
    assert recipe.training.output_dir == "/home/someone/run"


def test_byte_order_mark_and_line_ends(load):
    for text in (b"\xef\xbb\xbf" + PAIRS.encode(), PAIRS.replace("\n", "\r\n").encode()):
        assert load(text).data.train_file == "pairs.tsv"


def test_merged_mappings_are_no_duplicates(load):
    recipe = load(
        "data: &data {train_file: pairs.tsv, source_column: en, target_column: de}\n"
        "evaluation: {<<: {num_sample_predictions: 3}, num_sample_predictions: 4}\n"
    )
    assert recipe.evaluation.num_sample_predictions == 4


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("task: seq2seq\n" + PAIRS + "task: seq2seq\n", 3, "'task' stands here twice"),
        (PAIRS + "model:\n  d_model: 64\n  dropout: 0\n  d_model: 32\n", 5, "'d_model'"),
        ("data: {train_file: a,\n train_file: b}\n", 2, "'train_file'"),
        (PAIRS + "model: {d_model: 64\n", 3, "expected"),
        (PAIRS + "model:\n\td_model: 64\n", 3, "\\t"),
        (PAIRS + "--- \n" + PAIRS, 2, "document"),
        (PAIRS + "model: !!python/object/apply:os.system ['true']\n", 2, "constructor"),
        (PAIRS + "model: *unknown\n", 2, "unknown"),
        (PAIRS + "model: {? [a] : 3}\n", 2, "unhashable"),
        (PAIRS.encode() + b"# \x00\n", 2, "U+0000"),
        (PAIRS.encode() + b"\n# \xff\n", 3, "UTF-8"),
        (PAIRS.encode("utf-16"), 1, "UTF-8"),
    ],
)
def test_broken_yaml_is_reported_with_its_line(load, text, line, message):
    with pytest.raises(ValueError, match=rf"pairs\.yaml, line {line}: ") as error:
        load(text)
    assert message in str(error.value)


def test_files_that_are_no_recipe(load, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.yaml does not exist"):
        load_recipe(tmp_path / "nowhere.yaml")
    with pytest.raises(IsADirectoryError, match="is a folder"):
        load_recipe(tmp_path)
    for text in ("- a\n- b\n", "some words", "3"):
        with pytest.raises(ValueError, match=r"pairs\.yaml: a recipe is a mapping"):
            load(text)
    for text in ("", "# nothing\n", "model:\n"):
        with pytest.raises(ValueError, match="data names no pairs"):
            load(text)


@pytest.mark.parametrize("override", ["", "threads", "=3", "model.=3", ".d_model=3", "model..x=3"])
def test_malformed_overrides(load, override):
    with pytest.raises(ValueError, match=r"is not of the form section\.key=value"):
        load(PAIRS, override)


def test_override_below_a_value(load):
    with pytest.raises(ValueError, match=r"no keys below data\.train_file, which is 'pairs"):
        load(PAIRS, "data.train_file.name=x")


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("training.learning_rte=0.1", "training.learning_rate"),
        ("training.averge_last=5", "training.average_last"),
        ("training.max_tokens=4096", "data.max_tokens"),
        ("training.num_beams=4", "generation.num_beams"),
        ("data.learning_rate=0.1", "training.learning_rate"),
        ("data.train_fille=x", "data.train_file"),
        ("data.max_lenght=x", "data.max_"),
        ("model.d_modle=64", "model.d_model"),
        ("model.hidden_size=64", "model.d_model"),
        ("tokenizer.vocabsize=64", "tokenizer.vocab_size"),
        ("generation.num_beam=4", "generation.num_beams"),
        ("generation._from_model_config=3", "generation."),
        ("evaluation.metric=bleu", "evaluation.metrics"),
        ("evaluation.zzz=1", "evaluation."),
        ("modle.d_model=64", "model"),
        ("generate.num_beams=4", "generation"),
        ("trian=3", "training"),
        ("thread=4", "threads"),
        ("max_tokens=4096", "data.max_tokens"),
        ("learning_rates=4096", ""),
        ("name=x", ""),
    ],
)
def test_unknown_keys_are_refused_with_the_nearest(load, override, nearest):
    key, value = override.split("=")
    with pytest.raises(ValueError, match=r"unknown (key|section) ") as error:
        load(PAIRS, override)
    message = str(error.value)
    assert key in message or key.split(".")[0] in message
    assert value in message
    assert message.split()[-1].startswith(nearest)


def test_keys_that_are_no_text_are_refused(load):
    with pytest.raises(ValueError, match="1 is not a key"):
        load(PAIRS + "1: x")
    with pytest.raises(ValueError, match=r"model\.True is not a key"):
        load(PAIRS + "model: {true: x}")
    with pytest.raises(ValueError, match="model=3 must be a mapping"):
        load(PAIRS + "model: 3")
    with pytest.raises(ValueError, match=r"training=\['a'\] must be a mapping"):
        load(PAIRS + "training: [a]")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("model.d_model=abc", "int"),
        ("model.d_model=2.5", "int"),
        ("model.d_model=true", "int"),
        ("model.d_model=[64]", "int"),
        ("model.dropout=high", "float"),
        ("model.dropout=.nan", "float"),
        ("model.norm_first=1", "true or false"),
        ("model.norm_first=yes", "true or false, without quotes"),
        ("model.norm_first='true'", "true or false, without quotes"),
        ("training.learning_rate=fast", "float"),
        ("training.learning_rate=.inf", "float"),
        ("training.learning_rate=1_000", "float"),
        ("training.bf16=on", "true or false"),
        ("training.seed=1:30", "int"),
        ("training.max_steps=2024-01-01", "int"),
        ("training.average_last=many", "int or null"),
        ("training.logging_nan_inf_filter=nan", "true or false"),
        ("training.parallelism_config=x", "ParallelismConfig or null"),
        ("tokenizer.vocab_size=[]", "int"),
        ("tokenizer.lowercase=no", "true or false"),
        ("data.max_tokens=many", "int or null"),
        ("generation.num_beams=four", "int"),
        ("generation.do_sample=0", "true or false"),
        ("evaluation.metrics=[1]", "list of str"),
        ("threads=all", "int or null"),
    ],
)
def test_wrong_types_are_refused(load, override, expected):
    key = override.split("=")[0]
    with pytest.raises(ValueError, match=rf"{key}=.* has the wrong type: it takes {expected}"):
        load(PAIRS, override)


def test_a_number_in_the_file_where_text_is_wanted(load):
    with pytest.raises(ValueError, match=r"data\.source_column=2 .* takes str; put it in quotes"):
        load("data: {train_file: pairs.tsv, source_column: 2}")


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("tokenizer.kind=bep", "bpe"),
        ("tokenizer.normalization=nfkcc", "nfkc"),
        ("data.generator=revers", "reverse"),
        ("training.lr_scheduler_type=naom", "noam"),
        ("training.lr_scheduler_type=inverse_sqr", "inverse_sqrt"),
        ("training.optim=adamw_tarch", "adamw_torch"),
        ("training.eval_strategy=epochs", "epoch"),
        ("training.save_strategy=bests", "best"),
        ("generation.early_stopping=nevr", "never"),
        ("evaluation.metrics=blue", "bleu"),
        ("task=seq2sec", "seq2seq"),
    ],
)
def test_unknown_words_are_refused_with_the_nearest(load, override, nearest):
    key, value = override.split("=")
    with pytest.raises(ValueError, match=f"{key}='{value}' is none of .* nearest is {nearest}$"):
        load(PAIRS, override)


@pytest.mark.parametrize(
    "override",
    [
        "threads=0",
        "tokenizer.vocab_size=4",
        "tokenizer.min_frequency=0",
        "data.max_source_length=1",
        "data.max_target_length=1",
        "data.max_train_samples=0",
        "data.max_tokens=-1",
        "data.num_proc=0",
        "data.seed=-1",
        "training.average_last=0",
        "training.early_stopping_patience=0",
        "training.per_device_train_batch_size=0",
        "training.gradient_accumulation_steps=0",
        "training.learning_rate=-0.1",
        "training.warmup_steps=-1",
        "training.save_total_limit=0",
        "generation.num_beams=0",
        "generation.max_new_tokens=0",
        "evaluation.num_sample_predictions=-1",
    ],
)
def test_values_out_of_range_are_refused(load, override):
    key, value = override.split("=")
    with pytest.raises(ValueError, match=f"{key}={value} must be at least"):
        load(PAIRS, override)


@pytest.mark.parametrize(
    ("key", "instead"),
    [
        ("model.vocab_size", "tokenizer.vocab_size"),
        ("model.pad_token_id", "tokenizer"),
        ("model.decoder_start_token_id", "tokenizer"),
        ("model.is_decoder", "task"),
        ("model.num_labels", "classes in the data"),
        ("generation.eos_token_id", "tokenizer"),
        ("generation.num_return_sequences", "one prediction a row"),
        ("training.do_train", "command"),
        ("training.predict_with_generate", "evaluation.metrics"),
        ("training.generation_max_length", "generation.max_length"),
        ("training.generation_num_beams", "generation.num_beams"),
        ("training.warmup_ratio", "training.warmup_steps"),
        ("training.evaluation_strategy", "training.eval_strategy"),
        ("training.overwrite_output_dir", "training.overwrite"),
        ("training.group_by_length", "data.max_tokens"),
        ("training.no_cuda", "training.use_cpu"),
        ("training.logging_dir", "TENSORBOARD_LOGGING_DIR"),
        ("training.hub_token", "hf auth login"),
        ("training.local_rank", "torchrun"),
    ],
)
def test_keys_that_the_user_cannot_set_say_what_to_write(load, key, instead):
    with pytest.raises(ValueError, match=f"{key}=1 cannot be set: .*{instead}"):
        load(PAIRS, f"{key}=1")


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["task=translation"], "is none of seq2seq, classification, language_model"),
        (["data.text_column=line"], "data.text_column='line' means nothing to task=seq2seq"),
        (["data.label_column=kind"], "data.label_column='kind' means nothing to task=seq2seq"),
        (["data.image_shift=1"], "task=seq2seq without data.image_column"),
        (["task=classification", "data.source_column=de"], "data.source_column='de' means nothing"),
        (["task=language_model", "data.merge_references=true"], "means nothing to task=language_"),
        (["task=language_model", "data.label_column=kind"], "means nothing to task=language_model"),
        (
            ["task=language_model", "data.train_file=null", "data.generator=reverse"],
            "data.generator='reverse' means nothing to task=language_model",
        ),
        (
            ["task=classification", "data.image_column=image", "data.group_column=writer"],
            "data.group_column='writer' means nothing to task=classification with data.image_colu",
        ),
        (
            ["task=classification", "data.image_column=image", "data.max_source_length=5"],
            "data.max_source_length=5 means nothing to task=classification with data.image_column",
        ),
        (
            ["task=classification", "data.image_column=image", "tokenizer.vocab_size=77"],
            "tokenizer.vocab_size=77 means nothing with data.image_column='image'",
        ),
        (
            ["task=classification", "evaluation.metrics=[bleu]"],
            "task=classification always reports loss, accuracy, macro_f1",
        ),
        (["task=classification", "generation.num_beams=2"], "means nothing to task=classification"),
        (["task=classification", "model.decoder_layers=2"], "task=classification has no decoder"),
        (["task=language_model", "model.encoder_layers=2"], "task=language_model has no encoder"),
        (
            ["task=language_model", "training.metric_for_best_model=accuracy"],
            "is none of loss, perplexity, token_accuracy, bits_per_character",
        ),
        (["task=language_model", "model.is_decoder=true"], "the task decides it"),
    ],
)
def test_keys_of_another_task_are_refused_by_name(load, overrides, told):
    with pytest.raises(ValueError, match=re.escape(told)):
        load(PAIRS, *overrides)


@pytest.mark.parametrize("key", ["hub_token", "push_to_hub_token"])
def test_a_token_is_not_said_again(load, key):
    with pytest.raises(ValueError, match=r"=\.\.\. cannot be set: .*hf auth login") as error:
        load(PAIRS, f"training.{key}=hf_abcdef123")
    assert "abcdef" not in str(error.value)


@pytest.mark.parametrize("key", ["eval_strategy", "save_strategy"])
def test_a_stream_has_no_epochs_to_wait_for(load, key):
    stream = ("data.streaming=true", "training.max_steps=9")
    load(PAIRS, *stream, f"training.{key}=steps")
    with pytest.raises(ValueError, match=rf"training\.{key}=epoch never comes with data\.stream"):
        load(PAIRS, *stream, f"training.{key}=epoch")


def test_text_metrics_are_those_of_texts(load):
    assert load(PAIRS).evaluation.metrics == list(TEXT_METRICS)
    for task in ("classification", "language_model"):
        assert load(PAIRS, f"task={task}").evaluation.metrics == []
    recipe = load(PAIRS, "task=classification", "training.metric_for_best_model=accuracy")
    assert recipe.training.arguments["greater_is_better"] is True


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["data.generator=reverse"], ["data.train_file='pairs.tsv'", "data.generator='reverse'"]),
        (["data.dataset_name=x"], ["data.train_file='pairs.tsv'", "data.dataset_name='x'"]),
        (["data.train_source_file=a"], ["data.train_target_file"]),
        (["data.validation_target_file=a"], ["data.validation_source_file"]),
        (
            ["data.test_file=t", "data.test_source_file=a", "data.test_target_file=b"],
            ["data.test_file='t'", "data.test_source_file='a'"],
        ),
        (
            ["data.train_file=null", "data.generator=reverse", "data.test_file=t"],
            ["data.test_file='t'", "data.generator='reverse'"],
        ),
        (["data.dataset_config_name=x"], ["data.dataset_config_name='x'", "data.dataset_name"]),
        (["data.seed=3"], ["data.seed=3", "data.generator"]),
        (
            [
                "data.train_file=null",
                "data.train_source_file=a",
                "data.train_target_file=b",
                "data.group_column=g",
            ],
            ["data.group_column='g'", "data.train_source_file='a'"],
        ),
        (
            ["data.max_tokens=4096", "training.per_device_train_batch_size=8"],
            ["data.max_tokens=4096", "training.per_device_train_batch_size=8"],
        ),
        (["tokenizer.kind=regex"], ["tokenizer.kind=regex", "tokenizer.pattern"]),
        (["tokenizer.pattern=a"], ["tokenizer.kind=bpe", "tokenizer.pattern='a'"]),
        (
            ["training.average_last=3", "training.average_best=3", "training.eval_strategy=epoch"],
            ["training.average_last=3", "training.average_best=3"],
        ),
        (
            ["training.average_last=3", "training.save_total_limit=2"],
            ["training.average_last=3", "training.save_total_limit=2"],
        ),
        (
            ["training.average_last=3", "training.save_strategy=no"],
            ["training.average_last=3", "training.save_strategy='no'"],
        ),
        (["training.average_best=3"], ["training.average_best=3", "training.eval_strategy='no'"]),
        (
            [
                "training.cooldown_steps=7",
                "training.lr_scheduler_type=reduce_lr_on_plateau",
                "training.eval_strategy=epoch",
            ],
            ["training.cooldown_steps=7", "training.lr_scheduler_type=reduce_lr_on_plateau"],
        ),
        (
            ["training.cooldown_steps=7", "training.optim=apollo_adamw_layerwise"],
            ["training.cooldown_steps=7", "training.optim=apollo_adamw_layerwise"],
        ),
        (
            ["training.optim=schedule_free_adamw"],
            ["training.optim=schedule_free_adamw keeps the weights", "training.cooldown_steps"],
        ),
        (
            ["training.warmup_steps=7", "training.lr_scheduler_type=constant"],
            ["training.warmup_steps=7", "training.lr_scheduler_type=constant,", "with_warmup"],
        ),
        (
            [
                "training.warmup_steps=0.1",
                "training.lr_scheduler_type=greedy",
                "training.eval_strategy=epoch",
            ],
            ["training.warmup_steps=0.1", "training.lr_scheduler_type=greedy"],
        ),
        (
            ["training.early_stopping_patience=3"],
            ["training.early_stopping_patience=3", "training.eval_strategy='no'"],
        ),
        (
            ["training.load_best_model_at_end=true"],
            ["training.load_best_model_at_end=True", "training.eval_strategy='no'"],
        ),
        (
            ["training.load_best_model_at_end=true", "training.eval_strategy=epoch"],
            ["training.save_strategy='steps'", "training.eval_strategy='epoch'"],
        ),
        (
            [
                "training.load_best_model_at_end=true",
                "training.eval_strategy=steps",
                "training.eval_steps=300",
            ],
            ["training.save_steps=500", "training.eval_steps=300"],
        ),
        (["training.save_strategy=best"], ["training.save_strategy='best'", "eval_strategy"]),
        (
            ["training.lr_scheduler_type=reduce_lr_on_plateau"],
            ["training.lr_scheduler_type='reduce_lr_on_plateau'", "eval_strategy"],
        ),
        (
            ["training.overwrite=true", "training.resume_from_checkpoint=true"],
            ["training.overwrite=True", "training.resume_from_checkpoint=True"],
        ),
        (["training.fp16=true", "training.bf16=true"], ["training.fp16", "training.bf16"]),
        (["training.label_smoothing_factor=1"], ["training.label_smoothing_factor=1"]),
        (["training.max_steps=0"], ["training.max_steps=0", "training.num_train_epochs"]),
        (
            ["training.lr_scheduler_type=warmup_stable_decay"],
            ["training.lr_scheduler_type=warmup_stable_decay", "num_decay_steps"],
        ),
        (
            [
                "training.lr_scheduler_type=cosine_with_restarts",
                "training.lr_scheduler_kwargs.num_cycels=2",
            ],
            ["training.lr_scheduler_kwargs={'num_cycels': 2}", "unexpected keyword"],
        ),
        (
            ["training.lr_scheduler_type=constant", "training.lr_scheduler_kwargs.min_lr=2"],
            ["training.lr_scheduler_type=constant", "no such keys"],
        ),
        (
            [
                "training.lr_scheduler_type=reduce_lr_on_plateau",
                "training.lr_scheduler_kwargs.mode=min",
                "training.metric_for_best_model=bleu",
                "training.eval_strategy=steps",
            ],
            ["training.lr_scheduler_kwargs.mode='min'", "training.metric_for_best_model='bleu'"],
        ),
        (["training.lr_scheduler_type=noam"], ["training.warmup_steps"]),
        (
            ["training.lr_scheduler_type=noam", "training.warmup_steps=0.1"],
            ["training.warmup_steps=0.1"],
        ),
        (
            [
                "training.lr_scheduler_type=noam",
                "training.warmup_steps=100",
                "training.learning_rate=1e-3",
            ],
            ["training.learning_rate=0.001", "training.lr_scheduler_type=noam"],
        ),
        (
            ["generation.max_length=10", "generation.max_new_tokens=9"],
            ["generation.max_length=10", "generation.max_new_tokens=9"],
        ),
        (["generation.cache_implementation=magic"], ["generation=", "magic"]),
        (["evaluation.metrics=[bleu,bleu]"], ["evaluation.metrics", "twice"]),
        (["evaluation.metrics=[perplexity]"], ["evaluation.metrics", "perplexity is always"]),
        (
            ["training.metric_for_best_model=wer"],
            ["training.metric_for_best_model='wer'", "evaluation.metrics"],
        ),
        (
            ["training.metric_for_best_model=eval_blue"],
            ["training.metric_for_best_model='eval_blue'", "nearest is bleu"],
        ),
        (
            ["training.metric_for_best_model=bleu", "training.greater_is_better=false"],
            ["training.metric_for_best_model='bleu'", "training.greater_is_better=False"],
        ),
        (
            [
                "model.position_embedding_type=learned",
                "model.max_position_embeddings=64",
                "data.max_source_length=64",
                "data.max_target_length=65",
            ],
            ["data.max_target_length=65", "model.max_position_embeddings=64"],
        ),
        (
            ["model.position_embedding_type=learned", "data.max_source_length=null"],
            ["data.max_source_length=None", "model.max_position_embeddings=1024"],
        ),
    ],
)
def test_contradictions_are_refused_by_name(load, overrides, named):
    with pytest.raises(ValueError, match=r"pairs\.yaml: ") as error:
        load(PAIRS, *overrides)
    for words in named:
        assert words in str(error.value)


@pytest.mark.parametrize(("limit", "kept"), [(3, 4), (4, 4), (9, 9), (None, None)])
def test_the_best_checkpoint_takes_the_place_of_none_that_is_averaged(load, limit, kept):
    recipe = load(PAIRS, "training.average_last=3", f"training.save_total_limit={limit or 'null'}")
    assert recipe.training.trainer_arguments().get("save_total_limit") == kept
    assert recipe.training.arguments.get("save_total_limit") == limit


@pytest.mark.parametrize(("metric", "mode"), [("bleu", "max"), ("loss", "min"), ("wer", "min")])
@pytest.mark.parametrize("name", ["reduce_lr_on_plateau", "greedy"])
def test_a_schedule_that_follows_evaluations_knows_what_is_better(load, name, metric, mode):
    recipe = load(
        PAIRS,
        f"training.lr_scheduler_type={name}",
        f"training.metric_for_best_model={metric}",
        "training.lr_scheduler_kwargs.patience=3",
        "training.eval_strategy=steps",
        "evaluation.metrics=[bleu, wer]",
    )
    kwargs = {"patience": 3, "mode": mode}
    assert recipe.training.arguments["lr_scheduler_kwargs"] == kwargs
    assert load(recipe.to_yaml()).same_run(recipe)


@pytest.mark.parametrize(
    "overrides",
    [
        ["training.lr_scheduler_type=noam", "training.warmup_steps=0"],
        ["training.lr_scheduler_type=noam", "training.warmup_steps=100.0"],
        ["training.average_last=3", "training.save_total_limit=3"],
        ["training.cooldown_steps=7", "training.max_steps=6"],
        ["training.cooldown_steps=6", "training.lr_scheduler_type=cosine"],
        ["training.load_best_model_at_end=true", "training.eval_strategy=steps"],
        [
            "training.load_best_model_at_end=true",
            "training.eval_strategy=epoch",
            "training.save_strategy=best",
        ],
        ["training.max_steps=100", "training.num_train_epochs=3"],
        ["training.resume_from_checkpoint=outputs/pairs/checkpoint-3"],
        ["data.validation_source_file=a", "data.validation_target_file=b"],
        ["model.position_embedding_type=learned"],
        ["generation.early_stopping=never", "generation.num_beams=4"],
        ["generation.forced_eos_token_id=2", "generation.suppress_tokens=[5,6]"],
    ],
)
def test_what_looks_odd_but_is_right(load, overrides):
    load(PAIRS, *overrides)


@pytest.mark.parametrize("name", METRIC_DESCRIPTIONS)
def test_best_models_are_chosen_in_the_metrics_direction(load, name):
    recipe = load(
        PAIRS,
        f"evaluation.metrics={name}",
        f"training.metric_for_best_model={name}",
        "training.eval_strategy=steps",
        "training.load_best_model_at_end=true",
    )
    assert recipe.training.arguments["greater_is_better"] == (
        name in ("bleu", "tokenized_bleu", "chrf", "exact_match")
    )


def test_without_a_named_metric_the_loss_decides(load):
    assert load(PAIRS).training.arguments == {}
    for override in ("average_best=3", "early_stopping_patience=3", "load_best_model_at_end=true"):
        recipe = load(PAIRS, "training.eval_strategy=steps", f"training.{override}")
        assert recipe.training.arguments["metric_for_best_model"] == "loss"
        assert recipe.training.arguments["greater_is_better"] is False
    for task, figures in TASK_FIGURES.items():
        for name in figures:
            chosen = (f"task={task}", f"training.metric_for_best_model=eval_{name}")
            arguments = load(PAIRS, *chosen).training.arguments
            rising = {"token_accuracy", "accuracy", "macro_f1"}
            assert arguments["greater_is_better"] == (name in rising)
    assert {name for figures in TASK_FIGURES.values() for name in figures} == set(LOSS_METRICS)


def test_settings_are_what_their_readers_take(load, tmp_path):
    recipe = load(FULL, f"training.output_dir={tmp_path / 'run'}", "training.use_cpu=true")
    arguments = Seq2SeqTrainingArguments(**recipe.training.trainer_arguments())
    assert arguments.output_dir == str(tmp_path / "run")
    assert (arguments.adam_beta2, arguments.warmup_steps) == (0.98, 4000)
    assert arguments.lr_scheduler_type == "linear"  # the Trainer knows no noam
    recipe = load(PAIRS, "training.lr_scheduler_type=cosine", "training.use_cpu=true")
    assert recipe.training.trainer_arguments()["lr_scheduler_type"] == "cosine"
    recipe = load(FULL)
    assert TinyTFMConfig(vocab_size=120, **recipe.model).d_model == 64
    assert GenerationConfig(**recipe.generation).num_beams == 4


STREAM = ("data.streaming=true", "training.max_steps=100")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["tokenizer.bpe_dropout=-0.1"], r"tokenizer\.bpe_dropout=-0\.1 must be at least 0"),
        (["tokenizer.bpe_dropout=1.1"], r"tokenizer\.bpe_dropout=1\.1 must be at most 1"),
        (
            ["tokenizer.bpe_dropout=0.1", "tokenizer.kind=unigram"],
            r"bpe_dropout=0\.1 is for tokenizer\.kind=bpe, not for tokenizer\.kind=unigram",
        ),
        (
            ["tokenizer.bpe_dropout=0.1", "task=language_model"],
            r"bpe_dropout=0\.1 is for task=seq2seq, not for task=language_model",
        ),
        (
            [
                *("tokenizer.bpe_dropout=0.1", "training.dataloader_num_workers=1"),
                "training.dataloader_persistent_workers=true",
            ],
            r"dataloader_persistent_workers=True .*tokenizer\.bpe_dropout=0\.1",
        ),
        (["data.streaming=true"], r"data\.streaming=true needs training\.max_steps"),
        ([*STREAM, "training.max_steps=-1"], r"data\.streaming=true needs training\.max_steps"),
        ([*STREAM, "task=classification"], r"data\.streaming=True is for task=seq2seq"),
        ([*STREAM, "data.group_column=g"], r"data\.group_column='g' contradicts data\.streaming"),
        ([*STREAM, "data.max_train_samples=9"], r"max_train_samples=9 contradicts data\.stream"),
        (
            [*STREAM, "data.train_file=null", "data.generator=reverse"],
            r"data\.generator='reverse' contradicts data\.streaming=true",
        ),
        (
            [*STREAM, "data.max_tokens=1023"],
            r"max_tokens=1023 cannot hold every pair .*max_source_length=512 and .*=512 to no more",
        ),
        (
            [*STREAM, "data.max_tokens=4096", "data.max_target_length=null"],
            r"max_tokens=4096 cannot hold every pair .* data\.max_target_length=None to no more",
        ),
    ],
)
def test_streams_and_dropout_are_refused_where_they_cannot_be(load, overrides, message):
    with pytest.raises(ValueError, match=message):
        load(PAIRS, *overrides)


def test_streams_and_dropout_are_taken_where_they_can_be(load):
    recipe = load(PAIRS, *STREAM, "data.max_tokens=1024", "tokenizer.bpe_dropout=0.1")
    assert recipe.data.streaming
    assert recipe.tokenizer.bpe_dropout == 0.1
    load(PAIRS, *STREAM, "data.max_source_length=null", "training.per_device_train_batch_size=8")
    load(PAIRS, "tokenizer.kind=unigram")


def test_names_and_choices_are_those_of_the_modules_that_read_them():
    tokenizer_keys = {field.name for field in dataclasses.fields(TokenizerSettings)}
    training_only = set(inspect.signature(tokenization.with_bpe_dropout).parameters) - {"tokenizer"}
    training_only = {f"bpe_{name}" for name in training_only}
    learnt = set(inspect.signature(tokenization.train_tokenizer).parameters)
    assert tokenizer_keys <= learnt | training_only
    hints = typing.get_type_hints(TokenizerSettings)
    assert hints["kind"] == tokenization.TokenizerKind
    assert hints["normalization"] == tokenization.Normalization
    defaults = inspect.signature(tokenization.train_tokenizer).parameters
    for name in ("kind", "pattern", "normalization", "lowercase", "min_frequency"):
        assert getattr(TokenizerSettings(), name) == defaults[name].default
    parameters = inspect.signature(data.load_pairs).parameters
    for name in set(parameters) - {"files", "count_targets"}:  # what the task decides
        assert getattr(DataSettings(), name) == parameters[name].default


def test_training_arguments_are_not_made_here(load, monkeypatch):
    def refuse(self):
        raise AssertionError("TrainingArguments look for devices")

    monkeypatch.setattr(Seq2SeqTrainingArguments, "__post_init__", refuse)
    load(FULL)


def test_every_default_of_the_trainer_may_be_written(load):
    written = 0
    for field in dataclasses.fields(Seq2SeqTrainingArguments):
        default = field.default
        if (
            default is dataclasses.MISSING
            or f"training.{field.name}" in recipe_keys.REFUSED_KEYS
            or field.name in ("output_dir", "resume_from_checkpoint")
        ):
            continue
        value = getattr(default, "value", default)
        text = yaml.safe_dump({"data": {"train_file": "x"}, "training": {field.name: value}})
        stored = load(text).training.trainer_arguments()[field.name]
        assert (stored, type(stored)) == (value, type(value))
        written += 1
    assert written > 80


@pytest.mark.parametrize("text", [PAIRS, FULL, "data: {generator: cmudict, seed: 3}"])
def test_resolved_recipes_are_read_back(load, text):
    recipe = load(text)
    again = load(recipe.to_yaml(), name="recipe")
    assert again == recipe
    assert again.to_yaml() == recipe.to_yaml()
    assert again.differences(recipe) == []
    # Readers of YAML 1.1 find the same in it.
    assert yaml.safe_load(recipe.to_yaml()) == recipe.to_dict()


ODD_TEXTS = (
    "1e3|1e-3|no|on|true|null|~|2024-01-01|1:30|010|0o7|0x1|1_000|<<|=|[a]|a: b|a #b|'|\"|-|- a|!a"
    "|&a|*a|%|@|`| a |\t|a\nb\n|\\d+|é|猫|👩‍👩‍👧|a\u2028b|a\u0085b|\u0085|\x00|\x07|\ufeff"
)


@pytest.mark.parametrize("value", ODD_TEXTS.split("|"))
def test_any_text_is_read_back(load, value):
    recipe = load()
    recipe = dataclasses.replace(
        recipe,
        data=dataclasses.replace(recipe.data, source_column=value),
        tokenizer=TokenizerSettings(kind="regex", pattern=re.escape(value)),
    )
    again = load(recipe.to_yaml())
    assert again == recipe
    assert yaml.safe_load(recipe.to_yaml()) == recipe.to_dict()


def test_numbers_are_read_back(load):
    for value in (1e-9, 1e20, 0.1, 1 / 3, 5e-324, 123456789.0, 0):
        recipe = load(PAIRS, f"training.learning_rate={value!r}")
        assert recipe.training.arguments["learning_rate"] == value
        assert load(recipe.to_yaml()) == recipe


def test_same_run(load):
    recipe = load(FULL)
    same = load(
        FULL,
        "training.output_dir=elsewhere",
        "training.resume_from_checkpoint=true",
        "threads=1",
        "data.num_proc=2",
        "training.seed=42",
        "training.logging_strategy=steps",
        "model.decoder_layers=6",
        "generation.do_sample=false",
        name="another",
    )
    assert recipe.same_run(same)
    assert recipe != same
    other = load(
        FULL,
        "training.warmup_steps=1",
        "data.max_target_length=9",
        "training.seed=1",
        "generation.length_penalty=null",
        "evaluation.metrics=[per,wer]",
    )
    assert not recipe.same_run(other)
    assert set(recipe.differences(other)) == {
        "training.warmup_steps",
        "data.max_target_length",
        "training.seed",
        "generation.length_penalty",
        "evaluation.metrics",
    }


def test_to_dict_is_a_copy(load):
    recipe = load(FULL)
    resolved = recipe.to_dict()
    resolved["model"]["d_model"] = 1
    resolved["evaluation"]["metrics"].append("bleu")
    resolved["training"]["seed"] = 1
    assert recipe == load(FULL)


def test_every_key_is_described(load):
    rows = describe_keys()
    keys = [row.key for row in rows]
    assert len(keys) == len(set(keys))
    for text in (PAIRS, FULL):
        for section, values in load(text).to_dict().items():
            if not isinstance(values, dict):
                assert section in keys
                continue
            for name in values:
                assert f"{section}.{name}" in keys or (
                    section == "training" and "training.*" in keys
                )
    for row in rows:
        assert row.text, f"{row.key} has no documentation"
        assert row.type, f"{row.key} has no type"
        assert "\n" not in row.text
    assert "model.vocab_size" not in keys


def test_every_described_default_may_be_written(load):
    for row in describe_keys():
        if row.key.endswith(".*") or row.key == "tokenizer.pattern":
            continue
        default = yaml.safe_dump(row.default, default_flow_style=True).removesuffix("...\n").strip()
        recipe = load(PAIRS, *([f"{row.key}={default}"] if row.key != "data.train_file" else []))
        section, _, name = row.key.partition(".")
        if name and name in recipe.to_dict()[section] and row.key != "training.output_dir":
            written = recipe.to_dict()[section][name]
            assert written == row.default or row.key in ("data.train_file", "evaluation.metrics")
