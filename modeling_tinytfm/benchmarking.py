"""TinyTFM beside its peers: the same work, in turns, in one run.

Machines are noisy, so a time says little and a ratio of times taken one after the other much: all
contenders take turns, after a turn that does not count, and every second round goes backwards (A B,
B A, ...), as what came before may help or hinder. What is reported is the median of the ratios
within a round, with their quartiles.

The contenders have the same weights, by `conversion`; losses and tokens are compared before
anything is timed. Peers are MarianMTModel and torch.nn.Transformer here, and in `end_to_end`, where
installed, CTranslate2 and JoeyNMT.
"""

import copy
import gc
import importlib.util
import math
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .configuration_tinytfm import TinyTFMConfig
from .conversion import to_marian, to_torch_stacks
from .flops import TokenCounts, peak_flops, training_flops
from .losses import short_loss
from .modeling_tinytfm import TinyTFMForConditionalGeneration, shift_right

OURS, MARIAN, TORCH = "TinyTFM", "MarianMT", "nn.Transformer"
PAD = 0  # TinyTFMConfig's
COMMON_OPERATIONS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::linear")


@dataclass(frozen=True)
class Size:
    """A model and its batch.

    Attributes:
        d_model: Width.
        layers: Of the encoder, and of the decoder.
        ffn_dim: Width inside the feed-forward networks.
        heads: Of each attention.
        vocab_size: Shared by both sides and the output projection.
        rows: Of a batch.
        length: Longest source and target of a batch; the others are drawn from half of it up.
        dropout: In training.
    """

    d_model: int
    layers: int
    ffn_dim: int
    heads: int
    vocab_size: int
    rows: int
    length: int
    dropout: float = 0.3

    def __str__(self) -> str:
        return (
            f"d {self.d_model}, {self.layers}+{self.layers} layers, d_ff {self.ffn_dim}, "
            f"V {self.vocab_size:,}, {self.rows} x {self.length}"
        )

    def config(self) -> TinyTFMConfig:
        """The model's config."""
        return TinyTFMConfig(
            vocab_size=self.vocab_size,
            d_model=self.d_model,
            encoder_layers=self.layers,
            decoder_layers=self.layers,
            encoder_attention_heads=self.heads,
            decoder_attention_heads=self.heads,
            encoder_ffn_dim=self.ffn_dim,
            decoder_ffn_dim=self.ffn_dim,
            dropout=self.dropout,
        )

    def model(self, device: str = "cpu", seed: int = 0) -> TinyTFMForConditionalGeneration:
        """A model with random weights."""
        torch.manual_seed(seed)
        model: Any = TinyTFMForConditionalGeneration(self.config())
        return model.to(device)

    def batch(self, device: str = "cpu", seed: int = 0) -> dict[str, Tensor]:
        """Random source and target ids [rows, length], a quarter of them padding."""
        generator = torch.Generator().manual_seed(seed)

        def ragged(padding: int) -> Tensor:
            lengths = torch.randint(
                self.length // 2, self.length + 1, (self.rows, 1), generator=generator
            )
            lengths[0] = self.length
            shape = (self.rows, self.length)
            ids = torch.randint(4, self.vocab_size, shape, generator=generator)
            return ids.masked_fill(torch.arange(self.length) >= lengths, padding).to(device)

        input_ids = ragged(PAD)
        attention_mask = input_ids.ne(PAD).long()
        return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": ragged(-100)}


SIZES = {
    "d64": Size(64, 2, 128, 4, 13, 64, 8),
    "d128": Size(128, 4, 256, 4, 4000, 170, 24),
    "d256": Size(256, 3, 1024, 4, 8000, 32, 24),
    "base": Size(512, 6, 2048, 8, 37000, 8, 32),
    "big": Size(1024, 6, 4096, 16, 37000, 8, 32),
}


@dataclass(frozen=True)
class Timing:
    """How long a contender took, beside the first one, which is TinyTFM.

    Attributes:
        name: Of the contender.
        seconds: Median of its turns.
        ratio: Median over the rounds of its time / TinyTFM's: above 1, TinyTFM is faster.
        low: The ratios' lower quartile.
        high: Their upper quartile.
    """

    name: str
    seconds: float
    ratio: float
    low: float
    high: float


