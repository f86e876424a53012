"""Engine with vLLM servers as samplers, a client of these servers, and checks of their answers."""
