"""Section `agent`: episodes of several turns, with tools or played by a program, and its rules."""

from typing import Annotated, Literal

from pydantic import Field

from paceline.config.section import Positive, Section


class AgentSection(Section):
    """Episodes of several turns. Without `tools` and `program` a sample is one answer, and nothing here acts.

    With them `rollout.max_new_tokens` bounds an episode: sampled tokens and what is put between them.
    """

    tools: tuple[str, ...] = ()
    """Tools the model may call, each a Python function as `module:function`; its name is the tool's."""
    call_format: Literal["json", "tag"] = "json"
    """How a call is written. json: <tool_call>{"name": ..., "arguments": {...}}</tool_call>; tag:
    <name>argument</name>, for tools of one argument."""
    output_role: str = "tool"
    """Role of the messages that bring a tool's output, as the chat template knows it."""
    examples: tuple[dict[str, str], ...] = ()
    """Conversation (role and content of each message) shown before every question, of a tool being called for
    instance. Not learned."""
    max_turns: Positive = 4
    """An episode ends after so many answers of the model."""
    max_turn_tokens: Positive | None = None
    """Longest answer in tokens; None: what is left of the episode."""
    max_output_tokens: Positive = 256
    """A tool's output is cut to so many tokens; agent/outputs_cut counts."""
    workers: Positive = 2
    """Processes per device that run tools, or programs."""
    timeout_s: Annotated[float, Field(gt=0)] = 10.0
    """Seconds after which a tool's call, or a program, is killed; the model is told of a call's end."""
    reward_on: Literal["final", "episode"] = "final"
    """What the reward function gets as the completion: the last answer, or the text of the whole episode."""
    program: str | None = None
    """`module:function` that plays an episode through an OpenAI client; excludes `tools`. See docs/agents.md."""

    @property
    def is_on(self) -> bool:
        """Whether samples are episodes."""
        return bool(self.tools) or self.program is not None
