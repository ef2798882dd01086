"""Images become rewards: one file per kind of scorer, one stage call per scorer; a failure is never a number."""
