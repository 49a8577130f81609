"""Engine that samples with vLLM."""
