"""OpenAI's responses API, stateless, over the same conversations as chat."""
