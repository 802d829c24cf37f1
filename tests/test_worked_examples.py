"""The tutorials' examples with the right values, item by item; the number is the item's."""

import math

import pytest
import torch
import torch.nn.functional as F
from test_modeling import torch_stack
from tiny import redraw, tiny_config, tiny_model, token_ids
from torch import nn

from modeling_tinytfm import (
    TinyTFMConfig,
    TinyTFMForCausalLM,
    TinyTFMForConditionalGeneration,
    TinyTFMForSequenceClassification,
    TinyTFMModel,
)
from modeling_tinytfm.modeling_tinytfm import (
    SinusoidalPositions,
    TinyTFMAttention,
    TinyTFMDecoderLayer,
    TinyTFMEncoderLayer,
    causal_mask,
    eager_attention,
    sdpa_attention,
    shift_right,
    sinusoids,
    token_loss,
)

ENCODER = {"is_encoder_decoder": False}
DECODER = {"is_encoder_decoder": False, "is_decoder": True}
both_implementations = pytest.mark.parametrize("attend", [eager_attention, sdpa_attention])


def close(actual, expected, tolerance=1e-5):
    torch.testing.assert_close(
        torch.as_tensor(actual), torch.as_tensor(expected), rtol=0, atol=tolerance
    )


def difference(a, b):
    return float((a - b).detach().abs().max())


def attention(num_heads=4, **changes):
    changes = {"attn_implementation": "eager", **changes}
    return redraw(TinyTFMAttention(tiny_config(**changes), num_heads))


def heads(*shape):
    return torch.randn(*shape), torch.randn(*shape), torch.randn(*shape)


def parameters(module):
    return sum(parameter.numel() for parameter in module.parameters())


def on_meta(model_class, **settings):
    with torch.device("meta"):
        return model_class(TinyTFMConfig(**settings))


# Attention


@both_implementations
def test_01_three_token_example(attend):
    x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])[None, None]
    context, weights = attend(x, x, x)
    close(context[0, 0], [[0.8022, 0.5989], [0.5989, 0.8022], [0.7517, 0.7517]], 5e-5)
    if attend is eager_attention:
        close(
            weights[0, 0],
            [[0.4011, 0.1978, 0.4011], [0.1978, 0.4011, 0.4011], [0.2483, 0.2483, 0.5035]],
            5e-5,
        )


def test_01_three_token_example_scores():
    x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])[None, None]
    weights = eager_attention(x, x, x, scaling=1.0)[1][0, 0]
    scores = weights.log() - weights.log()[:, :1]  # up to a constant a row
    expected = torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 1.0], [1.0, 1.0, 2.0]])
    close(scores, expected - expected[:, :1])


def test_02_rows_of_weights_sum_to_one_unless_all_is_masked():
    query, key, value = heads(2, 4, 5, 8)
    mask = torch.rand(2, 1, 5, 5) < 0.5
    mask[0, 0, 2] = False
    mask[1, 0, :, 0] = True
    context, weights = eager_attention(query, key, value, mask)
    any_key = mask.any(dim=-1).float().expand(2, 4, 5)
    close(weights.sum(dim=-1), any_key)
    assert (weights >= 0).all()
    assert weights.masked_select(~mask).eq(0).all()
    assert context[0, :, 2].eq(0).all()
    close(sdpa_attention(query, key, value, mask)[0], context)


@both_implementations
def test_02_a_wholly_masked_row_gives_finite_numbers(attend):
    query, key, value = (tensor.requires_grad_() for tensor in heads(2, 4, 5, 8))
    mask = torch.ones(2, 1, 1, 5, dtype=torch.bool)
    mask[0] = False
    context, _ = attend(query, key, value, mask)
    assert context.isfinite().all()
    context.square().sum().backward()
    assert all(tensor.grad.isfinite().all() for tensor in (query, key, value))


def test_03_dot_products_have_variance_d_k_and_one_after_scaling():
    query, key, value = heads(1, 1, 300, 512)

    def variance_of_scores(scaling):
        # The logarithm of a weight is its score, less a constant of the row.
        return eager_attention(query, key, value, scaling=scaling)[1].log().var(dim=-1).mean()

    # Undivided scores would underflow the softmax.
    assert variance_of_scores(0.01) * 100**2 == pytest.approx(512, rel=0.05)
    assert variance_of_scores(None) == pytest.approx(1, rel=0.05)


