import os
import sys
from pathlib import Path
from typing import Any

# set-up
from ollama import Client

client = Client(host=os.environ["BASE_URL"], headers={"Authorization": f"Bearer {os.environ['API_KEY']}"})
# end


def read_file(path: str) -> str:
    """Reads a file.

    Args:
        path: of the file
    """
    return Path(path).read_text()


messages: list[Any] = [{"role": "user", "content": os.environ["PROMPT"]}]
deltas = 0
while messages[-1]["role"] != "assistant":
    text, calls = "", []
    for part in client.chat(os.environ["MODEL"], messages, tools=[read_file], stream=True):
        print(part.message.content, end="", flush=True)
        text += part.message.content or ""
        calls += part.message.tool_calls or []
        deltas += 1
        if sys.argv[1] == "cancel" and deltas == 5:
            sys.exit()
    messages.append({"role": "assistant", "content": text, "tool_calls": calls})
    for call in calls:
        content = read_file(**call.function.arguments)
        messages.append({"role": "tool", "tool_name": call.function.name, "content": content})
