"""The text of single tokens, read from a tokenizer.json without a tokenizer library.

Only for showing where tokens begin and end: byte-level vocabularies (GPT-2, Qwen, Llama 3) and those
that write a space as ▁. Any other kind gives no pieces, and the page shows ids.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import orjson

SPACE = "▁"


def token_pieces(places: Iterable[Path], ids: Iterable[int]) -> dict[int, str]:
    """Texts of `ids` by the first tokenizer.json in `places` that can be read; else nothing."""
    for place in places:
        try:
            tokenizer = orjson.loads((place / "tokenizer.json").read_bytes())
            return _pieces(tokenizer, set(ids))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue  # a page without pieces is still a page
    return {}


def _pieces(tokenizer: dict[str, Any], ids: set[int]) -> dict[int, str]:
    vocabulary = {number: piece for piece, number in tokenizer["model"]["vocab"].items() if number in ids}
    byte_level = "ByteLevel" in str(tokenizer.get("decoder")) + str(tokenizer.get("pre_tokenizer"))
    decode = _from_bytes if byte_level else _from_space
    pieces = {number: decode(piece) for number, piece in vocabulary.items()}
    added = {one["id"]: one["content"] for one in tokenizer.get("added_tokens", []) if one["id"] in ids}
    return pieces | added


def _from_space(piece: str) -> str:
    byte = re.fullmatch(r"<0x([0-9A-F]{2})>", piece)
    return _text(bytes([int(byte[1], 16)])) if byte else piece.replace(SPACE, " ")


def _from_bytes(piece: str) -> str:
    return _text(bytes(_BYTE_OF[character] for character in piece)) if set(piece) <= set(_BYTE_OF) else piece


def _text(data: bytes) -> str:
    return data.decode("utf-8", errors="replace")  # a token may hold a part of a character


def _byte_of() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others for characters from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_OF = _byte_of()
