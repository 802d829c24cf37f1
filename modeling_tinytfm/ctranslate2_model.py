"""CTranslate2: a model written for its engine, and run by it.

Importing this module also teaches CTranslate2's own converter what a TinyTFM model is.
"""

import copy
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase

from .configuration_tinytfm import TinyTFMConfig
from .conversion import EXPORT_FILE, check_class, check_config, deciding, required
from .decoding import Hypothesis, Translator
from .flops import processor_has_any
from .modeling_tinytfm import TinyTFMForConditionalGeneration
from .search import LengthPenaltyForm, as_list, length_penalty, penalty_form


def choose_products() -> None:
    """Has CTranslate2 take MKL where its own choice computes int8 wrongly; what is set stands.

    On AMD's processors it takes oneDNN, whose sums of two products saturate at 16 bits where there
    are no VNNI instructions: of a small model's 200 outputs 147 came out otherwise, of MKL's under
    10. CTranslate2 reads the variable when it is loaded.
    """
    if processor_has_any("avx512_vnni", "avx_vnni") is False:
        os.environ.setdefault("CT2_USE_MKL", "1")


choose_products()
ctranslate2 = required("ctranslate2", "ctranslate2")
# Not imported by ctranslate2 itself; a type checker that does not find it takes them for modules.
loaders: Any = required("ctranslate2.converters.transformers", "ctranslate2")
specs: Any = required("ctranslate2.specs.transformer_spec", "ctranslate2")

# Hypotheses to finish, in beams, where generate() would look for better ones. Of 200 sentences the
# outputs were the same from 1.5 to 6; of a model that repeats itself, one scored less with 2.
PATIENCE = 2
QUANTIZATIONS = tuple(ctranslate2.specs.model_spec.ACCEPTED_MODEL_TYPES)

# What it can do, see `search_options`.
_HONOURED = {
    "num_beams", "length_penalty", "early_stopping", "max_new_tokens", "max_length",
    "min_new_tokens", "min_length", "no_repeat_ngram_size", "renormalize_logits", "eos_token_id",
    "length_penalty_form", "suppress_tokens", "bad_words_ids", "forced_eos_token_id",
}  # fmt: skip


