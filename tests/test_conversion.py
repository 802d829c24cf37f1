import copy
import functools
import warnings

import pytest
import torch
import torch.nn.functional as F
from tiny import redraw, tiny_config, token_ids
from tiny import tiny_model as flat_tiny_model
from torch import nn
from transformers import MarianConfig, MarianMTModel
from transformers.models.bart.modeling_bart import BartScaledWordEmbedding

from modeling_tinytfm import (
    TinyTFMConfig,
    TinyTFMForCausalLM,
    TinyTFMForConditionalGeneration,
    TinyTFMForSequenceClassification,
    TinyTFMModel,
)
from modeling_tinytfm.conversion import (
    from_marian,
    from_torch_transformer,
    state_from_marian,
    state_from_torch,
    state_to_marian,
    state_to_torch,
    to_marian,
    to_torch_stacks,
    to_torch_transformer,
)
from modeling_tinytfm.modeling_tinytfm import sinusoids

PAD, EOS = 49, 0  # Marian's places for them: the last id, and 0
ALL_TIES = pytest.mark.parametrize(
    ("share", "tie"), [(True, True), (True, False), (False, True), (False, False)]
)
HALVES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)


def revive(model: nn.Module) -> nn.Module:
    """Moves the weights of norms from around 0 to around 1, for outputs that differ clearly."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                module.weight += 1
    return model


def tiny_model(*args, **changes):
    return revive(flat_tiny_model(*args, **changes))


def tiny_marian(**changes) -> MarianMTModel:
    """A Marian model whose two stacks differ in everything in which they may."""
    fields = {
        "vocab_size": 50,
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 3,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 8,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 48,
        "activation_function": "swish",
        "scale_embedding": True,
        "max_position_embeddings": 40,
        "dropout": 0.0,
        "pad_token_id": PAD,
        "eos_token_id": EOS,
        "forced_eos_token_id": EOS,
        "decoder_start_token_id": PAD,
    }
    model = MarianMTModel(MarianConfig(**fields | changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:  # the position tables are frozen parameters
                parameter.normal_(std=0.2)
        model.final_logits_bias.normal_()
        if model.config.pad_token_id is not None:
            for stack in (model.model.encoder, model.model.decoder):
                stack.embed_tokens.weight[model.config.pad_token_id] = 0
    return revive(model)


def batch(vocab_size: int = 49) -> dict[str, torch.Tensor]:
    """Sources of lengths 9 and 5, padded, and targets."""
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, 5:] = 0
    return {
        "input_ids": token_ids(2, 9, vocab_size=vocab_size).masked_fill(mask == 0, vocab_size),
        "attention_mask": mask,
        "decoder_input_ids": token_ids(2, 7, vocab_size=vocab_size),
    }


def assert_same_logits(first, second, tolerance=1e-5):
    inputs = batch()
    with torch.no_grad():
        a, b = first(**inputs).logits, second(**inputs).logits
    assert a.std() > 0.5, "logits that hardly differ prove nothing"
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


def assert_same_tokens(first, second, **options):
    inputs = batch()
    del inputs["decoder_input_ids"]
    a, b = first.generate(**inputs, **options), second.generate(**inputs, **options)
    assert a.tolist() == b.tolist()
    return a


def assert_same_state(first, second):
    a, b = first.state_dict(), second.state_dict()
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert torch.equal(tensor, b[name]), name
        assert tensor.dtype == b[name].dtype, name


def addresses(*modules: nn.Module) -> set[int]:
    tensors = [t for module in modules for t in (*module.parameters(), *module.buffers())]
    return {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.numel()}


# From Marian


@pytest.mark.parametrize("scale_embedding", [True, False])
@pytest.mark.parametrize("activation", ["swish", "gelu", "relu"])
def test_marian_logits_and_tokens(activation, scale_embedding):
    marian = tiny_marian(activation_function=activation, scale_embedding=scale_embedding)
    model = from_marian(marian)
    assert_same_logits(marian, model)
    for num_beams in (1, 4):
        assert_same_tokens(marian, model, max_length=20, num_beams=num_beams)
        # Otherwise models that are not trained say little but the same again and again.
        tokens = assert_same_tokens(
            marian, model, max_length=20, num_beams=num_beams, no_repeat_ngram_size=2
        )
        assert len(tokens.unique()) > 5


def test_marian_gradients():
    marian, inputs = tiny_marian(), batch()
    model = from_marian(marian)
    weight = torch.randn(2, 7, 50)
    for each in (marian, model):
        (each(**inputs).logits * weight).sum().backward()
    order = torch.arange(32).view(2, 16).T.flatten()
    expected = marian.model.shared.weight.grad[:, order]
    assert expected.abs().max() > 1
    torch.testing.assert_close(model.model.shared.weight.grad, expected, rtol=1e-4, atol=1e-4)
    expected = marian.model.encoder.layers[0].fc1.weight.grad[:, order]
    actual = model.model.encoder.layers[0].fc1.weight.grad
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@ALL_TIES
def test_marian_round_trip(share, tie):
    ties = {"share_encoder_decoder_embeddings": share, "tie_word_embeddings": tie}
    marian = tiny_marian(**ties)
    model = from_marian(marian)
    assert_same_logits(marian, model)
    back = to_marian(model)
    assert_same_logits(marian, back, tolerance=0.0)
    state = marian.state_dict()
    if share and not tie:
        # Marian then has four matrices of their own, one of which nothing reads.
        assert model.config.share_encoder_decoder_embeddings is False
        del state["model.shared.weight"]
    else:
        assert {**back.config.to_dict(), **ties} == back.config.to_dict()
    assert {name: model.config.to_dict()[name] for name in ties} == {
        name: back.config.to_dict()[name] for name in ties
    }
    assert state.keys() == back.state_dict().keys()
    for name, tensor in back.state_dict().items():
        assert torch.equal(tensor, state[name]), name


def test_marian_round_trip_keeps_the_config():
    marian = tiny_marian(
        dropout=0.1,
        attention_dropout=0.2,
        activation_dropout=0.3,
        use_cache=False,
        bos_token_id=7,
        eos_token_id=[EOS, 3],
    )
    model, back = from_marian(marian), to_marian(from_marian(marian))
    assert back.config.to_dict() == marian.config.to_dict()
    for name in ("dropout", "attention_dropout", "activation_dropout", "use_cache", "bos_token_id"):
        assert getattr(model.config, name) == getattr(marian.config, name)
    assert model.config.eos_token_id == [EOS, 3]
    assert model.config.max_position_embeddings == 40
    assert model.config.output_bias is True
    assert model.config.model_type == "tinytfm"


def test_marian_weights_tied_by_hand_stay_tied():
    marian = tiny_marian(share_encoder_decoder_embeddings=False, tie_word_embeddings=False)
    marian.model.encoder.embed_tokens.weight = marian.model.decoder.embed_tokens.weight
    model = from_marian(marian)
    assert model.model.encoder.embed_tokens.weight is model.model.shared.weight
    assert model.lm_head.weight is not model.model.shared.weight
    assert_same_logits(marian, model)


def test_marian_settings_of_generation():
    marian = tiny_marian()
    marian.generation_config.update(
        num_beams=3, max_length=17, bad_words_ids=[[PAD], [5, 6]], forced_eos_token_id=EOS
    )
    before = marian.generation_config.to_dict()
    model = from_marian(marian)
    assert model.generation_config.to_dict() == before
    tokens = assert_same_tokens(marian, model)
    assert (tokens[:, 0] == PAD).all()
    assert tokens.shape[1] <= 17
    model.generation_config.bad_words_ids.append([8])
    assert marian.generation_config.to_dict() == before
    back = to_marian(from_marian(marian))
    assert back.generation_config.to_dict() == before
    assert back.config.forced_eos_token_id == EOS
    back.generation_config.bad_words_ids.append([8])
    assert marian.generation_config.to_dict() == before


def test_marian_padding_token_stays_zero():
    model = from_marian(tiny_marian())
    assert model.model.shared.padding_idx == PAD
    assert not model.model.shared.weight[PAD].any()
    assert model.config.decoder_start_token_id == model.config.pad_token_id == PAD


def test_marian_positions_that_no_sinusoids_are():
    marian = tiny_marian()
    with torch.no_grad():
        marian.model.decoder.embed_positions.weight[3, 4] += 0.01
    with pytest.raises(ValueError, match=r"model\.decoder\.embed_positions\.weight.*sinusoids"):
        from_marian(marian)


@HALVES
def test_marian_in_half_precision(dtype):
    marian = tiny_marian().to(dtype)
    model = from_marian(marian)
    assert {t.dtype for t in model.state_dict().values()} == {dtype}
    assert model.model.encoder.embed_positions.table.dtype == dtype
    inputs = batch()
    with torch.no_grad():
        expected, actual = marian(**inputs).logits, model(**inputs).logits
    tolerance = 60 * torch.finfo(dtype).eps
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    back = to_marian(model)
    assert_same_state(marian, back)


def test_marian_saved_and_loaded(tmp_path):
    model = from_marian(tiny_marian())
    model.save_pretrained(tmp_path / "ours")
    assert_same_logits(model, TinyTFMForConditionalGeneration.from_pretrained(tmp_path / "ours"))
    marian = to_marian(model)
    marian.save_pretrained(tmp_path / "theirs")
    assert_same_logits(model, MarianMTModel.from_pretrained(tmp_path / "theirs"))


def test_marian_activation_that_learns():
    marian = tiny_marian(activation_function="prelu")
    model = from_marian(marian)
    assert_same_logits(marian, model)
    assert_same_state(marian, to_marian(model))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"decoder_vocab_size": 60, "share_encoder_decoder_embeddings": False},
            "decoder_vocab_size=60",
        ),
        ({"encoder_layerdrop": 0.1}, "encoder_layerdrop=0.1"),
        ({"decoder_layerdrop": 0.1}, "decoder_layerdrop=0.1"),
        (
            {"d_model": 24 + 3, "encoder_attention_heads": 3, "decoder_attention_heads": 9},
            "d_model=27",
        ),
    ],
)
def test_marian_refusals(changes, message):
    with pytest.raises(ValueError, match=message):
        from_marian(tiny_marian(**changes))


def test_marian_of_another_class():
    with pytest.raises(ValueError, match="model must be a MarianMTModel, not a MarianModel"):
        from_marian(tiny_marian().model)


def test_marian_with_a_weight_too_many():
    marian = tiny_marian()
    marian.model.adapter = nn.Linear(2, 2)
    marian.gate = nn.Parameter(torch.zeros(1))
    with pytest.raises(ValueError, match=r"no place for.*gate.*model\.adapter\.weight"):
        from_marian(marian)


def test_marian_in_several_dtypes():
    marian = tiny_marian()
    marian.model.encoder.half()
    with pytest.raises(ValueError, match=r"float16.*float32"):
        from_marian(marian)


# To Marian


@pytest.mark.parametrize("output_bias", [True, False])
@ALL_TIES
def test_to_marian(share, tie, output_bias):
    model = tiny_model(
        share_encoder_decoder_embeddings=share,
        tie_word_embeddings=tie,
        scale_embedding=output_bias is share,
        output_bias=output_bias,
        activation_function="gelu",
        encoder_layers=1,
        decoder_attention_heads=2,
        decoder_ffn_dim=40,
        max_position_embeddings=33,
    )
    marian = to_marian(model)
    assert isinstance(marian, MarianMTModel)
    assert_same_logits(model, marian)
    assert_same_tokens(model, marian, max_length=15)
    assert_same_tokens(model, marian, max_length=15, num_beams=4)
    back = from_marian(marian)
    assert_same_logits(model, back, tolerance=0.0)
    assert back.config.output_bias is True
    if output_bias and (tie or not share):
        assert back.config.to_dict() == model.config.to_dict()
        assert_same_state(model, back)
    assert bool(marian.final_logits_bias.any()) is output_bias
    assert marian.config.share_encoder_decoder_embeddings is (share and tie)
    assert ("model.shared.weight" in marian.state_dict()) is (share and tie)


def test_to_marian_with_positions_of_another_dtype():
    """As where only parameters were cast."""
    model = tiny_model().to(torch.bfloat16)
    positions = model.model.encoder.embed_positions
    positions.table = positions.table.float()
    assert to_marian(model).model.encoder.embed_positions.weight.dtype == torch.bfloat16


def test_state_of_marian_there_and_back():
    state = tiny_marian().state_dict()
    there = state_from_marian(state)
    weight = state["model.shared.weight"]
    expected = torch.stack((weight[:, :16], weight[:, 16:]), dim=-1).flatten(1)
    for name in ("model.shared.weight", "model.encoder.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(there[name], expected), name
    assert torch.equal(there["lm_head.bias"], state["final_logits_bias"][0])
    back = state_to_marian(there)
    assert back.keys() == state.keys()
    for name, tensor in back.items():
        assert torch.equal(tensor, state[name]), name


def test_to_marian_ends_as_our_model_does():
    """Marian's own default would force token 0 at the end."""
    model = tiny_model()
    marian = to_marian(model)
    assert marian.config.forced_eos_token_id is None
    assert marian.generation_config.to_dict() == model.generation_config.to_dict()
    assert_same_tokens(model, marian, max_length=6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"position_embedding_type": "learned"}, "position_embedding_type='learned'"),
        ({"norm_first": True}, "norm_first=True"),
        ({"add_final_layer_norm": True}, "add_final_layer_norm=True"),
        ({"layer_norm_eps": 1e-6}, "layer_norm_eps=1e-06"),
        ({"input_feature_size": 28}, "input_feature_size=28"),
        ({"decoder_start_token_id": None}, "decoder_start_token_id=None"),
    ],
)
def test_to_marian_refusals(changes, message):
    with pytest.raises(ValueError, match=f"{message} cannot be carried over to MarianMTModel"):
        to_marian(tiny_model(**changes))


