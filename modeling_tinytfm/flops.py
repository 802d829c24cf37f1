"""How much arithmetic training is, how fast it runs, and what share of the device that uses.

Counted are the products of matrices that the model must compute for its real tokens, forward and
backward; not padding, nor what a kernel computes again to save memory. A multiplication with its
addition is 2 FLOPs, and backward computes two products for each one of forward, which makes 6 FLOPs
for every weight that a token meets:

    a source token    encoder_layers (4 d^2 + 2 d d_ff) + decoder_layers 2 d^2
    a target token    decoder_layers (6 d^2 + 2 d d_ff) + d vocab_size

(the decoder's 2 d^2 are the keys and values of cross-attention, its 6 d^2 all other projections),
and 12 d for every pair of positions that an attention compares, half of it for the scores, half for
the mean of the values. Causal attention counts in full, as in torch's FlopCounterMode. Looking up
embeddings is no product; norms, softmax and the optimizer are left out, as is usual.
"""

import functools
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

# Dense 16-bit products of matrices on tensor cores, FLOPs a second, as their maker publishes them
# (half of what is given "with sparsity"). The first pattern that is found in torch's name counts;
# a slice of a GPU (MIG), which has a part of it, is measured.
PEAK_FLOPS: dict[str, float] = {
    r"\bB200\b": 2250e12,  # https://www.nvidia.com/en-us/data-center/hgx/
    r"\bH200 NVL\b": 835e12,  # https://www.nvidia.com/en-us/data-center/h200/
    r"\bH200\b": 989e12,  # there
    r"\bH100 NVL\b": 835e12,  # https://www.nvidia.com/en-us/data-center/h100/
    r"\bH100 PCIe\b": 756e12,  # there
    r"\bH100\b": 989e12,  # there
    r"\bA100\b": 312e12,  # https://www.nvidia.com/en-us/data-center/a100/
    r"\bL40S\b": 362e12,  # https://www.nvidia.com/en-us/data-center/l40s/
    r"\bL4\b": 121e12,  # https://www.nvidia.com/en-us/data-center/l4/
    r"\bA10\b": 125e12,  # https://www.nvidia.com/en-us/data-center/products/a10-gpu/
    # https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf
    r"\bRTX 4090$": 165.2e12,
}
MEASURED_SECONDS = 0.1


@dataclass(frozen=True)
class TokenCounts:
    """Real tokens of some rows, and the pairs of them that attention compares.

    Attributes:
        source: Tokens that the encoder reads.
        target: Tokens that the decoder reads, start token included and last token not.
        source_pairs: Sum over the rows of source x source.
        target_pairs: Of target x target.
        cross_pairs: Of target x source.
        rows: Number of rows.
    """

    source: int
    target: int
    source_pairs: int
    target_pairs: int
    cross_pairs: int
    rows: int

    @classmethod
    def of_batch(cls, config: Any, inputs: dict[str, Tensor]) -> "TokenCounts":
        """Counts a batch, as a collator made it, for a model of any of the three shapes."""
        given = inputs.get("input_ids")
        given = inputs["input_features"][..., 0] if given is None else given
        mask = inputs.get("attention_mask")
        read = (torch.ones_like(given, dtype=torch.long) if mask is None else mask.long()).sum(-1)
        nothing = torch.zeros_like(read)
        if config.is_encoder_decoder:
            source, target = read, (inputs["labels"] != -100).sum(-1)
        else:
            source, target = (nothing, read) if config.is_decoder else (read, nothing)
        lengths = {
            "source": source,
            "target": target,
            "source_pairs": source * source,
            "target_pairs": target * target,
            "cross_pairs": target * source,
        }
        totals = torch.stack([counted.sum() for counted in lengths.values()]).tolist()
        return cls(rows=len(given), **dict(zip(lengths, totals, strict=True)))


def weights_per_token(config: Any) -> tuple[int, int]:
    """How many weights of matrices meet each source token, and each target token.

    Args:
        config: A `TinyTFMConfig`.
    """
    d_model = config.d_model
    encoder_layer = 4 * d_model**2 + 2 * d_model * config.encoder_ffn_dim
    decoder_layer = 4 * d_model**2 + 2 * d_model * config.decoder_ffn_dim
    output = d_model * config.vocab_size
    if config.is_encoder_decoder:
        # Of cross-attention: queries and outputs meet target tokens, keys and values source tokens.
        half_cross_attention = config.decoder_layers * 2 * d_model**2
        return (
            config.encoder_layers * encoder_layer + half_cross_attention,
            config.decoder_layers * decoder_layer + half_cross_attention + output,
        )
    if config.is_decoder:
        return 0, config.decoder_layers * decoder_layer + output
    features = d_model * (config.input_feature_size or 0)
    return config.encoder_layers * encoder_layer + features, 0


def describe_flops(config: Any) -> str:
    """What training on a token takes, in words; attention between positions comes on top."""
    sides = zip(("source", "target"), weights_per_token(config), strict=True)
    parts = [f"{6e-6 * weights:,.3g} MFLOPs a {side} token" for side, weights in sides if weights]
    return f"{', '.join(parts)}, forward and backward, attention's products aside"


