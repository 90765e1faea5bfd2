"""A LangGraph agent whose tools run in a sandbox. The model is scripted, so the example needs no network. Replace
it with your own chat model.
"""

import asyncio
import os
from typing import Any

from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

from toolcrew import AutoApprover, ToolClient, as_langchain_tools

SCRIPT = [
    AIMessage("", tool_calls=[{"id": "call_1", "name": "read_tool", "args": {"file_path": "/workspace/numbers.txt"}}]),
    AIMessage(
        "",
        tool_calls=[
            {
                "id": "call_2",
                "name": "bash_tool",
                "args": {"command": "seq 5 > numbers.txt; echo $(($(paste -sd+ numbers.txt)))"},
            }
        ],
    ),
    AIMessage("There was no such file, so I made one. The sum is 15."),
]


async def main() -> None:
    pool = ToolClient.connect() if "TOOLCREW_REDIS_URL" in os.environ else ToolClient.embedded()
    async with pool as client, await client.open_session() as session:
        # AutoApprover asks no person. Calls can only change the sandbox.
        tools = await as_langchain_tools(client, session, approver=AutoApprover())
        model = GenericFakeChatModel(messages=iter(SCRIPT))  # ChatOpenAI(...).bind_tools(tools)

        async def ask(state: MessagesState) -> dict[str, Any]:
            return {"messages": [await model.ainvoke(state["messages"])]}

        graph = StateGraph(MessagesState)
        graph.add_node("model", ask)
        graph.add_node("tools", ToolNode(tools))
        graph.add_edge(START, "model")
        graph.add_conditional_edges("model", tools_condition)
        graph.add_edge("tools", "model")
        result = await graph.compile().ainvoke(
            {"messages": [("user", "What do the numbers in numbers.txt add up to?")]}
        )
    for message in result["messages"]:
        print(f"{message.type}: {message.text or [call['name'] for call in message.tool_calls]}")  # noqa: T201


asyncio.run(main())
