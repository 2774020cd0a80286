"""What crosses between stages: codecs. Knows tensors and the spec; nothing of training."""
