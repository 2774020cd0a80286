"""pmtrain: train one language model together, each peer holding a slice of the layers."""

__version__ = "0.1.0"
PROTOCOL = 5  # of the messages between peers and coordinator; both sides must have the same
