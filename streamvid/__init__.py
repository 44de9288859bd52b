"""streamvid: an endless, real-time stream of frames from an autoregressive video diffusion model.

Importing this package loads no torch: every public name is resolved on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what a type checker and an editor see of the lazy names
    from streamvid.errors import StreamvidError
    from streamvid.pipeline import StreamPipeline, load
    from streamvid.stream import VideoStream

__version__ = "0.1.0"

_LAZY = {
    "load": "streamvid.pipeline",
    "StreamPipeline": "streamvid.pipeline",
    "VideoStream": "streamvid.stream",
    "StreamvidError": "streamvid.errors",
}

__all__ = ["StreamPipeline", "StreamvidError", "VideoStream", "__version__", "load"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'streamvid' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
