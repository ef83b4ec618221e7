"""How inputs are taken apart and put together: msgpack, JSON, TOML, safetensors, protobuf, URIs. Without any limits."""

from __future__ import annotations

import contextlib
import json
import math
import struct
from typing import Any
from urllib.parse import quote

import msgspec

from replayfleet.federation.errors import UNREADABLE
from tests.fuzz.mutation import Form, Tree, Unfit


def _plain(value: Any) -> Any:
    """Return a tree whose sequences are lists: they can be changed."""
    return msgspec.to_builtins(value, builtin_types=(bytes, float))


def document(value: Any) -> bytes:
    """Return any value as an input of the form ``MSGPACK``."""
    return msgspec.msgpack.encode(_plain(value))


def taken_apart(data: bytes, kind: Any = Any) -> Any:
    """Return what ``document`` wrote.

    Raises:
        Unfit: Other bytes.
    """
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except UNREADABLE as error:
        raise Unfit from error


MSGPACK = Form(msgspec.msgpack.decode, msgspec.msgpack.encode)


def after(head: int, form: Form) -> Form:
    """Return the form of inputs with ``head`` bytes before; these stand as a number in the tree."""

    def parse(data: bytes) -> Tree:
        return [int.from_bytes(data[:head], "little"), form.parse(data[head:])]

    def unparse(tree: Tree) -> bytes:
        return int(tree[0]).to_bytes(head, "little") + form.unparse(tree[1])

    return Form(parse, unparse)


def _text(value: Any) -> str:
    """What JSON has no form for: bytes, and extensions of msgpack that a mutation made."""
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)


def _json(tree: Tree) -> bytes:
    return json.dumps(tree, ensure_ascii=False, default=_text).encode()


JSON = Form(json.loads, _json)
JSON_LINES = Form(
    lambda data: [json.loads(line) for line in data.splitlines()], lambda tree: b"\n".join(map(_json, tree))
)


def _toml(tree: Tree) -> bytes:
    try:
        return "\n".join(f"{json.dumps(str(key))} = {_toml_value(value)}" for key, value in tree.items()).encode()
    except RecursionError as error:
        raise Unfit from error


def _toml_value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(key))} = {_toml_value(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return json.dumps(value, default=_text)


def toml_of(tree: dict[str, Any]) -> bytes:
    """Return a table as TOML, values of None as the word."""
    return _toml(tree)


def _safetensors_parse(data: bytes) -> Tree:
    size = int.from_bytes(data[:8], "little")
    return [0, json.loads(data[8 : 8 + size]), data[8 + size :]]


def _safetensors_unparse(tree: Tree) -> bytes:
    wrong_by, header, body = tree
    head = _json(header)
    return struct.pack("<Q", (len(head) + wrong_by) % 2**64) + head + body


SAFETENSORS = Form(_safetensors_parse, _safetensors_unparse)
"""[by how much the header's size is wrong, header, data]."""


def _protobuf_parse(data: bytes) -> Tree:
    """[[field number, wire type, value], ...]; what reads as a message is taken to be one."""
    fields, place = [], 0
    while place < len(data):
        tag, place = _varint(data, place)
        kind, value = tag & 7, None
        if kind == 0:
            value, place = _varint(data, place)
        elif kind in {1, 2, 5}:
            length = {1: 8, 5: 4}.get(kind, 0)
            if kind == 2:
                length, place = _varint(data, place)
            value = data[place : place + length]
            if len(value) != length:
                raise ValueError("cut short")
            place += length
            if kind == 2 and length:
                with contextlib.suppress(ValueError):
                    value = _protobuf_parse(value)
        else:
            raise ValueError("no wire type")
        fields.append([tag >> 3, kind, value])
    return fields


def _varint(data: bytes, place: int) -> tuple[int, int]:
    result = shift = 0
    while place < len(data) and shift < 70:
        result |= (data[place] & 0x7F) << shift
        shift, place = shift + 7, place + 1
        if data[place - 1] < 0x80:
            return result, place
    raise ValueError("no number")


def _number(value: int) -> bytes:
    value, found = value % 2**64, bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def _protobuf_unparse(tree: Tree) -> bytes:
    found = bytearray()
    for field, kind, value in tree:
        found += _number(field << 3 | kind & 7)
        if isinstance(value, int):
            found += _number(value)
            continue
        raw = value if isinstance(value, bytes) else _protobuf_unparse(value)
        found += (_number(len(raw)) if kind == 2 else b"") + raw
    return bytes(found)


PROTOBUF = Form(_protobuf_parse, _protobuf_unparse)


def _uri_parse(data: bytes) -> Tree:
    """[[name, scheme, place, {key: value}, fragment], ...] of sources, one a line."""
    found = []
    for line in data.decode().split("\n"):
        name, _, uri = line.rpartition("=") if "=" in line.partition("://")[0] else ("", "", line)
        scheme, _, rest = uri.partition("://")
        rest, _, fragment = rest.partition("#")
        place, _, query = rest.partition("?")
        found.append([name, scheme, place, [pair.partition("=")[::2] for pair in query.split("&")], fragment])
    return json.loads(json.dumps(found))


def _uri_unparse(tree: Tree) -> bytes:
    lines = []
    for name, scheme, place, pairs, fragment in tree:
        query = "&".join(f"{key}={quote(str(value))}" for key, value in pairs)
        line = f"{scheme}://{place}" + (f"?{query}" if pairs else "") + (f"#{fragment}" if fragment else "")
        lines.append(f"{name}={line}" if name else line)
    return "\n".join(lines).encode()


URIS = Form(_uri_parse, _uri_unparse)