@pytest.mark.parametrize("convert", [to_marian, to_torch_stacks, to_torch_transformer])
def test_relatives_are_refused(convert):
    decoder_only = tiny_model(TinyTFMForCausalLM, is_encoder_decoder=False, is_decoder=True)
    encoder_only = tiny_model(TinyTFMForSequenceClassification, is_encoder_decoder=False)
    for model in (decoder_only, encoder_only, decoder_only.model, nn.Linear(2, 2)):
        message = f"TinyTFMForConditionalGeneration, not a {type(model).__name__}"
        with pytest.raises(ValueError, match=message):
            convert(model)


# To torch


def hidden_states(model: TinyTFMForConditionalGeneration, source, target, mask):
    """Our stacks on vectors, as torch's take them: without embeddings, positions and scale."""
    encoder, decoder = model.model.encoder, model.model.decoder
    hidden = mask[:, None, None, :]
    memory = encoder.run_layers(source, hidden, False)[0]
    return memory, decoder.run_layers(target, memory, None, True, hidden, None, False)[0]


def torch_hidden_states(encoder, decoder, source, target, mask):
    memory = encoder(source, src_key_padding_mask=~mask)
    causal = nn.Transformer.generate_square_subsequent_mask(target.shape[1]).isinf()
    return memory, decoder(
        target, memory, tgt_mask=causal, memory_key_padding_mask=~mask, tgt_is_causal=True
    )


