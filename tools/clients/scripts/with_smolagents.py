import os
import sys
from pathlib import Path

# set-up
from smolagents import OpenAIModel, ToolCallingAgent, tool

model = OpenAIModel(
    model_id=os.environ["MODEL"], api_base=f"{os.environ['BASE_URL']}/v1", api_key=os.environ["API_KEY"]
)
# end


@tool
def read_file(path: str) -> str:
    """Reads a file.

    Args:
        path: of the file
    """
    return Path(path).read_text()


agent = ToolCallingAgent([read_file], model, max_steps=4, stream_outputs=True)
deltas = 0
for event in agent.run(os.environ["PROMPT"], stream=True):
    if type(event).__name__ == "ChatMessageStreamDelta":
        print(event.content or "", end="", flush=True)
        deltas += 1
        if sys.argv[1] == "cancel" and deltas == 5:
            break
    elif type(event).__name__ == "FinalAnswerStep":
        print(event.output)
