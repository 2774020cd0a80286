"""What coordinator and peers must agree on, to the bit. Needs no torch and knows no spec, no socket and no tensor."""
