"""What is saved comes back the same, everywhere, with its ties; and what cannot, says so."""

import ast
import copy
import json
import logging
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny import redraw, tiny_config, tiny_model, token_ids
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    Trainer,
    TrainingArguments,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from modeling_tinytfm import (
    TinyTFMConfig,
    TinyTFMForCausalLM,
    TinyTFMForConditionalGeneration,
    TinyTFMForSequenceClassification,
    TinyTFMModel,
)
from modeling_tinytfm.modeling_tinytfm import SinusoidalPositions
from modeling_tinytfm.tokenization import save_tokenizer, train_tokenizer

ROOT = Path(__file__).parents[1]
PAD, EOS = 1, 2
ENCODER_DECODER = {"is_encoder_decoder": True, "is_decoder": False}
DECODER = {"is_encoder_decoder": False, "is_decoder": True}
ENCODER = {"is_encoder_decoder": False, "is_decoder": False}
HEADS = {
    TinyTFMForConditionalGeneration: (AutoModelForSeq2SeqLM, ENCODER_DECODER),
    TinyTFMForCausalLM: (AutoModelForCausalLM, DECODER),
    TinyTFMForSequenceClassification: (AutoModelForSequenceClassification, ENCODER),
}
AUTO_CLASSES = {head: auto for head, (auto, _) in HEADS.items()} | {TinyTFMModel: AutoModel}
SHARED_AND_TIED = [
    {"share_encoder_decoder_embeddings": share, "tie_word_embeddings": tie}
    for share in (True, False)
    for tie in (True, False)
]
# Every kind of model: its class and what its config says.
MODELS = [
    *((TinyTFMForConditionalGeneration, changes) for changes in SHARED_AND_TIED),
    *(
        (TinyTFMForConditionalGeneration, {**changes, "input_feature_size": 5})
        for changes in SHARED_AND_TIED
    ),
    *((TinyTFMModel, changes) for changes in SHARED_AND_TIED),
    (TinyTFMForCausalLM, DECODER),
    (TinyTFMForCausalLM, {**DECODER, "tie_word_embeddings": False, "output_bias": True}),
    (TinyTFMModel, DECODER),
    (TinyTFMForSequenceClassification, {**ENCODER, "num_labels": 5}),
    (TinyTFMForSequenceClassification, {**ENCODER, "input_feature_size": 5}),
    (TinyTFMModel, ENCODER),
    (
        TinyTFMForConditionalGeneration,
        {
            "position_embedding_type": "learned",
            "norm_first": True,
            "output_bias": True,
            "pad_token_id": None,
        },
    ),
]


def name_of(value) -> str:
    if isinstance(value, type):
        return value.__name__.removeprefix("TinyTFM")
    if isinstance(value, dict):
        return ",".join(f"{key}={item}" for key, item in value.items()) or "defaults"
    return str(value)


every_model = pytest.mark.parametrize(("model_class", "changes"), MODELS, ids=name_of)
shared_and_tied = pytest.mark.parametrize("changes", SHARED_AND_TIED, ids=name_of)


def example(model: nn.Module, vocab_size: int | None = None) -> dict[str, torch.Tensor]:
    """A padded batch that this model can read."""
    config = model.config
    generator = torch.Generator().manual_seed(5)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
    if config.is_decoder:
        mask = mask.flip(1)
    size = vocab_size or config.vocab_size
    inputs = {"attention_mask": mask}
    if config.input_feature_size:
        features = torch.randn(2, 6, config.input_feature_size, generator=generator)
        inputs["input_features"] = features.to(model.dtype)
    else:
        inputs["input_ids"] = torch.randint(3, size, (2, 6), generator=generator)
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = torch.randint(3, size, (2, 4), generator=generator)
    return inputs


@torch.no_grad()
def output(model: nn.Module, vocab_size: int | None = None) -> torch.Tensor:
    """Logits for the `example`, or hidden states where there is no head."""
    outputs = model(**example(model, vocab_size))
    return outputs.logits if "logits" in outputs else outputs.last_hidden_state


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """All parameters and buffers, the ones that are not saved included."""
    return {**model.state_dict(), **dict(model.named_buffers())}


def assert_same(found: nn.Module, expected: nn.Module) -> None:
    """The same class, tensors and outputs, to the bit."""
    assert type(found).__name__ == type(expected).__name__
    found_tensors, expected_tensors = tensors(found), tensors(expected)
    assert found_tensors.keys() == expected_tensors.keys()
    for name, tensor in expected_tensors.items():
        assert found_tensors[name].dtype == tensor.dtype, name
        assert torch.equal(found_tensors[name], tensor), name
    assert torch.equal(output(found), output(expected))
    assert shared_names(found) == shared_names(expected)


def shared_names(model: nn.Module) -> set[frozenset[str]]:
    """Groups of names that are one and the same parameter."""
    groups: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), set()).add(name)
    return {frozenset(names) for names in groups.values() if len(names) > 1}


