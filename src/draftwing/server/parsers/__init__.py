"""What a model writes, taken apart: reasoning, text and tool calls. Text in, text out; nothing of HTTP, no torch."""
