"""From a model's text to reasoning, content and tool calls: one incremental reader a format."""
