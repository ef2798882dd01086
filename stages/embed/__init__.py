"""Prompts become embeddings once, so that the text encoders never share memory with training."""
