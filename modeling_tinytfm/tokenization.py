"""Train a vocabulary on lines of text and keep it as a plain fast tokenizer.

What comes out is an ordinary `PreTrainedTokenizerFast`: `AutoTokenizer` loads it anywhere, without
this package. One vocabulary serves source and target, and every encoded line ends with one `</s>`.
"""

import copy
import json
import logging
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sized
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer, UnigramTrainer, WordLevelTrainer
from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

TokenizerKind = Literal["bpe", "unigram", "word", "character", "regex"]
Normalization = Literal["nfc", "nfkc", "nfd", "nfkd", "none"]

# In the order of their ids: 0, 1, 2, 3.
SPECIAL_TOKENS = {
    "pad_token": "<pad>",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
}

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    # Of an imported Marian, which may have these in place of the first:
    "source.spm",
    "target.spm",
    "vocab.json",
    "target_vocab.json",
)

_SPECIAL_TAILS = "|".join(re.escape(token.removeprefix("<")) for token in SPECIAL_TOKENS.values())

# What the library adds from one rare character of a unigram vocabulary to the next.
_RARE_CHARACTER_STEP = 1e-4

# The trainer reserves memory for the whole vocabulary at once: a slip of the finger would end the
# process without a word.
_LARGEST_VOCABULARY = 10_000_000

# Stands for a space between tokens until they are joined; not a character of any text (Unicode
# keeps it for internal use), so that a token's own spaces stay apart from it.
_SPACE_MARK = "\ufdd0"

# A word with the space before it, a digit, a run of signs, or white space. Joiners stay inside
# words (Persian, Hindi) and signs (emoji families). The limits keep a line without spaces from
# becoming one piece, on which learning and applying merges would take quadratic time.
_SUBWORD_PIECES = (
    r" ?\p{L}[\p{L}\p{M}\x{200C}\x{200D}]{0,63}"
    r"| ?\p{N}"
    r"| ?[^\s\p{L}\p{N}]{1,64}"
    r"|\s{1,64}(?!\S)"
    r"|\s"
)


