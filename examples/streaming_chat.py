"""Chats with a running server through OpenAI's client, word by word.

    draftwing serve                                  # in another terminal
    python examples/streaming_chat.py [URL]          # http://127.0.0.1:30000 by default

Needs `pip install openai`. Ctrl-D or an empty line ends it.
"""

from __future__ import annotations

import sys

try:
    import openai
except ModuleNotFoundError:
    sys.exit("this example needs OpenAI's client: pip install openai")


def main(url: str = "http://127.0.0.1:30000") -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    model = client.models.list().data[0].id
    messages: list[openai.types.chat.ChatCompletionMessageParam] = []
    print(f"chatting with {model}")
    while question := ask():
        messages.append({"role": "user", "content": question})
        answer = ""
        for chunk in client.chat.completions.create(model=model, messages=messages, max_tokens=128, stream=True):
            piece = chunk.choices[0].delta.content or "" if chunk.choices else ""
            answer += piece
            print(piece, end="", flush=True)
        print()
        messages.append({"role": "assistant", "content": answer})


def ask() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        return ""


if __name__ == "__main__":
    main(*sys.argv[1:])
