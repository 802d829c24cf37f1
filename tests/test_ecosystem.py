"""Ordinary tools on a saved model: LoRA by peft, dynamic int8 by torch, and README's lines."""

import copy
import re
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from test_conversion import tiny_model
from test_ctranslate2_model import word_tokenizer
from tiny import token_ids
from transformers import DataCollatorForSeq2Seq, Seq2SeqTrainer, Seq2SeqTrainingArguments

from modeling_tinytfm.tokenization import save_tokenizer

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)

pytestmark = [
    # peft asks every model by the old name.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    # torch itself has no other int8 for a CPU yet than the one that it wants to replace.
    pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning"),
]
LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"]}


def inputs() -> dict[str, torch.Tensor]:
    """Two sources, the second padded."""
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, 6:] = 0
    return {"input_ids": token_ids(2, 9).masked_fill(mask == 0, 1), "attention_mask": mask}


@pytest.mark.parametrize("task_type", [None, "SEQ_2_SEQ_LM"])
def test_B48_lora_trains_nothing_else_and_is_saved_loaded_and_merged(task_type, tmp_path):
    base = tiny_model()
    # Drawn at random, where it would begin as 0: an adapter that changes nothing proves nothing.
    config = LoraConfig(**LORA, task_type=task_type, init_lora_weights=False)
    model = get_peft_model(copy.deepcopy(base), config)
    model(**inputs(), labels=token_ids(2, 5)).loss.backward()
    trained = {name for name, x in model.named_parameters() if x.grad is not None}
    assert all(".lora_" in name for name in trained)
    for place in ("encoder.layers.1.self_attn", "decoder.layers.0.self_attn.q_proj"):
        assert any(place in name for name in trained)
    assert any("decoder.layers.1.encoder_attn.v_proj" in name for name in trained)
    model.eval()
    batch = inputs()
    found = model.generate(**batch, max_new_tokens=12)
    assert found.tolist() != base.generate(**batch, max_new_tokens=12).tolist()

    model.save_pretrained(tmp_path)
    assert (tmp_path / "adapter_model.safetensors").exists()
    loaded = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path).eval()
    assert torch.equal(loaded.generate(**batch, max_new_tokens=12), found)
    merged = loaded.merge_and_unload()
    assert type(merged) is type(base)
    assert torch.equal(merged.generate(**batch, max_new_tokens=12), found)
    for num_beams in (1, 4):
        beams = {"num_beams": num_beams, "max_new_tokens": 12}
        assert torch.equal(merged.generate(**batch, **beams), model.generate(**batch, **beams))


@pytest.mark.parametrize(
    "embeddings",
    [
        {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True},
        {"target_modules": ["q_proj"], "trainable_token_indices": [7, 8]},
    ],
    ids=str,
)
def test_B48_embeddings_have_adapters_too(embeddings):
    model = get_peft_model(tiny_model(), LoraConfig(r=4, **embeddings))
    model(**inputs(), labels=token_ids(2, 5)).loss.backward()
    trained = [name for name, x in model.named_parameters() if x.grad is not None]
    assert any("embed" in name or "token_adapter" in name for name in trained)
    assert model.eval().generate(**inputs(), max_new_tokens=4).shape[0] == 2


def test_B48_the_trainer_keeps_the_columns_that_lora_needs(reverser, tmp_path, caplog):
    model = get_peft_model(copy.deepcopy(reverser), LoraConfig(**LORA))
    before = {name: x.clone() for name, x in model.named_parameters()}
    symbols = token_ids(16, 5, vocab_size=13)
    rows = [{"input_ids": row, "labels": row, "note": "unused"} for row in symbols.tolist()]
    trainer = Seq2SeqTrainer(
        model,
        Seq2SeqTrainingArguments(
            tmp_path, max_steps=3, per_device_train_batch_size=8, learning_rate=0.1, use_cpu=True
        ),
        train_dataset=Dataset.from_list(rows),
        data_collator=DataCollatorForSeq2Seq(word_tokenizer(), model),
    )
    trainer.train()
    assert "No columns" not in caplog.text
    changed = {name for name, x in model.named_parameters() if not torch.equal(x, before[name])}
    assert changed
    assert all(".lora_" in name for name in changed)


def test_B49_dynamic_int8_is_close_and_leaves_the_original(reverser):
    model = tiny_model()
    state = copy.deepcopy(model.state_dict())
    quantized = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, torch.qint8)
    assert "quantized" in type(quantized.lm_head).__module__
    batch, decoder_input_ids = inputs(), token_ids(2, 6)
    expected = model(**batch, decoder_input_ids=decoder_input_ids).logits
    found = quantized(**batch, decoder_input_ids=decoder_input_ids).logits
    cosine = torch.nn.functional.cosine_similarity(found.flatten(), expected.flatten(), dim=0)
    assert 0.99 <= cosine < 1
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name]), name

    quantized = torch.ao.quantization.quantize_dynamic(reverser, {torch.nn.Linear}, torch.qint8)
    symbols = token_ids(20, 8, vocab_size=13)
    ends = torch.full((20, 1), 2)
    for num_beams in (1, 4):
        written = quantized.generate(
            torch.cat((symbols, ends), 1), num_beams=num_beams, max_new_tokens=9
        )
        assert (written[:, 1:9] == symbols.flip(1)).all(1).float().mean() > 0.9


def test_readmes_lines_run_on_a_pushed_model(reverser, tmp_path, elsewhere):
    """In a process without this package, on what a repository holds."""
    reverser.save_pretrained(tmp_path / "outputs" / "reverse")
    save_tokenizer(word_tokenizer(), tmp_path / "outputs" / "reverse")
    (lora,) = [block for block in BLOCKS if "LoraConfig(" in block]
    (int8,) = [block for block in BLOCKS if "quantize_dynamic(" in block]
    check = """
source = torch.tensor([[5, 9, 7, 12, 4, 6, 2]])
print(model.generate(source, max_new_tokens=8).tolist(), type(quantized.lm_head).__module__)
print(quantized.generate(source, max_new_tokens=8).tolist())
"""
    output = elsewhere("\n".join([lora, int8, check])).splitlines()
    assert output[-2:] == [
        "[[0, 6, 4, 12, 7, 9, 5, 2]] torch.ao.nn.quantized.dynamic.modules.linear",
        "[[0, 6, 4, 12, 7, 9, 5, 2]]",
    ]
    assert (tmp_path / "outputs" / "adapter" / "adapter_model.safetensors").exists()
