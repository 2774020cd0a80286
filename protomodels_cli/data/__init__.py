"""What is trained on: sources, tokenizers, token shards, and batches as a pure function of (seed, step, microbatch).

Knows the spec; nothing of torch.
"""
