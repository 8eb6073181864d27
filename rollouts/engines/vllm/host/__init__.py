"""The folder that vLLM's interpreter gets on its path."""
