"""Followers of a run's metrics.jsonl: what other tools draw. Each row is passed on once, also by a follower that was
killed and started again."""
