"""Snapshots on the peer's side: its own parts on disk, their way to the coordinator and back."""