def train_tokenizer(
    lines: Iterable[str],
    *,
    kind: TokenizerKind = "bpe",
    vocab_size: int,
    pattern: str | None = None,
    normalization: Normalization = "nfc",
    lowercase: bool = False,
    min_frequency: int | None = None,
    show_progress: bool = True,
) -> "PortableTokenizer":
    """Learn one joint vocabulary from source and target lines.

    | kind        | a token is                       | decoding gives back                    |
    |-------------|----------------------------------|----------------------------------------|
    | `bpe`       | a frequent piece of a word       | the normalised line, exactly           |
    | `unigram`   | a likely piece of a word         | the normalised line, exactly           |
    | `character` | one code point                   | the normalised line, exactly           |
    | `word`      | what stands between white space  | the words, one space between them      |
    | `regex`     | one match of `pattern`           | the tokens, spaced as in training text |

    For `bpe`, `unigram` and `character` the alphabet of the training text is always wholly in the
    vocabulary, so a character seen in training is never unknown; any other becomes `<unk>`. For
    `word` and `regex` the most frequent tokens are kept and a warning counts the others, which
    become `<unk>`.

    `regex` lets letters and phonemes share a vocabulary: with `[A-Z]+|[a-z']` the source `cat`
    becomes `c a t` and the target `K AE T` becomes `K AE T`. White space between matches only
    separates; any other character outside a match is a token of its own, so nothing is lost. In
    decoding a token follows a space, or abuts on the token before it, as it mostly did in the
    training text: these two lines decode to `cat` and `K AE T` again. Where spaces between letters
    matter too, let `pattern` match them, as in `[A-Z]+|[a-z']| (?=[a-z'])`.

    Text that spells a special token, such as `</s>`, is text like any other, for every kind. For
    the same reason special tokens that are added later are not found in text either.

    The same lines always give the same tokenizer.

    Args:
        lines: Training text without line ends, read once and not kept.
        kind: What a token is.
        vocab_size: Largest number of tokens, the four special ones included.
        pattern: Regular expression (Oniguruma, Ruby syntax) for kind `regex` only.
        normalization: Unicode normalisation form of all text, in training and in use.
        lowercase: Whether all text is lower-cased.
        min_frequency: How often a merge (`bpe`; 2 by default) or a token (`word`, `regex`; 1 by
            default) must occur to enter the vocabulary. Characters always enter.
        show_progress: Whether `tokenizers` draws its progress bars.

    Returns:
        A tokenizer that appends `</s>`, pads on the right and has no length limit.

    Raises:
        TypeError: If `lines` is one string, or holds something else than strings.
        ValueError: If a setting is unknown, unusable or out of place, if there is no text to learn
            from, or if `vocab_size` is too small for the alphabet.
    """
    _check_settings(kind, vocab_size, pattern, normalization, min_frequency)
    if isinstance(lines, str | bytes):
        raise TypeError("lines is one string: pass an iterable of lines, such as a list of strings")

    tokenizer = Tokenizer(_untrained_model(kind))
    normalizer = _normalizer(kind, normalization, lowercase)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    # No piece may spell a special token, or the model would look it up and find the special id.
    never_special = pre_tokenizers.Split(Regex(f"(?<=<)(?={_SPECIAL_TAILS})"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [_splitter(kind, pattern or ""), never_special]
    )

    trainer: BpeTrainer | WordLevelTrainer
    if kind == "bpe":
        trainer = BpeTrainer(
            vocab_size=vocab_size,
            min_frequency=2 if min_frequency is None else min_frequency,
            special_tokens=list(SPECIAL_TOKENS.values()),
            show_progress=show_progress,
        )
    else:
        trainer = WordLevelTrainer(
            vocab_size=sys.maxsize,  # cut to size below, where what falls away can be counted
            min_frequency=min_frequency or 1,
            special_tokens=list(SPECIAL_TOKENS.values()),
            show_progress=show_progress,
        )
    spacing = _Spacing(tokenizer)
    length = len(lines) if isinstance(lines, Sized) else None
    checked_lines = _only_strings(lines)
    if kind == "unigram":
        _train_unigram(tokenizer, checked_lines, vocab_size, length, show_progress)
    else:
        observed = spacing.observe(checked_lines) if kind == "regex" else checked_lines
        tokenizer.train_from_iterator(observed, trainer=trainer, length=length)

    _fit_vocabulary(tokenizer, kind, vocab_size)
    tokenizer.decoder = _decoder(kind, spacing, tokenizer.get_vocab())
    eos_token = SPECIAL_TOKENS["eos_token"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {eos_token}",
        pair=f"$A {eos_token} $B {eos_token}",
        special_tokens=[(eos_token, tokenizer.token_to_id(eos_token))],
    )
    return PortableTokenizer(
        tokenizer_object=tokenizer,
        **SPECIAL_TOKENS,
        padding_side="right",
        truncation_side="right",
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,
    )


class PortableTokenizer(PreTrainedTokenizerFast):
    """A plain fast tokenizer that is saved, and pushed, as every transformers version loads it."""

    def save_pretrained(  # type: ignore[override]
        self,
        save_directory: str | os.PathLike[str],
        *,
        push_to_hub: bool = False,
        repo_id: str | None = None,
        **kwargs: Any,
    ) -> tuple[str, ...]:
        """Save as transformers does, then mend; `push_to_hub()` uploads what this has saved."""
        files = super().save_pretrained(save_directory, **kwargs)
        mend_tokenizer_class(save_directory)
        if push_to_hub:
            self.push_to_hub(repo_id or Path(save_directory).name)
        return files


def portable(tokenizer: Any) -> Any:
    """The same tokenizer, as a `PortableTokenizer` if it is a plain fast one."""
    if type(tokenizer) is PreTrainedTokenizerFast:
        tokenizer.__class__ = PortableTokenizer  # which has no state of its own
    return tokenizer


def with_bpe_dropout(tokenizer: PreTrainedTokenizerFast, dropout: float) -> PreTrainedTokenizerFast:
    """A copy that leaves out merges at random, for training only (BPE dropout, arXiv:1910.13267).

    Every encoding draws anew, and no seed reaches the draws: `tokenizers` makes them from a
    generator of its own.

    Args:
        tokenizer: Of kind `bpe`; it stays as it is.
        dropout: Probability, 0 to 1, of leaving out each merge; at 1 tokens are characters.

    Raises:
        ValueError: If the tokenizer is of another kind.
    """
    random_tokenizer = copy.deepcopy(tokenizer)
    # One of Marian's with two SentencePiece models has no backend.
    backend = getattr(random_tokenizer, "backend_tokenizer", None)
    model = random_tokenizer if backend is None else backend.model
    if not isinstance(model, models.BPE):
        raise ValueError(
            f"bpe_dropout={dropout} needs a tokenizer of kind bpe, not {type(model).__name__}"
        )
    model.dropout = dropout
    return random_tokenizer


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: str | os.PathLike[str]) -> None:
    """Save a tokenizer so that every supported transformers version loads it alike.

    Args:
        tokenizer: The tokenizer; how it was last called for padding and truncation is not saved.
        folder: Where to, created if need be.
    """
    tokenizer.save_pretrained(folder)
    mend_tokenizer_class(folder)


