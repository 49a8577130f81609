"""From checkpoints, ours and those of other programs, to Hugging Face folders."""
