import pytest
import torch
import torch.nn.functional as F
from tiny import TINY, tiny_model, token_ids

from modeling_tinytfm import losses
from modeling_tinytfm.losses import ProjectedLoss, short_loss, smoothed_loss

every_smoothing = pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])


@pytest.fixture(autouse=True)
def _several_pieces(monkeypatch):
    monkeypatch.setattr(losses, "MOST_ROWS", 4)


def batch(*target_lengths):
    labels = token_ids(len(target_lengths), max(target_lengths))
    for row, length in enumerate(target_lengths):
        labels[row, length:] = -100
    mask = torch.ones(len(target_lengths), 6, dtype=torch.long)
    mask[0, 4:] = 0
    return {"input_ids": token_ids(len(target_lengths), 6), "attention_mask": mask}, labels


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@every_smoothing
@pytest.mark.parametrize("rows", [1, 4, 11])
@pytest.mark.parametrize("bias", [True, False])
def test_loss_and_gradients_are_those_of_all_logits(smoothing, rows, bias):
    x, weight = torch.randn(rows, 8, requires_grad=True), torch.randn(50, 8, requires_grad=True)
    biases = torch.randn(50, requires_grad=True) if bias else None
    labels = torch.randint(50, (rows,))
    inputs = [x, weight, biases] if bias else [x, weight]
    expected = F.cross_entropy(
        F.linear(x, weight, biases), labels, label_smoothing=smoothing, reduction="sum"
    )
    total = ProjectedLoss.apply(x, weight, biases, labels, smoothing)
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(
        torch.autograd.grad(total / 3, inputs), torch.autograd.grad(expected / 3, inputs)
    )


@pytest.mark.parametrize("scale", [1e3, 1e6])
def test_loss_of_a_word_whose_probability_is_too_small_for_a_float(scale):
    x, weight = torch.tensor([[scale]], requires_grad=True), torch.tensor([[1.0], [0.0], [-1.0]])
    total = ProjectedLoss.apply(x, weight, None, torch.tensor([1]), 0.0)
    assert total.item() == scale
    total.backward()
    assert x.grad.item() == 1.0


@every_smoothing
@pytest.mark.parametrize("changes", [{}, {"output_bias": True}, {"tie_word_embeddings": False}])
@pytest.mark.parametrize("num_items", [None, 5, torch.tensor(5)])
def test_the_short_way_gives_the_same_loss(smoothing, changes, num_items):
    model = tiny_model(**changes).train()
    inputs, labels = batch(5, 3, 7)
    outputs = model(**inputs, labels=labels)
    expected = smoothed_loss(outputs.logits, labels, smoothing, num_items)
    expected_gradients = gradients(model, expected)
    head = model.lm_head
    loss = short_loss(model, model, inputs, labels, smoothing, num_items)
    assert model.lm_head is head
    torch.testing.assert_close(loss, expected)
    for name, gradient in gradients(model, loss).items():
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-4, atol=1e-5)


def test_it_uses_decoder_inputs_that_are_given():
    model = tiny_model()
    inputs, labels = batch(5, 3)
    inputs["decoder_input_ids"] = token_ids(2, 5)
    expected = smoothed_loss(model(**inputs).logits, labels, 0.1)
    torch.testing.assert_close(short_loss(model, model, inputs, labels, 0.1), expected)


def test_under_autocast_it_is_as_near_as_the_long_way():
    model = tiny_model().train()
    inputs, labels = batch(5, 3, 7)
    exact = gradients(model, short_loss(model, model, inputs, labels))
    distances = []
    with torch.autocast("cpu", torch.bfloat16):
        short = short_loss(model, model, inputs, labels)
        for loss in (model(**inputs, labels=labels).loss, short):
            rounded = gradients(model, loss)
            distances.append(
                sum(float((rounded[name] - gradient).norm()) for name, gradient in exact.items())
            )
    assert short.dtype == torch.float32
    assert 0 < distances[1] < 1.2 * distances[0]


def test_no_target_at_all_gives_zero():
    model = tiny_model()
    inputs, labels = batch(4, 4)
    loss = short_loss(model, model, inputs, torch.full_like(labels, -100), 0.1)
    assert loss.item() == 0
    assert not any(gradient.any() for gradient in gradients(model, loss).values())


@pytest.mark.parametrize("label", [-1, TINY["vocab_size"]])
def test_labels_outside_the_vocabulary_are_refused(label):
    model = tiny_model()
    inputs, labels = batch(4, 4)
    labels[0, 0] = label
    head = model.lm_head
    with pytest.raises(ValueError, match=f"labels holds {label}"):
        short_loss(model, model, inputs, labels)
    assert model.lm_head is head


def test_the_projection_comes_back_after_an_error():
    model = tiny_model()
    inputs, labels = batch(4, 4)
    head = model.lm_head
    with pytest.raises(ValueError, match="attention_mask has shape"):
        short_loss(model, model, {**inputs, "attention_mask": torch.ones(2, 3)}, labels)
    assert model.lm_head is head


def test_never_are_there_more_logits_than_rows_of_a_piece(monkeypatch):
    """Every tensor of a forward pass whose last axis is the vocabulary has 4 rows at most."""
    model = tiny_model().train()
    inputs, labels = batch(5, 3, 7)
    widest = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            result = function(*arguments, **(options or {}))
            if isinstance(result, torch.Tensor) and result.shape[-1:] == (TINY["vocab_size"],):
                widest.append(result.numel() // TINY["vocab_size"])
            return result

    with Watch():
        short_loss(model, model, inputs, labels)
    embedding_rows = {TINY["d_model"]}  # the transposed matrix is as wide
    assert set(widest) - embedding_rows <= {1, 2, 3, 4}
    assert 4 in widest


def test_a_large_vocabulary_has_fewer_rows_in_memory_but_not_too_few(monkeypatch):
    made = []
    softmax = torch.softmax

    def watch(logits, **options):
        made.append(len(logits))
        return softmax(logits, **options)

    monkeypatch.setattr(torch, "softmax", watch)
    monkeypatch.setattr(losses, "FEWEST_ROWS", 2)
    x, weight, labels = torch.randn(6, 8), torch.randn(50, 8), torch.randint(50, (6,))
    totals = []
    for most_logits in (1000, 150, 1):
        monkeypatch.setattr(losses, "MOST_LOGITS", most_logits)
        totals.append(ProjectedLoss.apply(x, weight, None, labels, 0.1))
    assert made == [4, 2, 3, 3, 2, 2, 2]
    torch.testing.assert_close(totals, totals[:1] * 3)


def test_gradients_are_given_once_and_never_wrong():
    x, weight = torch.randn(5, 8, requires_grad=True), torch.randn(50, 8, requires_grad=True)
    total = ProjectedLoss.apply(x, weight, None, torch.randint(50, (5,)), 0.1)
    (2 * total).backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()
