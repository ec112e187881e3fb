"""OpenAI's HTTP API over an AsyncLLM. Torch-free."""