@pytest.mark.parametrize(
    ("scores", "expected"),
    [([1.0, 2.0, 3.0], [0.0900, 0.2447, 0.6652]), ([10.0, 20.0, 30.0], [2.1e-9, 4.5e-5, 0.99995])],
)
def test_03_softmax_saturates_for_large_scores(scores, expected):
    key = torch.tensor(scores)[None, None, :, None]
    _, weights = eager_attention(torch.ones(1, 1, 1, 1), key, key)
    torch.testing.assert_close(weights.flatten(), torch.tensor(expected), rtol=0.02, atol=0)


def test_04_shapes():
    x = torch.randn(2, 5, 16)
    layer = attention(num_heads=4, d_model=16)
    assert layer.split_heads(layer.q_proj(x)).shape == (2, 4, 5, 4)
    output, weights = layer(x, output_attentions=True)
    assert output.shape == (2, 5, 16)
    assert weights.shape == (2, 4, 5, 5)
    query, key, value = torch.randn(2, 4, 3, 4), torch.randn(2, 4, 7, 4), torch.randn(2, 4, 7, 4)
    context, weights = eager_attention(query, key, value)
    assert (context.shape, weights.shape) == ((2, 4, 3, 4), (2, 4, 3, 7))


def test_04_width_of_a_head():
    assert TinyTFMAttention(TinyTFMConfig(), 8).head_dim == 64
    TinyTFMConfig(d_model=128, encoder_attention_heads=4, decoder_attention_heads=4)
    with pytest.raises(ValueError, match=r"encoder_attention_heads=8 .*d_model=130"):
        TinyTFMConfig(d_model=130)


@pytest.mark.parametrize(
    ("source_length", "target_length"), [(7, 3), (3, 7), (1, 5), (5, 1), (4, 4)]
)
def test_05_cross_attention_over_another_length(source_length, target_length):
    layer = attention()
    target, memory = torch.randn(2, target_length, 32), torch.randn(2, source_length, 32)
    output, weights = layer(target, memory, output_attentions=True)
    assert output.shape == (2, target_length, 32)
    assert weights.shape == (2, 4, target_length, source_length)
    # Queries come from the target, keys and values from the memory.
    reference = eager_attention(
        layer.split_heads(layer.q_proj(target)),
        layer.split_heads(layer.k_proj(memory)),
        layer.split_heads(layer.v_proj(memory)),
    )[0]
    close(output, layer.out_proj(reference.transpose(1, 2).reshape(2, target_length, 32)))


def test_06_causal_mask_of_length_four():
    expected = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]).bool()
    assert causal_mask(4, 4).equal(expected)
    assert causal_mask(2, 4, past_length=2).equal(expected[2:])


def test_06_padding_and_causal_mask_combine_in_the_decoder():
    model = tiny_model()
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    weights = model(
        token_ids(2, 6),
        decoder_input_ids=token_ids(2, 4),
        decoder_attention_mask=mask,
        output_attentions=True,
    ).decoder_attentions
    allowed = causal_mask(4, 4) & mask.bool()[:, None, None, :]
    for layer in weights:
        assert layer.masked_select(~allowed).eq(0).all()
        assert layer.masked_select(allowed).gt(0).all()


def test_06_source_padding_is_hidden_from_the_encoder_and_from_cross_attention():
    model = tiny_model()
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
    outputs = model(
        token_ids(2, 6), mask, decoder_input_ids=token_ids(2, 4), output_attentions=True
    )
    assert len(outputs.encoder_attentions) == len(outputs.cross_attentions) == 2
    for layer in (*outputs.encoder_attentions, *outputs.cross_attentions):
        allowed = mask.bool()[:, None, None, :].expand_as(layer)
        assert layer.masked_select(~allowed).eq(0).all()
        assert layer.masked_select(allowed).gt(0).all()


def test_07_softmax_temperature():
    query, key, value = heads(1, 2, 6, 8)
    best = (query @ key.transpose(-1, -2)).argmax(dim=-1)
    cold = eager_attention(query, key, value, scaling=1e4)[1]
    close(cold, F.one_hot(best, 6).float(), 1e-3)
    hot = eager_attention(query, key, value, scaling=1e-7)[1]
    close(hot, torch.full_like(hot, 1 / 6))
    close(sdpa_attention(query, key, value, scaling=1e4)[0], cold @ value, 1e-3)
    close(sdpa_attention(query, key, value, scaling=1e-7)[0], hot @ value)


