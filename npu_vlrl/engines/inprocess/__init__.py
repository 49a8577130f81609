"""The engine that samples with the learner's own classes."""
