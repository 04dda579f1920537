"""`PackCheck`: before anything is sent, all ranks know that their packs and their transfers fit each other.

One small sum over the hosts per pack, which goes on beside the first forward. Sums show every mismatch: a sender adds the checksum of what
it describes, the receiver takes its own away. What differs is exchanged only then, and every rank raises the same error.
Before editing: each call is a collective of the world.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from trainer_kit.exceptions import ConfigurationError, ModelError
from trainer_kit.pipeline.transfer_spec import TransferSpec

if TYPE_CHECKING:
    from trainer_kit.mesh.context import DistributedContext
    from trainer_kit.pipeline.transport import Transport

MODULUS = 1 << 31  # sums over a million ranks are exact in fp64

Specs = Mapping[int, TransferSpec]  # of one microbatch, by stage


class PackCheck:
    """For one pipeline. num_stages: of the whole model."""

    def __init__(self, context: DistributedContext, transport: Transport, num_stages: int) -> None:
        self._context, self._transport, self._num_stages = context, transport, num_stages
        self._pipeline = transport.ranks[0]  # tells this pipeline from the others of the mesh
        self._wait: Callable[[], list[float]] | None = None
        self._number = 0
        self._incoming: Sequence[Specs] = ()
        self._outgoing: Sequence[Specs] = ()

    def start(self, num_microbatches: int, incoming: Sequence[Specs], outgoing: Sequence[Specs]) -> None:
        """Begin to compare; `incoming` and `outgoing` are what this rank's stages describe, by microbatch."""
        self._number, self._incoming, self._outgoing = num_microbatches, incoming, outgoing
        differences = [0.0] * (self._num_stages - 1)
        for index in range(num_microbatches):
            for stage, spec in outgoing[index].items():
                differences[stage] += self._mixed(spec, index)
            for stage, spec in incoming[index].items():
                differences[stage - 1] -= self._mixed(spec, index)
        failed = float(self._transport.record.is_open)
        self._wait = self._context.host.start_sum([num_microbatches, num_microbatches**2, failed, *differences])

    def _mixed(self, spec: TransferSpec, index: int) -> int:
        """One number for what fits together, such that differences in several places do not hide each other."""
        return hash((spec.checksum, index, self._pipeline)) % MODULUS  # hashes of numbers are the same in every process

    def finish(self) -> None:
        """Wait for the outcome, before the first transfer. Raises ConfigurationError or ModelError on every rank alike."""
        if self._wait is None:
            return
        wait, self._wait = self._wait, None
        total, squares, num_failed, *differences = wait()
        if total**2 != squares * self._context.world_size:
            raise ConfigurationError(self._of_numbers())
        if any(differences):
            raise ModelError(self._of_specs([stage for stage, difference in enumerate(differences) if difference]))
        if num_failed:
            records = self._context.host.exchange(self._transport.record)
            self._transport.settle({place: records[rank] for place, rank in enumerate(self._transport.ranks)})
        self._transport.begin()

    def _of_numbers(self) -> str:
        numbers = self._context.host.exchange(self._number)
        listed = ", ".join(f"rank {rank}: {number}" for rank, number in enumerate(numbers[:16]))
        return (
            f"the ranks got packs of different length for one step ({listed}); the ranks of a pipeline must see the same microbatches, and "
            "other data ranks as many: set Pack.num_on_all to the largest number"
        )

    def _of_specs(self, stages: Sequence[int]) -> str:
        """stages: those whose outputs do not fit the next one."""
        mine = [
            (stage, index, receives, str(specs[stage + receives]))
            for receives, of_pack in ((False, self._outgoing), (True, self._incoming))
            for index, specs in enumerate(of_pack)
            for stage in stages
            if stage + receives in specs
        ]
        sides: dict[tuple[int, int, int], dict[bool, tuple[int, str]]] = {}
        for rank, (pipeline, theirs) in enumerate(self._context.host.exchange((self._pipeline, mine))):
            for stage, index, receives, text in theirs:
                sides.setdefault((stage, index, pipeline), {})[receives] = rank, text
        different = [(at, found) for at, found in sorted(sides.items()) if found[False][1] != found[True][1]]
        (stage, index, _), found = different[0]
        (rank, sent), (to, expected) = found[False], found[True]
        return (
            f"stage {stage} on rank {rank} sends for microbatch {index}: {sent}; but stage {stage + 1} on rank {to} expects: {expected}. "
            "stage_transfer_spec(inputs, 'outgoing') of a stage and stage_transfer_spec(inputs, 'incoming') of the next one must describe "
            "the same tensors"
        )
