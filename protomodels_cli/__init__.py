"""pmtrain: train one language model together, each peer holding a slice of the layers."""

__version__ = "0.1.0"
PROTOCOL = 15  # of the messages between peers and with the coordinator; all must have the same
