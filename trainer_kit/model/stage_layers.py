"""`distribute_layers`: which layers of a model each pipeline stage gets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

from trainer_kit.exceptions import ConfigurationError


def distribute_layers(
    num_layers: int, num_stages: int, *, before: float = 0, after: float = 0, costs: Sequence[float] | None = None
) -> list[range]:
    """Consecutive layers for each stage, at least one, such that the stages take about as long.

    before, after: what comes before the first layer (embedding) and after the last one (norm, head), on the first and the last stage,
    counted in layers. costs: of each layer, in any unit, which is then that of `before` and `after` too; the largest sum of a stage is as
    small as can be. Without them all layers cost the same. Raises ConfigurationError if a stage would have no layer.
    """
    costs = [1.0] * num_layers if costs is None else [float(cost) for cost in costs]
    if num_stages < 1 or num_layers < num_stages:
        raise ConfigurationError(
            f"num_layers={num_layers} cannot be cut into num_stages={num_stages}: each stage needs a layer; use fewer stages, pp or "
            "stages_per_rank of MeshStrategy"
        )
    if len(costs) != num_layers or min(costs) < 0 or before < 0 or after < 0:
        raise ConfigurationError(
            f"distribute_layers got {len(costs)} costs for {num_layers} layers, before={before} and after={after}; expected one cost per "
            "layer, and none below 0"
        )
    first = _first_cut(costs, num_stages, before, after)
    return [range(start, end) for start, end in pairwise([0, *first, num_layers])]


def _first_cut(costs: Sequence[float], num_stages: int, before: float, after: float) -> list[int]:
    """Where stages 1, 2, ... begin: the cuts that make the most expensive stage cheapest, and of these the most even ones.

    By dynamic programming over (stages left, first layer): the largest sum, then the sum of squares.
    """
    num_layers = len(costs)
    sums = [0.0, *accumulate(costs)]

    def cost(stage: int, start: int, end: int) -> float:
        return sums[end] - sums[start] + before * (stage == 0) + after * (stage == num_stages - 1)

    last = num_stages - 1
    tail = {start: (cost(last, start, num_layers), cost(last, start, num_layers) ** 2, num_layers) for start in range(last, num_layers)}
    best = [tail]  # by stage, from `stage` on: first layer -> (largest sum, sum of squares, where the stage ends)
    for stage in range(last - 1, -1, -1):
        found: dict[int, tuple[float, float, int]] = {}
        for start in range(stage, num_layers - last + stage) if stage else [0]:
            chosen: tuple[float, float, int] | None = None
            for end in range(start + 1, num_layers - last + stage + 1):
                own, (largest, squares, _) = cost(stage, start, end), best[0][end]
                if chosen is not None and own > chosen[0]:
                    break  # it only grows
                chosen = min(chosen or (math.inf, 0.0, 0), (max(own, largest), squares + own**2, end))
            assert chosen is not None
            found[start] = chosen
        best.insert(0, found)
    cuts = [0]
    for of_stage in best[:-1]:
        cuts.append(of_stage[cuts[-1]][2])
    return cuts[1:]
