"""llama.cpp's server, where the machine has none of its own."""