def expected_ties(config: TinyTFMConfig, prefix: str = "model.") -> set[frozenset[str]]:
    """What the two sharing flags mean, spelled out."""
    head, encoder = "lm_head.weight", f"{prefix}encoder.embed_tokens.weight"
    decoder = f"{prefix}decoder.embed_tokens.weight"
    group = set()
    if config.is_encoder_decoder and config.share_encoder_decoder_embeddings:
        group = {f"{prefix}shared.weight", decoder}
        if not config.input_feature_size:
            group.add(encoder)
    if prefix and config.tie_word_embeddings:
        group |= {head, decoder}
    return {frozenset(group)} if group else set()


def fill_memory() -> None:
    """Leaves blocks of memory behind that hold 123.0 and fit the tables of tiny models."""
    blocks = [torch.full((rows, 32), 123.0) for rows in (16, 50, 512, 1024) for _ in range(20)]
    blocks += [torch.full((1024, 32), 123.0, dtype=torch.bfloat16) for _ in range(20)]
    del blocks


class Log(logging.Handler):
    """All records of a logger, whatever its level was."""

    def __init__(self):
        super().__init__(logging.DEBUG)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def text(self, level: int = logging.DEBUG) -> str:
        return "\n".join(r.getMessage() for r in self.records if r.levelno >= level)


@pytest.fixture
def log():
    """What transformers has to say, from warnings up."""
    handler, logger = Log(), logging.getLogger("transformers")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


# Save and load


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@every_model
def test_b08_every_model_comes_back_to_the_bit(model_class, changes, dtype, tmp_path, log):
    torch.set_default_dtype(dtype)
    try:
        model = tiny_model(model_class, dtype=dtype, **changes)
    finally:
        torch.set_default_dtype(torch.float32)
    table = next((m.table for m in model.modules() if isinstance(m, SinusoidalPositions)), None)
    assert table is None or table.dtype == dtype
    model.save_pretrained(tmp_path / "first")
    for loader in (model_class, AUTO_CLASSES[model_class], model_class):
        fill_memory()
        loaded, report = loader.from_pretrained(
            tmp_path / "first", dtype=dtype, output_loading_info=True
        )
        assert not any(report.values())
        assert not loaded.training
        assert_same(loaded, model)
    loaded.save_pretrained(tmp_path / "second")
    fill_memory()
    assert_same(AUTO_CLASSES[model_class].from_pretrained(tmp_path / "second", dtype=dtype), model)
    assert log.text(logging.WARNING) == ""


@pytest.mark.parametrize("saved", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, "auto"], ids=str)
def test_b08_position_table_in_another_type(saved, wanted, tmp_path):
    tiny_model().to(saved).save_pretrained(tmp_path)
    dtype = saved if wanted == "auto" else wanted
    fresh = SinusoidalPositions(tiny_config()).table
    for _ in range(5):
        fill_memory()
        loaded = TinyTFMForConditionalGeneration.from_pretrained(tmp_path, dtype=wanted)
        for stack in (loaded.model.encoder, loaded.model.decoder):
            assert torch.equal(stack.embed_positions.table, fresh.to(dtype))
        assert {parameter.dtype for parameter in loaded.parameters()} == {dtype}


@pytest.mark.parametrize("assign", [False, True])
def test_b08_a_model_built_without_memory_has_its_position_table(assign):
    model = tiny_model()
    with torch.device("meta"):
        empty = TinyTFMForConditionalGeneration(model.config)
    fill_memory()
    if not assign:
        empty.to_empty(device="cpu")
    empty.load_state_dict(model.state_dict(), assign=assign)
    assert torch.equal(output(empty.eval()), output(model))


def test_b08_a_model_that_was_smaller_for_a_while_has_its_position_table():
    model = tiny_model()
    fresh = SinusoidalPositions(tiny_config()).table
    model.bfloat16().float()
    for stack in (model.model.encoder, model.model.decoder):
        assert torch.equal(stack.embed_positions.table, fresh)


@pytest.mark.parametrize("head", HEADS)
def test_b14_the_stock_trainer_keeps_embeddings(head, tmp_path):
    changes = HEADS[head][1]
    model = head(tiny_config(**changes))
    names = {"inputs_embeds", *["decoder_inputs_embeds"] * changes["is_encoder_decoder"]}
    rows = {name: [[[0.0] * 32]] for name in names} | {"labels": [[3]], "other": [0]}
    trainer = trainer_of(model, tmp_path)
    kept = trainer._remove_unused_columns(Dataset.from_dict(rows), "training")
    assert set(kept.column_names) == names | {"labels"}