@pytest.mark.parametrize("positions", ["none", "sinusoidal", "learned"])
def test_08_permuting_the_source(positions):
    kind = "learned" if positions == "learned" else "sinusoidal"
    model = tiny_model(TinyTFMModel, position_embedding_type=kind, **ENCODER)
    if positions == "none":
        model.encoder.embed_positions.table.zero_()
    ids, order = token_ids(2, 9), torch.randperm(9)
    permuted = model(ids[:, order]).last_hidden_state
    straight = model(ids).last_hidden_state[:, order]
    assert (difference(permuted, straight) < 1e-5) == (positions == "none")


# Positions


def test_09_position_two_at_width_four():
    close(sinusoids(torch.tensor(2), 4), [0.9093, -0.4161, 0.0200, 0.9998], 5e-5)
    table = SinusoidalPositions(tiny_config(d_model=4)).table
    close(table[2], [0.9093, -0.4161, 0.0200, 0.9998], 5e-5)


def test_10_position_is_added_to_the_embedding():
    summed = torch.tensor([0.3, -0.2, 0.7, 0.1]) + sinusoids(torch.tensor(2), 4)
    close(summed, [1.2093, -0.6161, 0.7200, 1.0998], 5e-5)


def test_10_the_encoder_adds_them_to_scaled_embeddings():
    model = tiny_model(TinyTFMModel, **ENCODER)
    ids = token_ids(2, 5)
    first = model(ids, output_hidden_states=True).hidden_states[0]
    embedded = model.get_input_embeddings()(ids) * math.sqrt(32)
    close(first, embedded + sinusoids(torch.arange(5), 32))


def test_11_base_one_hundred():
    table = sinusoids(torch.arange(4), 4, base=100.0)
    close(table[1], [0.8415, 0.5403, 0.0998, 0.9950], 5e-5)
    close(table[3], [0.1411, -0.9900, 0.2955, 0.9553], 5e-5)


@pytest.mark.parametrize("shift", [1, 7, 100])
def test_12_a_shift_is_a_rotation_of_each_pair(shift):
    width = 16
    positions = torch.arange(50)
    angles = shift / 10000.0 ** (torch.arange(0, width, 2) / width)
    rotations = torch.stack(
        [torch.stack((angles.cos(), angles.sin())), torch.stack((-angles.sin(), angles.cos()))]
    ).permute(2, 0, 1)
    pairs = sinusoids(positions, width).unflatten(-1, (-1, 2))
    rotated = torch.einsum("pij,lpj->lpi", rotations, pairs).flatten(-2)
    close(sinusoids(positions + shift, width), rotated)


def test_13_the_table_moves_along_and_is_no_parameter(tmp_path):
    model = tiny_model()
    tables = {name: buffer for name, buffer in model.named_buffers() if "embed_positions" in name}
    assert sorted(tables) == [
        "model.decoder.embed_positions.table",
        "model.encoder.embed_positions.table",
    ]
    assert not any("embed_positions" in name for name, _ in model.named_parameters())
    assert not any("embed_positions" in name for name in model.state_dict())
    model.save_pretrained(tmp_path)
    loaded = TinyTFMForConditionalGeneration.from_pretrained(tmp_path)
    for name, table in loaded.named_buffers():
        assert table.equal(tables[name])
    moved = model.to("meta")
    assert all(buffer.is_meta for _, buffer in moved.named_buffers())


# Layers


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("layer_class", [TinyTFMEncoderLayer, TinyTFMDecoderLayer])
def test_14_post_norm_and_pre_norm(layer_class, norm_first):
    arguments = (0,) if layer_class is TinyTFMDecoderLayer else ()
    config = tiny_config(norm_first=norm_first, attn_implementation="sdpa")
    layer = redraw(layer_class(config, *arguments))
    x, memory = torch.randn(2, 5, 32), torch.randn(2, 7, 32)
    sublayers = [(lambda y: layer.self_attn(y)[0], layer.self_attn_layer_norm)]
    if layer_class is TinyTFMDecoderLayer:
        sublayers.append(
            (lambda y: layer.encoder_attn(y, memory)[0], layer.encoder_attn_layer_norm)
        )
        output = layer(x, memory)[0]
    else:
        output = layer(x)[0]
    sublayers.append((lambda y: layer.fc2(layer.fc1(y).relu()), layer.final_layer_norm))
    expected = x
    for sublayer, norm in sublayers:
        if norm_first:
            expected = expected + sublayer(norm(expected))
        else:
            expected = norm(expected + sublayer(expected))
    close(output, expected)


