"""The table of memory policies: one line each, one file each. See ``streamvid.memory.policy`` on how to write one."""

from streamvid.memory.policies.deep_forcing import DeepForcing
from streamvid.memory.policies.dummy_forcing import DummyForcing
from streamvid.memory.policies.forcing_kv import ForcingKV
from streamvid.memory.policies.full import Full
from streamvid.memory.policies.infinity_rope import InfinityRope
from streamvid.memory.policies.kv_bias import KVBias
from streamvid.memory.policies.memrope import MemRope
from streamvid.memory.policies.pyramid import Pyramid
from streamvid.memory.policies.rolling_forcing import RollingForcing
from streamvid.memory.policies.rolling_sink import RollingSink
from streamvid.memory.policies.soft_prune import SoftPrune
from streamvid.memory.policies.swift import Swift
from streamvid.memory.policies.tar_van import TarVan
from streamvid.memory.policies.tempcache import TempCache
from streamvid.memory.policies.tether import Tether
from streamvid.memory.policies.tri_attention import TriAttention
from streamvid.memory.policies.window import Window
from streamvid.memory.policy import MemoryPolicy

POLICIES: dict[str, type[MemoryPolicy]] = {
    "full": Full,
    "window": Window,
    "infinity_rope": InfinityRope,
    "rolling_sink": RollingSink,
    "rolling_forcing": RollingForcing,
    "tether": Tether,
    "memrope": MemRope,
    "deep_forcing": DeepForcing,
    "forcing_kv": ForcingKV,
    "dummy_forcing": DummyForcing,
    "pyramid": Pyramid,
    "tri_attention": TriAttention,
    "kv_bias": KVBias,
    "swift": Swift,
    "tar_van": TarVan,
    "tempcache": TempCache,
    "soft_prune": SoftPrune,
}