def test_parts_of_a_split_checkpoint_come_together(tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert_same(AutoModelForSeq2SeqLM.from_pretrained(tmp_path), model)


@pytest.mark.parametrize("how", [{"device_map": "cpu"}, {"device_map": "auto"}], ids=name_of)
@shared_and_tied
def test_loading_with_a_device_map(changes, how, tmp_path):
    model = tiny_model(**changes)
    model.save_pretrained(tmp_path)
    fill_memory()
    assert_same(AutoModelForSeq2SeqLM.from_pretrained(tmp_path, **how), model)


@every_model
def test_copies_keep_everything(model_class, changes):
    model = tiny_model(model_class, **changes)
    assert_same(copy.deepcopy(model), model)
    assert_same(pickle.loads(pickle.dumps(model)), model)
    other = model_class(model.config).eval()
    other.load_state_dict(model.state_dict(), strict=True)
    assert_same(other, model)


@every_model
def test_a_model_from_a_config(model_class, changes):
    config = tiny_config(**changes)
    model = AUTO_CLASSES[model_class].from_config(config)
    assert type(model) is model_class
    assert shared_names(model) == shared_names(model_class(config))


@every_model
def test_the_callers_config_is_not_edited(model_class, changes, tmp_path):
    config = tiny_config(**changes)
    before = copy.deepcopy(config.to_dict())
    model = model_class(config).eval()
    output(model)
    assert config.to_dict() == before
    model.save_pretrained(tmp_path)
    after = AutoConfig.from_pretrained(tmp_path).to_dict()
    for settings in (before, after):
        for name in ("_name_or_path", "architectures", "dtype", "transformers_version"):
            settings.pop(name, None)
    assert after == before


# Ties


@every_model
def test_b25_tied_weights_are_one(model_class, changes, tmp_path, log):
    model = tiny_model(model_class, **changes)
    prefix = "" if model_class is TinyTFMModel else "model."
    ties = expected_ties(model.config, prefix)
    if model_class is TinyTFMForSequenceClassification:
        ties = set()
    assert shared_names(model) == ties
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        saved = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        assert file.metadata() == {"format": "pt"}
    assert sum(t.numel() for t in saved.values()) == sum(p.numel() for p in model.parameters())
    for group in ties:
        assert len(group & saved.keys()) == 1

    loaded = model_class.from_pretrained(tmp_path)
    assert shared_names(loaded) == ties
    named = dict(loaded.named_parameters(remove_duplicate=False))
    for group in ties:
        assert len({named[name].data_ptr() for name in group}) == 1
    optimizer = torch.optim.SGD(loaded.parameters(), lr=0.1)
    loaded.train()
    outputs = loaded(**example(loaded))
    (outputs.logits if "logits" in outputs else outputs.last_hidden_state).square().sum().backward()
    optimizer.step()
    assert shared_names(loaded) == ties
    changed = [name for name, tensor in saved.items() if not torch.equal(named[name], tensor)]
    assert any("embed" in name or "shared" in name or "projection" in name for name in changed)
    assert log.text(logging.WARNING) == ""


def test_a_matrix_that_is_untied_later_is_saved(tmp_path):
    model = tiny_model()
    model.config.tie_word_embeddings = False
    own = torch.nn.Parameter(model.lm_head.weight.detach() + 1)
    model.lm_head.weight = own
    model.save_pretrained(tmp_path)
    loaded = TinyTFMForConditionalGeneration.from_pretrained(tmp_path)
    assert loaded.lm_head.weight.equal(own)
    assert loaded.model.shared.weight.equal(model.model.shared.weight)


@shared_and_tied
def test_b25_untied_matrices_stay_distinct(changes, tmp_path):
    model = tiny_model(**changes)
    model.save_pretrained(tmp_path)
    loaded = TinyTFMForConditionalGeneration.from_pretrained(tmp_path)
    encoder, decoder = loaded.model.encoder.embed_tokens, loaded.model.decoder.embed_tokens
    same = changes["share_encoder_decoder_embeddings"]
    assert torch.equal(encoder.weight, decoder.weight) == same
    same = changes["tie_word_embeddings"]
    assert torch.equal(loaded.lm_head.weight, decoder.weight) == same


@shared_and_tied
def test_setting_embeddings_keeps_the_ties(changes):
    model = tiny_model(**changes)
    ties = shared_names(model)
    model.set_input_embeddings(nn.Embedding(50, 32, padding_idx=PAD))
    assert shared_names(model) == ties
    before = model.get_output_embeddings().weight
    model.set_output_embeddings(nn.Linear(32, 50, bias=False))
    model.tie_weights()
    assert shared_names(model) == ties
    assert (model.get_output_embeddings().weight is before) == changes["tie_word_embeddings"]


def pairs(config: TinyTFMConfig) -> Dataset:
    rows = [[*token_ids(3 + number % 3).tolist(), EOS] for number in range(6)]
    labels = rows if config.is_encoder_decoder or config.is_decoder else [len(r) % 2 for r in rows]
    return Dataset.from_dict({"input_ids": rows, "labels": labels})


class Padding:
    """Pads ids with `PAD` and labels with -100."""

    def __call__(self, rows: list[dict]) -> dict[str, torch.Tensor]:
        width = max(len(row["input_ids"]) for row in rows)

        def padded(name: str, filler: int) -> torch.Tensor:
            return torch.tensor([r[name] + [filler] * (width - len(r[name])) for r in rows])

        ids = padded("input_ids", PAD)
        batch = {"input_ids": ids, "attention_mask": (ids != PAD).long()}
        if isinstance(rows[0]["labels"], int):
            return {**batch, "labels": torch.tensor([row["labels"] for row in rows])}
        return {**batch, "labels": padded("labels", -100)}


def trainer_of(model, folder: Path, **options) -> Trainer:
    arguments = {
        "output_dir": str(folder),
        "use_cpu": True,
        "max_steps": 3,
        "per_device_train_batch_size": 2,
        "learning_rate": 0.05,
        "lr_scheduler_type": "constant",
        "save_steps": 1,
        "eval_steps": 1,
        "eval_strategy": "steps",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "logging_strategy": "no",
        **options,
    }
    data = pairs(model.config)
    arguments = TrainingArguments(**arguments)
    return Trainer(model, arguments, Padding(), train_dataset=data, eval_dataset=data)


@pytest.mark.parametrize(
    ("model_class", "changes"),
    [
        *((TinyTFMForConditionalGeneration, changes) for changes in SHARED_AND_TIED),
        (TinyTFMForCausalLM, DECODER),
        (TinyTFMForCausalLM, {**DECODER, "tie_word_embeddings": False}),
        (TinyTFMForSequenceClassification, ENCODER),
    ],
    ids=name_of,
)
def test_b25_a_trainer_resumes_and_loads_its_best_model_in_silence(
    model_class, changes, tmp_path, log
):
    def fresh():
        torch.manual_seed(1)
        return model_class(tiny_config(**changes))

    straight = trainer_of(fresh(), tmp_path / "straight", load_best_model_at_end=True)
    straight.train()
    best = Path(straight.state.best_model_checkpoint)
    assert_same(straight.model.eval(), model_class.from_pretrained(best))
    ties = shared_names(fresh())
    assert shared_names(straight.model) == ties

    trainer_of(fresh(), tmp_path / "twice", max_steps=1).train()
    resumed = trainer_of(fresh(), tmp_path / "twice")
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 3
    assert shared_names(resumed.model) == ties
    last = model_class.from_pretrained(tmp_path / "straight" / "checkpoint-3")
    for name, tensor in tensors(last).items():
        torch.testing.assert_close(tensors(resumed.model)[name], tensor, atol=1e-6, rtol=0)

    words = log.text(logging.WARNING).lower()
    for bad in ("missing", "unexpected", "newly initialized", "tied"):
        assert bad not in words, words


# Weights that _init_weights must leave alone, and those that it must fill


def fill_with_constants(model: nn.Module) -> None:
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters(), start=1):
            parameter.fill_(number / 64)