def vectors(width: int = 32):
    mask = torch.ones(3, 8, dtype=torch.bool)
    mask[1, 5:] = False
    mask[2, 1:] = False
    return torch.randn(3, 8, width), torch.randn(3, 6, width), mask


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu"])
@pytest.mark.parametrize(
    "norms",
    [{}, {"add_final_layer_norm": True}, {"norm_first": True}],
    ids=["post-norm", "post-norm-final", "pre-norm"],
)
def test_torch_outputs_and_gradients(norms, activation):
    model = tiny_model(
        activation_function=activation,
        encoder_layers=3,
        encoder_attention_heads=8,
        decoder_ffn_dim=48,
        **norms,
    ).train()
    encoder, decoder = to_torch_stacks(model)
    assert (encoder.norm is None) is (norms == {})
    source, target, mask = vectors()
    source.requires_grad_()
    target.requires_grad_()
    weights = torch.randn(3, 8, 32) * mask[..., None], torch.randn(3, 6, 32)

    def outputs_and_gradients(outputs, parameters):
        outputs = [output * weight for output, weight in zip(outputs, weights, strict=True)]
        loss = sum(output.sum() for output in outputs) / 100
        gradients = torch.autograd.grad(loss, [source, target, *parameters.values()])
        return outputs, gradients[:2], dict(zip(parameters, gradients[2:], strict=True))

    stacks = nn.ModuleDict({"encoder": encoder, "decoder": decoder})
    theirs = outputs_and_gradients(
        torch_hidden_states(encoder, decoder, source, target, mask), dict(stacks.named_parameters())
    )
    layers = {
        name: parameter
        for name, parameter in model.named_parameters()
        if ".layers." in name or ".layer_norm." in name
    }
    ours = outputs_and_gradients(hidden_states(model, source, target, mask), layers)
    for expected, actual in zip(theirs[0], ours[0], strict=True):
        assert expected.std() > 0.3
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-4, atol=1e-5)
    expected = state_from_torch(theirs[2])
    assert expected.keys() == ours[2].keys()
    for name, gradient in ours[2].items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5, msg=name)
    with torch.no_grad():  # torch computes in other ways then
        memory, output = torch_hidden_states(encoder.eval(), decoder.eval(), source, target, mask)
    torch.testing.assert_close(memory * weights[0], theirs[0][0].detach(), rtol=0, atol=1e-5)
    torch.testing.assert_close(output * weights[1], theirs[0][1].detach(), rtol=0, atol=1e-5)


