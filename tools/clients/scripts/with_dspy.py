import asyncio
import os
import sys
from pathlib import Path

# set-up
import dspy

lm = dspy.LM(
    f"openai/{os.environ['MODEL']}",
    api_base=f"{os.environ['BASE_URL']}/v1",
    api_key=os.environ["API_KEY"],
    cache=False,
    num_retries=0,
)
dspy.configure(lm=lm)
# end


def read_file(path: str) -> str:
    """Reads a file."""
    return Path(path).read_text()


async def main() -> None:
    agent = dspy.streamify(dspy.ReAct("question -> answer", tools=[read_file], max_iters=2))
    deltas = 0
    async for part in agent(question=os.environ["PROMPT"]):
        if isinstance(part, dspy.Prediction):
            print(part.answer)
        deltas += 1
        if sys.argv[1] == "cancel" and deltas == 5:
            return


asyncio.run(main())
