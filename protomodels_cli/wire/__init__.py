"""What crosses between processes: frames, links, TLS, relays. Knows bytes and the spec; nothing of training."""