def test_torch_stacks_keep_the_length_of_a_batch_of_padding():
    encoder, _ = to_torch_stacks(tiny_model())
    source, _, mask = vectors()
    mask[:, 5:] = False
    with torch.no_grad():
        assert encoder(source, src_key_padding_mask=~mask).shape == source.shape


@pytest.mark.parametrize("norms", [{"add_final_layer_norm": True}, {"norm_first": True}])
def test_torch_transformer(norms):
    model = tiny_model(decoder_attention_heads=2, decoder_layers=1, **norms)
    transformer = to_torch_transformer(model)
    assert type(transformer) is nn.Transformer
    assert transformer.d_model == 32
    assert transformer.batch_first
    source, target, mask = vectors()
    with torch.no_grad():
        actual = transformer(
            source,
            target,
            tgt_mask=transformer.generate_square_subsequent_mask(6).isinf(),
            src_key_padding_mask=~mask,
            memory_key_padding_mask=~mask,
        )
        expected = hidden_states(model, source, target, mask)[1]
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


def test_torch_transformer_needs_final_norms():
    with pytest.raises(ValueError, match=r"add_final_layer_norm=False.*to_torch_stacks"):
        to_torch_transformer(tiny_model())


def test_torch_dropouts():
    model = tiny_model(
        dropout=0.1, attention_dropout=0.2, activation_dropout=0.3, layer_norm_eps=1e-3
    )
    for stack in to_torch_stacks(model):
        for layer in stack.layers:
            attentions = [m for m in layer.modules() if isinstance(m, nn.MultiheadAttention)]
            assert {attention.dropout for attention in attentions} == {0.2}
            assert layer.dropout.p == 0.3
            assert layer.dropout1.p == layer.dropout2.p == 0.1
            assert layer.norm1.eps == 1e-3
    assert stack.layers[0].dropout3.p == 0.1


