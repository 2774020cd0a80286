"""Trained weights on their way out: where they are read from, and how they are written as a Hugging Face checkpoint."""
