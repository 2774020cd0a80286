"""A trained model at work, in one process: text that it writes, and how well it predicts text.

Knows weights in Hugging Face's names and where they come from; nothing of training, peers or the wire.
"""
