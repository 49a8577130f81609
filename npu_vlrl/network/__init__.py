"""The processes of a training, and the typed messages between them."""
