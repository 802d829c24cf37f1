"""Saves tiny models of every shape, as pushed, with what they compute.

    python matrix_save.py FOLDER

`matrix_check.py` then loads each sub-folder on every transformers version that is supported.
"""

import json
import sys
from pathlib import Path

import torch
from matrix_check import LINES, observe_model, observe_tokenizer
from safetensors.torch import save_file

from modeling_tinytfm import (
    TinyTFMConfig,
    TinyTFMForCausalLM,
    TinyTFMForConditionalGeneration,
    TinyTFMForSequenceClassification,
)
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


def main(root):
    torch.manual_seed(0)
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
