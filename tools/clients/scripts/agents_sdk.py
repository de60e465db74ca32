import asyncio
import os
import sys
from pathlib import Path

# set-up
from agents import Agent, ModelSettings, OpenAIProvider, RunConfig, Runner, function_tool

provider = OpenAIProvider(
    base_url=f"{os.environ['BASE_URL']}/v1",
    api_key=os.environ["API_KEY"],
    use_responses=os.environ["DIALECT"] == "responses",
)
config = RunConfig(model_provider=provider, tracing_disabled=True)
# end


@function_tool
def read_file(path: str) -> str:
    """Reads a file."""
    return Path(path).read_text()


async def main() -> None:
    settings = ModelSettings(include_usage=True)
    agent = Agent(name="Reader", model=os.environ["MODEL"], tools=[read_file], model_settings=settings)
    stream = Runner.run_streamed(agent, os.environ["PROMPT"], run_config=config)
    deltas = 0
    async for event in stream.stream_events():
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
            print(event.data.delta, end="", flush=True)
            deltas += 1
            if sys.argv[1] == "cancel" and deltas == 5:
                stream.cancel()


asyncio.run(main())
