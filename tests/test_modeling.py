import copy
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from tiny import TINY, redraw, reversal_batch, tiny_config, tiny_model, token_ids
from torch import nn
from transformers import (
    AutoModelForSeq2SeqLM,
    DynamicCache,
    EncoderDecoderCache,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainingArguments,
)
from transformers.modeling_outputs import (
    BaseModelOutput,
    BaseModelOutputWithPastAndCrossAttentions,
    CausalLMOutputWithPast,
    Seq2SeqLMOutput,
    Seq2SeqModelOutput,
    SequenceClassifierOutput,
)

from modeling_tinytfm import (
    TinyTFMForCausalLM,
    TinyTFMForConditionalGeneration,
    TinyTFMForSequenceClassification,
    TinyTFMModel,
    modeling_tinytfm,
)
from modeling_tinytfm.modeling_tinytfm import (
    ATTENTION,
    TinyTFMDecoderLayer,
    TinyTFMEncoder,
    TinyTFMEncoderLayer,
    drop,
    eager_attention,
    fused_trains_slower,
    sdpa_attention,
    sinusoids,
    token_loss,
)

PAD, EOS, START = TINY["pad_token_id"], TINY["eos_token_id"], TINY["decoder_start_token_id"]
ENCODER = {"is_encoder_decoder": False}
DECODER = {"is_encoder_decoder": False, "is_decoder": True}
HEADS = {
    "encoder-decoder": (TinyTFMForConditionalGeneration, {}),
    "decoder": (TinyTFMForCausalLM, DECODER),
    "encoder": (TinyTFMForSequenceClassification, ENCODER),
}
every_shape = pytest.mark.parametrize("shape", HEADS)
generating_shapes = pytest.mark.parametrize("shape", ["encoder-decoder", "decoder"])
both_implementations = pytest.mark.parametrize("attention", ["eager", "sdpa"])
both_norms = pytest.mark.parametrize("norm_first", [False, True], ids=["post-norm", "pre-norm"])


def close(actual, expected, tolerance=1e-5):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def difference(a, b):
    return float((a - b).detach().abs().max())


def model_of(shape, attention="sdpa", **changes):
    head, settings = HEADS[shape]
    return tiny_model(head, attn_implementation=attention, **settings, **changes)


def right_padded(*lengths):
    """A mask [B, L] for rows of these lengths."""
    return (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()


def batch_of(shape, *lengths):
    """Random inputs of a shape's head, padded on the right."""
    mask = right_padded(*lengths)
    ids = token_ids(*mask.shape).masked_fill(mask == 0, PAD)
    batch = {"input_ids": ids, "attention_mask": mask}
    if shape == "encoder-decoder":
        batch["decoder_input_ids"] = token_ids(len(lengths), 5)
    return batch


def labelled_batch(shape, *lengths):
    """The same for training."""
    batch = batch_of(shape, *lengths)
    if shape == "encoder-decoder":
        batch["labels"] = batch.pop("decoder_input_ids")
        batch["labels"][0, 3:] = -100
    elif shape == "decoder":
        batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    else:
        batch["labels"] = torch.randint(0, 2, (len(lengths),))
    return batch


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def torch_stack(stack):
    """torch's own layers with the weights of one of our stacks; a final norm only where it has one.

    In training mode: torch's fast path for inference would put zeros where padding is.
    """
    config, is_encoder = stack.config, isinstance(stack, TinyTFMEncoder)
    kind = "encoder" if is_encoder else "decoder"
    layer_class = nn.TransformerEncoderLayer if is_encoder else nn.TransformerDecoderLayer
    layer = layer_class(
        config.d_model,
        getattr(config, f"{kind}_attention_heads"),
        getattr(config, f"{kind}_ffn_dim"),
        dropout=0.0,
        activation=config.activation_function,
        layer_norm_eps=config.layer_norm_eps,
        batch_first=True,
        norm_first=config.norm_first,
    )
    norm = copy.deepcopy(stack.layer_norm) if isinstance(stack.layer_norm, nn.LayerNorm) else None
    if is_encoder:
        reference = nn.TransformerEncoder(
            layer, len(stack.layers), norm=norm, enable_nested_tensor=False
        )
    else:
        reference = nn.TransformerDecoder(layer, len(stack.layers), norm=norm)
    for ours, theirs in zip(stack.layers, reference.layers, strict=True):
        modules = {
            "linear1": ours.fc1,
            "linear2": ours.fc2,
            "norm1": ours.self_attn_layer_norm,
            "norm2": ours.final_layer_norm if is_encoder else ours.encoder_attn_layer_norm,
            "norm3": ours.final_layer_norm,
        }
        for name, module in modules.items():
            if hasattr(theirs, name):
                getattr(theirs, name).load_state_dict(module.state_dict())
        attentions = {"self_attn": "self_attn", "encoder_attn": "multihead_attn"}
        for our_name, their_name in attentions.items():
            if hasattr(theirs, their_name):
                our, their = getattr(ours, our_name), getattr(theirs, their_name)
                projections = (our.q_proj, our.k_proj, our.v_proj)
                state = {
                    "in_proj_weight": torch.cat([linear.weight for linear in projections]),
                    "in_proj_bias": torch.cat([linear.bias for linear in projections]),
                    "out_proj.weight": our.out_proj.weight,
                    "out_proj.bias": our.out_proj.bias,
                }
                their.load_state_dict(state)
    return reference.train()


# What the layers compute


@both_norms
@both_implementations
def test_b10_equals_torch_layers_on_copied_weights(norm_first, attention):
    model = model_of("encoder-decoder", attention, norm_first=norm_first).model
    encoder, decoder = torch_stack(model.encoder), torch_stack(model.decoder)
    assert norm_first or (encoder.norm is None and decoder.norm is None)
    mask, target_mask = right_padded(7, 4, 6), right_padded(3, 5, 5)
    source = (torch.randn(3, 7, 32) * 0.2).requires_grad_()
    target = (torch.randn(3, 5, 32) * 0.2).requires_grad_()
    real, target_real = mask.bool(), target_mask.bool()
    outputs = model(
        inputs_embeds=source,
        attention_mask=mask,
        decoder_inputs_embeds=target,
        decoder_attention_mask=target_mask,
    )
    memory = encoder(
        source * math.sqrt(32) + sinusoids(torch.arange(7), 32), src_key_padding_mask=~real
    )
    expected = decoder(
        target * math.sqrt(32) + sinusoids(torch.arange(5), 32),
        memory,
        tgt_mask=torch.ones(5, 5).triu(1).bool(),
        tgt_key_padding_mask=~target_real,
        memory_key_padding_mask=~real,
    )
    close(outputs.encoder_last_hidden_state[real], memory[real])
    close(outputs.last_hidden_state[target_real], expected[target_real])

    direction = torch.randn(int(target_real.sum()), 32)
    ours = [source, target, model.encoder.layers[0].fc1.weight, model.decoder.layers[0].fc1.weight]
    theirs = [source, target, encoder.layers[0].linear1.weight, decoder.layers[0].linear1.weight]
    actual = torch.autograd.grad((outputs.last_hidden_state[target_real] * direction).sum(), ours)
    for gradient, reference in zip(
        actual, torch.autograd.grad((expected[target_real] * direction).sum(), theirs), strict=True
    ):
        close(gradient, reference, 1e-4)


@pytest.mark.parametrize(
    ("changes", "final_norms"),
    [({}, 0), ({"norm_first": True}, 2), ({"add_final_layer_norm": True}, 2)],
    ids=str,
)
def test_b10_number_of_layer_norms(changes, final_norms):
    model = tiny_model(encoder_layers=3, decoder_layers=1, **changes)
    norms = [module for module in model.modules() if isinstance(module, nn.LayerNorm)]
    assert len(norms) == 2 * 3 + 3 * 1 + final_norms


def all_dropped(layer_class, attention, **changes):
    config = tiny_config(
        dropout=1.0,
        attention_dropout=1.0,
        activation_dropout=1.0,
        attn_implementation=attention,
        **changes,
    )
    arguments = (config, 0) if layer_class is TinyTFMDecoderLayer else (config,)
    return redraw(layer_class(*arguments)).train()


@both_implementations
@both_norms
def test_b10_every_dropout_at_one_leaves_the_residual_path(norm_first, attention):
    x, memory = torch.randn(2, 5, 32), torch.randn(2, 3, 32)
    layer = all_dropped(TinyTFMEncoderLayer, attention, norm_first=norm_first)
    output = layer(x)[0]
    assert output.equal(x if norm_first else layer.final_layer_norm(layer.self_attn_layer_norm(x)))
    layer = all_dropped(TinyTFMDecoderLayer, attention, norm_first=norm_first)
    expected = layer.encoder_attn_layer_norm(layer.self_attn_layer_norm(x))
    expected = x if norm_first else layer.final_layer_norm(expected)
    assert layer(x, memory, is_causal=True)[0].equal(expected)


@both_implementations
@pytest.mark.parametrize("dropout", ["dropout", "attention_dropout", "activation_dropout"])
def test_b10_place_of_each_dropout(dropout, attention):
    model = tiny_model(TinyTFMModel, attn_implementation=attention, **{dropout: 1.0}).train()
    batch = batch_of("encoder-decoder", 5, 4)
    outputs = model(**batch, output_hidden_states=True)
    x = torch.randn(2, 5, 32)
    for stack, states in (
        (model.encoder, outputs.encoder_hidden_states),
        (model.decoder, outputs.decoder_hidden_states),
    ):
        layer = stack.layers[0]
        attended, fed = layer.self_attn(x)[0], layer.feed_forward(x)
        assert attended.eq(layer.self_attn.out_proj.bias).all() == (dropout == "attention_dropout")
        assert fed.eq(layer.fc2.bias).all() == (dropout == "activation_dropout")
        assert states[0].eq(0).all() == (dropout == "dropout")  # embedding and position, summed
    assert model.eval()(**batch).last_hidden_state.ne(0).any()


@pytest.mark.parametrize(
    ("name", "function"),
    [("relu", F.relu), ("gelu", F.gelu), ("silu", F.silu), ("tanh", torch.tanh)],
)
def test_activation_function(name, function):
    model = tiny_model(TinyTFMModel, activation_function=name)
    for stack in (model.encoder, model.decoder):
        layer, x = stack.layers[1], torch.randn(2, 5, 32)
        close(layer.feed_forward(x), layer.fc2(function(layer.fc1(x))))


@pytest.mark.parametrize(("scale_embedding", "factor"), [(True, math.sqrt(32)), (False, 1.0)])
def test_scale_of_the_embeddings(scale_embedding, factor):
    model = tiny_model(TinyTFMModel, scale_embedding=scale_embedding)
    batch = batch_of("encoder-decoder", 7, 7)
    outputs = model(**batch, output_hidden_states=True)
    for states, ids in (
        (outputs.encoder_hidden_states, batch["input_ids"]),
        (outputs.decoder_hidden_states, batch["decoder_input_ids"]),
    ):
        positions = sinusoids(torch.arange(ids.shape[1]), 32)
        close(states[0], model.shared(ids) * factor + positions)


def test_each_stack_has_its_own_sizes():
    model = tiny_model(
        TinyTFMModel,
        encoder_layers=1,
        decoder_layers=3,
        encoder_ffn_dim=48,
        decoder_ffn_dim=80,
        encoder_attention_heads=2,
        decoder_attention_heads=8,
    )
    for stack, layers, ffn_dim, heads in ((model.encoder, 1, 48, 2), (model.decoder, 3, 80, 8)):
        assert len(stack.layers) == layers
        for layer in stack.layers:
            assert layer.fc1.weight.shape == (ffn_dim, 32)
            assert layer.fc2.weight.shape == (32, ffn_dim)
            assert layer.self_attn.num_heads == heads
            assert layer.self_attn.head_dim == 32 // heads
    assert all(layer.encoder_attn.num_heads == 8 for layer in model.decoder.layers)


@pytest.mark.parametrize("dropout", ["dropout", "attention_dropout", "activation_dropout"])
@both_implementations
def test_dropout_acts_in_training_only(dropout, attention):
    model = model_of("encoder-decoder", attention, **{dropout: 0.3})
    batch = batch_of("encoder-decoder", 7, 4)
    assert model(**batch).logits.equal(model(**batch).logits)
    model.train()
    first, second = (model(**batch).logits.detach() for _ in range(2))
    assert difference(first, second) > 1e-3


@pytest.mark.parametrize("p", [0.1, 0.3, 0.9])
def test_dropout_keeps_the_expected_value(p):
    x = torch.full((401, 1001), 2.0, requires_grad=True)
    y = drop(x, p)
    y.sum().backward()
    assert y.equal(x.detach() * x.grad)
    dropped = y == 0
    number = y.numel()
    assert abs(dropped.float().mean() - p) < 5 * math.sqrt(p * (1 - p) / number)
    close(y[~dropped], torch.full_like(y[~dropped], 2 / (1 - p)), 2**-15 / (1 - p))
    # One draw decides on four neighbours, each for itself.
    for lag in (1, 2, 3, 4, 1001):
        both = (dropped.flatten()[lag:] & dropped.flatten()[:-lag]).float().mean()
        assert abs(both - p * p) < 5 * p / math.sqrt(number)


@pytest.mark.parametrize("p", [2**-15, 2**-15 - 2**-17, 1 - 2**-16, 1 - 2**-17])
def test_dropout_rounds_to_multiples_of_a_sixteen_bit_number(p):
    dropped, number = drop(torch.ones(2**22), p) == 0, 2**22
    expected = math.floor(p * 2**16) / 2**16
    assert abs(expected - p) < 2**-15
    spread = math.sqrt(expected * (1 - expected) / number)
    assert abs(dropped.float().mean() - expected) < 5 * spread


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (3, 5, 9)])
def test_dropout_of_any_kind_follows_the_seed(shape, dtype):
    x = torch.randn(shape, dtype=dtype)
    torch.manual_seed(3)
    first = drop(x, 0.5)
    torch.manual_seed(3)
    assert first.equal(drop(x, 0.5))
    assert (first.dtype, first.shape) == (dtype, x.shape)
    assert (first.eq(0) | first.eq(2 * x)).all()
    if x.numel() > 100:
        assert not drop(x.mT, 0.5).equal(drop(x.mT, 0.5))


