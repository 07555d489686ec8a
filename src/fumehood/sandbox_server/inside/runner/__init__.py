"""Running code and commands and capturing their output."""
