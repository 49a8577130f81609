"""Looks at what a training would read and play, before one is started."""