def mend_tokenizer_class(folder: str | os.PathLike[str]) -> None:
    """Make a tokenizer that any transformers version saved load alike on all of them.

    transformers 5 names the class `TokenizersBackend` and lists `extra_special_tokens`, and version
    4 can read neither; both read `PreTrainedTokenizerFast` and `additional_special_tokens`. Padding
    and truncation of the last call, which every save writes into `tokenizer.json`, are taken out,
    and so is BPE dropout. Call this after each save that is not `save_tokenizer`.

    Args:
        folder: Holds `tokenizer_config.json` and `tokenizer.json`. A tokenizer of another class
            keeps its class; one without `tokenizer.json` keeps its files.

    Raises:
        FileNotFoundError: If no tokenizer was saved in `folder`.
    """
    config_file = Path(folder) / "tokenizer_config.json"
    config = json.loads(config_file.read_text(encoding="utf-8"))
    is_plain = config.get("tokenizer_class") in ("TokenizersBackend", PortableTokenizer.__name__)
    has_list = isinstance(config.get("extra_special_tokens"), list)
    if is_plain:
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if has_list:
        config["additional_special_tokens"] = config.pop("extra_special_tokens")
    if is_plain or has_list:
        text = json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
        config_file.write_text(text, encoding="utf-8")

    tokenizer_file = Path(folder) / "tokenizer.json"
    if tokenizer_file.is_file():
        tokenizer = Tokenizer.from_file(str(tokenizer_file))
        dropout = getattr(tokenizer.model, "dropout", None)
        if any(part is not None for part in (tokenizer.padding, tokenizer.truncation, dropout)):
            tokenizer.no_padding()
            tokenizer.no_truncation()
            if dropout is not None:
                tokenizer.model.dropout = None
            tokenizer.save(str(tokenizer_file))


