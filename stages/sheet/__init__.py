"""A round for the eye: its best and worst images with their rewards."""
