"""What a run shows: metrics files and progress lines. Knows rows of numbers; nothing of training."""
