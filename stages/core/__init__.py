"""What every stage shares: types, keyed noise, errors, content digests and atomic publication."""
