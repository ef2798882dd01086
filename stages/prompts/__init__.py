"""A prompt file becomes one table of numbered, split rows."""
