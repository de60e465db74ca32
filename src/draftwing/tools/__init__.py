"""Commands beside the server: chat, bench."""
