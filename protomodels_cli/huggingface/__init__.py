"""Hugging Face's checkpoints of Llama and Qwen3 models, and ours with segments: names of modules, and files.

Knows no stages, peers or tensors of torch.
"""
