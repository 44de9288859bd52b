"""The table of memory policies: one line each, one file each. See ``streamvid.memory.policy`` on how to write one."""

from streamvid.memory.policies.full import Full
from streamvid.memory.policies.infinity_rope import InfinityRope
from streamvid.memory.policies.kv_bias import KVBias
from streamvid.memory.policies.memrope import MemRope
from streamvid.memory.policies.rolling_sink import RollingSink
from streamvid.memory.policies.soft_prune import SoftPrune
from streamvid.memory.policies.swift import Swift
from streamvid.memory.policies.tar_van import TarVan
from streamvid.memory.policies.tempcache import TempCache
from streamvid.memory.policies.tether import Tether
from streamvid.memory.policies.window import Window
from streamvid.memory.policy import MemoryPolicy

POLICIES: dict[str, type[MemoryPolicy]] = {
    "full": Full,
    "window": Window,
    "infinity_rope": InfinityRope,
    "rolling_sink": RollingSink,
    "tether": Tether,
    "memrope": MemRope,
    "kv_bias": KVBias,
    "swift": Swift,
    "tar_van": TarVan,
    "tempcache": TempCache,
    "soft_prune": SoftPrune,
}
