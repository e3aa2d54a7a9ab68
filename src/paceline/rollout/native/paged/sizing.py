"""How many pages a set of requests needs to run without preemption. Torch-free."""

from collections.abc import Iterable

from paceline.rollout.protocol import RolloutRequest


def pages_for(num_tokens: int, page_tokens: int) -> int:
    """Pages that hold so many tokens."""
    return -(-num_tokens // page_tokens)


def wanted_pages(requests: Iterable[RolloutRequest], page_tokens: int, max_running: int) -> int:
    """Pages for the `max_running` longest samples at full length, full pages of a group's prompt counted once."""
    needs: list[tuple[int, int, int]] = []
    for request in requests:
        prompt = len(request.prompt.token_ids)
        shared = prompt // page_tokens
        # the last token's keys are never written; the prompt's partial page may be held beside its copies
        own = pages_for(prompt + request.max_new_tokens - 1, page_tokens) - shared
        needs.append((own, shared + 1, len(request.seeds)))
    needs.sort(reverse=True)
    total, left = 0, max_running
    for own, shared, num_samples in needs:
        running = min(num_samples, left)
        if not running:
            break
        total += shared + running * own
        left -= running
    return total