def test_15_feed_forward_is_the_same_at_every_position():
    layer = TinyTFMEncoderLayer(TinyTFMConfig())
    assert layer.fc1.weight.shape == (2048, 512)
    assert layer.fc2.weight.shape == (512, 2048)
    x, order = torch.randn(2, 6, 512), torch.randperm(6)
    output = layer.feed_forward(x)
    close(layer.feed_forward(x[:, order]), output[:, order])
    hidden = torch.clamp(x @ layer.fc1.weight.T + layer.fc1.bias, min=0)
    close(output, hidden @ layer.fc2.weight.T + layer.fc2.bias)


def test_16_layer_norm_has_biased_variance_and_eps_inside_the_root():
    norm = redraw(TinyTFMEncoderLayer(tiny_config(layer_norm_eps=1e-2)).final_layer_norm)
    x = torch.randn(2, 5, 32)
    centred = x - x.mean(dim=-1, keepdim=True)
    variance = centred.square().mean(dim=-1, keepdim=True)
    close(norm(x), centred / (variance + 1e-2).sqrt() * norm.weight + norm.bias)
    wrong = centred / (x.std(dim=-1, keepdim=True) + 1e-2) * norm.weight + norm.bias
    assert difference(norm(x), wrong) > 1e-3


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 63_082_496),
        (
            {
                "d_model": 1024,
                "encoder_ffn_dim": 4096,
                "decoder_ffn_dim": 4096,
                "encoder_attention_heads": 16,
                "decoder_attention_heads": 16,
                "dropout": 0.3,
            },
            214_245_376,
        ),
    ],
    ids=["base", "big"],
)
def test_17_parameters_of_the_papers_models(settings, expected):
    model = on_meta(TinyTFMForConditionalGeneration, **settings)
    assert parameters(model) == model.num_parameters() == expected


def test_18_relatives_lack_what_they_do_not_need():
    decoder = TinyTFMForCausalLM(tiny_config(**DECODER)).state_dict()
    assert not [name for name in decoder if "encoder" in name]
    encoder = TinyTFMForSequenceClassification(tiny_config(**ENCODER)).state_dict()
    assert not [name for name in encoder if "decoder" in name or "lm_head" in name]


# torch tells of a fast path of its own that Pre-Norm cannot take.
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")
@pytest.mark.parametrize("norm_first", [False, True])
def test_19_torch_transformer_has_final_norms(norm_first):
    model = tiny_model(TinyTFMModel, norm_first=norm_first, add_final_layer_norm=True)
    theirs = nn.Transformer(32, 4, 2, 2, 64, dropout=0.0, batch_first=True, norm_first=norm_first)
    assert isinstance(theirs.encoder.norm, nn.LayerNorm)
    assert isinstance(theirs.decoder.norm, nn.LayerNorm)
    theirs.encoder.load_state_dict(torch_stack(model.encoder).state_dict())
    theirs.decoder.load_state_dict(torch_stack(model.decoder).state_dict())
    source, target = torch.randn(2, 6, 32), torch.randn(2, 4, 32)
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
    leaves = [tensor.clone().requires_grad_() for tensor in (source, target) for _ in range(2)]
    ours = model(
        inputs_embeds=leaves[0], attention_mask=mask, decoder_inputs_embeds=leaves[2]
    ).last_hidden_state
    reference = theirs(
        leaves[1] * math.sqrt(32) + sinusoids(torch.arange(6), 32),
        leaves[3] * math.sqrt(32) + sinusoids(torch.arange(4), 32),
        tgt_mask=~causal_mask(4, 4),
        src_key_padding_mask=mask == 0,
        memory_key_padding_mask=mask == 0,
    )
    close(ours, reference)
    direction = torch.randn_like(ours)
    (ours * direction).sum().backward()
    (reference * direction).sum().backward()
    close(leaves[0].grad, leaves[1].grad, 1e-4)
    close(leaves[2].grad, leaves[3].grad, 1e-4)


def test_19_the_paper_has_none():
    model = TinyTFMForConditionalGeneration(tiny_config())
    assert not [name for name in model.state_dict() if ".layer_norm." in name]
    last = model.model.encoder.layers[-1].final_layer_norm
    torch.nn.init.constant_(last.bias, 3.0)  # a further norm would take this mean away
    hidden = model.eval().model.encoder(token_ids(2, 5)).last_hidden_state
    close(hidden.mean(dim=-1), torch.full((2, 5), 3.0))


