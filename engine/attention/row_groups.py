"""Which decode rows attend together."""

from collections.abc import Sequence

# Padding costs its reading; a group of its own costs a launch, about as much as these many tokens.
_PADDING_TOKENS = 256


def group_rows(context_lens: Sequence[int], max_group_tokens: int) -> list[list[int]]:
    """Splits rows into groups that are each padded to their longest context.

    Few tokens of padding to a group, and at most `max_group_tokens` with padding unless a single row has
    more. All rows in their order, when one group does.
    """
    order = sorted(range(len(context_lens)), key=lambda row: -context_lens[row])
    groups: list[list[int]] = []
    longest = padding = 0
    for row in order:
        padding += longest - context_lens[row]
        fits = bool(groups) and (len(groups[-1]) + 1) * longest <= max_group_tokens
        if fits and padding <= _PADDING_TOKENS:
            groups[-1].append(row)
        else:
            groups.append([row])
            longest, padding = context_lens[row], 0
    return [sorted(group) for group in groups]
