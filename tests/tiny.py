"""Models and data small enough for every test."""

import torch

from modeling_tinytfm import TinyTFMConfig, TinyTFMForConditionalGeneration

TINY = {
    "vocab_size": 50,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "dropout": 0.0,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
}

# The `model` section of recipes that only have to run.
TINIEST = {
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
}


def tiny_config(**changes) -> TinyTFMConfig:
    """A config small enough for every test; no dropout."""
    return TinyTFMConfig(**{**TINY, **changes})


def tiny_model(model_class=TinyTFMForConditionalGeneration, **changes):
    """A tiny model in eval mode whose weights are large enough that logits differ clearly."""
    return redraw(model_class(tiny_config(**changes))).eval()


def redraw(model: torch.nn.Module, std: float = 0.2) -> torch.nn.Module:
    """Draws all parameters anew: with a usual initialisation many checks pass by luck."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=std)
    return model


def token_ids(*shape: int, vocab_size: int = TINY["vocab_size"]) -> torch.Tensor:
    """Random ids without the special tokens."""
    return torch.randint(3, vocab_size, shape)


def reversal_batch(batch_size: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Strings of 1-12 symbols and their reversals, each ending in </s>, padded on the right."""
    sources, labels = [], []
    for length in torch.randint(1, 13, (batch_size,), generator=generator).tolist():
        symbols = torch.randint(3, 13, (length,), generator=generator)
        end = torch.tensor([TINY["eos_token_id"]])
        sources.append(torch.cat((symbols, end)))
        labels.append(torch.cat((symbols.flip(0), end)))
    pad = torch.nn.utils.rnn.pad_sequence
    input_ids = pad(sources, batch_first=True, padding_value=TINY["pad_token_id"])
    return {
        "input_ids": input_ids,
        "attention_mask": (input_ids != TINY["pad_token_id"]).long(),
        "labels": pad(labels, batch_first=True, padding_value=-100),
    }
