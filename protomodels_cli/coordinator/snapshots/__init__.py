"""Snapshots at the coordinator: when one is due, how its parts come in, where they lie, and who has a second copy."""
