"""The run as a web page: read-only, live, without any outside host. Knows a status and a run's files, not training."""
