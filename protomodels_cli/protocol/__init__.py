"""What coordinator and peers must agree on, to the bit. Knows no socket and no tensor.

It reads fields of the spec that it is handed, and imports nothing of spec/ but types.
"""
