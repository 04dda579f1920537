"""What jobs on ranks share."""

from typing import Any

from trainer_kit import DistributedContext, MeshStrategy


def build(setup_timeout: float = 1800.0, step_timeout: float = 300.0, **degrees: Any) -> DistributedContext:
    """The context of a rank on the CPU."""
    return MeshStrategy(device="cpu", **degrees).build(setup_timeout=setup_timeout, step_timeout=step_timeout)
