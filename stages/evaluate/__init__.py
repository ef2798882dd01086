"""Evaluation: a policy in, rewards on held-out prompts from policy-independent noise out."""
