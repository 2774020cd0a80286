"""What a run shows: events, logs, metrics, progress lines, the live view. Knows rows and a status, not training."""