@loaders.register_loader(TinyTFMConfig.__name__)
class TinyTFMLoader(loaders.BartLoader):
    """Fills CTranslate2's specification of a Transformer with a model's weights.

    Layers and attention have BART's names. Positions are always a table; norms stand where the
    config puts them.
    """

    architecture_name = "AutoModelForSeq2SeqLM"

    def get_model_spec(self, model: Any) -> Any:
        """The specification of an encoder-decoder.

        Raises:
            ValueError: If the model has what CTranslate2 has not.
        """
        check_class("model", model, TinyTFMForConditionalGeneration)
        config = model.config
        check_config("CTranslate2", config, input_feature_size=None)
        activation = loaders._SUPPORTED_ACTIVATIONS.get(config.activation_function)
        if activation is None:
            raise ValueError(
                f"activation_function={config.activation_function!r} cannot be carried over to "
                f"CTranslate2, which has {', '.join(sorted(loaders._SUPPORTED_ACTIVATIONS))}"
            )
        for name in ("decoder_start_token_id", "eos_token_id"):
            if getattr(config, name) is None:
                raise ValueError(f"{name}=None cannot be carried over to CTranslate2")
        # Quantisation writes into the arrays that it is given.
        model = copy.deepcopy(model).cpu()
        final_norm = config.norm_first or config.add_final_layer_norm
        stacks = []
        for name in ("encoder", "decoder"):
            make = getattr(specs, f"Transformer{name.title()}Spec")
            layers, heads = (
                getattr(config, f"{name}_{what}") for what in ("layers", "attention_heads")
            )
            # What is told of cross-attention is the mean of all heads.
            told = {"alignment_heads": heads} if name == "decoder" else {}
            # With pre_norm it makes a final norm; where the norms stand is read later.
            stack = make(layers, heads, pre_norm=final_norm, activation=activation, **told)
            stack.pre_norm = config.norm_first
            stacks.append(stack)
        spec = specs.TransformerSpec(*stacks)
        self.set_encoder(spec.encoder, model.model.encoder)
        self.set_decoder(spec.decoder, model.model.decoder)
        self.set_linear(spec.decoder.projection, model.lm_head)
        return spec

    def set_common_layers(self, spec: Any, stack: Any) -> None:
        """Embeddings, their scale, positions, and the final norm where there is one."""
        spec.scale_embeddings = stack.embed_scale
        positions = stack.embed_positions
        table = getattr(positions, "table", None)
        if table is None:
            table = positions.weight
        # Scoring and attention read one token more than an output has; what follows is not used.
        spec.position_encodings.encodings = torch.cat((table, table[-1:]))
        embeddings = spec.embeddings[0] if isinstance(spec.embeddings, list) else spec.embeddings
        self.set_embeddings(embeddings, stack.embed_tokens)
        if hasattr(spec, "layer_norm"):
            self.set_layer_norm(spec.layer_norm, stack.layer_norm)

    def get_vocabulary(self, model: Any, tokenizer: PreTrainedTokenizerBase) -> list[str]:
        """The token of each id that the model has; a made-up one where the tokenizer has none.

        Raises:
            ValueError: If the tokenizer has ids that the model has not.
        """
        size = model.config.vocab_size
        tokens = {token_id: token for token, token_id in tokenizer.get_vocab().items()}
        if max(tokens, default=0) >= size:
            raise ValueError(
                f"the tokenizer has id {max(tokens)}, the model only vocab_size={size}: "
                "is this the model's own tokenizer?"
            )
        return [tokens.get(token_id, f"<no token {token_id}>") for token_id in range(size)]

    def set_config(self, config: Any, model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
        """The special tokens, and what LayerNorm adds to the variance."""
        ours = model.config
        tokens = self.get_vocabulary(model, tokenizer)
        eos: Any = ours.eos_token_id
        config.eos_token = tokens[eos[0] if isinstance(eos, list | tuple) else eos]
        config.decoder_start_token = tokens[ours.decoder_start_token_id]
        config.bos_token = config.decoder_start_token
        if ours.bos_token_id is not None:
            config.bos_token = tokens[ours.bos_token_id]
        if tokenizer.unk_token is not None:
            config.unk_token = tokenizer.unk_token
        config.layer_norm_epsilon = ours.layer_norm_eps
        config.add_source_eos = False  # the tokenizer has added it


def write_ctranslate2(
    model: TinyTFMForConditionalGeneration,
    tokenizer: PreTrainedTokenizerBase,
    folder: str | os.PathLike[str],
    quantization: str | None = None,
) -> None:
    """Writes a model in CTranslate2's format.

    Args:
        model: The model; it stays as it is.
        tokenizer: Its tokenizer.
        folder: An existing folder.
        quantization: One of `QUANTIZATIONS`, such as "int8"; float32 if None.

    Raises:
        ValueError: If CTranslate2 has no such model, no such quantisation, or cannot honour what
            the model's generation config says.
    """
    quantization = "float32" if quantization is None else quantization
    if quantization not in QUANTIZATIONS:
        raise ValueError(
            f"quantization={quantization!r} is unknown: choose one of {', '.join(QUANTIZATIONS)}"
        )
    with torch.no_grad():
        spec = TinyTFMLoader()(model, tokenizer)
    # But the form of the penalty, for which translate.py has an option.
    search_options(model.generation_config, 1, False, {"length_penalty_form": "length"})
    spec.validate()
    spec.optimize(quantization=quantization)
    spec.save(os.fspath(folder))


class CTranslate2Translator(Translator):
    """An exported model, run by CTranslate2.

    Beam search ends once `num_beams` hypotheses are finished, as generate() does with
    `early_stopping=True`. For the best one alone it otherwise goes on to `PATIENCE` times as many,
    which nearly always finds what generate() finds with `early_stopping="never"`; with
    transformers' default, False, generate() may give up a little earlier, by a guess that
    CTranslate2 does not make, and score less.

    With `forced_eos_token_id` the best hypothesis is generate()'s, too; of the others, those that
    reach the limit may differ.

    Args:
        folder: What `exporting.export_model` wrote.
        tokenizer: The tokenizer in it.
        threads: CPU threads; as many as torch uses if None.

    Raises:
        ValueError: If the folder holds no such model.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        tokenizer: PreTrainedTokenizerBase,
        threads: int | None = None,
    ):
        folder = Path(folder)
        record = json.loads((folder / EXPORT_FILE).read_text(encoding="utf-8"))
        self.tokenizer = tokenizer
        self.generation_config = GenerationConfig.from_pretrained(folder)
        self.positions: int = record["config"]["max_position_embeddings"]
        self.longest_input = self.positions
        vocabulary = (folder / "shared_vocabulary.json").read_text(encoding="utf-8")
        self.tokens: list[str] = json.loads(vocabulary)
        self.end_token = json.loads((folder / "config.json").read_text(encoding="utf-8"))[
            "eos_token"
        ]
        self.ids = {token: token_id for token_id, token in enumerate(self.tokens)}
        has_gpu = torch.cuda.is_available() and ctranslate2.get_cuda_device_count() > 0
        try:
            self.translator = ctranslate2.Translator(
                os.fspath(folder),
                device="cuda" if has_gpu else "cpu",
                intra_threads=torch.get_num_threads() if threads is None else threads,
            )
        except RuntimeError as error:
            raise ValueError(f"{folder}: CTranslate2 cannot load this model: {error}") from error

    def generate(
        self,
        sources: Sequence[Sequence[int]],
        *,
        prefixes: Sequence[Sequence[int]] | None = None,
        n_best: int = 1,
        with_scores: bool = False,
        **generation: Any,
    ) -> list[list[Hypothesis]]:
        """See `decoding.generate_batch`.

        Raises:
            ValueError: Naming what CTranslate2 cannot do.
        """
        options = search_options(self.generation_config, n_best, prefixes is not None, generation)
        longest, exponent = options["max_decoding_length"], options["length_penalty"]
        forced_end = options.pop("forced_end")
        for name, length in (
            ("a source", max(map(len, sources), default=0)),
            ("max_new_tokens", longest),
        ):
            if length > self.positions:
                raise ValueError(
                    f"{name} of {length} tokens exceeds max_position_embeddings="
                    f"{self.positions}, where the positions of an exported model end"
                )
        if forced_end is not None:
            options["max_decoding_length"] -= 1
            options["min_decoding_length"] = min(
                options["min_decoding_length"], options["max_decoding_length"]
            )
        if prefixes is not None:
            if (most := max(map(len, prefixes), default=0)) >= options["max_decoding_length"]:
                raise ValueError(
                    f"a prefix of {most} tokens leaves no room in outputs of {longest} tokens: "
                    "raise max_new_tokens"
                )
            options["target_prefix"] = self._rows(prefixes)
        ends, is_greedy = options["end_token"], options["beam_size"] == 1
        options["end_token"] = [self.tokens[token_id] for token_id in ends]
        options["suppress_sequences"] = self._rows(options["suppress_sequences"])
        results = self.translator.translate_batch(
            self._rows(sources),
            num_hypotheses=n_best,
            return_scores=not is_greedy,
            return_end_token=True,  # which an output that was cut has not
            max_input_length=0,
            **options,
        )
        rows = [[self.ids[token] for token in x] for result in results for x in result.hypotheses]
        scores = [float("nan")] * len(rows)
        if not is_greedy:
            scores = [score for result in results for score in result.scores]
        if forced_end is not None:
            for number, row in enumerate(rows):
                if row[-1] not in ends:  # its end is certain, and counts as length
                    row.append(forced_end)
                    scores[number] *= ((longest - 1) / longest) ** exponent
        if with_scores and is_greedy:
            form = penalty_form(self.generation_config, generation.get("length_penalty_form"))
            scores = self._scores(sources, rows, prefixes, exponent, form)
        rows = [row[:-1] if row and row[-1] in ends else row for row in rows]
        texts = self.tokenizer.batch_decode(rows, skip_special_tokens=True)
        hypotheses = [
            Hypothesis(text, score, tuple(row))
            for text, score, row in zip(texts, scores, rows, strict=True)
        ]
        groups = [hypotheses[i : i + n_best] for i in range(0, len(hypotheses), n_best)]
        return [sorted(group, key=lambda found: -found.score) for group in groups]

    def _scores(
        self,
        sources: Sequence[Sequence[int]],
        outputs: Sequence[Sequence[int]],
        prefixes: Sequence[Sequence[int]] | None,
        exponent: float,
        form: LengthPenaltyForm,
    ) -> list[float]:
        """Scores of given outputs, end tokens included, as beam search would have scored them.

        Greedy search would tell what was left of probabilities after what was forbidden, and count
        the prefix's tokens as length.
        """
        end = self.ids[self.end_token]
        targets = [row[:-1] if row[-1:] == [end] else row for row in outputs]  # it adds the end
        results = self.translator.score_batch(
            self._rows(sources), self._rows(targets), max_input_length=0
        )
        scores = []
        for number, (result, output) in enumerate(zip(results, outputs, strict=True)):
            begun = 0 if prefixes is None else len(prefixes[number])
            written = result.log_probs[begun : len(output)]
            scores.append(sum(written) / length_penalty(len(written), exponent, form))
        return scores

    def attend(
        self, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]
    ) -> list[Tensor]:
        """The last layer's cross-attention, the mean over its heads: see `cross_attention`."""
        results = self.translator.translate_batch(
            self._rows(sources),
            target_prefix=self._rows(targets),
            beam_size=1,
            max_input_length=0,
            max_decoding_length=max(map(len, targets)) + 1,
            return_attention=True,
            return_end_token=True,
        )
        return [
            torch.tensor(result.attention[0])[: len(target), : len(source)]
            for result, source, target in zip(results, sources, targets, strict=True)
        ]

    def _rows(self, rows: Sequence[Sequence[int]]) -> list[list[str]]:
        return [[self.tokens[token_id] for token_id in row] for row in rows]


def search_options(
    config: GenerationConfig, n_best: int, has_prefixes: bool, given: dict[str, Any]
) -> dict[str, Any]:
    """CTranslate2's names for settings of generate(), and the end that is forced at the limit.

    Args:
        config: The model's own settings.
        n_best: Number of outputs wanted.
        has_prefixes: Whether outputs are to begin with something given.
        given: Settings that take precedence.

    Raises:
        ValueError: Naming the first setting that CTranslate2 cannot honour.
    """
    own = {name: value for name, value in config.to_dict().items() if value is not None}
    settings = own | {name: value for name, value in given.items() if value is not None}
    for name, value in deciding(settings).items():
        if name not in _HONOURED:
            raise ValueError(f"{name}={value!r} cannot be carried over to CTranslate2")
    early_stopping = settings.get("early_stopping", False)
    form = penalty_form(config, given.get("length_penalty_form"))
    num_beams = settings.get("num_beams", 1)
    if n_best > num_beams:
        raise ValueError(
            f"n_best={n_best} outputs need num_beams={n_best} at least, not {num_beams}"
        )
    # max_length counts the start token; 20 is transformers' own default.
    longest = settings.get("max_new_tokens", settings.get("max_length", 20) - 1)
    shortest = max(settings.get("min_new_tokens", 0), settings.get("min_length", 0) - 1, 0)
    forbidden = [[token_id] for token_id in settings.get("suppress_tokens", [])]
    forbidden += settings.get("bad_words_ids", [])
    ends, forced_ends = (
        as_list(settings.get(name)) for name in ("eos_token_id", "forced_eos_token_id")
    )
    if not ends:
        raise ValueError("eos_token_id=None cannot be carried over to CTranslate2")
    if not set(forced_ends) <= set(ends):
        raise ValueError(
            f"forced_eos_token_id={settings['forced_eos_token_id']!r} cannot be carried over to "
            f"CTranslate2: it is not among eos_token_id={settings['eos_token_id']!r}"
        )
    if forced_ends and longest < 2:
        raise ValueError(
            f"max_new_tokens={longest} leaves no room before forced_eos_token_id="
            f"{settings['forced_eos_token_id']!r}: raise max_new_tokens"
        )
    for refused, what, instead in (
        (has_prefixes, "a prefix", ""),
        (form != "length", f"length_penalty_form={form!r}", ", or length_penalty_form='length'"),
    ):
        if num_beams > 1 and refused:
            raise ValueError(
                f"{what} with num_beams={num_beams} cannot be carried over to CTranslate2: take "
                f"num_beams=1{instead}"
            )
    for name, value in (
        ("min_new_tokens", shortest),
        ("no_repeat_ngram_size", settings.get("no_repeat_ngram_size", 0)),
        ("bad_words_ids", forbidden),
    ):
        if num_beams > 1 and value and not settings.get("renormalize_logits"):
            raise ValueError(
                f"{name}={value} with num_beams={num_beams} cannot be carried over to CTranslate2, "
                "which scores beams as with renormalize_logits=True: set that, or take num_beams=1"
            )
    return {
        "beam_size": num_beams,
        "patience": 1 if early_stopping is True or num_beams == 1 or n_best > 1 else PATIENCE,
        "length_penalty": float(settings.get("length_penalty", 1.0)),
        "max_decoding_length": longest,
        "min_decoding_length": min(shortest, longest),
        "no_repeat_ngram_size": settings.get("no_repeat_ngram_size", 0),
        "suppress_sequences": forbidden,
        "end_token": ends,
        "forced_end": forced_ends[0] if forced_ends else None,
    }
