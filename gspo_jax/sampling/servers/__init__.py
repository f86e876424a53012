"""Engine with HTTP servers as samplers, and its parts."""
