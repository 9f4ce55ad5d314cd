"""llama.cpp's own server as a real endpoint that starts in half a second: a model file, and a process."""
