"""What crosses between stages: byte codecs. Knows tensors and the spec; nothing of training."""
