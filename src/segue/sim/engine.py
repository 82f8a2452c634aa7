"""An engine of the product's own parts in virtual time."""

from __future__ import annotations

from collections.abc import Sequence

from segue.base.clock import VirtualClock
from segue.base.config import EngineConfig
from segue.engine import EngineCore
from segue.policies import Policy
from segue.sim.costs import StepCosts
from segue.sim.executor import SimulatedExecutor
from segue.sim.slow import DISK, NETWORK, Link, simulated

VOCAB = 1 << 20


class SimulatedEngine(EngineCore):
    """Time passes while steps run and blocks are copied, and otherwise when it is told to."""

    def __init__(
        self,
        costs: StepCosts,
        config: EngineConfig,
        *,
        policy: Policy | str | None = None,
        tiers: Sequence[str] = (),
        disk: Link = DISK,
        network: Link = NETWORK,
    ) -> None:
        self.clock = VirtualClock()
        self.executor = SimulatedExecutor(costs, self.clock, config.block_size)
        super().__init__(
            self.executor,
            config,
            vocab_size=VOCAB,
            model_fingerprint=f"simulated {costs.shape.name}",
            policy=policy,
            clock=self.clock,
            tiers=tiers,
            open_slow=simulated(self.clock, disk, network),
        )
