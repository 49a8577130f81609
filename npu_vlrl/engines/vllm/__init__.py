"""The engine that samples with vLLM."""
