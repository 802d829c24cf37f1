"""What was seen of a model at work, as one record, and the page that shows it without a network.

A `Trace` is a JSON header and named arrays. On disk the arrays are one block, gzip and base64, and
the header's `arrays` says where each lies: [type, shape, first byte]. The page is the same two,
in explorer.html with explorer.css and three scripts.
"""

import base64
import gzip
import hashlib
import html
import json
import math
import os
import re
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

FORMAT, VERSION = "tinytfm-trace", 1
TYPES = {"u2": "<u2", "i2": "<i2", "i4": "<i4", "f4": "<f4"}
# Attention as codes: -ln(w) in steps of 32 / 65534 up to 24, and from there in steps of 1 / 128, as
# far as float32 has weights. Small weights matter at high temperature, where linear codes fail.
FINE, FINE_END, COARSE, MASKED = 65534 / 32, 24.0, 128, 65535
SHARP_VECTORS = 8191  # levels on either side of zero: 14 of 16 bits, which compress
_OMITTED = re.compile(r"[\u0000\ud800-\udfff]")


@dataclass(eq=False)
class Trace:
    """What `look` saw: see `seeing`.

    Attributes:
        header: Model, tokens, and which views lack their numbers and why.
        arrays: The numbers by name, as stored.
    """

    header: dict[str, Any]
    arrays: dict[str, np.ndarray]

    def attention(self, kind: str, temperature: float = 1.0) -> np.ndarray:
        """Attention weights, softmax(s / temperature): w^(1 / temperature), normalised.

        Args:
            kind: "cross", "encoder" or "decoder".
            temperature: Above 0; 1 gives the model's own.

        Returns:
            [layers, heads, queries, keys] in float64.

        Raises:
            KeyError: If there is no such kind.
        """
        weights = decode_attention(self.arrays[f"attention.{kind}"], temperature)
        return weights / weights.sum(-1, keepdims=True)

    def vectors(self, name: str) -> np.ndarray:
        """Vectors in float64 that are stored with a scale each, such as "query.cross"."""
        return decode_vectors(self.arrays[name], self.arrays[f"{name}.scale"])

    def json(self) -> str:
        """The whole trace as one JSON object: the header, and the arrays' block as `data`."""
        directory, block = pack(self.arrays)
        return json.dumps({**self.header, "arrays": directory, "data": block}, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> "Trace":
        """The trace that `json`, or the page's export, wrote.

        Raises:
            ValueError: If it is something else, or of another version.
        """
        header = json.loads(text)
        found = (header.get("format"), header.get("version")) if isinstance(header, dict) else None
        if found != (FORMAT, VERSION):
            raise ValueError(f"no trace: format and version are {found}, not {(FORMAT, VERSION)}")
        return cls(header, unpack(header.pop("arrays"), header.pop("data")))

    def html(self) -> str:
        """The page: one file that loads nothing, and runs nothing but its own script."""
        directory, block = pack(self.arrays)
        header = json.dumps({**self.header, "arrays": directory}, ensure_ascii=False)
        scripts = ("explorer_drawing.js", "explorer_views.js", "explorer.js")
        parts = {"css": _resource("explorer.css"), "js": "\n".join(map(_resource, scripts))}
        source, output = self.header["source_text"], self.header["target_text"]
        parts |= {
            # By their hashes: whatever else should get into the page does not run.
            "policy": f"default-src 'none'; base-uri 'none'; form-action 'none'; "
            f"style-src '{_hash(parts['css'])}'; script-src '{_hash(parts['js'])}'",
            "title": html.escape(f"{source} → {output}"),
            "source": html.escape(source),
            "output": html.escape(output),
            "header": escape_script(header),
            "data": block,
        }
        # In one go: a token may look like a placeholder.
        return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _resource("explorer.html"))

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Writes the page."""
        Path(path).write_text(self.html(), encoding="utf-8", newline="\n")

    def save_json(self, path: str | os.PathLike[str]) -> None:
        """Writes the whole trace as JSON."""
        Path(path).write_text(self.json(), encoding="utf-8", newline="\n")

    def _repr_html_(self) -> str:
        """The page in a frame, for notebooks: their own page lends it nothing and is left alone."""
        return (
            '<iframe title="The Transformer at work" sandbox="allow-scripts allow-downloads" '
            'style="width:100%;height:900px;border:0;border-radius:12px" '
            f'srcdoc="{html.escape(self.html())}"></iframe>'
        )


def encode_attention(weights: np.ndarray, visible: np.ndarray) -> np.ndarray:
    """Attention weights as codes.

    Args:
        weights: Of 0 to 1.
        visible: Where a query may look, broadcastable; elsewhere the code says masked.
    """
    with np.errstate(divide="ignore"):
        surprise = -np.log(np.clip(weights.astype(np.float64), 0.0, 1.0))
    fine_codes = np.rint(np.minimum(surprise, FINE_END) * FINE)
    coarse_codes = np.rint(np.clip(surprise - FINE_END, 0.0, 1e4) * COARSE)
    codes = np.minimum(fine_codes + coarse_codes, MASKED - 1)
    return np.where(visible, codes, MASKED).astype(np.uint16)


def decode_attention(codes: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """w^(1 / temperature) of what `encode_attention` stored, not normalised; masked is 0."""
    turn = math.floor(FINE_END * FINE + 0.5)
    surprise = np.minimum(codes, turn) / FINE + np.maximum(codes.astype(int) - turn, 0) / COARSE
    return np.where(codes == MASKED, 0.0, np.exp(-surprise / temperature))


def encode_vectors(vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Vectors [..., D] as integers, and the scale [...] of each."""
    scale = np.abs(vectors).max(-1) / SHARP_VECTORS
    scale[scale == 0] = 1.0
    return np.rint(vectors / scale[..., None]).astype(np.int16), scale.astype(np.float32)


