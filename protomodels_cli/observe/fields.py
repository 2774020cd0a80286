"""A status as plain fields, for programs: `--format json`, the page, /metrics. Needs no terminal."""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor import Descriptor
from google.protobuf.json_format import MessageToDict

from protomodels_cli.wire.pb import pmtrain_pb2 as pb


def fields(s: pb.RunStatus) -> dict[str, Any]:
    """All fields, with enum values in lower case."""
    plain = MessageToDict(s, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    return _lower_enums(plain, s.DESCRIPTOR)


def _lower_enums(message: dict[str, Any], descriptor: Descriptor) -> dict[str, Any]:
    for name, value in message.items():
        field = descriptor.fields_by_name[name]
        if field.enum_type is not None:
            message[name] = str(value).lower()
        elif field.message_type is not None:
            for each in value:
                _lower_enums(each, field.message_type)
    return message
