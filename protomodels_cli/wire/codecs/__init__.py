"""Codecs: what a message's numbers become on their way over a boundary, and the bytes that carry them.

Pure functions on tensors, so that the reference crosses a boundary with the very numbers that a socket would deliver.
"""

from protomodels_cli.wire.codecs.crossing import Carrier, End
from protomodels_cli.wire.codecs.packing import pack_ids, unpack_ids

__all__ = ["Carrier", "End", "pack_ids", "unpack_ids"]
