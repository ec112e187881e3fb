"""Anthropic's messages API, over the same conversations as OpenAI's chat."""
