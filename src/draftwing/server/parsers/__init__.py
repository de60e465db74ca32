"""Takes apart what a model writes: reasoning, text and tool calls. Text in, text out; nothing of HTTP, no torch."""