def in_turns(
    contenders: dict[str, Callable[[], Any]],
    rounds: int,
    wait: Callable[[], Any] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Timing]:
    """Times contenders round by round, to and fro; the first round does not count.

    Args:
        contenders: What to time, by name; the first one is what the others are compared with.
        rounds: How many count.
        wait: Waits for the device to finish.
        clock: Seconds.
    """
    times: dict[str, list[float]] = {name: [] for name in contenders}
    order = list(contenders)
    for _ in range(rounds + 1):
        for name in order:
            wait()
            start = clock()
            contenders[name]()
            wait()
            times[name].append(clock() - start)
        order.reverse()
    return compared({name: of_name[1:] for name, of_name in times.items()})


def compared(times: dict[str, list[float]]) -> list[Timing]:
    """The timings of contenders from the times of their turns; the first is compared with."""
    first = next(iter(times.values()))
    timings = []
    for name, of_name in times.items():
        ratios = [time / ours for time, ours in zip(of_name, first, strict=True)]
        low, middle, high = quartiles(ratios)
        timings.append(Timing(name, statistics.median(of_name), middle, low, high))
    return timings


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def waiter(device: str) -> Callable[[], Any]:
    """What waits until a device has done all it was told."""
    return torch.cuda.synchronize if device.startswith("cuda") else lambda: None


# A training step


class TorchTransformer(nn.Module):
    """torch.nn's own layers around the weights of a TinyTFM model, with the usual masks."""

    def __init__(self, model: TinyTFMForConditionalGeneration):
        super().__init__()
        self.config = model.config
        self.encoder, self.decoder = to_torch_stacks(model)
        self.embedding = copy.deepcopy(model.model.shared)
        table = model.get_buffer("model.encoder.embed_positions.table")
        self.register_buffer("positions", table.clone())
        self.dropout = nn.Dropout(model.config.dropout)

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings and positions [B, L, D]."""
        positions: Any = self.positions
        scaled = self.embedding(ids) * self.config.d_model**0.5
        return self.dropout(scaled + positions[: ids.shape[1]])

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        """The mean loss."""
        padding = attention_mask == 0
        decoder_input_ids = shift_right(labels, self.config)
        causal = torch.triu(
            torch.ones(2 * (labels.shape[1],), dtype=torch.bool, device=labels.device), 1
        )
        memory = self.encoder(self.embed(input_ids), src_key_padding_mask=padding)
        x = self.decoder(
            self.embed(decoder_input_ids),
            memory,
            tgt_mask=causal,
            tgt_is_causal=True,
            memory_key_padding_mask=padding,
        )
        logits = F.linear(x, self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


class Step:
    """A training step: loss, gradients, and an update by fused AdamW.

    Args:
        model: In training mode.
        loss: Of a batch.
        batch: The batch.
        bf16: Whether to compute under bfloat16 autocast.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[dict[str, Tensor]], Tensor],
        batch: dict[str, Tensor],
        bf16: bool = False,
    ):
        self.model, self.loss, self.batch, self.bf16 = model, loss, batch, bf16
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def loss_now(self) -> Tensor:
        """The loss of the batch."""
        device = self.batch["labels"].device.type
        with torch.autocast(device, torch.bfloat16, enabled=self.bf16):
            return self.loss(self.batch)

    def __call__(self) -> None:
        """Makes one update."""
        self.loss_now().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def our_loss(
    model: TinyTFMForConditionalGeneration, wrapped: nn.Module | None = None
) -> Callable[[dict[str, Tensor]], Tensor]:
    """The loss as `TinyTFMTrainer` computes it; where the model is compiled, its own."""

    def loss(batch: dict[str, Tensor]) -> Tensor:
        if wrapped is not None:
            return wrapped(**batch).loss
        inputs = dict(batch)
        labels = inputs.pop("labels")
        return short_loss(model, model, inputs, labels)

    return loss


def training_steps(
    size: Size, device: str = "cpu", bf16: bool = False, compiled: bool = False
) -> dict[str, Step]:
    """The contenders' steps on one batch, from the same weights.

    Args:
        size: Of model and batch.
        device: Where.
        bf16: Whether to compute under bfloat16 autocast.
        compiled: Whether to add TinyTFM under torch.compile.

    Raises:
        RuntimeError: If their losses differ.
    """
    model, batch = size.model(device=device), size.batch(device)
    marian, stacks = to_marian(model), TorchTransformer(model)
    steps = {
        OURS: Step(model, our_loss(model), batch, bf16),
        MARIAN: Step(marian, lambda batch: marian(**batch).loss, batch, bf16),
        TORCH: Step(stacks, lambda batch: stacks(**batch), batch, bf16),
    }
    if compiled:
        twin = copy.deepcopy(model)
        loss = our_loss(twin, torch.compile(twin))  # type: ignore[arg-type]
        steps[f"{OURS}, compiled"] = Step(twin, loss, batch, bf16)
    losses = {}
    for name, step in steps.items():
        step.model.eval()
        with torch.no_grad():
            losses[name] = step.loss_now().item()
        step.model.train()
    if max(losses.values()) - min(losses.values()) > (0.02 if bf16 else 1e-4) * losses[OURS]:
        raise RuntimeError(f"the contenders' losses differ: {losses}")
    return steps


