"""What the files of a run directory are called. Imports nothing: whoever only looks at folders starts at once."""

from __future__ import annotations

PRIVATE = "private.json"  # secrets and the spec; its presence makes a folder a coordinator's
JOURNAL, SNAPSHOTS, METRICS, EVENTS, BASES = "journal.sqlite", "snapshots", "metrics.jsonl", "events.jsonl", "basis"
SPEC, LINK, LOCK, LOG, SUMMARY = "run.yaml", "link", "lock", "coordinator.log", "summary.json"
PAGE_SAMPLE = "page_sample"  # the prompt that the page shows continued
