"""LaunchPlace: where an outside launcher (torchrun, Slurm, Kubernetes) has put this process among all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.errors import ConfigError

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class LaunchPlace:
    """What torchrun's variables say.

    Attributes:
        rank, size: among all processes.
        local_rank, num_local_ranks: among those of this host.
        address, port: where all meet.
        has_agent: the launcher itself holds the meeting place; otherwise rank 0 does.
    """

    rank: int
    size: int
    local_rank: int
    num_local_ranks: int
    address: str
    port: int
    has_agent: bool

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> LaunchPlace:
        """From a process's environment. Without LOCAL_RANK each process is taken to have a host of its own.

        Raises: ConfigError naming the variable that is missing or no number.
        """
        missing = [name for name in _NEEDED if not environment.get(name)]
        if missing:
            raise ConfigError(
                f"launcher='external' needs the variables {', '.join(_NEEDED)}, as torchrun sets them; "
                f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set (launcher='spawn' needs none)"
            )
        place = cls(
            _number(environment, "RANK"),
            _number(environment, "WORLD_SIZE"),
            _number(environment, "LOCAL_RANK", 0),
            _number(environment, "LOCAL_WORLD_SIZE", 1),
            environment["MASTER_ADDR"],
            _number(environment, "MASTER_PORT"),
            environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )
        if not 0 <= place.rank < place.size:
            raise ConfigError(f"RANK is {place.rank}, but WORLD_SIZE is {place.size}; ranks count from 0")
        return place

    def check_size(self, num_ranks: int) -> None:
        """Raises ConfigError when the launcher started another number of processes than the sizes ask for."""
        if self.size != num_ranks:
            raise ConfigError(
                f"WORLD_SIZE is {self.size}, but tensor_parallel_size x pipeline_parallel_size is {num_ranks}; start "
                f"{num_ranks} processes"
            )


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise ConfigError(f"{name} must be a whole number; got {text!r}") from None