# Training, as far as it is the model's own


def test_20_decoder_input_and_labels_of_a_sentence():
    bos, i, like, nlp, eos = 1, 5, 6, 7, 2
    labels = torch.tensor([[i, like, nlp, eos]])
    assert shift_right(labels, TinyTFMConfig()).tolist() == [[bos, i, like, nlp]]


def test_20_decoder_input_and_labels_of_a_reversal():
    config = TinyTFMConfig()
    source = torch.tensor([[3, 7, 5, 9]])
    labels = torch.cat((source.flip(1), torch.tensor([[config.eos_token_id]])), dim=1)
    assert labels.tolist() == [[9, 5, 7, 3, 2]]
    model = on_meta(TinyTFMForConditionalGeneration)
    assert model.prepare_decoder_input_ids_from_labels(labels).tolist() == [[1, 9, 5, 7, 3]]


def test_21_loss_is_cross_entropy_of_raw_logits_without_padding():
    model = tiny_model()
    labels = token_ids(2, 5)
    labels[0, 3:] = -100
    outputs = model(token_ids(2, 6), labels=labels)
    assert outputs.logits.shape == (2, 5, 50)
    log_probabilities = outputs.logits.log_softmax(dim=-1)
    chosen = [log_probabilities[b, t, labels[b, t]] for b, t in (labels != -100).nonzero()]
    assert len(chosen) == 8
    close(outputs.loss, -sum(chosen) / 8)


# Relatives


def test_26_digits_as_rows_of_pixels():
    config = TinyTFMConfig(
        is_encoder_decoder=False,
        d_model=64,
        encoder_layers=2,
        encoder_attention_heads=4,
        encoder_ffn_dim=128,
        input_feature_size=28,
        position_embedding_type="learned",
        max_position_embeddings=28,
        num_labels=10,
    )
    model = redraw(TinyTFMForSequenceClassification(config)).eval()
    images = torch.rand(3, 28, 28)
    outputs = model(input_features=images, output_hidden_states=True)
    assert outputs.logits.shape == (3, 10)
    encoder = model.model.encoder
    entering = encoder.feature_projection(images) + encoder.embed_positions.weight
    close(outputs.hidden_states[0], entering)
    pooled = outputs.hidden_states[-1].mean(dim=1)
    assert pooled.shape == (3, 64)
    close(outputs.logits, model.classifier(pooled), 1e-4)


def test_27_decoder_only_trains_on_shifted_text_and_generates():
    model = TinyTFMForCausalLM(tiny_config(decoder_layers=1, **DECODER)).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    alphabet = torch.arange(3, 13).repeat(4)
    for _ in range(60):
        starts = torch.randint(0, 10, (16,))
        batch = torch.stack([alphabet[start : start + 12] for start in starts.tolist()])
        loss = model(batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.5
    prompt = torch.tensor([[7, 8, 9, 10]])
    tokens = model.eval().generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=6)
    assert tokens.tolist() == [[7, 8, 9, 10, 11, 12, 3, 4, 5, 6]]


def elements_kept_for_backward(attend, length):
    """Elements of the largest tensor that a forward pass keeps."""
    sizes = []

    def note(tensor):
        sizes.append(tensor.numel())
        return tensor

    query, key, value = (tensor.requires_grad_() for tensor in heads(1, 2, length, 8))
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        _, weights = attend(query, key, value)
    return max(sizes), weights


def test_28_cost_of_attention_grows_with_the_square_and_fused_memory_does_not():
    short, short_weights = elements_kept_for_backward(eager_attention, 512)
    long, long_weights = elements_kept_for_backward(eager_attention, 1024)
    assert long_weights.numel() == 4 * short_weights.numel()
    assert long == 4 * short
    short, _ = elements_kept_for_backward(sdpa_attention, 512)
    long, _ = elements_kept_for_backward(sdpa_attention, 1024)
    assert long == 2 * short


def test_29_shares_of_parameters():
    model = on_meta(TinyTFMForConditionalGeneration)
    stacks = model.model
    encoder, decoder = stacks.encoder.layers[0], stacks.decoder.layers[0]
    encoder_part = parameters(encoder.fc1) + parameters(encoder.fc2)
    decoder_part = parameters(decoder.fc1) + parameters(decoder.fc2)
    assert round(encoder_part / parameters(encoder), 3) == 0.666
    assert round(decoder_part / parameters(decoder), 3) == 0.499
    everywhere = 6 * (encoder_part + decoder_part)
    assert round(everywhere / parameters(model), 3) == 0.399
    assert parameters(model) - parameters(stacks.shared) == 44_138_496


