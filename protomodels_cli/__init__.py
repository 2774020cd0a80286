"""pmtrain: train one language model together, each peer holding a slice of the layers."""

import os

# gRPC itself prints a line for every handshake that fails, and anybody can make one fail: what matters to us it raises.
# It reads this when it is imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

__version__ = "0.1.0"
PROTOCOL = 16  # of the messages between peers and with the coordinator; all must have the same
