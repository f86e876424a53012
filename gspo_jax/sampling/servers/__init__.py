"""Engine with vLLM servers as samplers, their client, and checks of their answers."""
