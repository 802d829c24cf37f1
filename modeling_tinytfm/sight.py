"""What is measured of a model on one sentence: one teacher-forced pass, and reruns of it.

A pass is seen through hooks on modules by their usual names. Reruns are copies of the sentence in
which one head is switched off, or one source token hidden.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .explorer import encode_attention, encode_vectors
from .modeling_tinytfm import sinusoids

VECTOR_TOKENS = 64  # more have no queries, keys and values
# What a page carries at most, however few layers it shows: 128 x 128 weights in 18 x 8 heads.
MOST_WEIGHTS = 18 * 8 * 128**2
BINS, TOP_TOKENS, TOP_UNITS, POSITIONS = 33, 5, 6, 64
ROWS = 16  # copies of the sentence that are run at once
# Which stack a kind of attention is in, and the name of its module there.
KINDS = {
    "cross": ("decoder", "encoder_attn"),
    "encoder": ("encoder", "self_attn"),
    "decoder": ("decoder", "self_attn"),
}
PROJECTIONS = {"query": "q_proj", "key": "k_proj", "value": "v_proj"}


@dataclass
class Stack:
    """Encoder or decoder: its module, all its layers, and which of them are kept."""

    module: Any
    layers: list[nn.Module]
    kept: list[int]  # from 0
    normed_first: bool = False


@contextmanager
def hooks(register: Sequence[tuple[Callable, Callable]]) -> Iterator[None]:
    """Hooks, as pairs of a module's method and what to pass it, for the time inside."""
    with ExitStack() as stack:
        for method, hook in register:
            stack.callback(method(hook).remove)
        yield


class MissingError(Exception):
    """Why a view has no numbers."""


