"""What happened in the episodes of one rollout."""

from dataclasses import dataclass


@dataclass(slots=True)
class AgentCounts:
    """Episodes, answers, calls and how they ended; `tool_s` are seconds that calls (or programs) took, side by side or
    behind one another."""

    num_episodes: int = 0
    num_turns: int = 0
    num_calls: int = 0
    num_malformed: int = 0
    num_errors: int = 0
    num_timeouts: int = 0
    num_outputs_cut: int = 0
    num_out_of_turns: int = 0
    num_out_of_room: int = 0
    num_inserted_tokens: int = 0
    num_branches_dropped: int = 0
    num_without_turn: int = 0
    tool_s: float = 0.0
