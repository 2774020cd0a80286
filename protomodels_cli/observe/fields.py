"""A status, or a list of tokens, for programs: plain data, without anything that a terminal needs."""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message


def fields(s: Message) -> dict[str, Any]:
    """For programs: all fields, with enum values in lower case, and every number a number."""
    plain = MessageToDict(s, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    return _plain(plain, s.DESCRIPTOR)


def _plain(message: dict[str, Any], descriptor: Descriptor) -> dict[str, Any]:
    """Protobuf's JSON has 64-bit integers as strings."""
    for name, value in message.items():
        field = descriptor.fields_by_name[name]
        if field.enum_type is not None:
            message[name] = str(value).lower()
        elif field.message_type is not None:
            for each in value:
                _plain(each, field.message_type)
        elif field.cpp_type in (FieldDescriptor.CPPTYPE_UINT64, FieldDescriptor.CPPTYPE_INT64):
            message[name] = int(value)
    return message