@every_model
def test_b24_constants_survive_loading(model_class, changes, tmp_path):
    model = tiny_model(model_class, **changes)
    fill_with_constants(model)
    model.save_pretrained(tmp_path)
    for loader in (model_class, AUTO_CLASSES[model_class]):
        fill_memory()
        loaded, report = loader.from_pretrained(tmp_path, output_loading_info=True)
        assert not any(report.values())
        assert loaded.state_dict().keys() == model.state_dict().keys()
        for name, tensor in model.state_dict().items():
            assert torch.equal(loaded.state_dict()[name], tensor), name


def drop_from_checkpoint(folder: Path, *names: str) -> None:
    file = folder / "model.safetensors"
    weights = load_file(file)
    for name in names:
        del weights[name]
    save_file(weights, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    "name",
    [
        "model.shared.weight",
        "model.encoder.layers.1.fc1.weight",
        "model.decoder.layers.0.encoder_attn.q_proj.bias",
        "model.decoder.layers.1.final_layer_norm.weight",
        "model.decoder.layers.1.final_layer_norm.bias",
        "model.decoder.embed_positions.weight",
        "lm_head.bias",
    ],
)
def test_b24_a_missing_weight_is_reported_and_drawn_anew(name, tmp_path, log):
    changes = {"output_bias": True, "position_embedding_type": "learned"}
    model = tiny_model(**changes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(123.0)
    model.save_pretrained(tmp_path)
    drop_from_checkpoint(tmp_path, name)
    fill_memory()
    loaded, report = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, output_loading_info=True)
    tied_to_it = next((group for group in shared_names(model) if name in group), {name})
    assert report["missing_keys"] == tied_to_it
    assert not report["unexpected_keys"]
    assert name in log.text(logging.WARNING)
    assert shared_names(loaded) == shared_names(model)
    for other, tensor in loaded.state_dict().items():
        if other not in tied_to_it:
            assert (tensor == 123.0).all(), other

    found = loaded.get_parameter(name)
    fresh = TinyTFMForConditionalGeneration(tiny_config(**changes)).get_parameter(name)
    if found.std() == 0:
        assert torch.equal(found, fresh)
        return
    assert not (found == 123.0).any()
    torch.testing.assert_close(found.std(), fresh.std(), atol=0, rtol=0.1)
    assert found.mean().abs() < 0.2 * found.std()
    if name == "model.shared.weight":
        assert found[PAD].abs().max() == 0.0
        assert (found.abs().sum(dim=1) == 0.0).sum() == 1


def test_a_new_number_of_classes(tmp_path, log):
    model = tiny_model(TinyTFMForSequenceClassification, **ENCODER, num_labels=3)
    model.save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match=r"classifier|ignore_mismatched_sizes"):
        TinyTFMForSequenceClassification.from_pretrained(tmp_path, num_labels=7)
    loaded = TinyTFMForSequenceClassification.from_pretrained(
        tmp_path, num_labels=7, ignore_mismatched_sizes=True
    )
    assert output(loaded).shape == (2, 7)
    assert_same(loaded.model, model.model)
    assert "classifier.weight" in log.text(logging.WARNING)