def test_dropout_at_its_ends():
    x = torch.randn(100)
    assert drop(x, 0.0) is x
    assert drop(x, 1.0).equal(torch.zeros(100))


@every_shape
@both_implementations
def test_training_and_evaluation_agree_without_dropout(shape, attention):
    model, batch = model_of(shape, attention), labelled_batch(shape, 7, 4)
    evaluated = model(**batch)
    trained = model.train()(**batch)
    close(trained.logits, evaluated.logits, 1e-6)
    close(trained.loss, evaluated.loss, 1e-6)


@every_shape
@both_norms
def test_eager_equals_sdpa(shape, norm_first):
    eager, fused = (model_of(shape, name, norm_first=norm_first) for name in ("eager", "sdpa"))
    fused.load_state_dict(eager.state_dict())
    batch = labelled_batch(shape, 7, 4, 1)
    outputs = [model(**batch) for model in (eager, fused)]
    close(outputs[0].logits, outputs[1].logits)
    close(outputs[0].loss, outputs[1].loss)
    eager_gradients, fused_gradients = (
        gradients(model, output.loss) for model, output in zip((eager, fused), outputs, strict=True)
    )
    for name, gradient in eager_gradients.items():
        close(fused_gradients[name], gradient)


@every_shape
@pytest.mark.parametrize("changes", [{}, {"dropout": 0.3, "attention_dropout": 0.0}])
def test_short_sequences_train_as_the_kernel_would(shape, changes, monkeypatch):
    model, batch = model_of(shape, **changes).train(), labelled_batch(shape, 7, 4)
    attention, found = dict(ATTENTION), []
    for spelled_out in (True, False):
        # Each in its turn is the only one that there is.
        name, other = ("eager", "sdpa") if spelled_out else ("sdpa", "eager")
        monkeypatch.setattr(
            modeling_tinytfm, "fused_trains_slower", lambda key, answer=spelled_out: answer
        )
        monkeypatch.setitem(ATTENTION, name, attention[name])
        monkeypatch.setitem(ATTENTION, other, None)
        torch.manual_seed(1)
        loss = model(**batch).loss
        found.append((loss, gradients(model, loss)))
    (loss, gradient), (expected_loss, expected) = found
    close(loss, expected_loss)
    for name in expected:
        close(gradient[name], expected[name])


def test_which_attention_trains_faster():
    assert fused_trains_slower(torch.empty(1, 1, 128, 8))
    assert not fused_trains_slower(torch.empty(1, 1, 129, 8))
    assert not fused_trains_slower(torch.empty(1, 1, 8, 8, device="meta"))


@every_shape
@both_implementations
def test_returning_weights_changes_nothing_else(shape, attention):
    model, batch = model_of(shape, attention), batch_of(shape, 7, 4)
    plain = model(**batch).logits
    close(model(**batch, output_attentions=True).logits, plain)
    close(model(**batch, output_hidden_states=True).logits, plain, 0)


def test_attention_implementation_can_be_changed_later():
    model = model_of("encoder-decoder", "sdpa")
    batch = batch_of("encoder-decoder", 7, 4)
    fused = model(**batch).logits
    model.set_attn_implementation("eager")
    assert model.config._attn_implementation == "eager"
    assert model.model.encoder.layers[0].self_attn.config._attn_implementation == "eager"
    close(model(**batch).logits, fused)


@every_shape
@both_implementations
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_stays_finite_and_near(shape, attention, dtype):
    model, batch = model_of(shape, attention), labelled_batch(shape, 7, 4)
    expected = model(**batch)
    outputs = model.to(dtype)(**batch)
    assert outputs.logits.dtype == dtype
    assert outputs.loss.dtype == torch.float32
    close(outputs.logits.float(), expected.logits, 0.1)
    close(outputs.loss, expected.loss, 0.05)
    assert all(gradient.isfinite().all() for gradient in gradients(model, outputs.loss).values())


@every_shape
@both_implementations
def test_autocast(shape, attention):
    model, batch = model_of(shape, attention), labelled_batch(shape, 7, 4)
    expected = model(**batch)
    with torch.autocast("cpu", torch.bfloat16):
        outputs = model(**batch)
    close(outputs.logits.float(), expected.logits, 0.1)
    close(outputs.loss, expected.loss, 0.05)
    assert all(gradient.isfinite().all() for gradient in gradients(model, outputs.loss).values())


@pytest.mark.parametrize("attend", [eager_attention, sdpa_attention])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scores_beyond_half_precision(attend, dtype):
    query, key, value = (torch.randn(2, 3, 6, 8) * scale for scale in (500, 500, 1))
    mask = torch.rand(2, 1, 6, 6) < 0.7
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    actual = attend(query, key, value, mask)[0]
    expected = eager_attention(query.double(), key.double(), value.double(), mask)[0]
    close(actual.double(), expected, 0.02)


def test_a_mask_is_not_lost_beside_causality():
    query, key, value = torch.randn(3, 1, 2, 4, 8)
    mask = torch.tensor([[True, True, False, True]])
    for attend in (eager_attention, sdpa_attention):
        with pytest.raises(ValueError, match=r"mask.*is_causal"):
            attend(query, key, value, mask, is_causal=True)


def test_a_layer_works_on_its_own():
    x, memory = torch.randn(2, 5, 32), torch.randn(2, 7, 32)
    output, weights = TinyTFMEncoderLayer(tiny_config())(x)
    assert (output.shape, weights) == (x.shape, None)
    output, *weights = TinyTFMDecoderLayer(tiny_config(), 0)(x, memory, output_attentions=True)
    assert output.shape == x.shape
    assert [tensor.shape for tensor in weights] == [(2, 4, 5, 5), (2, 4, 5, 7)]


# Masks


@both_implementations
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_b01_fully_masked_source(attention, dtype, training):
    model = model_of("encoder-decoder", attention).to(dtype).train(training)
    ids, target = token_ids(2, 7), token_ids(2, 5)
    mask = torch.tensor([[0] * 7, [1] * 7])
    outputs = model(ids, mask, decoder_input_ids=target)
    assert outputs.logits.isfinite().all()
    assert outputs.encoder_last_hidden_state.isfinite().all()
    alone = model(ids[1:], decoder_input_ids=target[1:]).logits
    close(outputs.logits[1:], alone, 1e-5 if dtype is torch.float32 else 2e-2)
    labels = target.clone()
    labels[0] = -100
    found = gradients(model, model(ids, mask, labels=labels).loss)
    assert all(gradient.isfinite().all() for gradient in found.values())
    # Garbage that nobody may look at stays without influence, and a loss on it without NaN, too.
    found = gradients(model, model(ids, mask, labels=target).loss)
    assert all(gradient.isfinite().all() for gradient in found.values())


@both_implementations
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@every_shape
def test_b01_fully_masked_row_of_each_shape(shape, attention, dtype):
    model = model_of(shape, attention).to(dtype)
    batch = labelled_batch(shape, 6, 6)
    name = "decoder_attention_mask" if shape == "encoder-decoder" else "attention_mask"
    width = batch["labels"].shape[-1] if shape == "encoder-decoder" else 6
    batch[name] = torch.tensor([[0] * width, [1] * width])
    outputs = model(**batch)
    assert outputs.logits.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in gradients(model, outputs.loss).values())
    alone = model(**{key: value[1:] for key, value in batch.items()}).logits
    close(outputs.logits[1:], alone, 1e-5 if dtype is torch.float32 else 2e-2)


