"""Previews of a training: checks its data, and plays its environment, before it starts."""