# Heads and shapes


def folders_of_all_models(folder: Path) -> dict[str, nn.Module]:
    """A saved model of every shape, with its head and without."""
    models = {}
    for head, (_, fields) in HEADS.items():
        for model_class in (head, TinyTFMModel):
            models[f"{head.__name__}-{model_class.__name__}"] = tiny_model(
                model_class, tie_word_embeddings=False, **fields
            )
    for name, model in models.items():
        model.save_pretrained(folder / name)
    return models


def test_a_head_refuses_another_shape_by_name(tmp_path):
    folders_of_all_models(tmp_path)
    for head, (auto, fields) in HEADS.items():
        for other, (_, other_fields) in HEADS.items():
            if other is head:
                continue
            config = tiny_config(**other_fields)
            before = copy.deepcopy(config.to_dict())
            folders = [
                tmp_path / f"{other.__name__}-{kind}" for kind in (other.__name__, "TinyTFMModel")
            ]
            for build in (
                lambda: head(config),  # noqa: B023
                lambda: auto.from_config(config),  # noqa: B023
                *(lambda folder=folder: head.from_pretrained(folder) for folder in folders),  # noqa: B023
                *(lambda folder=folder: auto.from_pretrained(folder) for folder in folders),  # noqa: B023
            ):
                with pytest.raises(ValueError, match=head.__name__) as caught:
                    build()
                message = str(caught.value)
                for shape in (fields, other_fields):
                    for field, value in shape.items():
                        assert f"{field}={value}" in message
                assert other.__name__ in message
            assert config.to_dict() == before


def test_nothing_loads_half_a_checkpoint_in_silence(tmp_path, log):
    for name, model in folders_of_all_models(tmp_path).items():
        head_name, _, saved_name = name.partition("-")
        head = next(head for head in HEADS if head.__name__ == head_name)
        for loader in (TinyTFMModel, AutoModel, head, HEADS[head][0]):
            log.records.clear()
            loaded, report = loader.from_pretrained(tmp_path / name, output_loading_info=True)
            base = loaded if isinstance(loaded, TinyTFMModel) else loaded.model
            saved_base = model if isinstance(model, TinyTFMModel) else model.model
            assert_same(base, saved_base)
            heads_keys = {"lm_head.weight"}
            if head is TinyTFMForSequenceClassification:
                heads_keys = {"classifier.weight", "classifier.bias"}
            loaded_head = loaded is not base
            saved_head = saved_name != "TinyTFMModel"
            assert set(report["missing_keys"]) == (
                heads_keys if loaded_head and not saved_head else set()
            )
            assert set(report["unexpected_keys"]) == (
                heads_keys if saved_head and not loaded_head else set()
            )
            assert not report["mismatched_keys"]
            reported = log.text(logging.WARNING)
            for key in {*report["missing_keys"], *report["unexpected_keys"]}:
                assert key in reported


def test_an_encoder_alone_from_a_whole_transformer_reports_the_rest(tmp_path, log):
    """A text encoder can be taken out of a translation model, but not without a word."""
    model = tiny_model()
    model.save_pretrained(tmp_path)
    _, report = TinyTFMModel.from_pretrained(
        tmp_path, is_encoder_decoder=False, output_loading_info=True
    )
    dropped = {name for name in load_file(tmp_path / "model.safetensors") if ".decoder." in name}
    assert {
        f"model.{name}" if not name.startswith("model.") else name
        for name in report["unexpected_keys"]
    } >= dropped
    assert "decoder" in log.text(logging.WARNING)


@pytest.mark.parametrize("flag", ["share_encoder_decoder_embeddings", "tie_word_embeddings"])
@shared_and_tied
def test_other_sharing_than_the_checkpoints_is_never_silent(changes, flag, tmp_path, log):
    tiny_model(**changes).save_pretrained(tmp_path)
    TinyTFMForConditionalGeneration.from_pretrained(tmp_path, **{flag: not changes[flag]})
    warned = log.text(logging.WARNING)
    assert "tied weights mapping" in warned or "MISSING" in warned


# Another vocabulary


