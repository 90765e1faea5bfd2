"""An evaluation with Inspect on sandboxes of the pool that TOOLCREW_REDIS_URL names. The model is Inspect's mock, which
plays the script below.

Run it: python examples/inspect_eval.py [LOG_FOLDER], or with your own model: inspect eval examples/inspect_eval.py
--model openai/gpt-5
"""

import sys

from inspect_ai import Task, eval, task
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessage, ChatMessageTool, GenerateConfig, ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import Score, Scorer, Target, accuracy, scorer
from inspect_ai.solver import TaskState, generate, use_tools
from inspect_ai.tool import ToolChoice, ToolInfo, bash
from inspect_ai.util import sandbox


@scorer(metrics=[accuracy()])
def sum_is_written() -> Scorer:
    async def score(state: TaskState, target: Target) -> Score:
        written = (await sandbox().read_file("sum.txt")).strip()
        return Score(value=written == target.text, answer=written)

    return score


@task
def sums() -> Task:
    samples = [
        Sample(
            id=f"sum-{numbers[-1]}",
            input="Add the numbers in numbers.txt, write the sum into sum.txt, then say done.",
            target=str(sum(numbers)),
            files={"numbers.txt": "\n".join(map(str, numbers))},
            setup="echo 0 >sum.txt",
        )
        for numbers in ([1, 2, 3], [10, 20, 30, 40])
    ]
    return Task(
        dataset=samples, solver=[use_tools(bash(timeout=30)), generate()], scorer=sum_is_written(), sandbox="toolcrew"
    )


def play(messages: list[ChatMessage], tools: list[ToolInfo], choice: ToolChoice, config: GenerateConfig) -> ModelOutput:
    if isinstance(messages[-1], ChatMessageTool):
        output = ModelOutput.from_content("mockllm/model", "done")
    else:
        command = "echo $(($(paste -sd+ numbers.txt))) >sum.txt"
        output = ModelOutput.for_tool_call("mockllm/model", "bash", {"command": command})
    # Without a usage, the mock downloads a tokenizer to count tokens.
    output.usage = ModelUsage()
    return output


def main() -> int:
    model = get_model("mockllm/model", custom_outputs=play)
    log = eval(sums(), model=model, display="plain", log_dir=sys.argv[1] if len(sys.argv) > 1 else "logs")[0]
    for sample in log.samples or []:
        print(sample.id, sample.target, {name: score.answer for name, score in (sample.scores or {}).items()})
    return (
        0
        if log.status == "success" and all(s.scores and s.scores["sum_is_written"].value for s in log.samples or [])
        else 1
    )


if __name__ == "__main__":
    sys.exit(main())
