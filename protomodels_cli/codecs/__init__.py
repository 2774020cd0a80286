"""Codecs: what a message's numbers become on their way over a boundary, and the bytes that carry them.

Each is one file with all that is known of it: how it is written, where it fits, its sizes, its tensors. What spec and
cost model ask of them needs no torch. To add one, add a file here or an entry point elsewhere (docs/codecs.md).
"""

from protomodels_cli.codecs.crossing import Carrier, End
from protomodels_cli.codecs.packing import pack_ids, unpack_ids
from protomodels_cli.codecs.registry import parse_codec

__all__ = ["Carrier", "End", "pack_ids", "parse_codec", "unpack_ids"]
