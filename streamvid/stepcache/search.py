"""Searches for static masks: the lexicographic minimax path of LeMiCa, and plain enumeration for few steps.

Both work on measured errors and know neither models nor samplers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import combinations

Edge = tuple[int, int]


def lexicographic_path(weights: Mapping[Edge, float], num_steps: int, full_steps: int) -> tuple[int, ...]:
    """The best path of full steps from 0 to the last step.

    Args:
        weights: ``(i, j) -> error`` of running i and j in full and reusing i between them (``j - i = 1``: no
            skip, taken as 0 when absent).
        num_steps: S.
        full_steps: nodes of the path, first and last included.

    Returns:
        The steps to skip. Among all paths, the multiset of edge errors sorted from the largest down is
        lexicographically smallest.
    """
    if not 2 <= full_steps <= num_steps:
        raise ValueError(f"full_steps must be in 2..{num_steps}, got {full_steps}")
    # best[j]: (errors sorted down, nodes) of the best path of the current length that ends at j.
    best: dict[int, tuple[tuple[float, ...], tuple[int, ...]]] = {0: ((), (0,))}
    for _ in range(full_steps - 1):
        longer: dict[int, tuple[tuple[float, ...], tuple[int, ...]]] = {}
        for i, (errors, nodes) in best.items():
            for j in range(i + 1, num_steps):
                error = weights.get((i, j), 0.0) if j - i == 1 else weights[i, j]
                key = tuple(sorted((*errors, error), reverse=True))
                if j not in longer or key < longer[j][0]:
                    longer[j] = (key, (*nodes, j))
        best = longer
    nodes = best[num_steps - 1][1]
    return tuple(step for step in range(num_steps) if step not in nodes)


def masks(num_steps: int, full_steps: int) -> Iterator[tuple[int, ...]]:
    """Every set of steps to skip that leaves ``full_steps``, the first among them."""
    yield from combinations(range(1, num_steps), num_steps - full_steps)


def exhaustive(num_steps: int, error: Callable[[tuple[int, ...]], float]) -> dict[int, tuple[int, ...]]:
    """The best mask for each number of full steps, by measuring all of them; meant for up to 6 steps."""
    return {
        full_steps: min(masks(num_steps, full_steps), key=error) for full_steps in range(1, num_steps + 1)
    }