def test_30_lowest_dimensions_turn_fastest():
    width = 8
    wavelengths = 2 * math.pi * 10000.0 ** (torch.arange(0, width, 2, dtype=torch.float64) / width)
    assert wavelengths.tolist() == sorted(wavelengths.tolist())
    for pair, wavelength in enumerate(wavelengths):
        positions = torch.linspace(0, 50, 7, dtype=torch.float64)
        here = sinusoids(positions, width)[:, 2 * pair : 2 * pair + 2]
        close(sinusoids(positions + wavelength, width)[:, 2 * pair : 2 * pair + 2], here)
        half = sinusoids(positions + wavelength / 2, width)[:, 2 * pair : 2 * pair + 2]
        close(half, -here)


def test_31_length_of_a_normalised_vector():
    norm = TinyTFMEncoderLayer(TinyTFMConfig()).final_layer_norm  # gain 1, bias 0
    lengths = norm(torch.randn(3, 4, 512) * 7 + 2).norm(dim=-1)
    close(lengths, torch.full((3, 4), math.sqrt(512)), 1e-3)


@pytest.mark.parametrize("norm_first", [False, True])
def test_32_only_pre_norm_lets_the_input_through_unchanged(norm_first):
    layers = nn.Sequential()
    config = tiny_config(norm_first=norm_first, attn_implementation="sdpa")
    for _ in range(6):
        layer = TinyTFMEncoderLayer(config)
        for sublayer in (layer.self_attn.out_proj, layer.fc2):
            nn.init.zeros_(sublayer.weight)
            nn.init.zeros_(sublayer.bias)
        layers.append(layer)
    x = torch.randn(2, 5, 32, requires_grad=True)
    y = x
    for layer in layers:
        y = layer(y)[0]
    direction = torch.randn_like(x)
    (gradient,) = torch.autograd.grad(y, x, direction)
    assert y.equal(x) == norm_first
    assert gradient.equal(direction) == norm_first


def test_33_weights_of_torch_multihead_attention():
    config = tiny_config(decoder_attention_heads=2, attn_implementation="eager")
    layer = redraw(TinyTFMAttention(config, 2))
    theirs = nn.MultiheadAttention(32, 2, batch_first=True)
    projections = (layer.q_proj, layer.k_proj, layer.v_proj)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat([linear.weight for linear in projections]))
        theirs.in_proj_bias.copy_(torch.cat([linear.bias for linear in projections]))
    theirs.out_proj.load_state_dict(layer.out_proj.state_dict())
    x = torch.randn(2, 4, 32)
    output, weights = layer(x, output_attentions=True)
    expected, averaged = theirs(x, x, x)
    _, per_head = theirs(x, x, x, average_attn_weights=False)
    assert averaged.shape == (2, 4, 4)
    assert per_head.shape == weights.shape == (2, 2, 4, 4)
    close(output, expected)
    close(weights, per_head)
    close(weights.mean(dim=1), averaged)


# Mistakes that the tutorials warn of


def test_mistake_no_positions():
    model = tiny_model()
    ids, target = token_ids(1, 8), token_ids(1, 5)
    swapped = ids[:, [1, 0, *range(2, 8)]]
    logits = model(ids, decoder_input_ids=target).logits
    assert difference(logits, model(swapped, decoder_input_ids=target).logits) > 1e-4
    # The decoder's last step sees the same set of tokens, in another order.
    reordered = model(ids, decoder_input_ids=target[:, [1, 0, 2, 3, 4]]).logits
    assert difference(logits[:, -1], reordered[:, -1]) > 1e-4


@both_implementations
def test_mistake_softmax_over_the_wrong_dimension(attend):
    query, key, value = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 6, 8), torch.ones(2, 3, 6, 8)
    close(attend(query, key, value)[0], torch.ones(2, 3, 4, 8))  # a mean over the keys


@both_implementations
def test_mistake_missing_scale(attend):
    query, key, value = heads(2, 3, 5, 64)
    close(attend(query, key, value)[0], attend(query, key, value, scaling=1 / 8)[0])
    assert difference(attend(query, key, value)[0], attend(query, key, value, scaling=1)[0]) > 0.1


