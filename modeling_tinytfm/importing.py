"""A Marian folder made a model of ours, ready to be fine-tuned."""

import os
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, processors
from transformers import AutoConfig, MarianMTModel, MarianTokenizer, PreTrainedTokenizerFast

from .conversion import check_class, from_marian, required
from .loading import load_tokenizer
from .tokenization import save_tokenizer
from .translation import new_folder

_NORMAL, _UNKNOWN, _CONTROL = 1, 2, 3  # types of SentencePiece's pieces
_UNIGRAM = 1  # a type of its models
_SPACE = "▁"


def import_marian(name: str | os.PathLike[str], output: str | os.PathLike[str]) -> str:
    """Writes the model of ours that computes what a Marian model does, with its tokenizer.

    A Marian tokenizer has two SentencePiece models, for source and for target, and one vocabulary.
    Where the two are one, it becomes a plain fast tokenizer that gives the same ids. A fast
    tokenizer cannot cut sources and targets differently: where it would have to, Marian's own files
    are kept.

    Args:
        name: A folder, or a name on the Hub.
        output: A folder that does not exist, or is empty.

    Returns:
        What became of the tokenizer, in one sentence.

    Raises:
        ValueError: If this is no Marian model, if it cannot be carried over, or if `output` is in
            use.
        OSError: If a folder cannot be read or written.
        ModuleNotFoundError: If SentencePiece is needed and not installed.
    """
    with new_folder(output) as folder:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        if config.model_type != "marian":
            raise ValueError(f"{name} is no Marian model: its model_type is {config.model_type!r}")
        model = from_marian(MarianMTModel.from_pretrained(name))
        tokenizer, what_happened = marian_tokenizer(name)
        size = model.config.vocab_size
        if len(tokenizer) > size:
            raise ValueError(
                f"{name}: the tokenizer has {len(tokenizer)} tokens, the model vocab_size={size}"
            )
        model.save_pretrained(folder)
        save_tokenizer(tokenizer, folder)
    return what_happened


def marian_tokenizer(name: str | os.PathLike[str]) -> tuple[Any, str]:
    """The tokenizer of a Marian model, fast where that gives the same ids; and what it now is."""
    try:
        tokenizer = load_tokenizer(os.fspath(name))
    except OSError as error:
        if isinstance(error.__cause__, ImportError):
            required("sentencepiece", "marian")
        raise
    if isinstance(tokenizer, PreTrainedTokenizerFast):
        return tokenizer, "the tokenizer is the model's own fast one"
    required("sentencepiece", "marian")
    check_class("the tokenizer", tokenizer, MarianTokenizer)
    reason = reason_to_keep(tokenizer)
    if reason is not None:
        return tokenizer, f"the tokenizer stays Marian's (needs sentencepiece): {reason}"
    return fast_tokenizer(tokenizer), "the tokenizer became a fast one that gives the same ids"


def read_pieces(file: str | os.PathLike[str]) -> Any:
    """A SentencePiece model file, parsed."""
    proto = required("sentencepiece.sentencepiece_model_pb2", "marian").ModelProto()
    proto.ParseFromString(Path(file).read_bytes())
    return proto


def reason_to_keep(tokenizer: MarianTokenizer) -> str | None:
    """Why no fast tokenizer can give the same ids; None if one can."""
    if tokenizer.separate_vocabs:
        return "source and target have vocabularies of their own"
    source, target = (read_pieces(file) for file in tokenizer.spm_files)
    if source.SerializeToString() != target.SerializeToString():
        return "source and target are cut by different SentencePiece models"
    if source.trainer_spec.model_type != _UNIGRAM:
        return "its SentencePiece model is no unigram model"
    kinds = {piece.type for piece in source.pieces} - {_NORMAL, _UNKNOWN, _CONTROL}
    if kinds:
        return "its SentencePiece model has byte, unused or user-defined pieces"
    if tokenizer.supported_language_codes:
        return "its vocabulary has language codes, which count at the start of a line only"
    vocabulary: dict[str, int] = dict(tokenizer.encoder)
    pieces = {piece.piece for piece in source.pieces if piece.type == _NORMAL}
    special = set(tokenizer.all_special_tokens)
    if pieces - special != vocabulary.keys() - special:
        return "its vocabulary has other pieces than its SentencePiece model"
    if sorted(vocabulary.values()) != list(range(len(vocabulary))):
        return "its vocabulary has gaps"
    return None


def fast_tokenizer(tokenizer: MarianTokenizer) -> PreTrainedTokenizerFast:
    """The fast tokenizer that cuts a line as the source's SentencePiece model does."""
    proto = read_pieces(tokenizer.spm_files[0])
    settings = proto.normalizer_spec
    scores = {piece.piece: piece.score for piece in proto.pieces if piece.type == _NORMAL}
    ordered = sorted(tokenizer.encoder, key=tokenizer.encoder.__getitem__)
    # Special tokens are no pieces: no path through a text's lattice may take them.
    never = min(scores.values()) * len(ordered) - 1e6
    fast = Tokenizer(
        models.Unigram(
            [(piece, scores.get(piece, never)) for piece in ordered],
            unk_id=tokenizer.unk_token_id,
            byte_fallback=False,
        )
    )
    steps: list[normalizers.Normalizer] = []
    if settings.precompiled_charsmap:
        steps.append(normalizers.Precompiled(settings.precompiled_charsmap))
    if settings.remove_extra_whitespaces:
        steps.append(normalizers.Replace(Regex(r"\A +| +\z"), ""))
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    if settings.add_dummy_prefix:
        steps.append(normalizers.Replace(Regex(r"\A(?=[\s\S])"), " "))
    if settings.escape_whitespaces:
        steps.append(normalizers.Replace(" ", _SPACE))
    fast.normalizer = normalizers.Sequence(steps)
    fast.decoder = decoders.Sequence(
        [
            decoders.Replace(_SPACE, " "),
            decoders.Fuse(),
            decoders.Replace(Regex(r"\A\s+|\s+\z"), ""),
        ]
    )
    eos: Any = tokenizer.eos_token
    fast.post_processor = processors.TemplateProcessing(
        single=f"$A {eos}", special_tokens=[(eos, tokenizer.eos_token_id)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=fast,
        pad_token=tokenizer.pad_token,
        eos_token=eos,
        unk_token=tokenizer.unk_token,
        model_max_length=tokenizer.model_max_length,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )
