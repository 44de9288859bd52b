"""The table of memory policies: one line each, one file each. See ``streamvid.memory.policy`` on how to write one."""

from streamvid.memory.policies.full import Full
from streamvid.memory.policies.window import Window
from streamvid.memory.policy import MemoryPolicy

POLICIES: dict[str, type[MemoryPolicy]] = {
    "full": Full,
    "window": Window,
}