def common_share(step: Step) -> float:
    """The share of a step's time that both sides spend alike: products of matrices, optimizer."""
    kind = torch.profiler.ProfilerActivity
    kinds = [kind.CPU, kind.CUDA] if step.batch["labels"].is_cuda else [kind.CPU]
    step()
    with torch.profiler.profile(activities=kinds) as profile:
        step()
    on_cuda = len(kinds) > 1
    events = profile.key_averages()
    times = {
        event.key: event.self_device_time_total if on_cuda else event.self_cpu_time_total
        for event in events
    }
    common = sum(times.get(name, 0) for name in (*COMMON_OPERATIONS, "aten::_fused_adamw_"))
    if on_cuda:  # an operation has the time of its kernels, which are events of their own
        device = torch.autograd.DeviceType.CUDA
        kernels = [x for x in events if x.device_type == device and not x.is_user_annotation]
        return common / sum(kernel.self_device_time_total for kernel in kernels)
    return common / sum(times.values())


def throughput(size: Size, batch: dict[str, Tensor], seconds: float, bf16: bool) -> dict[str, Any]:
    """Real target tokens a second, and the share of the device's peak (MFU) of a step."""
    sources, targets = (
        (batch[name] >= floor).sum(dim=1).tolist()
        for name, floor in (("attention_mask", 1), ("labels", 0))
    )
    pairs = list(zip(sources, targets, strict=True))
    counts = TokenCounts(
        source=sum(sources),
        target=sum(targets),
        source_pairs=sum(s * s for s in sources),
        target_pairs=sum(t * t for t in targets),
        cross_pairs=sum(s * t for s, t in pairs),
        rows=len(pairs),
    )
    peak = peak_flops(batch["labels"].device, torch.bfloat16 if bf16 else torch.float32)
    return {
        "target_tokens_per_second": sum(targets) / seconds,
        "mfu": training_flops(size.config(), counts) / seconds / peak,
    }


# Generation


def generators(
    size: Size, num_beams: int, new_tokens: int, device: str = "cpu", compiled: bool = False
) -> dict[str, Callable[[], Tensor]]:
    """The contenders' generate() on one batch of sources, with the same weights.

    Args:
        size: Of model and batch.
        num_beams: 1 is greedy search.
        new_tokens: Of each output: a random model does not end one.
        device: Where.
        compiled: Whether to add TinyTFM with a static cache and torch.compile.

    Raises:
        RuntimeError: If their tokens differ.
    """
    model, batch = size.model(device=device).eval(), size.batch(device)
    batch.pop("labels")
    settings: dict[str, Any] = {
        "num_beams": num_beams,
        "max_new_tokens": new_tokens,
        "eos_token_id": None,
        "do_sample": False,
    }

    def contender(model: Any, **more: Any) -> Callable[[], Tensor]:
        def run() -> Tensor:
            with torch.inference_mode():
                return model.generate(**batch, **settings, **more)

        return run

    contenders = {OURS: contender(model), MARIAN: contender(to_marian(model))}
    if compiled:
        twin = copy.deepcopy(model)
        contenders[f"{OURS}, static cache, compiled"] = contender(
            twin, cache_implementation="static"
        )
    tokens = {name: run() for name, run in contenders.items()}
    if not all(ids.equal(tokens[OURS]) for ids in tokens.values()):
        raise RuntimeError("the contenders' tokens differ")
    return contenders


def cached_step_ratio(size: Size, short: int, long: int, rounds: int) -> Timing:
    """Time of a step of greedy search over `long` tokens / that over `short` ones."""
    model, batch = size.model().eval(), size.batch()

    def run(tokens: int) -> Callable[[], Any]:
        return lambda: model.generate(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            max_new_tokens=tokens,
            eos_token_id=None,
            do_sample=False,
        )

    times: dict[str, list[float]] = {str(short): [], str(long): []}
    for _ in range(rounds):
        for tokens in (short, long):
            start = time.perf_counter()
            run(tokens)()
            times[str(tokens)].append((time.perf_counter() - start) / tokens)
    return compared(times)[1]