def test_torch_activation_that_learns():
    with pytest.raises(ValueError, match=r"layers\.0\.activation_fn\.weight"):
        to_torch_stacks(tiny_model(activation_function="prelu"))


def test_state_to_torch_in_any_order():
    """As safetensors has it, k before q before v."""
    state = tiny_model().state_dict()
    expected, actual = state_to_torch(state), state_to_torch(dict(sorted(state.items())))
    assert expected.keys() == actual.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, actual[name]), name


# From torch


def torch_model(share=True, tie=True, bias=False, padding_idx=None, bias_in_layers=True, **changes):
    """An nn.Transformer, and the other arguments of from_torch_transformer."""
    settings = {
        "d_model": 32,
        "nhead": 4,
        "num_encoder_layers": 2,
        "num_decoder_layers": 3,
        "dim_feedforward": 48,
        "dropout": 0.0,
        "batch_first": True,
        "bias": bias_in_layers,
    }
    with warnings.catch_warnings():
        # Of settings in which its encoder can use no nested tensors.
        warnings.filterwarnings("ignore", "enable_nested_tensor is True")
        transformer = revive(redraw(nn.Transformer(**settings | changes))).eval()
    # They are said to be a prototype, in a warning, too.
    transformer.encoder.use_nested_tensor = False
    source = redraw(nn.Embedding(50, 32, padding_idx))
    target = None if share else redraw(nn.Embedding(50, 32, padding_idx))
    output = None
    if bias or not tie:
        output = redraw(nn.Linear(32, 50, bias=bias))
        if tie:
            output.weight = (target or source).weight
    return transformer, source, target, output


def torch_logits(transformer, source, target, output, inputs, scale=32**0.5):
    """What a user of nn.Transformer computes by hand."""
    target = source if target is None else target
    x = source(inputs["input_ids"]) * scale + sinusoids(torch.arange(9), 32)
    y = target(inputs["decoder_input_ids"]) * scale + sinusoids(torch.arange(7), 32)
    padding = inputs["attention_mask"] == 0
    causal = transformer.generate_square_subsequent_mask(7).isinf()
    if not transformer.batch_first:
        x, y = x.transpose(0, 1), y.transpose(0, 1)
    hidden = transformer(
        x, y, tgt_mask=causal, src_key_padding_mask=padding, memory_key_padding_mask=padding
    )
    if not transformer.batch_first:
        hidden = hidden.transpose(0, 1)
    return F.linear(hidden, target.weight) if output is None else output(hidden)


@ALL_TIES
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_from_torch(share, tie, bias, norm_first):
    arguments = torch_model(share, tie, bias, norm_first=norm_first, batch_first=share)
    model = from_torch_transformer(*arguments)
    inputs = batch()
    with torch.no_grad():
        expected, actual = torch_logits(*arguments, inputs), model(**inputs).logits
    assert expected.std() > 0.5
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)
    config = model.config
    assert config.share_encoder_decoder_embeddings is share
    assert config.tie_word_embeddings is tie
    assert config.output_bias is bias
    assert config.norm_first is norm_first
    assert config.add_final_layer_norm is not norm_first
    assert (config.encoder_layers, config.decoder_layers) == (2, 3)
    assert (config.encoder_ffn_dim, config.decoder_ffn_dim) == (48, 48)


def test_from_torch_reads_every_setting():
    arguments = torch_model(
        dropout=0.3, layer_norm_eps=1e-3, activation=F.silu, nhead=8, padding_idx=4
    )
    config = from_torch_transformer(*arguments).config
    assert config.dropout == config.attention_dropout == config.activation_dropout == 0.3
    assert config.layer_norm_eps == 1e-3
    assert config.activation_function == "silu"
    assert config.encoder_attention_heads == config.decoder_attention_heads == 8
    assert config.pad_token_id == 4
    defaults = TinyTFMConfig()
    for name in (
        "scale_embedding",
        "position_embedding_type",
        "max_position_embeddings",
        "bos_token_id",
        "eos_token_id",
        "decoder_start_token_id",
    ):
        assert getattr(config, name) == getattr(defaults, name)


