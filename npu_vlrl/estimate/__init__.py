"""What a run takes before it is started: memory and time, from the shapes of a model that has no weights."""
