"""What a package elsewhere adds to pmtrain: here, for its tests alone."""
