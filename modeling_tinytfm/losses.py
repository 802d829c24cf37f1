"""The loss of a training step: cross-entropy with label smoothing, and a short way to it.

A step needs the logits of real targets only, and not all at a time. With some thousand words and
short sentences, the scores of all words at all positions cost as much time as the layers below, and
most of the memory.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .modeling_tinytfm import TinyTFMForConditionalGeneration, check_labels, mean_loss, shift_right

MOST_ROWS, FEWEST_ROWS = 512, 128  # targets whose logits are in memory together
MOST_LOGITS = 2**23  # for which large vocabularies go below MOST_ROWS


def smoothed_loss(
    logits_BTV: Tensor, labels_BT: Tensor, smoothing: float, num_items: int | Tensor | None = None
) -> Tensor:
    """(1 - e) * NLL + e * mean over the vocabulary of -log p, per real target (section 5.4).

    Args:
        logits_BTV: Raw logits.
        labels_BT: Token ids; -100 is ignored.
        smoothing: e.
        num_items: What the sum is divided by; the number of real targets if None.
    """
    total = F.cross_entropy(
        logits_BTV.flatten(0, 1).float(),
        labels_BT.flatten(),
        label_smoothing=smoothing,
        reduction="sum",
    )
    return mean_loss(total, labels_BT, num_items)


class ProjectedLoss(torch.autograd.Function):
    """Summed smoothed cross-entropy of x W^T + b, some rows at a time, with its gradients.

    Each gradient is known as soon as the logits are: p minus the target's distribution. Of that,
    what smoothing takes from all words alike never meets the logits: it is one number times the
    sums of W and x. The memory of the logits is taken once and used by all rows in turn.
    `torch.nn.functional.linear_cross_entropy` (torch 2.13) knows no smoothing in pieces, and on a
    CPU no bfloat16.
    """

    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, labels_N: Tensor, e: float
    ) -> Tensor:
        """The sum over N rows; `e` is the smoothing."""
        device, dtype = x_ND.device.type, x_ND.dtype
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        N, V = len(x_ND), len(weight_VD)
        share = e / V
        most = max(1, min(N, MOST_ROWS, max(FEWEST_ROWS, MOST_LOGITS // V)))
        with torch.autocast(device, enabled=False):
            multiplied_ND, multiplied_VD = x_ND.to(dtype), weight_VD.to(dtype)
            products = x_ND.new_empty(most, V, dtype=dtype)
            logits = products if dtype == torch.float32 else products.float()
            gradients = torch.empty_like(logits)
            total = x_ND.new_zeros((), dtype=torch.float32)
            x_grad, weight_grad = torch.empty_like(multiplied_ND), torch.zeros_like(weight_VD)
            bias_grad = None if bias_V is None else torch.zeros_like(bias_V)
            for start in range(0, N, most):
                rows = slice(start, start + most)
                x_RD, labels_R1 = multiplied_ND[rows], labels_N[rows, None]
                R = len(x_RD)
                products_RV, logits_RV, grad_RV = products[:R], logits[:R], gradients[:R]
                torch.mm(x_RD, multiplied_VD.T, out=products_RV)
                if logits is not products:
                    logits_RV.copy_(products_RV)
                if bias_V is not None:
                    logits_RV += bias_V
                torch.softmax(logits_RV, dim=-1, out=grad_RV)
                # log(sum(exp(x))) is that of the likeliest word, whose p is never too small.
                behind_R1 = logits_RV.amax(1, True) - logits_RV.gather(1, labels_R1)
                total += (behind_R1 - grad_RV.amax(1, True).log()).sum()
                if e:
                    total += e * logits_RV.gather(1, labels_R1).sum()
                grad_RV.scatter_add_(1, labels_R1, grad_RV.new_full(labels_R1.shape, e - 1))
                if bias_grad is not None:
                    bias_grad += grad_RV.sum(dim=0)
                if logits is not products:
                    grad_RV = products_RV.copy_(grad_RV)
                torch.mm(grad_RV, multiplied_VD, out=x_grad[rows])
                if grad_RV.dtype == weight_grad.dtype:
                    weight_grad.addmm_(grad_RV.T, x_RD)
                else:
                    weight_grad += grad_RV.T @ x_RD
            x_grad = x_grad.to(x_ND.dtype)
            if e:
                x_sum_D = x_ND.sum(dim=0, dtype=torch.float32)
                weight_sum_D = weight_VD.sum(dim=0, dtype=torch.float32)
                total -= share * (x_sum_D @ weight_sum_D)
                x_grad -= (share * weight_sum_D).to(x_grad.dtype)
                weight_grad -= (share * x_sum_D).to(weight_grad.dtype)
                if bias_V is not None and bias_grad is not None:
                    total -= share * N * bias_V.sum(dtype=torch.float32)
                    bias_grad -= share * N
        ctx.save_for_backward(x_grad, weight_grad, bias_grad)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        """The gradients of `forward`, times that of its sum."""
        # In place, as they are as large as the weights; autograd refuses to use them again.
        return *(None if g is None else g.mul_(grad) for g in ctx.saved_tensors), None, None


class LossHead(nn.Module):
    """Stands in for an output projection during a step: hidden states to the summed loss.

    Args:
        projection: The model's `lm_head`.
        labels_BT: Token ids; -100 is ignored.
        smoothing: e.
    """

    def __init__(self, projection: nn.Linear, labels_BT: Tensor, smoothing: float):
        super().__init__()
        self.projection = projection
        labels = labels_BT.flatten()
        self.real = (labels != -100).nonzero().squeeze(1)
        self.labels = labels.index_select(0, self.real).long()
        self.smoothing = smoothing

    def forward(self, x_BTD: Tensor) -> Tensor:
        """[B, T, D] -> a number."""
        x_ND = x_BTD.flatten(0, 1).index_select(0, self.real)
        weight, bias = self.projection.weight, self.projection.bias
        return ProjectedLoss.apply(x_ND, weight, bias, self.labels, self.smoothing)


def short_loss(
    wrapped: nn.Module,
    model: TinyTFMForConditionalGeneration,
    inputs: dict[str, Any],
    labels: Tensor,
    smoothing: float = 0.0,
    num_items: int | Tensor | None = None,
) -> Tensor:
    """What `smoothed_loss` gives for the logits of a batch, which are never there all at once.

    The projection is exchanged for the loss while the model runs, so that what is wrapped around
    the model (processes that share gradients, mixed precision) sees a usual forward pass.

    Args:
        wrapped: What is called: the model, or what is wrapped around it.
        model: The model.
        inputs: Arguments of its forward.
        labels: Token ids [B, T]; -100 is ignored.
        smoothing: e.
        num_items: What the sum is divided by; the number of real targets if None.
    """
    check_labels(labels, model.config.vocab_size)
    if not inputs.keys() & {"decoder_input_ids", "decoder_inputs_embeds"}:
        inputs = {**inputs, "decoder_input_ids": shift_right(labels, model.config)}
    lm_head = model.lm_head
    model.lm_head = LossHead(lm_head, labels, smoothing)
    try:
        total = wrapped(**inputs, use_cache=False).logits
    finally:
        model.lm_head = lm_head
    return mean_loss(total, labels, num_items)
