"""Hugging Face's checkpoints of ordinary Llama and Qwen3 models: their names of our modules, and their files.

Knows no stages, peers or tensors of torch.
"""
