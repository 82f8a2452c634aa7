"""How the plugin is set up: `--additional-config '{"segue": {"policy": "adaptive"}}'`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from segue.base.errors import InvalidRequest
from segue.policies.registry import DEFAULT


@dataclass(frozen=True, slots=True)
class Options:
    policy: str = DEFAULT
    max_states: int = 10_000
    max_state_bytes: int = 1 << 30

    @classmethod
    def of(cls, config: Any) -> Options:
        """Those of a VllmConfig; one that is not known is refused."""
        given = (config.additional_config or {}).get("segue", {}) if isinstance(config.additional_config, dict) else {}
        known = {field.name for field in fields(cls)}
        for name in given:
            if name not in known:
                raise InvalidRequest(
                    "additional_config", f"segue has no option {name!r:.60}: there are {', '.join(sorted(known))}"
                )
        return cls(**given)
