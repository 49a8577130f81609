"""Exports checkpoints, ours and those of other programs, as Hugging Face folders."""