@pytest.mark.parametrize(
    ("request_", "size"),
    [
        ({"new_num_tokens": 61}, 61),
        ({"new_num_tokens": 37}, 37),
        ({"new_num_tokens": 51, "pad_to_multiple_of": 8}, 56),
        ({"pad_to_multiple_of": 64}, 64),
        ({"new_num_tokens": 50}, 50),
        ({}, 50),
        ({"new_num_tokens": 61, "mean_resizing": False}, 61),
    ],
    ids=name_of,
)
@pytest.mark.parametrize("output_bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize(
    ("model_class", "changes"),
    [
        *((TinyTFMForConditionalGeneration, changes) for changes in SHARED_AND_TIED),
        *(
            (TinyTFMForConditionalGeneration, {**changes, "input_feature_size": 5})
            for changes in SHARED_AND_TIED[:2]
        ),
        (TinyTFMForCausalLM, DECODER),
        (TinyTFMForCausalLM, {**DECODER, "tie_word_embeddings": False}),
    ],
    ids=name_of,
)
def test_resizing_the_vocabulary(model_class, changes, output_bias, request_, size, tmp_path):
    model = tiny_model(model_class, output_bias=output_bias, **changes)
    kept = min(size, 50)
    ties, before = shared_names(model), output(model, vocab_size=kept)
    old_bias = model.lm_head.bias.clone() if output_bias else None
    resized = model.resize_token_embeddings(**request_)
    assert resized is model.get_input_embeddings()

    assert model.config.vocab_size == size
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            assert module.weight.shape == (size, 32)
            assert module.num_embeddings == size
            assert module.padding_idx == PAD
    head = model.get_output_embeddings()
    assert head.weight.shape == (size, 32)
    assert head.out_features == size
    assert (head.bias is not None) == output_bias
    if output_bias:
        assert torch.equal(head.bias[:kept], old_bias[:kept])
        assert head.bias.shape == (size,)
    assert shared_names(model) == ties
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert all(parameter.requires_grad for parameter in model.parameters())
    after = output(model, vocab_size=kept)
    assert after.shape[-1] == size
    torch.testing.assert_close(after[..., :kept], before[..., :kept], atol=1e-6, rtol=0)
    assert not model.training

    model.save_pretrained(tmp_path)
    loaded = model_class.from_pretrained(tmp_path)
    assert_same(loaded, model)
    inputs = example(model)
    labels = inputs.get("decoder_input_ids", inputs.get("input_ids"))
    loaded.train()
    loaded(**inputs, labels=labels).loss.backward()
    if size > 50:
        assert inputs.get("decoder_input_ids", inputs.get("input_ids")).max() < size


@pytest.mark.parametrize("fields", [ENCODER_DECODER, DECODER, ENCODER], ids=name_of)
def test_resizing_a_model_without_a_head(fields):
    model = tiny_model(TinyTFMModel, share_encoder_decoder_embeddings=False, **fields)
    before = output(model, vocab_size=50)
    model.resize_token_embeddings(70)
    assert model.config.vocab_size == 70
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            assert module.weight.shape == (70, 32)
    torch.testing.assert_close(output(model, vocab_size=50), before, atol=0, rtol=0)


def test_resizing_below_a_special_token_is_refused():
    """The smaller model could not be loaded again: its config names a token it lacks."""
    model = tiny_model(eos_token_id=49)
    with pytest.raises(ValueError, match=r"eos_token_id=49.*vocab_size=40"):
        model.resize_token_embeddings(40)
    assert model.config.vocab_size == 50
    assert model.get_input_embeddings().weight.shape == (50, 32)


def test_resizing_continuous_inputs_is_refused():
    model = tiny_model(TinyTFMForSequenceClassification, **ENCODER, input_feature_size=5)
    with pytest.raises((TypeError, ValueError)):
        model.resize_token_embeddings(60)
    assert output(model).shape == (2, 2)


# Elsewhere: where this package cannot be imported

# Loads folders, and saves what it found: argument 1 is a list of [folder, Auto class, dtype].
LOAD_ELSEWHERE = """
import json, logging, sys, torch, transformers
torch.set_num_threads(1)
transformers.utils.logging.disable_progress_bar()
messages = []
handler = logging.Handler(logging.WARNING)
handler.emit = lambda record: messages.append(record.getMessage())
logging.getLogger("transformers").addHandler(handler)
found = {}
for folder, auto_class, dtype in json.loads(sys.argv[1]):
    blocks = [torch.full((1024, 32), 123.0, dtype=getattr(torch, dtype)) for _ in range(20)]
    del blocks
    model, report = getattr(transformers, auto_class).from_pretrained(
        folder, trust_remote_code=True, dtype=getattr(torch, dtype), output_loading_info=True
    )
    inputs = torch.load(folder + "/inputs.pt")
    with torch.no_grad():
        outputs = model(**inputs)
        generated = None
        if hasattr(model, "lm_head"):
            inputs.pop("decoder_input_ids", None)
            generated = model.generate(**inputs, num_beams=3, max_new_tokens=6)
    found[folder, auto_class] = {
        "class": type(model).__module__ + "." + type(model).__name__,
        "tensors": {**model.state_dict(), **dict(model.named_buffers())},
        "output": outputs["logits" if "logits" in outputs else "last_hidden_state"],
        "generated": generated,
        "report": {key: sorted(map(str, value)) for key, value in report.items()},
        "config": transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True).to_dict(),
    }
    model.save_pretrained(folder + "-again")
    torch.save(torch.load(folder + "/inputs.pt"), folder + "-again/inputs.pt")
torch.save(found, "found.pt")
print(json.dumps(messages))
"""


def save_for_elsewhere(model: nn.Module, folder: Path) -> None:
    model.save_pretrained(folder)
    torch.save(example(model), folder / "inputs.pt")


