"""The device meshes and process groups of a world, made when they are first asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer_kit.exceptions import ConfigurationError
from trainer_kit.mesh.domains import Domain
from trainer_kit.mesh.groups import GroupCache

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


class Meshes:
    """One device mesh per domain. The first use of each mesh and group is a collective of the world."""

    def __init__(self, domains: dict[str, Domain], groups: GroupCache, device_type: str) -> None:
        self.domains, self.groups, self._device_type = domains, groups, device_type
        self._meshes: dict[str, DeviceMesh] = {}
        self._found: dict[tuple[str, ...], ProcessGroup | None] = {}

    def mesh_for(self, name: str) -> DeviceMesh:
        """The device mesh of a domain, with a group per dimension."""
        if name not in self._meshes:
            import torch
            from torch.distributed.device_mesh import DeviceMesh

            domain = self._domain(name)
            groups = [self.groups.along(domain, dim) for dim in domain.dims]
            ranks = torch.arange(domain.world_size, device="cpu").view(domain.shape)
            self._meshes[name] = DeviceMesh.from_group(groups, self._device_type, mesh=ranks, mesh_dim_names=domain.dims)
        return self._meshes[name]

    def group(self, name: str, *dims: str) -> ProcessGroup | None:
        """This rank's group over the product of some dimensions of a domain; None if it is alone in it."""
        if (name, *dims) not in self._found:
            domain = self._domain(name)
            self._found[name, *dims] = self.groups.along(domain, *dims) if domain.size(*dims) > 1 else None
        return self._found[name, *dims]

    def _domain(self, name: str) -> Domain:
        if name not in self.domains:
            raise ConfigurationError(f"there is no domain {name!r}; the domains are {', '.join(self.domains)}")
        return self.domains[name]