def decode_vectors(codes: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """The reverse of `encode_vectors`."""
    return codes.astype(np.float64) * scale[..., None]


def pack(arrays: Mapping[str, np.ndarray]) -> tuple[dict[str, list], str]:
    """Arrays as a directory, {name: [type, shape, first byte]}, and a block of gzip and base64."""
    names = {np.dtype(code): name for name, code in TYPES.items()}
    directory, block = {}, bytearray()
    for name, array in arrays.items():
        block += bytes(-len(block) % 4)  # the page reads them in place, which wants them aligned
        directory[name] = [names[array.dtype], list(array.shape), len(block)]
        block += np.ascontiguousarray(array).astype(TYPES[names[array.dtype]]).tobytes()
    return directory, base64.b64encode(gzip.compress(bytes(block), 6, mtime=0)).decode()


def unpack(directory: Mapping[str, list], data: str) -> dict[str, np.ndarray]:
    """The reverse of `pack`."""
    block = gzip.decompress(base64.b64decode(data))
    return {
        name: np.frombuffer(block, TYPES[kind], math.prod(shape), first).reshape(shape)
        for name, (kind, shape, first) in directory.items()
    }


def escape_script(text: str) -> str:
    """JSON that can stand in a script element: no `<` can end it."""
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def tokens(
    tokenizer: Any, token_ids: Iterable[int], special_ids: Iterable[int]
) -> list[dict[str, Any]]:
    """Tokens as the page shows them: id, text, what is shown of it, whether it is a special one."""
    special_ids = set(special_ids)
    byte_level = _is_byte_level(tokenizer)
    result = []
    for token_id in token_ids:
        text = tokenizer.convert_ids_to_tokens(token_id)
        text = f"#{token_id}" if text is None else _OMITTED.sub("\ufffd", str(text))
        special = token_id in special_ids
        shown = visible(text, byte_level=byte_level and not special)
        result.append({"id": token_id, "text": text, "shown": shown, "special": special})
    return result


def visible(text: str, byte_level: bool = False) -> str:
    """A token with everything in it made visible: spaces, control characters, single bytes.

    Args:
        text: The token.
        byte_level: Whether its characters stand for bytes, as in GPT-2's vocabulary.
    """
    if byte_level and all(character in _BYTES for character in text):
        raw = bytes(_BYTES[character] for character in text)
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError:
            return " ".join(f"0x{byte:02X}" for byte in raw)
    if byte := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", text):
        return f"0x{byte[1].upper()}"
    if not text:
        return "∅"
    shown = [_visible_character(text, place) for place in range(len(text))]
    if unicodedata.category(text[0]).startswith("M"):
        shown.insert(0, "◌")  # a mark needs something to stand on
    return "".join(shown)


def _visible_character(text: str, place: int) -> str:
    character = text[place]
    if character in _SIGNS:
        return _SIGNS[character]
    category = unicodedata.category(character)
    if character in "\u200c\u200d" and 0 < place < len(text) - 1:
        # Between letters of Persian or the parts of an emoji a joiner belongs to how they look.
        if min(text[place - 1], text[place + 1]) > "\u02ff":
            return character
    elif 0xE0020 <= ord(character) <= 0xE007F and place and text[0] == "\U0001f3f4":
        return character  # the tail of a flag
    if category[0] in "CZ":
        return f"⟨U+{ord(character):04X}⟩"
    return character


_SIGNS = {" ": "␣", "\u2581": "␣", "\n": "⏎", "\r": "␍", "\t": "⇥", "\u00a0": "⍽"}


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's characters for bytes: the printable ones themselves, the others from U+0100 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {
        chr(256 + number): byte for number, byte in enumerate(others)
    }


_BYTES = _byte_alphabet()


def _is_byte_level(tokenizer: Any) -> bool:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return "ByteLevel" in repr(getattr(backend, "decoder", None))


def _resource(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
