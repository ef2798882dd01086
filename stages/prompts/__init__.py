"""A prompt file (or the lab's grammar) becomes one table of numbered, split rows; round order is decided here too."""
