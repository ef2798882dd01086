"""Rollout: a forest of latent trees (one per prompt) is sampled and stored with everything the update will need."""