def test_from_torch_takes_the_rest_from_a_config():
    arguments = torch_model(padding_idx=None)
    config = TinyTFMConfig(
        scale_embedding=False,
        max_position_embeddings=8,
        pad_token_id=None,
        eos_token_id=5,
        decoder_start_token_id=6,
    )
    before = config.to_dict()
    model = from_torch_transformer(*arguments, config=config)
    assert config.to_dict() == before
    assert model.generation_config.eos_token_id == 5
    assert model.generation_config.decoder_start_token_id == 6
    assert model.config.pad_token_id is None
    assert model.model.shared.padding_idx is None
    inputs = batch()
    with torch.no_grad():
        expected, actual = torch_logits(*arguments, inputs, scale=1.0), model(**inputs).logits
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("activation", "name"),
    [
        (torch.relu, "relu"),
        (torch.relu_, "relu"),
        (nn.ReLU(inplace=True), "relu"),
        (nn.GELU(), "gelu"),
        (nn.GELU("tanh"), "gelu_pytorch_tanh"),
        (functools.partial(F.gelu, approximate="tanh"), "gelu_pytorch_tanh"),
        (nn.Tanh(), "tanh"),
        (F.mish, "mish"),
        (lambda x: x, "linear"),
    ],
)
def test_from_torch_activations(activation, name):
    arguments = torch_model()
    for stack in (arguments[0].encoder, arguments[0].decoder):
        for layer in stack.layers:
            layer.activation = activation
            layer.activation_relu_or_gelu = 0
    model = from_torch_transformer(*arguments)
    assert model.config.activation_function == name
    inputs = batch()
    with torch.no_grad():
        expected, actual = torch_logits(*arguments, inputs), model(**inputs).logits
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


def test_from_torch_notices_an_activation_that_torch_lost():
    """nn.Transformer's decoder replaces an activation that is a module by ReLU (torch 2.13)."""
    arguments = torch_model(activation=nn.Tanh())
    decoder_layer = arguments[0].decoder.layers[0]
    if decoder_layer.activation is not F.relu:
        pytest.skip("this version of torch does not lose it")
    with pytest.raises(ValueError, match=r"decoder\.layers\.0\.activation=relu cannot be carried"):
        from_torch_transformer(*arguments)


def test_torch_stacks_keep_their_activation_when_copied():
    model = tiny_model(activation_function="silu")
    copies = copy.deepcopy(
        nn.ModuleDict(zip(("encoder", "decoder"), to_torch_stacks(model), strict=True))
    )
    source, target, mask = vectors()
    with torch.no_grad():
        expected = hidden_states(model, source, target, mask)[1]
        actual = torch_hidden_states(*copies.values(), source, target, mask)[1]
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "norms", [{}, {"add_final_layer_norm": True}, {"norm_first": True}], ids=str
)
@ALL_TIES
def test_torch_round_trip(norms, share, tie):
    model = tiny_model(
        activation_function="quick_gelu",
        share_encoder_decoder_embeddings=share,
        tie_word_embeddings=tie,
        output_bias=not tie,
        encoder_layers=1,
        decoder_attention_heads=2,
        decoder_ffn_dim=40,
        dropout=0.1,
        attention_dropout=0.2,
        activation_dropout=0.3,
        **norms,
    )
    encoder, decoder = to_torch_stacks(model)
    if norms:
        transformer = to_torch_transformer(model)
    else:
        # The one nn.Transformer without final norms is one of given stacks, which it redraws.
        transformer = nn.Transformer(32, custom_encoder=encoder, custom_decoder=decoder)
        transformer.load_state_dict(state_to_torch(model.state_dict()))
        transformer.eval()
    back = from_torch_transformer(
        transformer,
        model.model.encoder.embed_tokens,
        model.model.decoder.embed_tokens,
        None if tie else model.lm_head,
        config=model.config,
    )
    assert back.config.to_dict() == model.config.to_dict()
    assert_same_state(model, back)
    assert_same_logits(model, back, tolerance=0.0)


def change(path: str, value):
    """A function that sets an attribute somewhere in an nn.Transformer."""

    def apply(transformer: nn.Transformer) -> None:
        module, _, name = path.rpartition(".")
        setattr(transformer.get_submodule(module), name, value)

    return apply


class Subclass(nn.TransformerEncoderLayer):
    """Computes who knows what."""