# Memory


def peak_memory(name: str, size: Size, bf16: bool = False, device: str = "cpu") -> int:
    """Bytes that a contender's model, optimizer and first two steps need at their peak.

    On a CPU this is what the process grows by, so it is run in a process of its own.
    """
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        gc.collect()
        before = status_bytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM counts from here
    model, batch = size.model(device=device), size.batch(device)
    if name == OURS:
        step = Step(model, our_loss(model), batch, bf16)
    else:
        marian = to_marian(model)
        del model
        step = Step(marian, lambda batch: marian(**batch).loss, batch, bf16)
    for _ in range(2):  # the optimizer's state is there from the second on
        step()
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated() - before
    return status_bytes("VmHWM") - before


def status_bytes(field: str) -> int:
    """A figure of this process, as Linux tells it: VmRSS (now) or VmHWM (at most)."""
    text = Path("/proc/self/status").read_text(encoding="utf-8")
    return 1024 * int(text.partition(f"{field}:")[2].split()[0])


def alone(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function of this module returns in a process of its own."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        threads = torch.get_num_threads()
        return pool.submit(_with_threads, threads, function, arguments).result()


def _with_threads(threads: int, function: Callable[..., Any], arguments: tuple) -> Any:
    torch.set_num_threads(threads)
    return function(*arguments)


# Growth


@dataclass(frozen=True)
class Curve:
    """What training steps cost as one thing grows.

    Attributes:
        what: That which grows.
        values: Its values.
        seconds: Of a step.
        bytes: At its peak.
    """

    what: str
    values: list[int]
    seconds: list[float]
    bytes: list[int]

    def exponents(self) -> tuple[float, float]:
        """The k of time ~ n^k and of memory ~ n^k, by least squares on a log-log scale."""
        return exponent(self.values, self.seconds), exponent(self.values, self.bytes)


def exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """The slope of log(cost) over log(size)."""
    x, y = (torch.tensor(values, dtype=torch.float64).log() for values in (sizes, costs))
    x, y = x - x.mean(), y - y.mean()
    return float((x @ y) / (x @ x))


def curve(what: str, variants: Sequence[tuple[int, Size]], rounds: int) -> Curve:
    """Times TinyTFM's steps at several sizes in turns, and measures the memory of each.

    Args:
        what: That which grows.
        variants: Its values, each with its size.
        rounds: Of timing.
    """
    steps: dict[str, Callable[[], Any]] = {}
    for value, size in variants:
        model = size.model().train()
        steps[str(value)] = Step(model, our_loss(model), size.batch())
    timings = in_turns(steps, rounds)
    return Curve(
        what,
        [value for value, _ in variants],
        [timing.seconds for timing in timings],
        [alone(peak_memory, OURS, size) for _, size in variants],
    )


def draw_growth(curves: Sequence[Curve], path: str | Path) -> None:
    """Draws time and peak memory of each curve on log-log scales, with the fitted power of n."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    figure = Figure(figsize=(3 * len(curves), 5), layout="constrained")
    rows = figure.subplots(2, len(curves), sharey="row", squeeze=False)
    for one, axes in zip(curves, rows.T, strict=True):
        costs = ([1e3 * seconds for seconds in one.seconds], [size / 2**20 for size in one.bytes])
        for axis, values, k in zip(axes, costs, one.exponents(), strict=True):
            axis.loglog(one.values, values, "o-")
            scale = math.exp(
                statistics.fmean(
                    math.log(value / n**k) for n, value in zip(one.values, values, strict=True)
                )
            )
            fitted = [scale * n**k for n in one.values]
            axis.plot(one.values, fitted, "--", color="gray", label=f"n^{k:.2f}")
            axis.set_xticks(one.values, [f"{value:,}" for value in one.values])
            axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.yaxis.set_major_formatter("{x:,.0f}")
            axis.minorticks_off()
            axis.grid(alpha=0.3)
            axis.legend(loc="upper left")
        axes[-1].set_xlabel(one.what)
    rows[0, 0].set_ylabel("ms a training step")
    rows[1, 0].set_ylabel("peak memory, MiB")
    figure.savefig(path, dpi=110)


def installed(package: str) -> bool:
    """Whether an optional peer is here."""
    return importlib.util.find_spec(package) is not None


def as_rows(timings: Iterable[Timing], **facts: Any) -> list[dict[str, Any]]:
    """Timings as dictionaries, each with the facts of its work."""
    return [{**facts, **asdict(timing)} for timing in timings]