def check_travelling_folder(folder: Path) -> None:
    """Two flat files of code that import nothing unusual, and references to only these."""
    code = sorted(path.name for path in folder.rglob("*.py"))
    assert code == ["configuration_tinytfm.py", "modeling_tinytfm.py"]
    for name in code:
        for node in ast.walk(ast.parse((folder / name).read_text(encoding="utf-8"))):
            imported = []
            if isinstance(node, ast.Import):
                imported = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level:
                assert (node.level, f"{node.module}.py" in code) == (1, True)
            elif isinstance(node, ast.ImportFrom):
                imported = [node.module]
            for module in imported:
                top = module.split(".")[0]
                assert top in {"torch", "transformers"} or top in sys.stdlib_module_names
    references = json.loads((folder / "config.json").read_text())["auto_map"]
    assert {"AutoConfig", "AutoModel"} < references.keys()
    for reference in references.values():
        file, _, name = reference.partition(".")
        assert f"{file}.py" in code
        assert f"class {name}(" in (folder / f"{file}.py").read_text(encoding="utf-8")


def test_b08_b24_b43_every_model_loads_elsewhere(tmp_path, elsewhere):
    models, jobs = {}, []
    for number, (model_class, changes) in enumerate(MODELS):
        dtype = torch.bfloat16 if number % 3 == 2 else torch.float32
        model = tiny_model(model_class, **changes).to(dtype)
        if number % 4 == 1:
            fill_with_constants(model)
        name = f"model{number}"
        save_for_elsewhere(model, tmp_path / name)
        check_travelling_folder(tmp_path / name)
        models[name] = model
        # After a round trip elsewhere, once more.
        for folder in (name, f"{name}-again"):
            jobs.append([folder, AUTO_CLASSES[model_class].__name__, str(dtype).split(".")[1]])
    messages = elsewhere(LOAD_ELSEWHERE, json.dumps(jobs)).splitlines()[-1]
    assert json.loads(messages) == []
    found = torch.load(tmp_path / "found.pt")
    for folder, auto_class, _ in jobs:
        model, result = models[folder.removesuffix("-again")], found[folder, auto_class]
        assert result["class"].startswith("transformers_modules.")
        assert result["class"].endswith(f".modeling_tinytfm.{type(model).__name__}")
        assert not any(result["report"].values()), folder
        expected = tensors(model)
        assert result["tensors"].keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(result["tensors"][name], tensor), (folder, name)
        assert torch.equal(result["output"], output(model)), folder
        if result["generated"] is not None:
            inputs = torch.load(tmp_path / folder / "inputs.pt")
            inputs.pop("decoder_input_ids", None)
            generated = model.generate(**inputs, num_beams=3, max_new_tokens=6)
            assert torch.equal(result["generated"], generated)
        check_travelling_folder(tmp_path / folder)


def test_b43_a_trainers_checkpoint_loads_elsewhere(tmp_path, elsewhere):
    """Every Auto class finds its model, of every shape, in a folder that the Trainer wrote."""
    tokenizer = train_tokenizer(["a b c d e f g"], kind="word", vocab_size=50, show_progress=False)
    for head, (auto, fields) in HEADS.items():
        model = head(
            tiny_config(**fields, pad_token_id=0, bos_token_id=1, decoder_start_token_id=1)
        )
        trainer = trainer_of(redraw(model), tmp_path / head.__name__, max_steps=2)
        trainer.train()
        checkpoint = tmp_path / head.__name__ / "checkpoint-2"
        save_tokenizer(tokenizer, checkpoint)
        check_travelling_folder(checkpoint)
        inputs = tokenizer(["a c e", "g"], padding=True, return_tensors="pt")
        if model.config.is_encoder_decoder:
            inputs["decoder_input_ids"] = torch.tensor([[1, 5], [1, 6]])
        model.eval()
        with torch.no_grad():
            expected = {
                auto.__name__: model(**inputs).logits,
                "AutoModel": model.model(**inputs).last_hidden_state,
            }
        torch.save({"inputs": dict(inputs), "expected": expected}, checkpoint / "expected.pt")
    printed = elsewhere(
        """
import json, sys, torch, transformers
torch.set_num_threads(1)
found = []
for head in json.loads(sys.argv[1]):
    folder = head + "/checkpoint-2"
    saved = torch.load(folder + "/expected.pt")
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    encoded = tokenizer(["a c e", "g"], padding=True, return_tensors="pt")
    found.append([type(config).__name__, type(tokenizer).__module__.split(".")[0]])
    for name, ids in encoded.items():
        assert torch.equal(ids, saved["inputs"][name]), (folder, name)
    for auto_class, expected in saved["expected"].items():
        model = getattr(transformers, auto_class).from_pretrained(folder, trust_remote_code=True)
        with torch.no_grad():
            outputs = model(**saved["inputs"])
        output = outputs["logits" if "logits" in outputs else "last_hidden_state"]
        assert torch.equal(output, expected), (folder, auto_class)
        built = getattr(transformers, auto_class).from_config(config, trust_remote_code=True)
        assert type(built) is type(model)
        found.append(type(model).__name__)
print(json.dumps(found))
""",
        json.dumps([head.__name__ for head in HEADS]),
    )
    expected = []
    for head in HEADS:
        expected += [["TinyTFMConfig", "transformers"], head.__name__, "TinyTFMModel"]
    assert json.loads(printed.splitlines()[-1]) == expected