@pytest.mark.parametrize(
    ("apply", "message"),
    [
        (change("encoder", nn.Identity()), r"encoder\.layers\.0\..* is missing"),
        (change("decoder", nn.GRU(32, 32)), r"decoder\.num_layers|decoder\.layers"),
        (change("encoder.layers", nn.ModuleList()), r"encoder\.layers\.0"),
        (
            change("encoder.layers.1", Subclass(32, 4, 48, 0.0, batch_first=True)),
            r"encoder\.layers\.1=.*Subclass",
        ),
        (change("encoder.norm", None), r"(en|de)coder\.norm"),
        (change("decoder.norm", None), r"decoder\.norm"),
        (change("decoder.norm", nn.RMSNorm(32)), r"decoder\.norm=.*RMSNorm"),
        (change("decoder.norm.eps", 1e-6), r"decoder\.norm\.eps=1e-06"),
        (change("decoder.layers.2.norm2.eps", 1e-6), r"decoder\.layers\.2\.norm2\.eps=1e-06"),
        (change("decoder.layers.2.norm_first", True), r"decoder\.layers\.2\.norm_first=True"),
        (change("decoder.layers.0.dropout3.p", 0.5), r"decoder\.layers\.0\.dropout3\.p=0\.5"),
        (
            change("encoder.layers.1.self_attn.dropout", 0.5),
            r"encoder\.layers\.1\.self_attn\.dropout=0\.5",
        ),
        (change("decoder.layers.0.multihead_attn.num_heads", 8), r"multihead_attn\.num_heads=8"),
        (change("encoder.layers.1.self_attn.add_zero_attn", True), r"add_zero_attn=True"),
        (
            change("encoder.layers.1.self_attn", nn.MultiheadAttention(32, 4, add_bias_kv=True)),
            r"self_attn\.bias_k",
        ),
        (
            change("encoder.layers.1.self_attn", nn.MultiheadAttention(32, 4, kdim=16, vdim=16)),
            r"self_attn\.in_proj_weight=None",
        ),
        (
            change("encoder.layers.0.linear1", nn.Linear(32, 40)),
            r"linear1\.out_features=40|linear1|linear2",
        ),
        (change("decoder.layers.1.activation", F.gelu), r"decoder\.layers\.1\.activation=gelu"),
        (change("encoder.layers.0.activation", F.softplus), "activation=.*softplus.* is none of"),
        (
            change("encoder.layers.0.activation", nn.Hardtanh(0.0, 1000.0)),
            "activation=.*Hardtanh.* is none of",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_from_torch_refuses_layers(apply, message):
    arguments = torch_model()
    apply(arguments[0])
    with pytest.raises(ValueError, match=message):
        from_torch_transformer(*arguments)


def test_from_torch_refuses_layers_without_biases():
    with pytest.raises(ValueError, match=r"bias=None cannot be carried over"):
        from_torch_transformer(*torch_model(bias_in_layers=False))


def test_from_torch_refuses_pre_norm_without_final_norms():
    encoder, decoder = to_torch_stacks(tiny_model(norm_first=True))
    encoder.norm = decoder.norm = None
    transformer = nn.Transformer(32, custom_encoder=encoder, custom_decoder=decoder)
    with pytest.raises(ValueError, match=r"encoder\.norm=None"):
        from_torch_transformer(transformer, nn.Embedding(50, 32))


def test_from_torch_needs_an_nn_transformer():
    with pytest.raises(ValueError, match=r"transformer\.encoder\..* is missing"):
        from_torch_transformer(torch_model()[0].encoder, nn.Embedding(50, 32))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"source_embedding": nn.Embedding(50, 30)}, r"source_embedding\.embedding_dim=30"),
        ({"source_embedding": nn.Linear(50, 32)}, "source_embedding"),
        ({"source_embedding": BartScaledWordEmbedding(50, 32, 0)}, "BartScaledWordEmbedding"),
        ({"source_embedding": nn.Embedding(50, 32, max_norm=1.0)}, r"max_norm=1\.0"),
        (
            {"target_embedding": nn.Embedding(50, 32, scale_grad_by_freq=True)},
            "target_embedding.scale_grad_by_freq=True",
        ),
        ({"target_embedding": nn.Embedding(60, 32)}, r"target_embedding\.num_embeddings=60"),
        ({"target_embedding": nn.Embedding(50, 32, padding_idx=3)}, "padding_idx=3"),
        ({"output": nn.Linear(32, 60)}, r"output\.out_features=60"),
        ({"output": nn.Linear(16, 50)}, r"output\.weight=\(50, 16\)"),
        ({"output": nn.Bilinear(32, 32, 50)}, "output=.*Bilinear"),
        (
            {"config": TinyTFMConfig(position_embedding_type="learned")},
            r"model\.encoder\.embed_positions\.weight",
        ),
        ({"config": TinyTFMConfig(input_feature_size=28)}, r"feature_projection\.weight"),
        ({"config": tiny_config(vocab_size=99, eos_token_id=98)}, "eos_token_id=98"),
        ({"config": tiny_config(is_encoder_decoder=False)}, "is_encoder_decoder=False"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_from_torch_refuses_the_rest(arguments, message):
    transformer, source_embedding, *_ = torch_model()
    arguments = {"source_embedding": source_embedding, **arguments}
    with pytest.raises(ValueError, match=message):
        from_torch_transformer(transformer, **arguments)


# All of them


def marian_there():
    return tiny_marian(), from_marian


def marian_back():
    return tiny_model(output_bias=True), to_marian


def torch_there():
    transformer, source, target, output = torch_model(share=False, tie=False, bias=True)
    model = nn.ModuleDict({"transformer": transformer, "s": source, "t": target, "o": output})
    return model.eval(), lambda model: from_torch_transformer(*model.values())


def torch_transformer_back():
    return tiny_model(add_final_layer_norm=True), to_torch_transformer


def torch_stacks_back():
    return tiny_model(), lambda model: nn.ModuleList(to_torch_stacks(model))


every_way = pytest.mark.parametrize(
    "way",
    [marian_there, marian_back, torch_there, torch_transformer_back, torch_stacks_back],
    ids=lambda way: way.__name__,
)


@every_way
def test_original_stays_as_it_is_and_shares_no_memory(way):
    model, convert = way()
    before = copy.deepcopy(model.state_dict())
    config = copy.deepcopy(model.config.to_dict()) if hasattr(model, "config") else None
    ties = addresses(model)
    random_state = torch.get_rng_state()
    result = convert(model)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert not addresses(model) & addresses(result)
    with torch.no_grad():
        for parameter in result.parameters():
            parameter.fill_(7.0)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert addresses(model) == ties
    if config is not None:
        assert model.config.to_dict() == config


@every_way
def test_mode_is_kept(way):
    model, convert = way()
    for training in (True, False):
        result = convert(model.train(training))
        _, *modules = result.modules()
        assert {module.training for module in modules} == {training}
        assert all(parameter.grad is None for parameter in result.parameters())


@HALVES
@every_way
def test_dtype_is_kept(way, dtype):
    model, convert = way()
    result = convert(model.to(dtype))
    assert {t.dtype for t in (*result.parameters(), *result.buffers())} == {dtype}


@every_way
def test_default_dtype_does_not_matter(way):
    model, convert = way()
    torch.set_default_dtype(torch.float64)
    try:
        result = convert(model)
    finally:
        torch.set_default_dtype(torch.float32)
    assert {t.dtype for t in (*result.parameters(), *result.buffers())} == {torch.float32}


@pytest.mark.gpu
@every_way
def test_device_is_kept(way):
    model, convert = way()
    result = convert(model.to("cuda"))
    assert {t.device.type for t in (*result.parameters(), *result.buffers())} == {"cuda"}


# The names of our weights, which checkpoints and these conversions rely on


def both(*modules: str) -> list[str]:
    return [f"{module}.{kind}" for module in modules for kind in ("weight", "bias")]


ATTENTION = ("q_proj", "k_proj", "v_proj", "out_proj")
LAYER = both(
    *(f"self_attn.{projection}" for projection in ATTENTION),
    "self_attn_layer_norm",
    "fc1",
    "fc2",
    "final_layer_norm",
)
CROSS_ATTENTION = both(
    *(f"encoder_attn.{projection}" for projection in ATTENTION), "encoder_attn_layer_norm"
)
ENCODER = ["encoder.embed_tokens.weight", *(f"encoder.layers.0.{name}" for name in LAYER)]
DECODER = ["decoder.embed_tokens.weight", *(f"decoder.layers.0.{name}" for name in LAYER)]
CROSSING = [f"decoder.layers.0.{name}" for name in CROSS_ATTENTION]
NORMS = both("encoder.layer_norm", "decoder.layer_norm")


def with_head(names, *head):
    return [*(f"model.{name}" for name in names), *head]


@pytest.mark.parametrize(
    ("model_class", "changes", "names"),
    [
        (TinyTFMModel, {}, ["shared.weight", *ENCODER, *DECODER, *CROSSING]),
        (
            TinyTFMForConditionalGeneration,
            {},
            with_head(["shared.weight", *ENCODER, *DECODER, *CROSSING], "lm_head.weight"),
        ),
        (
            TinyTFMForConditionalGeneration,
            {"share_encoder_decoder_embeddings": False, "output_bias": True, "norm_first": True},
            with_head([*ENCODER, *DECODER, *CROSSING, *NORMS], "lm_head.weight", "lm_head.bias"),
        ),
        (
            TinyTFMModel,
            {
                "share_encoder_decoder_embeddings": False,
                "position_embedding_type": "learned",
                "input_feature_size": 7,
            },
            [
                *ENCODER[1:],
                *DECODER,
                *CROSSING,
                "encoder.feature_projection.weight",
                "encoder.feature_projection.bias",
                "encoder.embed_positions.weight",
                "decoder.embed_positions.weight",
            ],
        ),
        (
            TinyTFMForCausalLM,
            {"is_encoder_decoder": False, "is_decoder": True, "add_final_layer_norm": True},
            with_head([*DECODER, *NORMS[2:]], "lm_head.weight"),
        ),
        (
            TinyTFMForSequenceClassification,
            {"is_encoder_decoder": False},
            with_head(ENCODER, "classifier.weight", "classifier.bias"),
        ),
        (TinyTFMModel, {"is_encoder_decoder": False}, ENCODER),
        (TinyTFMModel, {"is_encoder_decoder": False, "is_decoder": True}, DECODER),
    ],
)
def test_names_of_weights_are_public(model_class, changes, names):
    model = model_class(tiny_config(encoder_layers=1, decoder_layers=1, **changes))
    assert sorted(model.state_dict()) == sorted(names)
