"""Fields of protobuf messages as bytes: a tag, a length, and what is of that length."""

from __future__ import annotations

from google.protobuf.message import Message

MESSAGE = 2
"""The kind of a field that has a length."""


def head(number: int, length: int) -> bytes:
    """The tag and the length that precede a field of `length` bytes."""
    written = bytearray()
    for value in (number << 3 | MESSAGE, length):
        while value > 0x7F:
            written.append(value & 0x7F | 0x80)
            value >>= 7
        written.append(value)
    return bytes(written)


def field_of(number: int, message: Message) -> bytes:
    """A message as a field of another one. Of a repeated field, each is one."""
    content = message.SerializeToString()
    return head(number, len(content)) + content
