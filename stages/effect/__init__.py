"""What a step was worth: many completions from the states before and after it, and the difference of their rewards."""