def leaks(model, ids_name, batch, **options):
    """Positions t at which logits change if ids from t + 1 on do."""
    reference = model(**batch, **options).logits
    ids = batch[ids_name]
    found = []
    for t in range(1, ids.shape[1]):
        changed = ids.clone()
        changed[:, t:] = (changed[:, t:] - 3 + torch.randint(1, 47, changed[:, t:].shape)) % 47 + 3
        logits = model(**{**batch, ids_name: changed}, **options).logits
        assert not logits[:, t:].equal(reference[:, t:])
        if not logits[:, :t].equal(reference[:, :t]):
            found.append(t)
    return found


@every_shape
@both_implementations
def test_holes_in_a_mask_hide_what_stands_there(shape, attention):
    model, batch = model_of(shape, attention), batch_of(shape, 8, 8)
    batch["attention_mask"] = torch.tensor([[1, 0, 1, 1, 0, 0, 1, 1], [0, 1, 0, 1, 1, 1, 0, 0]])
    real = batch["attention_mask"].bool()
    ids = torch.where(real, batch["input_ids"], token_ids(2, 8))
    logits = model(**batch).logits
    changed = model(**{**batch, "input_ids": ids}).logits
    if shape == "decoder":
        logits, changed = logits[real], changed[real]
    assert changed.equal(logits)


