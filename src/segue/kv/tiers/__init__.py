"""Where KV can live besides the device: host memory, a folder, another server."""

from segue.kv.tiers.compressed import Codec, CompressedTier
from segue.kv.tiers.courier import Counts, Courier, SlowTier
from segue.kv.tiers.disk import DiskTier
from segue.kv.tiers.host import HostTier
from segue.kv.tiers.names import BlockNames, tenant_tag
from segue.kv.tiers.remote import RemoteTier

__all__ = [
    "BlockNames",
    "Codec",
    "CompressedTier",
    "Counts",
    "Courier",
    "DiskTier",
    "HostTier",
    "RemoteTier",
    "SlowTier",
    "tenant_tag",
]