@pytest.mark.parametrize("remote", [None, True, False])
def test_every_shape_loads_with_the_plugin(remote, tmp_path):
    for name, model in folders_of_all_models(tmp_path).items():
        options = {} if remote is None else {"trust_remote_code": remote}
        config = AutoConfig.from_pretrained(tmp_path / name, **options)
        assert type(config) is TinyTFMConfig
        loaded = AUTO_CLASSES[type(model)].from_pretrained(tmp_path / name, **options)
        assert type(loaded) is type(model)
        assert_same(loaded, model)


def test_references_to_another_repository_are_replaced(tmp_path):
    """As in a config.json that was downloaded, and saved by a version that prefixes them."""
    tiny_model().save_pretrained(tmp_path / "first")
    file = tmp_path / "first" / "config.json"
    settings = json.loads(file.read_text())
    settings["auto_map"] = {
        name: f"somebody/something--{reference}" for name, reference in settings["auto_map"].items()
    }
    file.write_text(json.dumps(settings))
    loaded = TinyTFMForConditionalGeneration.from_pretrained(tmp_path / "first")
    loaded.save_pretrained(tmp_path / "second")
    check_travelling_folder(tmp_path / "second")


def test_b44_our_name_is_not_taken():
    assert TinyTFMConfig.model_type not in CONFIG_MAPPING_NAMES


def test_b44_registering_again_hijacks_nobody(tmp_path):
    model = tiny_model()
    save_for_elsewhere(model, tmp_path / "ours")
    code = """
import importlib, importlib.util, sys, torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM, MarianConfig, MarianMTModel
import modeling_tinytfm
importlib.reload(modeling_tinytfm)
for name in ("configuration_tinytfm", "modeling_tinytfm"):
    importlib.reload(sys.modules["modeling_tinytfm." + name])
importlib.reload(modeling_tinytfm)
spec = importlib.util.spec_from_file_location(
    "another_name", modeling_tinytfm.__file__, submodule_search_locations=modeling_tinytfm.__path__
)
another = importlib.util.module_from_spec(spec)
sys.modules["another_name"] = another
spec.loader.exec_module(another)
inputs = torch.load("ours/inputs.pt")
outputs = []
for options in ({}, {"trust_remote_code": True}, {"trust_remote_code": False}):
    loaded = AutoModelForSeq2SeqLM.from_pretrained("ours", **options)
    assert type(loaded).__name__ == "TinyTFMForConditionalGeneration"
    outputs.append(loaded(**inputs).logits)
torch.save(outputs, "outputs.pt")
for package in (modeling_tinytfm, another):
    package.TinyTFMForConditionalGeneration(package.TinyTFMConfig(d_model=8, vocab_size=9))
small = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
         "decoder_attention_heads": 2, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}
marian = MarianMTModel(MarianConfig(vocab_size=20, d_model=8, pad_token_id=1, eos_token_id=0,
                                    decoder_start_token_id=1, forced_eos_token_id=0, **small))
marian.save_pretrained("marian")
assert type(AutoModelForSeq2SeqLM.from_pretrained("marian")) is MarianMTModel
assert type(AutoConfig.from_pretrained("marian")) is MarianConfig
print("done")
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_MODULES_CACHE": str(tmp_path / "hf")}
    finished = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert finished.stdout.endswith("done\n"), finished.stderr
    for found in torch.load(tmp_path / "outputs.pt"):
        assert torch.equal(found, output(model))


def test_b44_awkward_folder_names(tmp_path, elsewhere):
    """Each folder's own code is used: two folders of one name differ in one constant of theirs."""
    names = [
        "my.model-v1.0",
        "a/m",
        "b/m",
        "with space",
        "ünïcode",
        "1-starts-with-a-digit",
        "class",
    ]
    for number, name in enumerate(names):
        save_for_elsewhere(tiny_model(), tmp_path / name)
        file = tmp_path / name / "modeling_tinytfm.py"
        code = file.read_text(encoding="utf-8")
        changed = code.replace("base: float = 10000.0", f"base: float = 1000{number}.0")
        assert (number == 0) == (changed == code)
        file.write_text(changed, encoding="utf-8")
    printed = elsewhere(
        """
import json, os, sys, transformers
names = json.loads(sys.argv[1])
def load(folder):
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder, trust_remote_code=True)
    code = sys.modules[type(model).__module__]
    return [code.sinusoids.__defaults__[0], model.model.encoder.embed_positions.table[7, 2].item()]
found = [load(name) for name in [*names, *names]]
start = os.getcwd()
for name in ("my.model-v1.0", "b/m"):
    os.chdir(os.path.join(start, name))
    found.append(load("."))
print(json.dumps(found))
""",
        json.dumps(names),
    )
    found = json.loads(printed.splitlines()[-1])
    bases = [10000.0 + number for number in range(len(names))]
    expected = [*bases, *bases, bases[0], bases[2]]
    assert [base for base, _ in found] == expected
    for base, entry in found:
        assert entry == pytest.approx(torch.tensor(7 / base ** (2 / 32)).sin().item(), abs=1e-6)
    assert len({entry for _, entry in found[:2]}) == 2