@generating_shapes
@both_implementations
@pytest.mark.parametrize("scale", [1, 1e3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_b04_later_targets_do_not_leak(shape, attention, scale, dtype):
    model = model_of(shape, attention).to(dtype)
    enlarge_scores(model, scale)
    batch = batch_of(shape, 6, 6, 6)
    ids_name, mask_name = "decoder_input_ids", "decoder_attention_mask"
    if shape == "decoder":
        ids_name, mask_name = "input_ids", "attention_mask"
        del batch["attention_mask"]
    ids = batch[ids_name]
    masks = [None, torch.ones_like(ids), torch.ones_like(ids)]
    masks[2][0, 0] = 0  # a pad on the left
    for training, use_cache, output_attentions in itertools.product([False, True], repeat=3):
        model.train(training)
        for mask in masks:
            options = {"use_cache": use_cache, "output_attentions": output_attentions}
            assert not leaks(model, ids_name, {**batch, mask_name: mask}, **options)


def enlarge_scores(model, scale):
    """Makes scores far larger than any finite number that a mask might have added."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                parameter.mul_(scale)


@generating_shapes
@both_implementations
def test_b04_no_gradient_reaches_later_targets(shape, attention):
    model = model_of(shape, attention)
    embeds = torch.randn(2, 6, 32, requires_grad=True)
    if shape == "decoder":
        logits = model(inputs_embeds=embeds).logits
    else:
        logits = model(token_ids(2, 7), decoder_inputs_embeds=embeds).logits
    for t in range(6):
        (gradient,) = torch.autograd.grad(logits[:, t].sum(), embeds, retain_graph=True)
        assert gradient[:, t + 1 :].eq(0).all()
        assert gradient[:, : t + 1].ne(0).any(dim=-1).all()


@both_implementations
@pytest.mark.parametrize("scale", [1, 1e3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_b04_padded_source_keys_do_not_leak(attention, scale, dtype):
    model = model_of("encoder-decoder", attention).to(dtype)
    enlarge_scores(model, scale)
    batch = batch_of("encoder-decoder", 7, 4, 1)
    hidden = batch["attention_mask"] == 0
    for training, output_attentions in itertools.product([False, True], repeat=2):
        model.train(training)
        reference = model(**batch, output_attentions=output_attentions)
        ids = torch.where(hidden, token_ids(3, 7), batch["input_ids"])
        outputs = model(**{**batch, "input_ids": ids}, output_attentions=output_attentions)
        assert outputs.logits.equal(reference.logits)
        real = ~hidden
        states, expected = (x.encoder_last_hidden_state[real] for x in (outputs, reference))
        assert states.equal(expected)


@both_implementations
def test_b04_no_gradient_reaches_padded_sources(attention):
    model = model_of("encoder-decoder", attention)
    embeds = torch.randn(2, 6, 32, requires_grad=True)
    mask = right_padded(6, 4)
    logits = model(
        inputs_embeds=embeds, attention_mask=mask, decoder_input_ids=token_ids(2, 4)
    ).logits
    (gradient,) = torch.autograd.grad(logits.sum(), embeds)
    assert gradient[1, 4:].eq(0).all()
    assert gradient[mask.bool()].ne(0).any(dim=-1).all()


def unpadded(batch, row, real):
    """One row of a batch, without its padding."""
    single = {name: value[row : row + 1] for name, value in batch.items()}
    single["input_ids"] = single["input_ids"][:, real]
    del single["attention_mask"]
    return single


@every_shape
@both_implementations
@both_norms
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["sinusoidal", "learned"])
def test_padding_garbage_and_batch_change_nothing(shape, attention, norm_first, side, kind):
    model = model_of(shape, attention, norm_first=norm_first, position_embedding_type=kind)
    batch = batch_of(shape, 7, 4, 1, 6)
    if side == "left":
        batch["input_ids"] = batch["input_ids"].flip(1)
        batch["attention_mask"] = batch["attention_mask"].flip(1)
    real = batch["attention_mask"].bool()
    logits = model(**batch).logits

    garbage = torch.where(real, batch["input_ids"], token_ids(4, 7))
    with_garbage = model(**{**batch, "input_ids": garbage}).logits
    order = torch.randperm(4)
    shuffled = model(**{name: value[order] for name, value in batch.items()}).logits
    if shape == "decoder":
        # The padding's own logits are nobody's.
        close(with_garbage[real], logits[real])
        close(shuffled[real[order]], logits[order][real[order]])
    else:
        close(with_garbage, logits)
        close(shuffled, logits[order])
    for row in range(4):
        expected = model(**unpadded(batch, row, real[row])).logits[0]
        close(logits[row][real[row]] if shape == "decoder" else logits[row], expected)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["sinusoidal", "learned"])
def test_target_padding_changes_nothing(side, kind):
    model = model_of("encoder-decoder", position_embedding_type=kind)
    ids, target, mask = token_ids(3, 6), token_ids(3, 5), right_padded(5, 2, 4)
    if side == "left":
        mask = mask.flip(1)
    logits = model(ids, decoder_input_ids=target, decoder_attention_mask=mask).logits
    for row, real in enumerate(mask.bool()):
        alone = model(ids[row : row + 1], decoder_input_ids=target[row : row + 1, real]).logits
        close(logits[row, real], alone[0])


def test_padding_on_the_right_of_targets_needs_no_mask():
    model = model_of("encoder-decoder")
    ids, target = token_ids(2, 6), token_ids(2, 5)
    target[1, 3:] = PAD
    mask = right_padded(5, 3)
    masked = model(ids, decoder_input_ids=target, decoder_attention_mask=mask).logits
    unmasked = model(ids, decoder_input_ids=target).logits
    close(unmasked[mask.bool()], masked[mask.bool()])


@pytest.mark.parametrize("num_beams", [1, 4])
def test_padding_changes_no_token(reverser, num_beams):
    batch = reversal_batch(6, torch.Generator().manual_seed(1))
    ids, mask = batch["input_ids"], batch["attention_mask"].bool()
    settings = {"num_beams": num_beams, "max_new_tokens": 14}
    expected = []
    for row in range(6):
        (tokens,) = reverser.generate(ids[row : row + 1, mask[row]], **settings).tolist()
        expected.append(tokens)
    assert len({tuple(tokens) for tokens in expected}) == 6
    left = torch.stack(
        [torch.cat((row[~real], row[real])) for row, real in zip(ids, mask, strict=True)]
    )
    left_mask = mask.sort(dim=1, stable=True).values
    variants = [
        (ids, mask),
        (torch.where(mask, ids, token_ids(*ids.shape)), mask),
        (torch.where(left_mask, left, token_ids(*ids.shape)), left_mask),
    ]
    for padded, variant_mask in variants:
        tokens = reverser.generate(padded, attention_mask=variant_mask.long(), **settings)
        for row, single in zip(tokens.tolist(), expected, strict=True):
            assert row[: len(single)] == single
            assert set(row[len(single) :]) <= {PAD}


def test_left_padded_prompts_of_a_decoder_give_the_same_tokens():
    model = model_of("decoder")
    mask = right_padded(6, 2, 5).flip(1)
    ids = token_ids(3, 6)
    settings = {"max_new_tokens": 8, "min_new_tokens": 8}
    tokens = model.generate(ids, attention_mask=mask, **settings)[:, 6:]
    for row, real in enumerate(mask.bool()):
        alone = model.generate(
            ids[row : row + 1, real], attention_mask=mask[row : row + 1, real], **settings
        )
        assert alone[0, int(real.sum()) :].equal(tokens[row])


@every_shape
@both_implementations
@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.uint8, torch.float32, torch.half])
def test_masks_of_all_types_mean_the_same(shape, attention, dtype):
    model, batch = model_of(shape, attention), batch_of(shape, 7, 4)
    if shape == "encoder-decoder":
        batch["decoder_attention_mask"] = right_padded(3, 5)
    expected = model(**batch).logits
    converted = {
        name: value.to(dtype) if name.endswith("mask") else value for name, value in batch.items()
    }
    assert model(**converted).logits.equal(expected)


@every_shape
def test_a_mask_of_ones_is_no_mask(shape):
    model, batch = model_of(shape), batch_of(shape, 6, 6)
    masked = model(**batch).logits
    del batch["attention_mask"]
    assert model(**batch).logits.equal(masked)


@every_shape
@pytest.mark.parametrize("shape_of_mask", [(2, 6), (2, 8), (1, 7), (3, 7), (7,), (2, 1, 1, 7)])
def test_a_mask_of_the_wrong_shape_is_refused(shape, shape_of_mask):
    model, batch = model_of(shape), batch_of(shape, 7, 4)
    batch["attention_mask"] = torch.ones(shape_of_mask, dtype=torch.long)
    with pytest.raises(ValueError, match=r"^attention_mask .*\(2, 7\)"):
        model(**batch)


@pytest.mark.parametrize("shape_of_mask", [(2, 4), (2, 6), (1, 5), (5,), (2, 1, 5, 5)])
def test_a_target_mask_of_the_wrong_shape_is_refused(shape_of_mask):
    model, batch = model_of("encoder-decoder"), batch_of("encoder-decoder", 7, 4)
    with pytest.raises(ValueError, match=r"decoder_attention_mask .*\(2, 5\)"):
        model(**batch, decoder_attention_mask=torch.ones(shape_of_mask))


@generating_shapes
def test_a_mask_of_new_tokens_only_is_refused_beside_a_cache(shape):
    model, batch = model_of(shape), batch_of(shape, 6, 6)
    name = "attention_mask" if shape == "decoder" else "decoder_attention_mask"
    first = model(**batch, use_cache=True)
    batch["input_ids" if shape == "decoder" else "decoder_input_ids"] = token_ids(2, 2)
    past = 6 if shape == "decoder" else 5
    with pytest.raises(ValueError, match=rf"{name} has shape \(2, 2\).*\(2, {past + 2}\)"):
        model(**{**batch, name: torch.ones(2, 2)}, cache=cache_of(first))


def cache_of(outputs):
    """The cache, whatever this version of transformers calls it."""
    return outputs.get("cache", outputs.get("past_key_values"))


@pytest.mark.parametrize("holder", ["attention_mask", "decoder_attention_mask"])
@pytest.mark.parametrize("value", [-1.0, -1e9, -math.inf, math.nan, 2.0])
def test_a_mask_holds_zeros_and_ones(holder, value):
    model, batch = model_of("encoder-decoder"), batch_of("encoder-decoder", 7, 4)
    mask = torch.ones(2, 7 if holder == "attention_mask" else 5)
    mask[1, -1] = value
    with pytest.raises(ValueError, match=f"^{holder}"):
        model(**{**batch, holder: mask})


# Positions


@pytest.mark.parametrize("kind", ["sinusoidal", "learned"])
def test_b06_the_pad_id_leaves_no_hole_among_positions(kind):
    vectors = []
    for pad in (0, 1, 3, 49):
        torch.manual_seed(0)
        model = TinyTFMModel(tiny_config(pad_token_id=pad, position_embedding_type=kind))
        for stack in (model.encoder, model.decoder):
            vectors.append(stack.embed_positions(torch.arange(11), 11))
    assert all(vector.ne(0).any(dim=-1).all() for vector in vectors)
    for vector in vectors[2:]:
        assert vector.equal(vectors[0]) or vector.equal(vectors[1])


@pytest.mark.parametrize("d_model", [32, 512])
@pytest.mark.parametrize("rows", [16, 5001])
def test_b06_frequencies(d_model, rows):
    config = tiny_config(d_model=d_model, max_position_embeddings=rows, **ENCODER)
    positions = torch.arange(5001)
    actual = TinyTFMModel(config).encoder.embed_positions(positions, 5001)
    exponents = torch.arange(0, d_model, 2, dtype=torch.float64) / d_model
    angles = positions.double()[:, None] / torch.tensor(10000.0, dtype=torch.float64) ** exponents
    assert difference(actual[:513, 0::2], angles[:513].sin()) <= 2e-5
    assert difference(actual[:513, 1::2], angles[:513].cos()) <= 2e-5
    assert difference(actual[:, 0::2], angles.sin()) <= 1e-3
    assert difference(actual[:, 1::2], angles.cos()) <= 1e-3


def with_table_of(model, rows):
    """The same weights in a config with another number of positions."""
    config = copy.deepcopy(model.config)
    config.max_position_embeddings = rows
    other = type(model)(config)
    other.load_state_dict(model.state_dict())
    return other.eval()


@every_shape
@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_b07_sinusoidal_positions_continue(shape, side):
    short = model_of(shape, max_position_embeddings=16)
    long = with_table_of(short, 64)
    batch = batch_of(shape, 48, 48 if side == "none" else 20)
    if side == "left":
        batch["attention_mask"] = batch["attention_mask"].flip(1)
    if shape == "encoder-decoder":
        batch["decoder_input_ids"] = token_ids(2, 48)
    close(short(**batch).logits, long(**batch).logits, 1e-6)


@generating_shapes
@pytest.mark.parametrize("num_beams", [1, 4])
def test_b07_generation_beyond_the_table(shape, num_beams):
    short = model_of(shape, max_position_embeddings=16)
    long = with_table_of(short, 64)
    ids = token_ids(2, 10)
    settings = {"max_new_tokens": 40, "min_new_tokens": 40, "num_beams": num_beams}
    tokens = short.generate(ids, **settings)
    assert tokens.equal(long.generate(ids, **settings))
    assert tokens.shape[1] == 40 + (10 if shape == "decoder" else 1)


@every_shape
def test_b07_learned_positions_name_limit_and_length(shape):
    model = model_of(shape, max_position_embeddings=16, position_embedding_type="learned")
    batch = batch_of(shape, 16, 3)
    model(**batch)
    with pytest.raises(ValueError, match=r"17 .*max_position_embeddings=16"):
        model(token_ids(2, 17), **{k: v for k, v in batch.items() if k.startswith("decoder")})
    if shape == "encoder-decoder":
        model(token_ids(2, 5), decoder_input_ids=token_ids(2, 16))
        with pytest.raises(ValueError, match=r"48 .*max_position_embeddings=16"):
            model(token_ids(2, 5), decoder_input_ids=token_ids(2, 48))


@generating_shapes
def test_b07_generation_names_the_limit_of_learned_positions(shape):
    model = model_of(shape, max_position_embeddings=16, position_embedding_type="learned")
    ids = token_ids(2, 5)
    with pytest.raises(ValueError, match=r"17 .*max_position_embeddings=16"):
        model.generate(ids, max_new_tokens=40, min_new_tokens=40)


# Loss


def test_b14_embeddings_stand_for_ids():
    model = model_of("encoder-decoder")
    embeddings = model.get_input_embeddings()
    batch = batch_of("encoder-decoder", 7, 4)
    ids, mask, target = batch.values()
    expected = model(**batch).logits
    embedded = model(
        inputs_embeds=embeddings(ids), attention_mask=mask, decoder_inputs_embeds=embeddings(target)
    ).logits
    close(embedded, expected, 1e-6)


@pytest.mark.parametrize("scale_embedding", [True, False])
@pytest.mark.parametrize("num_beams", [1, 4])
@generating_shapes
def test_b14_generation_from_embeddings(shape, scale_embedding, num_beams):
    model = model_of(shape, scale_embedding=scale_embedding)
    ids, mask = token_ids(2, 7), right_padded(7, 4)
    if shape == "decoder":
        mask = mask.flip(1)
    settings = {"attention_mask": mask, "num_beams": num_beams, "max_new_tokens": 8}
    tokens = model.generate(ids, **settings)
    embeds = model.get_input_embeddings()(ids)
    embedded = model.generate(inputs_embeds=embeds, **settings)
    assert embedded.equal(tokens[:, 7:] if shape == "decoder" else tokens)


@pytest.mark.parametrize("shape", ["decoder", "encoder"])
def test_b14_embeddings_stand_for_ids_in_the_relatives(shape):
    model, batch = model_of(shape), labelled_batch(shape, 7, 4)
    expected = model(**batch)
    embeds = model.get_input_embeddings()(batch.pop("input_ids"))
    outputs = model(inputs_embeds=embeds, **batch)
    close(outputs.logits, expected.logits, 1e-6)
    close(outputs.loss, expected.loss, 1e-6)


def test_b14_labels_beside_embedded_targets():
    model, batch = model_of("encoder-decoder"), labelled_batch("encoder-decoder", 7, 4)
    expected = model(**batch)
    shifted = model.prepare_decoder_input_ids_from_labels(batch["labels"])
    embeds = model.get_input_embeddings()(shifted).detach().requires_grad_()
    outputs = model(**batch, decoder_inputs_embeds=embeds)
    close(outputs.loss, expected.loss, 1e-6)
    (gradient,) = torch.autograd.grad(outputs.loss, embeds)
    assert gradient.ne(0).any()


def test_b14_labels_beside_given_targets():
    model, batch = model_of("encoder-decoder"), labelled_batch("encoder-decoder", 7, 4)
    given = token_ids(2, 5)
    outputs = model(**batch, decoder_input_ids=given)
    expected = model(batch["input_ids"], batch["attention_mask"], decoder_input_ids=given)
    assert outputs.logits.equal(expected.logits)


def test_b15_labels_are_shifted_and_left_alone():
    model = model_of("encoder-decoder", decoder_start_token_id=4)
    labels = torch.tensor([[5, 6, EOS], [7, EOS, -100]])
    before = labels.clone()
    shifted = model.prepare_decoder_input_ids_from_labels(labels)
    assert shifted.tolist() == [[4, 5, 6], [4, 7, EOS]]
    longer = torch.tensor([[7, EOS, -100, -100]])
    assert model.prepare_decoder_input_ids_from_labels(longer).tolist() == [[4, 7, EOS, PAD]]
    ids = token_ids(2, 6)
    outputs = model(ids, labels=labels)
    assert labels.equal(before)
    assert outputs.logits.equal(model(ids, decoder_input_ids=shifted).logits)


def test_b15_a_start_token_that_is_the_padding_is_attended():
    model = model_of("encoder-decoder", decoder_start_token_id=PAD)
    ids, labels = token_ids(2, 6), token_ids(2, 4)
    outputs = model(ids, labels=labels)
    assert outputs.loss.isfinite()
    embeds = model.get_input_embeddings()(model.prepare_decoder_input_ids_from_labels(labels))
    noisy = embeds.clone()
    noisy[:, 0] += torch.randn(2, 32)
    logits = [model(ids, decoder_inputs_embeds=x).logits for x in (embeds, noisy)]
    assert logits[0].equal(outputs.logits)
    assert difference(logits[0][:, 1], logits[1][:, 1]) > 1e-3


@pytest.mark.parametrize("missing", ["decoder_start_token_id", "pad_token_id"])
def test_b15_what_shifting_needs_is_named(missing):
    model = model_of("encoder-decoder", **{missing: None})
    with pytest.raises(ValueError, match=missing):
        model(token_ids(1, 5), labels=token_ids(1, 4))


def test_b16_loss_is_cross_entropy_of_the_models_own_logits():
    model, batch = model_of("encoder-decoder"), labelled_batch("encoder-decoder", 7, 4)
    outputs = model(**batch)
    labels = batch["labels"]
    expected = F.cross_entropy(outputs.logits.view(-1, 50), labels.view(-1), ignore_index=-100)
    close(outputs.loss, expected, 1e-6)


def test_b16_an_overfitted_pair_comes_back_from_its_first_token():
    model = TinyTFMForConditionalGeneration(tiny_config()).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    ids, labels = token_ids(1, 6), torch.tensor([[17, 5, 5, 41, 8, EOS]])
    loss = torch.tensor(1.0)
    for _ in range(200):
        if loss < 1e-3:
            break
        loss = model(ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 1e-3
    tokens = model.eval().generate(ids, max_new_tokens=10)
    assert tokens.tolist() == [[START, *labels[0].tolist()]]


@every_shape
def test_b16_no_label_at_all_gives_zero(shape):
    model, batch = model_of(shape).train(), labelled_batch(shape, 7, 4)
    batch["labels"] = torch.full_like(batch["labels"], -100)
    outputs = model(**batch)
    assert outputs.loss == 0.0
    assert all(gradient.eq(0).all() for gradient in gradients(model, outputs.loss).values())
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_the_loss_ignores_padding_and_counts_tokens_not_rows():
    model, batch = model_of("encoder-decoder"), labelled_batch("encoder-decoder", 7, 4)
    loss = model(**batch).loss
    wider = {
        "input_ids": F.pad(batch["input_ids"], (0, 7), value=PAD),
        "attention_mask": F.pad(batch["attention_mask"], (0, 7)),
        "labels": F.pad(batch["labels"], (0, 5), value=-100),
    }
    close(model(**wider).loss, loss, 1e-6)
    rows = [model(**{k: v[i : i + 1] for k, v in batch.items()}).loss for i in range(2)]
    close(loss, (3 * rows[0] + 5 * rows[1]) / 8, 1e-6)


@every_shape
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_logits_are_always_all_there(shape, training):
    model, batch = model_of(shape).train(training), labelled_batch(shape, 7, 4)
    expected = {"encoder-decoder": (2, 5, 50), "decoder": (2, 7, 50), "encoder": (2, 2)}[shape]
    outputs = model(**batch)
    assert outputs.logits.shape == expected
    assert outputs.loss.shape == ()


@every_shape
@pytest.mark.parametrize("as_tensor", [False, True])
def test_num_items_in_batch_divides_the_sum(shape, as_tensor):
    model, batch = model_of(shape), labelled_batch(shape, 7, 4)
    labels = batch["labels"][:, 1:] if shape == "decoder" else batch["labels"]
    count = int((labels != -100).sum())
    number = torch.tensor(40) if as_tensor else 40
    outputs = model(**batch, num_items_in_batch=number)
    close(outputs.loss, model(**batch).loss * count / 40, 1e-6)


@every_shape
def test_accumulated_gradients_are_those_of_the_whole_batch(shape):
    model, batch = model_of(shape), labelled_batch(shape, 7, 4, 6, 2)
    labels = batch["labels"][:, 1:] if shape == "decoder" else batch["labels"]
    whole = gradients(model, model(**batch).loss)
    parts = [
        model(
            **{name: value[i : i + 1] for name, value in batch.items()},
            num_items_in_batch=(labels != -100).sum(),
        ).loss
        for i in range(4)
    ]
    for name, gradient in gradients(model, sum(parts)).items():
        close(gradient, whole[name])


def as_rows(batch):
    return [{name: value[i] for name, value in batch.items()} for i in range(len(batch["labels"]))]


@every_shape
def test_the_stock_trainer_accumulates_the_same_gradient(shape, tmp_path):
    batch = labelled_batch(shape, 7, 4, 6, 2)
    results = []
    for accumulation in (1, 4):
        torch.manual_seed(0)
        model = model_of(shape)
        before = {name: value.clone() for name, value in model.named_parameters()}
        expected = gradients(model, model(**batch).loss)
        arguments = TrainingArguments(
            str(tmp_path),
            per_device_train_batch_size=4 // accumulation,
            gradient_accumulation_steps=accumulation,
            max_steps=1,
            optim="sgd",
            learning_rate=1.0,
            lr_scheduler_type="constant",
            max_grad_norm=0,
            logging_steps=1,
            save_strategy="no",
            use_cpu=True,
            dataloader_pin_memory=False,
            disable_tqdm=True,
        )
        trainer = Trainer(model, arguments, train_dataset=as_rows(batch))
        trainer.train()
        for name, value in model.named_parameters():
            close(before[name] - value, expected[name], 1e-4)
        results.append(trainer.state.log_history[0]["loss"])
    assert results[0] == pytest.approx(results[1], abs=1e-4)


def test_b16_the_stock_trainer_smooths_the_labels_of_next_tokens(tmp_path):
    model = model_of("decoder").eval()
    ids = token_ids(2, 9)
    arguments = TrainingArguments(str(tmp_path), label_smoothing_factor=0.1, use_cpu=True)
    loss = Trainer(model, arguments).compute_loss(model, {"input_ids": ids, "labels": ids})
    logits = model(ids).logits[:, :-1].flatten(0, 1)
    close(loss, F.cross_entropy(logits, ids[:, 1:].flatten(), label_smoothing=0.1))


LABEL_ERRORS = {
    "too high": (torch.full((2, 5), 50), r"labels .*50"),
    "negative": (torch.full((2, 5), -1), r"labels .*-1"),
    "float": (torch.rand(2, 5), r"labels .*torch.float32"),
    "flat": (torch.full((5,), 3), r"labels .*\(5,\)"),
    "deep": (torch.full((2, 5, 1), 3), r"labels .*\(2, 5, 1\)"),
}


@pytest.mark.parametrize(("labels", "message"), LABEL_ERRORS.values(), ids=LABEL_ERRORS)
@generating_shapes
def test_label_errors(shape, labels, message):
    model = model_of(shape)
    inputs = token_ids(2, 5)
    with pytest.raises(ValueError, match=f"^{message}"):
        model(inputs, labels=labels)


@pytest.mark.parametrize("length", [4, 6])
def test_labels_of_another_length(length):
    with pytest.raises(ValueError, match=rf"^labels .*\(2, {length}\).*\(2, 5\)"):
        model_of("decoder")(token_ids(2, 5), labels=token_ids(2, length))
    batch = batch_of("encoder-decoder", 7, 4)
    with pytest.raises(ValueError, match=rf"^labels .*\(2, {length}\).*\(2, 5\)"):
        model_of("encoder-decoder")(**batch, labels=token_ids(2, length))


@every_shape
def test_ids_and_labels_of_32_bits(shape):
    model, batch = model_of(shape), labelled_batch(shape, 7, 4)
    expected = model(**batch).loss
    close(model(**{name: value.int() for name, value in batch.items()}).loss, expected, 0)


def test_token_loss_in_half_precision_is_computed_in_single():
    logits, labels = torch.randn(2, 5, 50) * 20, token_ids(2, 5)
    expected = F.cross_entropy(logits.half().double().flatten(0, 1), labels.flatten())
    close(token_loss(logits.half(), labels).double(), expected, 1e-5)


def test_causal_lm_scores_each_label_one_step_earlier():
    model = model_of("decoder")
    ids = token_ids(2, 6)
    outputs = model(ids, labels=ids)
    expected = F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    close(outputs.loss, expected, 1e-6)
    # The first label is nobody's prediction.
    other = ids.clone()
    other[:, 0] = token_ids(2)
    assert model(ids, labels=other).loss.equal(outputs.loss)
    assert model(ids[:, :1], labels=ids[:, :1]).loss == 0


# Classification


def test_masked_mean_pooling():
    model, batch = model_of("encoder"), batch_of("encoder", 7, 4, 1)
    hidden = model.model(batch["input_ids"], batch["attention_mask"]).last_hidden_state
    lengths = batch["attention_mask"].sum(dim=1).tolist()
    pooled = torch.stack([hidden[row, :length].mean(dim=0) for row, length in enumerate(lengths)])
    close(model(**batch).logits, model.classifier(pooled))


PROBLEMS = [
    # problem_type, num_labels, labels, reference
    ("single_label_classification", 3, torch.tensor([2, 0]), F.cross_entropy),
    (None, 3, torch.tensor([2, 0]), F.cross_entropy),
    (None, 3, torch.tensor([[2], [0]]), lambda x, y: F.cross_entropy(x, y[:, 0])),
    ("multi_label_classification", 3, torch.tensor([[1.0, 0, 1], [0, 0, 1]]), None),
    ("multi_label_classification", 3, torch.tensor([[1, 0, 1], [0, 0, 1]]), None),
    (None, 3, torch.tensor([[1.0, 0, 1], [0, 0, 1]]), None),
    ("regression", 1, torch.tensor([0.3, -2.0]), lambda x, y: F.mse_loss(x[:, 0], y)),
    (None, 1, torch.tensor([0.3, -100.0]), lambda x, y: F.mse_loss(x[:, 0], y)),
    (None, 1, torch.tensor([3, -2]), lambda x, y: F.mse_loss(x[:, 0], y.float())),
    ("regression", 3, torch.tensor([[0.3, -2.0, -100.0], [1, 2, 3]]), F.mse_loss),
]


@pytest.mark.parametrize(("problem", "num_labels", "labels", "reference"), PROBLEMS)
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_problem_types(problem, num_labels, labels, reference, training):
    model = model_of("encoder", num_labels=num_labels, problem_type=problem).train(training)
    before = labels.clone()
    outputs = model(**batch_of("encoder", 7, 4), labels=labels)
    if reference is None:
        expected = F.binary_cross_entropy_with_logits(outputs.logits, labels.float())
    else:
        expected = reference(outputs.logits, labels)
    close(outputs.loss, expected)
    assert labels.equal(before)
    assert model.config.problem_type == problem


@pytest.mark.parametrize("problem", ["regression", "multi_label_classification"])
def test_losses_in_half_precision_are_computed_in_single(problem):
    model = model_of("encoder", num_labels=3, problem_type=problem).half()
    labels = torch.tensor([[400.0, -1.0, 0.0], [0.0, 1.0, 300.0]])
    if problem != "regression":
        labels = labels.clamp(0, 1)
    outputs = model(**batch_of("encoder", 7, 4), labels=labels)
    criterion = F.mse_loss if problem == "regression" else F.binary_cross_entropy_with_logits
    assert outputs.loss.dtype == torch.float32
    close(outputs.loss, criterion(outputs.logits.float(), labels))


@pytest.mark.parametrize(
    ("problem", "num_labels", "labels", "message"),
    [
        (None, 3, torch.tensor([3, 0]), r"labels .*3.*num_labels=3"),
        (None, 3, torch.tensor([-1, 0]), r"labels .*-1.*num_labels=3"),
        (None, 3, torch.tensor([1, 0, 2]), r"labels .*\(3"),
        (None, 3, torch.tensor([1.0, 0.0]), r"labels .*\(2,\)"),
        ("single_label_classification", 3, torch.tensor([0.0, 1.0]), "labels .*float32"),
        ("multi_label_classification", 3, torch.tensor([1, 0]), r"labels .*\(2,\)"),
        ("multi_label_classification", 3, torch.ones(3, 2), r"labels .*\(3, 2\)"),
        ("regression", 1, torch.tensor([1.0, 0.0, 1.0]), r"labels .*\(3,\)"),
    ],
)
def test_class_label_errors(problem, num_labels, labels, message):
    model = model_of("encoder", num_labels=num_labels, problem_type=problem)
    with pytest.raises(ValueError, match=f"^{message}"):
        model(token_ids(2, 5), labels=labels)


# Continuous inputs


def test_features_are_projected_and_not_scaled():
    model = model_of("encoder", input_feature_size=6)
    features = torch.randn(2, 7, 6)
    outputs = model(input_features=features, output_hidden_states=True)
    expected = model.model.encoder.feature_projection(features) + sinusoids(torch.arange(7), 32)
    close(outputs.hidden_states[0], expected)
    assert model.main_input_name == "input_features"
    embeds = model.get_input_embeddings()(features)
    close(model(inputs_embeds=embeds).logits, outputs.logits)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("shape", ["encoder", "encoder-decoder"])
def test_padded_features_change_nothing(shape, side):
    model = model_of(shape, input_feature_size=6)
    mask = right_padded(7, 4)
    if side == "left":
        mask = mask.flip(1)
    real = mask[1].bool()
    features = torch.randn(2, 7, 6)
    features[1, ~real] *= 1e4
    target = {"decoder_input_ids": token_ids(2, 5)} if shape == "encoder-decoder" else {}
    logits = model(input_features=features, attention_mask=mask, **target).logits
    target = {name: value[1:] for name, value in target.items()}
    close(logits[1:], model(input_features=features[1:, real], **target).logits)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"input_ids": token_ids(2, 7)}, "input_ids"),
        ({"input_features": torch.randn(2, 7, 5)}, r"^input_features .*6.*\(2, 7, 5\)"),
        ({"input_features": torch.randn(7, 6)}, r"input_features .*\(7, 6\)"),
        (
            {"input_features": torch.randn(2, 7, 6), "inputs_embeds": torch.randn(2, 7, 32)},
            "input_features and inputs_embeds",
        ),
        ({}, "input_features and inputs_embeds"),
        (
            {"input_features": torch.randn(2, 7, 6), "attention_mask": torch.ones(2, 6)},
            r"attention_mask .*\(2, 6\).*\(2, 7\)",
        ),
    ],
)
@pytest.mark.parametrize("shape", ["encoder", "encoder-decoder"])
def test_feature_errors(shape, inputs, message):
    model = model_of(shape, input_feature_size=6)
    target = {"decoder_input_ids": token_ids(2, 5)} if shape == "encoder-decoder" else {}
    with pytest.raises(ValueError, match=message):
        model(**inputs, **target)


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("tie", [True, False])
def test_features_to_text(tmp_path, share, tie):
    model = model_of(
        "encoder-decoder",
        input_feature_size=6,
        share_encoder_decoder_embeddings=share,
        tie_word_embeddings=tie,
    )
    features, labels = torch.randn(2, 7, 6), token_ids(2, 5)
    outputs = model.train()(
        input_features=features, attention_mask=right_padded(7, 4), labels=labels
    )
    found = gradients(model, outputs.loss)
    assert all(gradient is not None for gradient in found.values())
    assert found["model.encoder.feature_projection.weight"].ne(0).any()
    tokens = model.eval().generate(
        input_features=features, attention_mask=right_padded(7, 4), max_new_tokens=6, num_beams=3
    )
    alone = model.generate(input_features=features[1:, :4], max_new_tokens=6, num_beams=3)
    assert tokens[1, : alone.shape[1]].equal(alone[0])
    model.save_pretrained(tmp_path)
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert loaded.generate(input_features=features[1:, :4], max_new_tokens=6, num_beams=3).equal(
        alone
    )


# Outputs


@every_shape
@pytest.mark.parametrize("how", ["argument", "config"])
def test_hidden_states_and_attentions(shape, how):
    layers = {"encoder_layers": 2, "decoder_layers": 3}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 8}
    # transformers allows the config to ask for weights where the implementation returns them.
    attention = "eager" if how == "config" else "sdpa"
    model, batch = model_of(shape, attention, **layers, **heads), batch_of(shape, 7, 4)
    options = {"output_hidden_states": True, "output_attentions": True}
    if how == "config":
        for name, value in options.items():
            setattr(model.config, name, value)
        options = {}
    outputs = model(**batch, **options)
    source, target = {"hidden": (2, 7, 32), "self": (2, 2, 7, 7)}, {}
    if shape == "encoder-decoder":
        target = {"hidden": (2, 5, 32), "self": (2, 8, 5, 5), "cross": (2, 8, 5, 7)}
        found = [
            (outputs.encoder_hidden_states, 3, source["hidden"]),
            (outputs.encoder_attentions, 2, source["self"]),
            (outputs.decoder_hidden_states, 4, target["hidden"]),
            (outputs.decoder_attentions, 3, target["self"]),
            (outputs.cross_attentions, 3, target["cross"]),
        ]
        assert outputs.encoder_hidden_states[-1] is outputs.encoder_last_hidden_state
    elif shape == "decoder":
        found = [
            (outputs.hidden_states, 4, source["hidden"]),
            (outputs.attentions, 3, (2, 8, 7, 7)),
        ]
        close(model.lm_head(outputs.hidden_states[-1]), outputs.logits, 0)
    else:
        found = [
            (outputs.hidden_states, 3, source["hidden"]),
            (outputs.attentions, 2, source["self"]),
        ]
    for tensors, number, shape_of_each in found:
        assert isinstance(tensors, tuple)
        assert [tuple(tensor.shape) for tensor in tensors] == [shape_of_each] * number
    for tensors, _, shape_of_each in found:
        if len(shape_of_each) == 4:
            for weights in tensors:
                close(weights.sum(dim=-1), torch.ones(shape_of_each[:3]))


def test_returned_weights_are_those_before_dropout():
    model = model_of("encoder", "eager", attention_dropout=0.5).train()
    for weights in model(token_ids(2, 6), output_attentions=True).attentions:
        close(weights.sum(dim=-1), torch.ones(2, 4, 6))


@generating_shapes
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_a_cache_is_returned_where_it_is_of_use(shape, training):
    model, batch = model_of(shape).train(training), batch_of(shape, 7, 4)
    assert (cache_of(model(**batch)) is None) == training
    assert cache_of(model(**batch, use_cache=True)) is not None
    assert cache_of(model(**batch, use_cache=False)) is None
    labelled = labelled_batch(shape, 7, 4)
    assert cache_of(model(**labelled)) is None
    assert cache_of(model(**labelled, use_cache=True)) is not None
    model.config.use_cache = False
    assert cache_of(model(**batch)) is None


def test_parts_that_other_tools_ask_for():
    model = model_of("encoder-decoder")
    assert model.get_encoder() is model.model.encoder
    assert model.get_decoder() is model.model.decoder
    assert model.get_output_embeddings() is model.lm_head
    assert model.get_input_embeddings() is model.model.shared
    assert model.base_model is model.model


@every_shape
def test_nothing_is_returned_unasked(shape):
    outputs = model_of(shape, use_cache=False)(**batch_of(shape, 7, 4))
    expected = {"logits"} | ({"encoder_last_hidden_state"} if shape == "encoder-decoder" else set())
    assert set(outputs.keys()) == expected


@both_norms
def test_hidden_states_are_those_of_the_layers(norm_first):
    model = tiny_model(TinyTFMModel, norm_first=norm_first, **ENCODER)
    states = model(token_ids(2, 5), output_hidden_states=True).hidden_states
    first, second = model.encoder.layers
    close(states[1], first(states[0])[0], 0)
    last = second(states[1])[0]
    close(states[2], model.encoder.layer_norm(last) if norm_first else last, 0)


@every_shape
@pytest.mark.parametrize("how", ["argument", "config"])
def test_tuples(shape, how):
    model, batch = model_of(shape), labelled_batch(shape, 7, 4)
    options = {"output_hidden_states": True, "output_attentions": True}
    expected = model(**batch, **options).to_tuple()
    if how == "config":
        model.config.return_dict = False
        outputs = model(**batch, **options)
    else:
        outputs = model(**batch, **options, return_dict=False)
    assert isinstance(outputs, tuple)
    assert len(outputs) == len(expected)
    for actual, wanted in zip(outputs, expected, strict=True):
        assert type(actual) is type(wanted)
        actual, wanted = ([x] if torch.is_tensor(x) else x for x in (actual, wanted))
        assert all(a.equal(b) for a, b in zip(actual, wanted, strict=True))


@pytest.mark.parametrize(
    ("shape", "output_class"),
    [
        ("encoder-decoder", Seq2SeqLMOutput),
        ("decoder", CausalLMOutputWithPast),
        ("encoder", SequenceClassifierOutput),
    ],
)
def test_output_classes_of_the_heads(shape, output_class):
    assert type(model_of(shape)(**batch_of(shape, 7, 4))) is output_class


@pytest.mark.parametrize(
    ("changes", "output_class"),
    [
        ({}, Seq2SeqModelOutput),
        (DECODER, BaseModelOutputWithPastAndCrossAttentions),
        (ENCODER, BaseModelOutput),
    ],
)
def test_the_model_without_a_head(changes, output_class):
    model = tiny_model(TinyTFMModel, **changes)
    ids = token_ids(2, 7)
    target = {} if changes else {"decoder_input_ids": token_ids(2, 4)}
    outputs = model(ids, **target)
    assert type(outputs) is output_class
    assert outputs.last_hidden_state.shape == (2, 7 if changes else 4, 32)
    assert hasattr(model, "encoder") == (changes != DECODER)
    assert hasattr(model, "decoder") == (changes != ENCODER)
    if changes != ENCODER:
        assert isinstance(cache_of(outputs), EncoderDecoderCache if not changes else DynamicCache)


@pytest.mark.parametrize("form", ["object", "tuple", "list", "with all states"])
def test_encoder_outputs_given(form):
    model, batch = model_of("encoder-decoder", "eager"), labelled_batch("encoder-decoder", 7, 4)
    expected = model(**batch, output_hidden_states=True, output_attentions=True)
    encoded = model.get_encoder()(
        batch["input_ids"],
        batch["attention_mask"],
        output_hidden_states=True,
        output_attentions=True,
    )
    if form == "object":
        encoded = BaseModelOutput(last_hidden_state=encoded.last_hidden_state)
    elif form != "with all states":
        encoded = encoded.to_tuple() if form == "tuple" else list(encoded.to_tuple())
    calls = []
    model.model.encoder.register_forward_hook(lambda *_: calls.append(1))
    outputs = model(
        attention_mask=batch["attention_mask"], labels=batch["labels"], encoder_outputs=encoded
    )
    assert not calls
    assert outputs.logits.equal(expected.logits)
    assert outputs.loss.equal(expected.loss)
    if form != "object":
        for name in ("encoder_hidden_states", "encoder_attentions"):
            for actual, wanted in zip(outputs[name], expected[name], strict=True):
                assert actual.equal(wanted)


# Names


LINEARS = ("weight", "bias")
ATTENTION_KEYS = {
    f"{name}.{part}" for name in ("q_proj", "k_proj", "v_proj", "out_proj") for part in LINEARS
}
LAYER_KEYS = {f"self_attn.{key}" for key in ATTENTION_KEYS} | {
    f"{name}.{part}"
    for name in ("self_attn_layer_norm", "fc1", "fc2", "final_layer_norm")
    for part in LINEARS
}
CROSS_KEYS = {f"encoder_attn.{key}" for key in ATTENTION_KEYS} | {
    f"encoder_attn_layer_norm.{part}" for part in LINEARS
}


def layer_keys(stack, keys):
    return {f"model.{stack}.layers.{layer}.{key}" for layer in range(2) for key in keys}


ENCODER_KEYS = {"model.encoder.embed_tokens.weight"} | layer_keys("encoder", LAYER_KEYS)
DECODER_KEYS = {"model.decoder.embed_tokens.weight", "lm_head.weight"} | layer_keys(
    "decoder", LAYER_KEYS
)
KEYS = {
    "encoder-decoder": {"model.shared.weight"}
    | ENCODER_KEYS
    | DECODER_KEYS
    | layer_keys("decoder", CROSS_KEYS),
    "decoder": DECODER_KEYS,
    "encoder": ENCODER_KEYS | {"classifier.weight", "classifier.bias"},
}


def per_stack(shape, *names):
    stacks = ["encoder", "decoder"] if shape == "encoder-decoder" else [shape]
    return {f"model.{stack}.{name}" for stack in stacks for name in names}


@every_shape
def test_state_dict_keys(shape):
    final_norms = per_stack(shape, "layer_norm.weight", "layer_norm.bias")
    learned = per_stack(shape, "embed_positions.weight")
    assert set(model_of(shape).state_dict()) == KEYS[shape]
    assert set(model_of(shape, norm_first=True).state_dict()) == KEYS[shape] | final_norms
    assert set(model_of(shape, add_final_layer_norm=True).state_dict()) == KEYS[shape] | final_norms
    model = model_of(shape, position_embedding_type="learned")
    assert set(model.state_dict()) == KEYS[shape] | learned
    bias = {"lm_head.bias"} if shape != "encoder" else set()
    assert set(model_of(shape, output_bias=True).state_dict()) == KEYS[shape] | bias


@pytest.mark.parametrize("shape", ["encoder-decoder", "encoder"])
def test_state_dict_keys_with_features(shape):
    projection = {f"model.encoder.feature_projection.{part}" for part in LINEARS}
    expected = (KEYS[shape] - {"model.encoder.embed_tokens.weight"}) | projection
    assert set(model_of(shape, input_feature_size=6).state_dict()) == expected


def test_state_dict_keys_without_sharing():
    model = model_of("encoder-decoder", share_encoder_decoder_embeddings=False)
    assert set(model.state_dict()) == KEYS["encoder-decoder"] - {"model.shared.weight"}


@every_shape
def test_state_dict_keys_of_the_model_without_a_head(shape):
    model = tiny_model(TinyTFMModel, **HEADS[shape][1])
    expected = {key.removeprefix("model.") for key in KEYS[shape] if key.startswith("model.")}
    assert set(model.state_dict()) == expected


# Initial values


@pytest.mark.parametrize("gain", [1.0, 0.5])
def test_initial_values(gain):
    config = tiny_config(d_model=64, vocab_size=2000, sublayer_init_gain=gain)
    model = TinyTFMForConditionalGeneration(config)
    embedding = model.get_input_embeddings().weight.detach()
    assert embedding[PAD].eq(0).all()
    assert embedding.std() == pytest.approx(64**-0.5, rel=0.02)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    for name, parameter in model.state_dict().items():
        if name.endswith("layer_norm.weight"):
            assert parameter.eq(1).all()
        elif name.endswith("bias"):
            assert parameter.eq(0).all()
        elif "layers" in name:
            bound = math.sqrt(6 / sum(parameter.shape))  # Xavier, uniform
            if name.endswith(("v_proj.weight", "out_proj.weight", "fc1.weight", "fc2.weight")):
                bound *= gain
            assert 0.9 * bound < parameter.abs().max() <= bound
            assert parameter.std() == pytest.approx(bound / math.sqrt(3), rel=0.05)


@pytest.mark.parametrize("scale_embedding", [True, False])
def test_the_padding_row_is_not_trained_by_the_input(scale_embedding):
    model = model_of("encoder", scale_embedding=scale_embedding)
    ids = token_ids(2, 6)
    ids[:, -1] = PAD
    found = gradients(model, model(ids, labels=torch.tensor([0, 1])).loss)
    gradient = found["model.encoder.embed_tokens.weight"]
    assert gradient[PAD].eq(0).all()
    assert gradient[ids[0, 0]].ne(0).any()


# Machinery of others


# The new name is not known to every version that is supported.
old_checkpointing_name = pytest.mark.filterwarnings(
    "ignore:`gradient_checkpointing.*is deprecated:FutureWarning"
)
CHECKPOINTINGS = {
    "default": {},
    "reentrant": {"gradient_checkpointing_kwargs": {"use_reentrant": True}},
    "not reentrant": {"gradient_checkpointing_kwargs": {"use_reentrant": False}},
}


@old_checkpointing_name
@every_shape
@both_norms
@pytest.mark.parametrize("how", CHECKPOINTINGS.values(), ids=CHECKPOINTINGS)
def test_b28_checkpointed_gradients_are_the_same(shape, norm_first, how):
    model = model_of(shape, norm_first=norm_first, dropout=0.3, attention_dropout=0.1).train()
    batch = labelled_batch(shape, 7, 4)
    if shape != "encoder":
        assert model.config.use_cache
    torch.manual_seed(1)
    loss = model(**batch).loss
    expected = gradients(model, loss)
    assert all(gradient is not None for gradient in expected.values())
    model.gradient_checkpointing_enable(**how)
    layers = [module for module in model.modules() if getattr(module, "gradient_checkpointing", 0)]
    assert len(layers) == (4 if shape == "encoder-decoder" else 2)
    calls = []
    for layer in layers:
        layer.fc1.register_forward_hook(lambda *_: calls.append(1))
    torch.manual_seed(1)
    again = model(**batch).loss
    close(again, loss, 1e-6)
    found = gradients(model, again)
    assert len(calls) == 2 * len(layers)  # each runs twice
    for name, gradient in found.items():
        close(gradient, expected[name], 1e-6)
    model.gradient_checkpointing_disable()
    assert not any(getattr(module, "gradient_checkpointing", 0) for module in model.modules())


@old_checkpointing_name
@pytest.mark.parametrize("num_beams", [1, 4])
@generating_shapes
def test_b28_generation_after_checkpointing(shape, num_beams):
    model, ids = model_of(shape), token_ids(2, 6)
    expected = model.generate(ids, num_beams=num_beams, max_new_tokens=8)
    model.gradient_checkpointing_enable()
    assert model.generate(ids, num_beams=num_beams, max_new_tokens=8).equal(expected)


@old_checkpointing_name
def test_b28_a_cache_beside_checkpointing_is_refused():
    model = model_of("encoder-decoder").train()
    model.gradient_checkpointing_enable()
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    with pytest.raises(ValueError, match="gradient checkpointing"):
        model(**batch_of("encoder-decoder", 7, 4), cache=cache)


@old_checkpointing_name
@pytest.mark.parametrize("reentrant", [True, False])
def test_b28_seq2seq_trainer_checkpoints_and_generates(tmp_path, reentrant):
    model, batch = model_of("encoder-decoder"), labelled_batch("encoder-decoder", 7, 4)
    arguments = Seq2SeqTrainingArguments(
        str(tmp_path),
        per_device_train_batch_size=2,
        max_steps=1,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": reentrant},
        predict_with_generate=True,
        generation_max_length=8,
        save_strategy="no",
        use_cpu=True,
        dataloader_pin_memory=False,
        disable_tqdm=True,
    )
    trainer = Seq2SeqTrainer(model, arguments, train_dataset=as_rows(batch))
    assert math.isfinite(trainer.train().training_loss)
    assert math.isfinite(trainer.evaluate(as_rows(batch))["eval_loss"])
    assert len(trainer.predict(as_rows(batch)).predictions) == 2


@pytest.mark.parametrize(
    ("shape", "backend"), [*((shape, "eager") for shape in HEADS), ("encoder-decoder", "aot_eager")]
)
def test_b45_compiles_to_one_graph(shape, backend):
    torch._dynamo.reset()
    model = model_of(shape, encoder_layers=1, decoder_layers=1)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for target_length, lengths in ((5, (7, 4)), (6, (9, 1))):
        batch = batch_of(shape, *lengths)
        if shape == "encoder-decoder":
            batch["decoder_input_ids"] = token_ids(2, target_length)
        close(compiled(**batch).logits, model(**batch).logits)
        del batch["attention_mask"]
        close(compiled(**batch).logits, model(**batch).logits)


def test_b45_compiled_training_step():
    torch._dynamo.reset()
    model = model_of("encoder-decoder", encoder_layers=1, decoder_layers=1).train()
    batch = labelled_batch("encoder-decoder", 7, 4)
    expected = gradients(model, model(**batch).loss)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for name, gradient in gradients(model, compiled(**batch).loss).items():
        close(gradient, expected[name])


@every_shape
@pytest.mark.parametrize("where", ["memory", "disk"])
def test_offloaded_weights(shape, where, tmp_path):
    accelerate = pytest.importorskip("accelerate")
    model, batch = model_of(shape), batch_of(shape, 7, 4)
    expected = model(**batch).logits
    if where == "memory":
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"), offload_buffers=True)
    else:
        accelerate.disk_offload(
            model, str(tmp_path), execution_device=torch.device("cpu"), offload_buffers=True
        )
    assert model.get_parameter(next(name for name, _ in model.named_parameters())).is_meta
    with torch.no_grad():
        assert model(**batch).logits.equal(expected)


@generating_shapes
def test_device_map_with_a_disk(shape, tmp_path):
    model, ids = model_of(shape), token_ids(2, 6)
    expected = model.generate(ids, max_new_tokens=6)
    model.save_pretrained(tmp_path / "saved")
    places = {"lm_head": "cpu"}
    stacks = ["encoder", "decoder"] if shape == "encoder-decoder" else ["decoder"]
    if shape == "encoder-decoder":
        places["model.shared"] = "cpu"
    for stack in stacks:
        for name, _ in getattr(model.model, stack).named_children():
            places[f"model.{stack}.{name}"] = "cpu"
        del places[f"model.{stack}.layers"]
        places |= {f"model.{stack}.layers.0": "cpu", f"model.{stack}.layers.1": "disk"}
    loaded = type(model).from_pretrained(
        tmp_path / "saved", device_map=places, offload_folder=tmp_path / "offloaded"
    )
    assert loaded.get_parameter("model.decoder.layers.1.fc1.weight").is_meta
    assert loaded.generate(ids, max_new_tokens=6).equal(expected)


def test_layers_are_never_split_between_devices():
    accelerate = pytest.importorskip("accelerate")
    model = model_of("encoder-decoder")
    kinds = {type(module).__name__ for module in model.modules()}
    assert set(model._no_split_modules) == {"TinyTFMEncoderLayer", "TinyTFMDecoderLayer"}
    assert set(model._no_split_modules) <= kinds
    layer = sum(p.numel() * 4 for p in model.model.decoder.layers[0].parameters())
    size = model.num_parameters() * 4
    # Room for everything but a part of the last layer.
    places = accelerate.infer_auto_device_map(
        model,
        max_memory={0: size - layer // 2, "cpu": 10**9},
        no_split_module_classes=model._no_split_modules,
        offload_buffers=True,
    )
    assert len(set(places.values())) == 2
    assert not [name for name in places if ".layers." in name and name.count(".") > 3]


# Errors of a call


def ids(*shape):
    return torch.full(shape, 5)


CALL_ERRORS = {
    "no source": ({"decoder_input_ids": ids(2, 4)}, "input_ids and inputs_embeds"),
    "two sources": (
        {"input_ids": ids(2, 5), "inputs_embeds": torch.randn(2, 5, 32)}
        | {"decoder_input_ids": ids(2, 4)},
        "input_ids and inputs_embeds",
    ),
    "no target": ({"input_ids": ids(2, 5)}, "decoder_input_ids and decoder_inputs_embeds"),
    "two targets": (
        {"input_ids": ids(2, 5), "decoder_input_ids": ids(2, 4)}
        | {"decoder_inputs_embeds": torch.randn(2, 4, 32)},
        "decoder_input_ids and decoder_inputs_embeds",
    ),
    "id too high": (
        {"input_ids": ids(2, 5) + 45, "decoder_input_ids": ids(2, 4)},
        r"^input_ids .*50.*vocab_size=50",
    ),
    "id negative": (
        {"input_ids": ids(2, 5) - 6, "decoder_input_ids": ids(2, 4)},
        r"^input_ids .*-1.*vocab_size=50",
    ),
    "target id too high": (
        {"input_ids": ids(2, 5), "decoder_input_ids": ids(2, 4) + 45},
        r"^decoder_input_ids .*50.*vocab_size=50",
    ),
    "target id -100": (
        {"input_ids": ids(2, 5), "decoder_input_ids": ids(2, 4) - 105},
        r"^decoder_input_ids .*-100",
    ),
    "float ids": (
        {"input_ids": ids(2, 5).float(), "decoder_input_ids": ids(2, 4)},
        r"^input_ids .*float32",
    ),
    "float target ids": (
        {"input_ids": ids(2, 5), "decoder_input_ids": ids(2, 4).float()},
        r"^decoder_input_ids .*float32",
    ),
    "flat ids": ({"input_ids": ids(5), "decoder_input_ids": ids(1, 4)}, r"^input_ids .*\(5,\)"),
    "deep ids": (
        {"input_ids": ids(1, 2, 5), "decoder_input_ids": ids(2, 4)},
        r"^input_ids .*\(1, 2, 5\)",
    ),
    "flat target ids": (
        {"input_ids": ids(1, 5), "decoder_input_ids": ids(4)},
        r"^decoder_input_ids .*\(4,\)",
    ),
    "embeddings of another width": (
        {"inputs_embeds": torch.randn(2, 5, 31), "decoder_input_ids": ids(2, 4)},
        r"^inputs_embeds .*32.*\(2, 5, 31\)",
    ),
    "flat embeddings": (
        {"inputs_embeds": torch.randn(5, 32), "decoder_input_ids": ids(1, 4)},
        r"^inputs_embeds .*\(5, 32\)",
    ),
    "target embeddings of another width": (
        {"input_ids": ids(2, 5), "decoder_inputs_embeds": torch.randn(2, 4, 33)},
        r"^decoder_inputs_embeds .*32.*\(2, 4, 33\)",
    ),
    "encoder outputs of another width": (
        {"encoder_outputs": (torch.randn(2, 5, 31),), "decoder_input_ids": ids(2, 4)},
        r"^encoder_outputs .*32.*\(2, 5, 31\)",
    ),
    "encoder outputs without states": (
        {"encoder_outputs": (None,), "decoder_input_ids": ids(2, 4)},
        "encoder_outputs",
    ),
    "empty encoder outputs": (
        {"encoder_outputs": BaseModelOutput(), "decoder_input_ids": ids(2, 4)},
        "encoder_outputs",
    ),
    "other numbers of sources and targets": (
        {"input_ids": ids(3, 5), "decoder_input_ids": ids(2, 4)},
        "batch of 2 .* 3",
    ),
    "features": (
        {"input_features": torch.randn(2, 5, 6), "decoder_input_ids": ids(2, 4)},
        "input_features .*input_feature_size",
    ),
    "a cache of tuples": (
        {"input_ids": ids(2, 5), "decoder_input_ids": ids(2, 1)} | {"cache": ((), ())},
        "cache .*tuple",
    ),
}


@pytest.mark.parametrize(("inputs", "message"), CALL_ERRORS.values(), ids=CALL_ERRORS)
@pytest.mark.parametrize("model_class", [TinyTFMModel, TinyTFMForConditionalGeneration])
def test_call_errors(model_class, inputs, message):
    with pytest.raises(ValueError, match=message):
        tiny_model(model_class)(**inputs)


@pytest.mark.parametrize("shape", ["encoder", "decoder"])
@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "input_ids and inputs_embeds"),
        (
            {"input_ids": ids(2, 5), "inputs_embeds": torch.randn(2, 5, 32)},
            "input_ids and inputs_embeds",
        ),
        ({"input_ids": ids(2, 5) + 45}, "^input_ids .*50.*vocab_size=50"),
        ({"input_ids": ids(2, 5) - 6}, "^input_ids .*-1"),
        ({"input_ids": ids(5)}, r"^input_ids .*\(5,\)"),
        ({"inputs_embeds": torch.randn(2, 5, 31)}, r"^inputs_embeds .*32.*31"),
        ({"input_features": torch.randn(2, 5, 6)}, "input_features"),
        ({"input_ids": ids(2, 5), "decoder_input_ids": ids(2, 4)}, "decoder_input_ids"),
        (
            {"input_ids": ids(2, 5), "decoder_inputs_embeds": torch.randn(2, 4, 32)},
            "decoder_inputs_embeds",
        ),
        (
            {"input_ids": ids(2, 5), "decoder_attention_mask": torch.ones(2, 4)},
            "decoder_attention_mask",
        ),
        ({"input_ids": ids(2, 5), "encoder_outputs": (torch.randn(2, 4, 32),)}, "encoder_outputs"),
    ],
)
def test_call_errors_of_the_relatives(shape, inputs, message):
    with pytest.raises(ValueError, match=message):
        model_of(shape)(**inputs)


def test_an_encoder_has_no_use_for_a_cache():
    with pytest.raises(ValueError, match="cache"):
        model_of("encoder")(token_ids(2, 5), cache=DynamicCache())


@every_shape
def test_an_unknown_argument_is_refused(shape):
    with pytest.raises(TypeError, match="atention_mask"):
        model_of(shape)(**batch_of(shape, 5, 3), atention_mask=torch.ones(2, 5))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # of shapes, which are constants
@pytest.mark.filterwarnings("ignore:.torch.jit.trace:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # torch reads all
def test_a_trace_of_an_unpadded_batch_reads_masks():
    model = tiny_model()

    class Logits(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, ids, mask, decoder_ids):
            return self.model(ids, mask, decoder_ids, use_cache=False).logits

    ids, decoder_ids = token_ids(2, 5), token_ids(2, 4)
    traced = torch.jit.trace(Logits().eval(), (ids, torch.ones_like(ids), decoder_ids))
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    close(traced(ids, mask, decoder_ids), model(ids, mask, decoder_ids).logits, 1e-5)


@old_checkpointing_name
@pytest.mark.parametrize("changes", [{}, {"share_encoder_decoder_embeddings": False}])
def test_adapters_train_where_checkpointing_re_enters_autograd(changes):
    model = tiny_model(**changes).train()
    batch = {"input_ids": token_ids(2, 5), "labels": token_ids(2, 4)}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("q_proj" in name)
    model(**batch).loss.backward()
    wanted = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    model.zero_grad()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    model(**batch).loss.backward()
    for name, parameter in model.named_parameters():
        if name in wanted:
            close(parameter.grad, wanted[name], 1e-5)
    model.disable_input_require_grads()
    embedded = model.model.encoder.embed_tokens(batch["input_ids"])
    assert not embedded.requires_grad


def test_a_source_padded_on_the_left_needs_no_mask():
    model, ids, target = tiny_model(), token_ids(2, 5), token_ids(2, 4)
    padded = torch.cat((torch.full((2, 3), PAD), ids), dim=1)
    expected = model(ids, decoder_input_ids=target).logits
    close(model(padded, decoder_input_ids=target).logits, expected, 1e-5)
    one_padded = torch.stack((padded[0], torch.cat((ids[1], token_ids(3)))))
    mask = torch.ones(2, 8)
    mask[0, :3] = 0
    found = model(one_padded, decoder_input_ids=target).logits
    close(found, model(one_padded, mask, decoder_input_ids=target).logits, 1e-6)


@pytest.mark.parametrize(
    ("head", "shape", "layers"),
    [
        (TinyTFMForConditionalGeneration, {}, ["TinyTFMEncoderLayer", "TinyTFMDecoderLayer"]),
        (TinyTFMForCausalLM, {"is_decoder": True}, ["TinyTFMDecoderLayer"]),
        (TinyTFMForSequenceClassification, {"is_decoder": False}, ["TinyTFMEncoderLayer"]),
    ],
)
def test_only_layers_that_are_there_are_named_to_shard_by(head, shape, layers):
    """FSDP refuses to wrap a layer that it does not find."""
    model = tiny_model(head, is_encoder_decoder=not shape, **shape)
    assert set(model._no_split_modules) == set(layers)
