"""An agent of the OpenAI Agents SDK whose tools run in a sandbox. The run stops for approvals. The model is scripted,
so the example needs no network.
"""

import asyncio
import os

from agents import Agent, RunConfig, Runner
from agents.testing import ScriptedModel, assistant_message, function_call

from toolcrew import ToolClient, as_agents_tools

MODEL = ScriptedModel(
    [
        [
            function_call(
                "write_tool", {"file_path": "/workspace/numbers.txt", "content": "1\n2\n3\n4\n5\n"}, call_id="call_1"
            )
        ],
        [function_call("bash_tool", {"command": "echo $(($(paste -sd+ numbers.txt)))"}, call_id="call_2")],
        [assistant_message("The sum is 15.")],
    ]
)


async def main() -> None:
    pool = ToolClient.connect() if "TOOLCREW_REDIS_URL" in os.environ else ToolClient.embedded()
    async with pool as client, await client.open_session() as session:
        tools = await as_agents_tools(client, session, asks_by_run=True)
        # Without `model`, the SDK uses a model of OpenAI.
        agent = Agent(name="adder", instructions="Work in /workspace.", model=MODEL, tools=list(tools))
        config = RunConfig(tracing_disabled=True)
        result = await Runner.run(agent, "Write the numbers 1 to 5 into a file and add them up.", run_config=config)
        while result.interruptions:
            state = result.to_state()
            for question in result.interruptions:
                print(f"approved: {question.name} {question.arguments}")  # noqa: T201  # ask a person here
                state.approve(question)
            result = await Runner.run(agent, state, run_config=config)
        for item in result.new_items:
            if item.type == "tool_call_output_item":
                print(f"tool: {item.output}")  # noqa: T201
        print(result.final_output)  # noqa: T201


asyncio.run(main())
