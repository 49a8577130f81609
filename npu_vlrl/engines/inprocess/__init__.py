"""In-process engine, which samples with the learner's own model classes."""