def training_flops(config: Any, counts: TokenCounts) -> float:
    """FLOPs of one forward and backward pass.

    Args:
        config: A `TinyTFMConfig`.
        counts: Of the rows that pass.
    """
    per_source, per_target = weights_per_token(config)
    pairs = 0
    if per_source:
        pairs += config.encoder_layers * counts.source_pairs
    if per_target:
        pairs += config.decoder_layers * (counts.target_pairs + counts.cross_pairs)
    products = counts.source * per_source + counts.target * per_target + 2 * config.d_model * pairs
    flops = 6.0 * products
    if not (config.is_encoder_decoder or config.is_decoder):
        flops += 6.0 * counts.rows * config.d_model * (config.num_labels or 0)
        # Backward computes no gradient of the features themselves.
        flops -= 2.0 * counts.source * config.d_model * (config.input_feature_size or 0)
    return flops


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """What a device can compute in products of matrices, FLOPs a second.

    Args:
        device: Looked up in `PEAK_FLOPS` for 16-bit types; otherwise measured, on a CPU with as
            many threads as torch has now.
        dtype: Of the factors.
    """
    if device.type == "cuda" and dtype.itemsize == 2:
        name = torch.cuda.get_device_name(device)
        for pattern, peak in PEAK_FLOPS.items():
            if re.search(pattern, name) and "MIG" not in name:
                return peak
    return _measured_flops(device, dtype, torch.get_num_threads())


@functools.cache
def _measured_flops(device: torch.device, dtype: torch.dtype, threads: int) -> float:
    """The best of some products, of matrices large enough for the device to be busy."""
    size = 1024 if device.type == "cpu" else 8192
    factor = torch.ones(size, size, dtype=dtype, device=device)

    def seconds() -> float:
        start = time.perf_counter()
        factor @ factor
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        return time.perf_counter() - start

    end = time.perf_counter() + MEASURED_SECONDS
    best = min(seconds(), seconds())  # the first one loads the library
    while time.perf_counter() < end:
        best = min(best, seconds())
    return 2 * size**3 / best


def processor_has_any(*instructions: str) -> bool | None:
    """Whether this CPU has one of some sets of instructions, by torch's names (`avx512_bf16`).

    None: torch does not tell (its versions before 2.7, other architectures than x86-64).
    """
    known: dict[str, bool] = getattr(torch.cpu, "get_capabilities", lambda: {})()
    if not all(name in known for name in instructions):
        return None
    return any(known[name] for name in instructions)


class SpeedMeter(TrainerCallback):
    """Tokens and FLOPs of training over the time it took, without evaluation and checkpoints.

    Args:
        config: The model's.
        dtype: What products of matrices are computed in.
    """

    def __init__(self, config: Any, dtype: torch.dtype):
        self.config = config
        self.dtype = dtype
        self.peak: float | None = None
        # Since the last line of the log, and before: source tokens, target tokens, FLOPs, seconds.
        self.recent = [0.0, 0.0, 0.0, 0.0]
        self.earlier = [0.0, 0.0, 0.0, 0.0]
        self.running_since = time.perf_counter()

    def count(self, inputs: dict[str, Tensor]) -> float:
        """Takes note of a batch, which lies on the CPU still; returns its FLOPs."""
        counts = TokenCounts.of_batch(self.config, inputs)
        flops = training_flops(self.config, counts)
        for place, value in enumerate((counts.source, counts.target, flops)):
            self.recent[place] += value
        return flops

    def rates(self, sum_of_processes: Callable[[list[float]], list[float]]) -> dict[str, float]:
        """Speed since the last call, of all processes together.

        Args:
            sum_of_processes: Adds up numbers over the processes, all of which call this.

        Returns:
            `tokens_per_second`, source and target, `target_tokens_per_second` where there are
            both, `model_flops_per_second`, and `mfu`, its share of what the devices can do.
        """
        return self._rates(self._close(), sum_of_processes)

    def overall(self, sum_of_processes: Callable[[list[float]], list[float]]) -> dict[str, float]:
        """`rates` since training began, or was resumed."""
        self._close()
        return self._rates(self.earlier, sum_of_processes)

    def _close(self) -> list[float]:
        """Ends the time since the last line of the log; returns its totals."""
        self._pause()
        recent, self.recent = self.recent, [0.0, 0.0, 0.0, 0.0]
        self.earlier = [old + new for old, new in zip(self.earlier, recent, strict=True)]
        return recent

    def _rates(
        self, totals: list[float], sum_of_processes: Callable[[list[float]], list[float]]
    ) -> dict[str, float]:
        *own, seconds = totals
        source, target, flops, peak = sum_of_processes([*own, self.peak or 0.0])
        if seconds == 0 or peak == 0:
            return {}
        rates = {"tokens_per_second": (source + target) / seconds}
        if source and target:
            rates["target_tokens_per_second"] = target / seconds
        rates["model_flops_per_second"] = flops / seconds
        rates["mfu"] = flops / seconds / peak
        return rates

    def _pause(self) -> None:
        now = time.perf_counter()
        self.recent[3] += now - self.running_since
        self.running_since = now

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Learns what the device can do, and starts the clock."""
        self.peak = peak_flops(args.device, self.dtype)
        self.recent, self.earlier = [0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]
        self.running_since = time.perf_counter()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Takes the time: what comes now may be an evaluation or a checkpoint."""
        self._pause()

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Starts the clock again after an evaluation."""
        self.running_since = time.perf_counter()

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Starts the clock again after a checkpoint."""
        self.running_since = time.perf_counter()