@dataclass(eq=False)
class Sight:
    """One sentence in one model, and what is measured of it.

    Attributes:
        arrays: What a page shows, by name.
        header: What belongs in the header besides.
        missing: Views without numbers, and why.
    """

    model: Any
    source_ids: Tensor  # [1, S]
    start: int
    written: list[int]  # T ids
    stacks: dict[str, Stack]
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    header: dict[str, Any] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    seen: dict[nn.Module, tuple[Tensor, Tensor]] = field(default_factory=dict)  # input, output

    def __post_init__(self):
        device = self.source_ids.device
        self.labels = torch.tensor(self.written, device=device)  # [T]
        self.read_ids = torch.tensor([[self.start, *self.written[:-1]]], device=device)  # [1, T]

    def measure(self, detail: str) -> None:
        """The pass, and whatever the page shows of it."""
        with hooks([(module.register_forward_hook, self._keep) for module in self._modules()]):
            self.outputs = self.model(
                input_ids=self.source_ids,
                attention_mask=torch.ones_like(self.source_ids),
                decoder_input_ids=self.read_ids,
                output_attentions=True,
                output_hidden_states=True,
                use_cache=False,
            )
        self.attention()
        self.arrays["written"] = numbers(self.log_probabilities(self.outputs.logits)[0])
        views: dict[str, Callable[[], None]] = {
            "heads": self.heads,
            "vectors": self.vectors,
            "positions": self.positions,
            "stream": self.stream,
            "units": self.units,
            "path": self.path,
            "lens": self.lens,
            "erase": self.erase,
        }
        for view, measure in views.items():
            try:
                if detail == "attention":
                    raise MissingError("only attention weights were kept (detail: attention)")
                measure()
            except MissingError as reason:
                self.missing[view] = str(reason)

    def _keep(self, module: nn.Module, inputs: tuple, output: Any) -> None:
        output = output[0] if isinstance(output, tuple) else output
        self.seen[module] = (inputs[0], output)

    def _modules(self) -> Iterator[nn.Module]:
        """What is hooked: of each kept layer all parts that go by the usual names."""
        for stack in self.stacks.values():
            for child in ("embed_positions", "layer_norm"):
                if isinstance(getattr(stack.module, child, None), nn.Module):
                    yield getattr(stack.module, child)
            for number in stack.kept:
                for name, module in stack.layers[number].named_modules():
                    last = name.rpartition(".")[2]
                    if last in ("fc1", "fc2", "out_proj", *PROJECTIONS.values()) or last.endswith(
                        "layer_norm"
                    ):
                        yield module

    def part(self, stack: str, number: int, path: str) -> nn.Module:
        """A module of a layer, which has been run.

        Raises:
            MissingError: If there is none of that name.
        """
        module: Any = self.stacks[stack].layers[number]
        for name in path.split("."):
            module = getattr(module, name, None)
        if module not in self.seen:
            raise MissingError(f"the {stack}'s layer {number + 1} has no {path}")
        return module

    def given(self, *where: Any) -> Tensor:
        """What went into a module [L, D]: see `part`."""
        return self.seen[self.part(*where)][0][0].float()

    def made(self, *where: Any) -> Tensor:
        """What came out of a module [L, D]: see `part`."""
        return self.seen[self.part(*where)][1][0].float()

    def log_probabilities(self, logits: Tensor) -> Tensor:
        """Log p of each written token [B, T] from logits [B, T, V]."""
        labels = self.labels.expand(len(logits), -1)[..., None]
        return logits.float().log_softmax(-1).gather(-1, labels)[..., 0]

    def attention(self) -> None:
        """Weights of all kinds [layers, heads, queries, keys]."""
        outputs, sizes = self.outputs, {}
        given = (outputs.cross_attentions, outputs.encoder_attentions, outputs.decoder_attentions)
        for (kind, (stack, _)), weights in zip(KINDS.items(), given, strict=True):
            if not weights or weights[0] is None:
                raise ValueError(
                    f"{type(self.model).__name__} gives no {kind} attention weights: it needs "
                    "attn_implementation='eager'"
                )
            kept = self.stacks[stack].kept
            weights_LHQK = numbers(torch.stack([weights[number][0] for number in kept]))
            visible = np.ones(weights_LHQK.shape[-2:], bool)
            if kind == "decoder":
                visible = np.tril(visible)
            self.arrays[f"attention.{kind}"] = encode_attention(weights_LHQK, visible)
            sizes[kind] = weights_LHQK.size
        if sum(sizes.values()) > MOST_WEIGHTS:
            lengths = f"{self.source_ids.shape[1]} source and {len(self.written)} target tokens"
            raise ValueError(
                f"{lengths} in {len(self.stacks['decoder'].kept)} layers are more than a page "
                "shows: choose fewer with layers=[...] (see.py: --layers 6)"
            )
        self.header["layers"] = {
            name: [number + 1 for number in stack.kept] for name, stack in self.stacks.items()
        }

    def vectors(self) -> None:
        """Queries, keys and values [layers, tokens, heads, E]."""
        longest = max(self.source_ids.shape[1], len(self.written))
        if longest > VECTOR_TOKENS:
            raise MissingError(
                f"queries, keys and values are kept up to {VECTOR_TOKENS} tokens, and here are "
                f"{longest}"
            )
        kept = {}
        for kind, (stack, attention) in KINDS.items():
            for vector, projection in PROJECTIONS.items():
                rows = [
                    self.made(stack, number, f"{attention}.{projection}")
                    for number in self.stacks[stack].kept
                ]
                split = torch.stack(rows).unflatten(-1, (self.head_count(kind), -1))
                name = f"{vector}.{kind}"
                kept[name], kept[f"{name}.scale"] = encode_vectors(numbers(split))
        self.arrays |= kept

    def head_count(self, kind: str) -> int:
        """Heads of a kind of attention."""
        return self.arrays[f"attention.{kind}"].shape[1]

    def heads(self) -> None:
        """What each head adds (its length), and what is lost without it (nats, for each token)."""
        found: dict[str, np.ndarray] = {}
        usual = self.log_probabilities(self.outputs.logits)
        for kind, (stack, attention) in KINDS.items():
            lengths, falls = [], []
            for number in self.stacks[stack].kept:
                out_proj = self.part(stack, number, f"{attention}.out_proj")
                context = self.given(stack, number, f"{attention}.out_proj")
                parts_HQD = head_parts(out_proj, context, self.head_count(kind))
                lengths.append(parts_HQD.norm(dim=-1))
                falls.append(usual - self.without_heads(kind, out_proj))
            found[f"part.{kind}"] = numbers(torch.stack(lengths))
            found[f"off.{kind}"] = numbers(torch.stack(falls))
        self.arrays |= found

    def without_heads(self, kind: str, out_proj: nn.Module) -> Tensor:
        """Log p of the written tokens [H, T] with one head at a time switched off.

        A copy of the sentence for each head, in which its slice before `out_proj` is zero.
        """
        heads, results = self.head_count(kind), []
        for some in torch.arange(heads, device=self.labels.device).split(ROWS):
            keep_BH = torch.arange(heads, device=some.device) != some[:, None]

            def switch_off(_: nn.Module, inputs: tuple, keep_BH: Tensor = keep_BH) -> tuple:
                context = inputs[0].unflatten(-1, (heads, -1)) * keep_BH[:, None, :, None]
                return (context.flatten(-2),)

            with hooks([(out_proj.register_forward_pre_hook, switch_off)]):
                results.append(self.rerun(len(some), encode=kind == "encoder"))
        return torch.cat(results)

    def rerun(self, rows: int, encode: bool, attention_mask: Tensor | None = None) -> Tensor:
        """Log p of the written tokens [rows, T] for copies of the sentence, under present hooks.

        Args:
            rows: Number of copies.
            encode: Whether the encoder runs again.
            attention_mask: [rows, S]; nothing is hidden if None.
        """
        arguments: dict[str, Any] = {"decoder_input_ids": self.read_ids.expand(rows, -1)}
        if encode:
            arguments["input_ids"] = self.source_ids.expand(rows, -1)
        else:
            memory = self.outputs.encoder_last_hidden_state.expand(rows, -1, -1)
            arguments["encoder_outputs"] = (memory,)
        if attention_mask is None:
            attention_mask = torch.ones_like(self.source_ids).expand(rows, -1)
        outputs = self.model(**arguments, attention_mask=attention_mask, use_cache=False)
        return self.log_probabilities(outputs.logits)

    def erase(self) -> None:
        """How far each written token's log-probability falls without each source token [T, S]."""
        length = self.source_ids.shape[1]
        if length < 2:
            raise MissingError("the source has a single token, and without it nothing is left")
        positions = getattr(self.stacks["encoder"].module, "embed_positions", None)
        stay = []
        if isinstance(positions, nn.Module) and positions in self.seen:
            added = self.seen[positions][1]
            # Our encoder takes a hidden first token for padding, and would move the others.
            stay = [(positions.register_forward_hook, lambda *_: added)]
        usual, falls = self.log_probabilities(self.outputs.logits), []
        for some in torch.arange(length, device=self.labels.device).split(ROWS):
            hide = (torch.arange(length, device=some.device) != some[:, None]).long()
            with hooks(stay):
                falls.append(usual - self.rerun(len(some), encode=True, attention_mask=hide))
        self.arrays["erase"] = numbers(torch.cat(falls).T)

    def positions(self) -> None:
        """Each stack's position table [positions, D], and which formula it follows."""
        layouts, found = {}, {}
        for name, stack in self.stacks.items():
            module = getattr(stack.module, "embed_positions", None)
            if module not in self.seen:
                raise MissingError(
                    f"the {name} has no embed_positions: it adds no position vectors"
                )
            added = self.seen[module][1].float().reshape(-1, self.model.config.d_model)
            table = getattr(module, "table", getattr(module, "weight", None))
            rows = added
            # More than the sentence needs, where the table begins as the sentence was given it.
            if table is not None and torch.equal(table[: len(added)].float(), added):
                rows = table[: max(POSITIONS, len(added))].float()
            layouts[name] = position_layout(rows)
            found[f"positions.{name}"], found[f"positions.{name}.scale"] = encode_vectors(
                numbers(rows)
            )
        self.arrays |= found
        self.header["positions"] = layouts

    def stream(self) -> None:
        """The residual stream at every sub-layer, and what LayerNorm makes of it.

        `stream.*` holds for each sub-layer and token |x|, |f(x)|, cos(x, f(x)), and mean and
        (biased) standard deviation before and after LayerNorm.
        """
        found, order = {}, {}
        for name, stack in self.stacks.items():
            rows, before, after, ranges = [], [], [], []
            for number in stack.kept:
                for _, reads, writes, norm in self.sublayers(name):
                    normed, out = (call(name, number, norm) for call in (self.given, self.made))
                    f = self.made(name, number, writes)
                    entered = self.given(name, number, reads)
                    first = torch.equal(out, entered)  # Pre-Norm: the sub-layer reads the norm
                    order[name] = "pre" if first else "post"
                    x = normed if first else entered
                    statistics = [x.norm(dim=-1), f.norm(dim=-1), cosine(x, f)]
                    for values in (normed, out):
                        statistics += [values.mean(-1), values.std(-1, unbiased=False)]
                    rows.append(torch.stack(statistics))
                    limit = torch.maximum(normed.abs().amax(-1), out.abs().amax(-1))
                    ranges.append(limit)
                    before.append(histograms(normed, limit))
                    after.append(histograms(out, limit))
            found[f"stream.{name}"] = numbers(torch.stack(rows))
            found[f"range.{name}"] = numbers(torch.stack(ranges))
            found[f"before.{name}"] = np.stack(before)
            found[f"after.{name}"] = np.stack(after)
        self.arrays |= found
        self.header["norm"] = order["decoder"]
        self.header["sublayers"] = {
            name: [row[0] for row in self.sublayers(name)] for name in self.stacks
        }

    @staticmethod
    def sublayers(stack: str) -> Iterator[tuple[str, str, str, str]]:
        """Of each sub-layer of a layer: its name, what reads x, what writes f(x), its norm."""
        yield "self-attention", "self_attn.q_proj", "self_attn.out_proj", "self_attn_layer_norm"
        if stack == "decoder":
            cross = ("encoder_attn.q_proj", "encoder_attn.out_proj", "encoder_attn_layer_norm")
            yield ("cross-attention", *cross)
        yield "feed-forward", "fc1", "fc2", "final_layer_norm"

    def units(self) -> None:
        """The feed-forward's hidden units: what share is active, and which are strongest."""
        found = {}
        for name, stack in self.stacks.items():
            hidden = torch.stack([self.given(name, number, "fc2") for number in stack.kept])
            strongest = hidden.topk(min(TOP_UNITS, hidden.shape[-1]), dim=-1)
            found[f"active.{name}"] = numbers((hidden > 0).float().mean(-1))
            found[f"unit.{name}"] = strongest.indices.cpu().numpy().astype(np.int32)
            found[f"strength.{name}"] = numbers(strongest.values)
            self.header.setdefault("units", {})[name] = hidden.shape[-1]
        self.arrays |= found

    def path(self) -> None:
        """The stream from embedding to last layer in its two principal directions."""
        states = {
            "encoder": self.outputs.encoder_hidden_states,
            "decoder": self.outputs.decoder_hidden_states,
        }
        shares = {}
        for name, stack in self.stacks.items():
            *earlier, last = (state[0].float() for state in states[name])
            norm = self.final_norm(stack)
            if norm is not None:  # the stream itself, as all the others
                last = self.seen[norm][0][0].float()
            stream_LTD = torch.stack([*earlier, last])
            flat = stream_LTD.flatten(0, 1)
            flat = flat - flat.mean(0)
            _, sizes, directions = torch.linalg.svd(flat, full_matrices=False)
            plane = nn.functional.pad(flat @ directions[:2].T, (0, 2 - len(directions[:2])))
            self.arrays[f"path.{name}"] = numbers(plane.unflatten(0, stream_LTD.shape[:2]))
            variance = sizes**2 / (sizes**2).sum().clamp(min=1e-12)
            shares[name] = [*variance[:2].tolist(), 0.0][:2]
        self.header["variance"] = shares

    @staticmethod
    def final_norm(stack: Stack) -> nn.Module | None:
        """A stack's final norm, if it has one."""
        norm = getattr(stack.module, "layer_norm", None)
        return norm if isinstance(norm, nn.LayerNorm) else None

    def lens(self) -> None:
        """What the output projection reads in each decoder layer's output.

        Where a final norm precedes the projection, it is applied to each layer by the layer's own
        mean and deviation, and not again to the last state, which has passed it.
        """
        norm = self.final_norm(self.stacks["decoder"])
        project = self.model.get_output_embeddings()
        bias = getattr(self.model, "final_logits_bias", 0)
        states = self.outputs.decoder_hidden_states
        rows: dict[str, list] = {name: [] for name in ("id", "p", "written", "rank", "entropy")}
        for depth, state in enumerate(states):
            last = depth == len(states) - 1
            logits = project(state if last or norm is None else norm(state)) + bias
            if last and not torch.equal(logits, self.outputs.logits):
                raise MissingError("the last layer's row would not equal the model's own logits")
            log_p = logits[0].float().log_softmax(-1)
            best = log_p.topk(min(TOP_TOKENS, log_p.shape[-1]), dim=-1)
            written = log_p.gather(-1, self.labels[:, None])
            rows["id"].append(best.indices)
            rows["p"].append(best.values.exp())
            rows["written"].append(written[:, 0].exp())
            rows["rank"].append((log_p > written).sum(-1) + 1)
            rows["entropy"].append(torch.special.entr(log_p.exp()).sum(-1) / np.log(2))
        for name, values in rows.items():
            whole = name in ("id", "rank")
            stacked = numbers(torch.stack(values))
            self.arrays[f"lens.{name}"] = stacked.astype(np.int32 if whole else np.float32)
        self.header["final_norm"] = norm is not None


