"""The pipeline schedules by name, as `MeshStrategy(pipeline="1f1b")` takes them.

| name | stages per rank | layout | bubble with p ranks | kept activations of rank r at most | microbatches |
|---|---|---|---|---|---|
| gpipe | 1 | loop | (p-1)(F+B) | m | any |
| 1f1b | 1 | loop | (p-1)(F+B) | p - r | any |
| interleaved_1f1b | any | loop | (p-1)(F+B) | (v-1)s + 2(p-1-r) + 1 | any |
| looped_bfs | any | loop | (p-1)(F+B) | vm | any |
| zb1p | any | loop | (p-1)(F+I-W) | (v-1)s + p | any |
| zbv | 2 | v | 0 for F = I = W, within each rank's own span | 2p | any |
| dualpipe_v | 2 | v | (p-1)(F&B+B-3W) | 2p + 1 | 2p or more |
| forward_only_loop | any | loop | (p-1)F | none | any |
| forward_only_v | 2 | v | 2(p-1)F | none | any |

Times are those of one stage, which is v times smaller with v stages per rank; B = I + W; activations are counted in stages. m is the
number of microbatches, s those of a round: m / max(1, m // p), rounded up. Bubbles hold from p microbatches on (zbv: 2p - 1).
"""

from __future__ import annotations

from trainer_kit.exceptions import ConfigurationError, nearest
from trainer_kit.pipeline.schedules.breadth_first import breadth_first, breadth_first_peak
from trainer_kit.pipeline.schedules.dualpipe_v import dualpipe_v, dualpipe_v_peak
from trainer_kit.pipeline.schedules.forward_only import forward_loop, forward_v, no_activations
from trainer_kit.pipeline.schedules.interleaved import interleaved, interleaved_peak, zero_bubble, zero_bubble_peak
from trainer_kit.pipeline.schedules.one_stage import gpipe, gpipe_peak, one_forward_one_backward, one_forward_one_backward_peak
from trainer_kit.pipeline.schedules.schedule import Order, Schedule
from trainer_kit.pipeline.schedules.zbv import zbv, zbv_peak

__all__ = ["SCHEDULES", "Order", "Schedule", "find_schedule", "find_training_schedule", "forward_only"]

SCHEDULES: dict[str, Schedule] = {
    schedule.name: schedule
    for schedule in (
        Schedule("gpipe", "loop", gpipe, gpipe_peak, stages_per_rank=1),
        Schedule("1f1b", "loop", one_forward_one_backward, one_forward_one_backward_peak, stages_per_rank=1),
        Schedule("interleaved_1f1b", "loop", interleaved, interleaved_peak),
        Schedule("looped_bfs", "loop", breadth_first, breadth_first_peak),
        Schedule("zb1p", "loop", zero_bubble, zero_bubble_peak, splits_backward=True),
        Schedule("zbv", "v", zbv, zbv_peak, stages_per_rank=2, splits_backward=True),
        Schedule("dualpipe_v", "v", dualpipe_v, dualpipe_v_peak, stages_per_rank=2, splits_backward=True, microbatches_per_rank=2),
        Schedule("forward_only_loop", "loop", forward_loop, no_activations, trains=False),
        Schedule("forward_only_v", "v", forward_v, no_activations, stages_per_rank=2, trains=False),
    )
}


def find_schedule(name: str) -> Schedule:
    """The schedule of that name; case, hyphens and underscores do not count. Raises ConfigurationError with the nearest name."""
    wanted = _plain(name)
    for schedule in SCHEDULES.values():
        if _plain(schedule.name) == wanted:
            return schedule
    raise ConfigurationError(f"there is no pipeline schedule {name!r}; {nearest(name, SCHEDULES)}")


def find_training_schedule(name: str) -> Schedule:
    """`find_schedule` for one with backwards. Raises ConfigurationError for the others too."""
    if not any(_plain(known) == _plain(name) for known in SCHEDULES):
        training = [known for known, schedule in SCHEDULES.items() if schedule.trains]
        raise ConfigurationError(f"there is no pipeline schedule {name!r}; {nearest(name, training)}")
    schedule = find_schedule(name)
    check_trains(schedule)
    return schedule


def check_trains(schedule: Schedule) -> None:
    """Raises ConfigurationError for a schedule that has no backwards."""
    if not schedule.trains:
        names = ", ".join(sorted(name for name, other in SCHEDULES.items() if other.trains))
        raise ConfigurationError(f"the pipeline schedule {schedule.name!r} has no backwards; choose one that trains: {names}")


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def forward_only(schedule: Schedule) -> Schedule:
    """The schedule that runs forwards alone on the layout of `schedule`, for evaluation and prediction."""
    return SCHEDULES[f"forward_only_{schedule.shape}"]
