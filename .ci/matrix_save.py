"""Saves tiny models of every shape, as pushed, with what they compute, and what a run leaves.

    python matrix_save.py FOLDER

`matrix_check.py` then loads each sub-folder on every transformers version that is supported.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from matrix_check import LINES, observe_model, observe_tokenizer, outputs
from safetensors.torch import save_file

from modeling_tinytfm import (
    TinyTFMConfig,
    TinyTFMForCausalLM,
    TinyTFMForConditionalGeneration,
    TinyTFMForSequenceClassification,
)
from modeling_tinytfm.experiment import run_recipe
from modeling_tinytfm.loading import load_model
from modeling_tinytfm.publishing import files_to_publish
from modeling_tinytfm.recipes import load_recipe
from modeling_tinytfm.tokenization import save_tokenizer, train_tokenizer

SIZES = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
    "dropout": 0.0,
}
DECODER_ONLY = {"is_encoder_decoder": False, "is_decoder": True}
ENCODER_ONLY = {"is_encoder_decoder": False, "is_decoder": False}
MODELS = {
    **{
        f"seq2seq-share-{share}-tie-{tie}".lower(): (
            TinyTFMForConditionalGeneration,
            {"share_encoder_decoder_embeddings": share, "tie_word_embeddings": tie},
        )
        for share in (True, False)
        for tie in (True, False)
    },
    "seq2seq-pre-norm-learned-bias": (
        TinyTFMForConditionalGeneration,
        {"norm_first": True, "position_embedding_type": "learned", "output_bias": True},
    ),
    "causal-lm-tied": (TinyTFMForCausalLM, DECODER_ONLY),
    "causal-lm-untied": (TinyTFMForCausalLM, {**DECODER_ONLY, "tie_word_embeddings": False}),
    "classifier": (TinyTFMForSequenceClassification, {**ENCODER_ONLY, "num_labels": 5}),
    "classifier-of-features": (
        TinyTFMForSequenceClassification,
        {**ENCODER_ONLY, "num_labels": 5, "input_feature_size": 6},
    ),
}
AUTO_CLASSES = {
    TinyTFMForConditionalGeneration: "AutoModelForSeq2SeqLM",
    TinyTFMForCausalLM: "AutoModelForCausalLM",
    TinyTFMForSequenceClassification: "AutoModelForSequenceClassification",
}
RECIPE = Path(__file__).parents[1] / "configs" / "reverse.yaml"
# 200 updates of a smaller model: far from right, but no two outputs are alike.
OVERRIDES = [
    "threads=1",
    "model.d_model=32",
    "data.max_train_samples=2000",
    "training.max_steps=200",
    "training.eval_steps=200",
    "training.save_steps=200",
    "training.learning_rate=3e-3",
    "generation.num_beams=3",
]
SOURCES = ["3 7 5 9", "0 0 1", "4 8 6 3 7 2 1", "9 8 7 x", "</s> 5"]
TRAVELLING_FILES = ["configuration_tinytfm.py", "modeling_tinytfm.py"]


def make_inputs(config, tokenizer):
    """A padded batch of `LINES`, or of continuous inputs."""
    if config.input_feature_size:
        lengths = torch.tensor([[9], [4], [1]])
        return {
            "input_features": torch.randn(len(lengths), 9, config.input_feature_size),
            "attention_mask": (torch.arange(9) < lengths).long(),
        }
    padding_side = "left" if config.is_decoder else "right"
    inputs = tokenizer(LINES, padding=True, padding_side=padding_side, return_tensors="pt")
    return dict(inputs)


def learn(model, inputs):
    """Some steps towards random labels: a fresh model repeats one token, whatever its input."""
    config, rows = model.config, len(inputs["attention_mask"])
    if config.is_encoder_decoder:
        labels = torch.randint(4, config.vocab_size, (rows, 12))
        labels[:, -1] = config.eos_token_id
        batch = inputs | {"labels": labels}
    elif config.is_decoder:
        input_ids = torch.randint(4, config.vocab_size, (rows, 24))
        batch = {"input_ids": input_ids, "labels": input_ids}
    else:
        batch = inputs | {"labels": torch.randint(config.num_labels, (rows,))}
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(100):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def save_run(root):
    """A run's folder, its last checkpoint, and what is published of the run: text in, text out."""
    with tempfile.TemporaryDirectory() as home:
        run = Path(home) / "run"
        run_recipe(load_recipe(RECIPE, [*OVERRIDES, f"training.output_dir={run}"]), lambda _: None)
        public = Path(home) / "published"
        public.mkdir()
        for name, content in files_to_publish(run).items():
            data = content if isinstance(content, bytes) else content.read_bytes()
            (public / name).write_bytes(data)
        for folder in (run, run / "checkpoint-200", public):
            model, tokenizer = load_model(folder)
            texts = outputs(model, tokenizer, SOURCES)
            if len(set(texts)) < len(SOURCES):
                raise AssertionError(f"{folder.name}: too easy a test: {texts}")
            inputs = two_sided(tokenizer, model)
            seen = observe_model(model, model.base_model, inputs)
            save_file(
                seen | {f"inputs.{key}": value for key, value in inputs.items()},
                folder / "expected.safetensors",
                metadata={
                    "auto_class": "AutoModelForSeq2SeqLM",
                    "tokenizer": json.dumps(observe_tokenizer(tokenizer)),
                    "texts": json.dumps([SOURCES, texts]),
                },
            )
            shutil.copytree(
                folder,
                root / f"reverse-{folder.name}",
                ignore=shutil.ignore_patterns("checkpoint-*"),
            )


def two_sided(tokenizer, model):
    """A padded batch of sources, with the start of some targets."""
    batch = dict(tokenizer(SOURCES, padding=True, return_tensors="pt"))
    batch["decoder_input_ids"] = torch.randint(4, model.config.vocab_size, (len(SOURCES), 7))
    return batch


def main(root):
    torch.manual_seed(0)
    save_run(root)
    tokenizer = train_tokenizer(LINES * 5, vocab_size=120, show_progress=False)
    for name, (model_class, settings) in MODELS.items():
        config = TinyTFMConfig(vocab_size=len(tokenizer), **SIZES, **settings)
        model = model_class(config)
        inputs = make_inputs(config, tokenizer)
        learn(model, inputs)
        model.eval()

        folder = root / name
        model.save_pretrained(folder)
        files = sorted(path.name for path in folder.glob("*.py"))
        if files != TRAVELLING_FILES:
            raise AssertionError(f"{name}: {files} travel, expected {TRAVELLING_FILES}")
        metadata = {"auto_class": AUTO_CLASSES[model_class]}
        if not config.input_feature_size:
            save_tokenizer(tokenizer, folder)
            metadata["tokenizer"] = json.dumps(observe_tokenizer(tokenizer))

        if config.is_encoder_decoder:
            rows = len(inputs["input_ids"])
            inputs["decoder_input_ids"] = torch.randint(4, config.vocab_size, (rows, 7))
        seen = observe_model(model, model.base_model, inputs)
        if "greedy" in seen and max(len(row.unique()) for row in seen["greedy"]) < 5:
            raise AssertionError(f"{name}: too easy a test: {seen['greedy']}")
        save_file(
            seen | {f"inputs.{key}": value for key, value in inputs.items()},
            folder / "expected.safetensors",
            metadata=metadata,
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