class _Spacing:
    """Learns from text which tokens follow a space and which abut on the token before them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.normalizer = tokenizer.normalizer
        self.pre_tokenizer = tokenizer.pre_tokenizer
        # Places where the token abuts, less places where white space stands, on its left and right.
        self.left: Counter[str] = Counter()
        self.right: Counter[str] = Counter()

    def observe(self, lines: Iterable[str]) -> Iterator[str]:
        """Pass lines on and count, on the way, how their tokens are spaced."""
        for line in lines:
            text = line if self.normalizer is None else self.normalizer.normalize_str(line)
            pieces = self.pre_tokenizer.pre_tokenize_str(text)
            starts = [start for _, (start, _) in pieces]
            ends = [end for _, (_, end) in pieces]
            for gap_start, gap_end in zip([0, *ends], [*starts, len(text)], strict=True):
                gap = text[gap_start:gap_end]
                if gap and not gap.isspace():
                    raise ValueError(
                        f"pattern matches the empty string, so {gap!r} would be lost from the line "
                        f"{_shortened(line)}: let every match hold a character, + instead of *"
                    )
            for (previous, (_, end)), (token, (start, _)) in pairwise(pieces):
                abuts = 1 if start == end else -1
                self.left[token] += abuts
                self.right[previous] += abuts
            yield line

    def decoder(self, tokens: Iterable[str]) -> decoders.Decoder:
        """A decoder that writes a space before every one of `tokens` that does not abut."""
        abutting: set[str] = set()
        spaced = set(SPECIAL_TOKENS.values())
        for token in tokens:
            # The right side speaks for tokens that stand only at the start of lines.
            evidence = self.left if token in self.left else self.right
            (abutting if evidence[token] > 0 else spaced).add(token)
        # The shorter list goes into the decoder: it is searched for every token that is decoded.
        if len(abutting) <= len(spaced):
            return _spaced_decoder(f"(?!{_any_of(abutting)})" if abutting else "")
        return _spaced_decoder(f"(?={_any_of(spaced)})")


def _spaced_decoder(condition: str) -> decoders.Decoder:
    """Joins tokens, with a space before those at whose start `condition` holds."""
    return decoders.Sequence(
        [
            decoders.Replace(Regex(rf"\A{condition}"), _SPACE_MARK),
            decoders.Fuse(),
            decoders.Strip(_SPACE_MARK, left=1, right=0),
            # Together again, what was cut so as not to spell a special token.
            decoders.Replace(Regex(f"(?<=<){_SPACE_MARK}(?={_SPECIAL_TAILS})"), ""),
            decoders.Replace(_SPACE_MARK, " "),
        ]
    )


def _any_of(tokens: Iterable[str]) -> str:
    """A regular expression for exactly one of `tokens`, up to the end of the text."""
    ordered = sorted(tokens)
    characters = "".join(re.escape(token) for token in ordered if len(token) == 1)
    alternatives = [re.escape(token) for token in ordered if len(token) > 1]
    if characters:
        alternatives.insert(0, f"[{characters}]")
    return rf"(?:{'|'.join(alternatives)})\z"


def _check_settings(
    kind: str, vocab_size: int, pattern: str | None, normalization: str, min_frequency: int | None
) -> None:
    for name, value, choices in (
        ("kind", kind, get_args(TokenizerKind)),
        ("normalization", normalization, get_args(Normalization)),
    ):
        if value not in choices:
            raise ValueError(f"{name}={value!r} is unknown: use one of {', '.join(choices)}")
    if vocab_size <= len(SPECIAL_TOKENS):
        raise ValueError(
            f"vocab_size={vocab_size} leaves no room beside the {len(SPECIAL_TOKENS)} special "
            f"tokens {' '.join(SPECIAL_TOKENS.values())}: set a larger one"
        )
    if vocab_size > _LARGEST_VOCABULARY:
        raise ValueError(
            f"vocab_size={vocab_size} is above {_LARGEST_VOCABULARY}: set a smaller one"
        )
    if kind != "regex" and pattern is not None:
        raise ValueError(
            f"pattern={pattern!r} is for kind='regex' only, and kind is {kind!r}: "
            "set kind='regex' or leave pattern out"
        )
    if kind == "regex" and not pattern:
        raise ValueError("kind='regex' needs a pattern, such as pattern=\"[A-Z]+|[a-z']\"")
    if kind in ("character", "unigram") and min_frequency is not None:
        raise ValueError(
            f"min_frequency={min_frequency} is not for kind={kind!r}, which keeps every "
            "character: leave it out"
        )
    if min_frequency is not None and min_frequency < 1:
        raise ValueError(f"min_frequency={min_frequency} must be 1 or more")


def _only_strings(lines: Iterable[str]) -> Iterator[str]:
    for number, line in enumerate(lines, start=1):
        if not isinstance(line, str):
            raise TypeError(f"lines must hold strings, but item {number} is {_shortened(line)}")
        yield line


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _untrained_model(kind: TokenizerKind) -> models.Model:
    if kind == "unigram":
        return models.Unigram()
    model = models.BPE if kind == "bpe" else models.WordLevel
    return model(unk_token=SPECIAL_TOKENS["unk_token"])


def _train_unigram(
    tokenizer: Tokenizer,
    lines: Iterable[str],
    vocab_size: int,
    length: int | None,
    show_progress: bool,
) -> None:
    """Learn the pieces and their scores, the same ones from the same lines."""
    trainer = UnigramTrainer(
        vocab_size=vocab_size,
        unk_token=SPECIAL_TOKENS["unk_token"],
        special_tokens=list(SPECIAL_TOKENS.values()),
        show_progress=show_progress,
    )
    alphabet: set[str] = set()
    normalizer = tokenizer.normalizer  # in training, the tokenizer itself is locked

    def observed() -> Iterator[str]:
        for line in lines:
            alphabet.update(normalizer.normalize_str(line))
            yield line

    try:
        tokenizer.train_from_iterator(observed(), trainer=trainer, length=length)
    except Exception as error:
        # The library knows two refusals, no text and too many characters, and says less of them. It
        # gives them no class of their own.
        known = not alphabet or len(alphabet) + len(SPECIAL_TOKENS) > vocab_size
        if type(error) is not Exception or not known:
            raise
    if len(alphabet) + len(SPECIAL_TOKENS) > vocab_size:
        raise _too_small(vocab_size, len(alphabet))
    model = json.loads(tokenizer.to_str())["model"]
    scores = {piece: round(score, 6) for piece, score in model["vocab"][len(SPECIAL_TOKENS) :]}
    # The library scores rare characters in the random order of a hash table, each a step above the
    # one before it. They get one score, and all pieces an order, to be the same in every run.
    least = min(scores.values(), default=0.0)
    for piece in scores:
        steps = (scores[piece] - least) / _RARE_CHARACTER_STEP
        if len(piece) == 1 and steps < len(alphabet) and abs(steps - round(steps)) < 0.02:
            scores[piece] = least
    ordered = sorted(scores.items(), key=lambda item: (-item[1], item[0]))
    specials = [(token, 0.0) for token in SPECIAL_TOKENS.values()]
    unk_id = list(SPECIAL_TOKENS).index("unk_token")
    tokenizer.model = models.Unigram([*specials, *ordered], unk_id, byte_fallback=False)


def _too_small(vocab_size: int, characters: int) -> ValueError:
    return ValueError(
        f"vocab_size={vocab_size} is smaller than the {characters} different characters of the "
        f"training text and the {len(SPECIAL_TOKENS)} special tokens: set it to "
        f"{characters + len(SPECIAL_TOKENS)} or more, or clean the text of rare characters"
    )


def _normalizer(
    kind: TokenizerKind, normalization: Normalization, lowercase: bool
) -> normalizers.Normalizer | None:
    steps: list[normalizers.Normalizer] = []
    if normalization != "none":
        steps.append(getattr(normalizers, normalization.upper())())
    if lowercase:
        # Lower-casing can undo the form (Greek capitals with two accents): bring it back.
        steps = [*steps, normalizers.Lowercase(), *steps]
    if kind in ("bpe", "unigram"):
        # The first word of a line gets the space that all others have, to be the same token.
        steps.append(normalizers.Prepend(" "))
    return normalizers.Sequence(steps) if steps else None


def _splitter(kind: TokenizerKind, pattern: str) -> pre_tokenizers.PreTokenizer:
    if kind in ("bpe", "unigram"):
        return pre_tokenizers.Split(Regex(_SUBWORD_PIECES), "isolated")
    if kind == "character":
        return pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    if kind == "word":
        return pre_tokenizers.WhitespaceSplit()
    try:
        Regex(pattern)  # alone first: brackets must not pair with those around it
        match = Regex(f"(?:{pattern})|\\S")
    except Exception as error:  # the bindings raise no narrower class
        raise ValueError(f"pattern={pattern!r} is no regular expression: {error}") from error
    return pre_tokenizers.Split(match, "removed", invert=True)


def _decoder(kind: TokenizerKind, spacing: _Spacing, tokens: Iterable[str]) -> decoders.Decoder:
    if kind in ("bpe", "unigram"):
        return decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", left=1, right=0)])
    if kind == "character":
        return decoders.Fuse()
    if kind == "word":
        return _spaced_decoder("")
    return spacing.decoder(tokens)


def _fit_vocabulary(tokenizer: Tokenizer, kind: TokenizerKind, vocab_size: int) -> None:
    """Cut the learnt vocabulary to `vocab_size`, or refuse where that would lose characters."""
    vocab = tokenizer.get_vocab()
    learnt = len(vocab) - len(SPECIAL_TOKENS)
    if learnt == 0:
        raise ValueError("the training text holds no token: no lines, or none with any text")
    if len(vocab) <= vocab_size:
        return
    if kind in ("bpe", "character"):
        # Merges stop at vocab_size, so what stands above it are characters alone.
        raise _too_small(vocab_size, learnt)
    kept = {token: index for token, index in vocab.items() if index < vocab_size}
    tokenizer.model = models.WordLevel(kept, unk_token=SPECIAL_TOKENS["unk_token"])
    logger.warning(
        "vocab_size=%d holds the %d most frequent of %d different tokens: the others become %s",
        vocab_size,
        vocab_size - len(SPECIAL_TOKENS),
        learnt,
        SPECIAL_TOKENS["unk_token"],
    )