@pytest.mark.parametrize("model_class", [TinyTFMForConditionalGeneration, TinyTFMForCausalLM])
def test_mistake_no_causal_mask_in_training(model_class):
    shape = DECODER if model_class is TinyTFMForCausalLM else {}
    model = tiny_model(model_class, **shape).train()
    target = token_ids(2, 6)
    changed = target.clone()
    changed[:, 3:] = token_ids(2, 3)
    if shape:
        logits = [model(ids, labels=ids).logits for ids in (target, changed)]
    else:
        ids = token_ids(2, 7)
        logits = [model(ids, labels=labels).logits for labels in (target, changed)]
    assert logits[0][:, :3].equal(logits[1][:, :3])
    assert difference(*logits) > 1e-3


def test_mistake_source_padding_seen_by_cross_attention():
    model = tiny_model()
    mask = torch.tensor([[1, 1, 1, 0, 0]])
    memory = torch.randn(1, 5, 32)
    changed = memory.clone()
    changed[:, 3:] = 100 * torch.randn(1, 2, 32)
    target = token_ids(1, 4)
    logits = [
        model(attention_mask=mask, encoder_outputs=(states,), decoder_input_ids=target).logits
        for states in (memory, changed)
    ]
    assert logits[0].equal(logits[1])


@pytest.mark.parametrize(
    "mask",
    [[0.0, 0.0, 0.0, -1e9, -1e9], [0.0, 0.0, 0.0, -math.inf, -math.inf], [1, 1, 1, -1, -1]],
    ids=str,
)
def test_mistake_mask_polarity(mask):
    model = tiny_model()
    ids, target = token_ids(1, 5), token_ids(1, 4)
    attended = torch.tensor([[1, 1, 1, 0, 0]])
    close(
        model(ids, attended, decoder_input_ids=target).logits,
        model(ids[:, :3], decoder_input_ids=target).logits,
    )
    # What is added to scores elsewhere means the opposite here.
    with pytest.raises(ValueError, match="attention_mask"):
        model(ids, torch.tensor([mask]), decoder_input_ids=target)


def test_mistake_width_not_divisible_by_heads():
    config = tiny_config()
    config.decoder_attention_heads = 5
    with pytest.raises(ValueError, match=r"decoder_attention_heads=5 .*d_model=32"):
        TinyTFMForConditionalGeneration(config)


def test_mistake_softmax_before_cross_entropy():
    model = tiny_model()
    ids, labels = token_ids(2, 6), token_ids(2, 5)
    outputs = model(ids, labels=labels)
    assert difference(outputs.logits.sum(dim=-1), torch.ones(2, 5)) > 1
    close(outputs.loss, token_loss(outputs.logits, labels))
    # A confident and right model has no loss; after a softmax it would keep at least log(V) - 1.
    confident = F.one_hot(labels, 50).float() * 50
    assert token_loss(confident, labels) < 1e-6


def test_mistake_forgetting_eval(tmp_path):
    tiny_model(dropout=0.5).save_pretrained(tmp_path)
    model = TinyTFMForConditionalGeneration.from_pretrained(tmp_path)
    assert not model.training
    ids = token_ids(2, 6)
    expected = model.generate(ids, max_new_tokens=10)
    assert model.train().generate(ids, max_new_tokens=10).equal(expected)
    assert model.training


def test_mistake_forgetting_no_grad():
    model = tiny_model()
    outputs = model.generate(
        token_ids(2, 6), max_new_tokens=3, output_logits=True, return_dict_in_generate=True
    )
    assert not any(logits.requires_grad for logits in outputs.logits)


def test_mistake_the_decoder_reads_the_encoders_input():
    model = tiny_model()
    embeddings = model.get_input_embeddings()
    source = embeddings(token_ids(1, 6)).detach().requires_grad_()
    target = embeddings(token_ids(1, 4)).detach().requires_grad_()
    outputs = model(inputs_embeds=source, decoder_inputs_embeds=target, output_hidden_states=True)
    first = outputs.decoder_hidden_states[0]
    assert first.shape == (1, 4, 32)
    assert torch.autograd.grad(first.sum(), source, allow_unused=True, retain_graph=True)[0] is None
    for leaf in (source, target):
        assert torch.autograd.grad(outputs.logits.sum(), leaf, retain_graph=True)[0].abs().max() > 0
