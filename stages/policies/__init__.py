"""One adapter per model family: encode prompts, evaluate velocities, decode latents, name what is trained."""