def numbers(tensor: Tensor) -> np.ndarray:
    """A tensor as an array in float32."""
    return tensor.detach().float().cpu().numpy()


def cosine(x: Tensor, y: Tensor) -> Tensor:
    """Cos of the angle between vectors [..., D]."""
    return nn.functional.cosine_similarity(x, y, dim=-1)


def head_parts(out_proj: Any, context_QD: Tensor, heads: int) -> Tensor:
    """What each head adds to its sub-layer's output [H, Q, D]; with the bias they add up to it.

    Args:
        out_proj: The projection W_O.
        context_QD: What goes into it: the heads' outputs, side by side.
        heads: H.
    """
    weight_DHE = out_proj.weight.float().unflatten(1, (heads, -1))
    return torch.einsum("qhe,dhe->hqd", context_QD.unflatten(-1, (heads, -1)), weight_DHE)


def histograms(values: Tensor, limit: Tensor) -> np.ndarray:
    """How often values [T, D] lie in each of 33 equal bins from -limit to limit [T]: [T, 33]."""
    scaled = (values / limit.clamp(min=1e-12)[:, None] + 1) / 2 * BINS
    bins = scaled.long().clamp(0, BINS - 1)
    counts = torch.zeros(len(values), BINS, dtype=torch.long, device=values.device)
    return counts.scatter_add_(1, bins, torch.ones_like(bins)).cpu().numpy().astype(np.uint16)


def position_layout(table: Tensor) -> str:
    """Which formula a table [positions, D] follows.

    Returns:
        "interleaved" (sine and cosine alternate, as in the paper), "halves" (first all sines, then
        all cosines, as in Marian), or "learned".
    """
    if table.shape[-1] % 2:
        return "learned"
    paper = sinusoids(torch.arange(len(table)), table.shape[-1])
    halves = torch.cat((paper[:, 0::2], paper[:, 1::2]), dim=-1)
    for name, formula in (("interleaved", paper), ("halves", halves)):
        if torch.allclose(table.cpu(), formula, atol=1e-3):
            return name
    return "learned"
