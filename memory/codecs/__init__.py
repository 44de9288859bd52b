"""KV codecs: the table of all of them, and the text form that names one.

>>> make_codec("int4:group=32")
Int4(check='auto', group=32, asym=False, center=False)
"""

from __future__ import annotations

from streamvid.memory.codecs.base import Codec, KVCodec, PackedKV, packed_bytes, recode
from streamvid.memory.codecs.integer import Int2, Int4, Int8
from streamvid.memory.codecs.kivi import Kivi
from streamvid.memory.codecs.mixed import Mixed
from streamvid.memory.codecs.none import NoCodec
from streamvid.memory.codecs.nsnquant import NsnQuant
from streamvid.memory.codecs.nvfp4 import Nvfp4
from streamvid.memory.codecs.prq import Prq
from streamvid.memory.codecs.quarot import QuaRot
from streamvid.memory.codecs.qvg import Qvg
from streamvid.memory.codecs.rotatekv import RotateKV
from streamvid.memory.spec import build

CODECS: dict[str, type[KVCodec]] = {
    "none": NoCodec,
    "int8": Int8,
    "int4": Int4,
    "int2": Int2,
    "kivi": Kivi,
    "quarot": QuaRot,
    "prq": Prq,
    "nvfp4": Nvfp4,
    "rotatekv": RotateKV,
    "nsnquant": NsnQuant,
    "qvg": Qvg,
    "mixed": Mixed,
}


def make_codec(spec: str | KVCodec) -> KVCodec:
    """The codec that ``spec`` names (``"int4"``, ``"qvg:stages=2"``), or ``spec`` itself when it is a codec.

    Raises:
        ValueError: an unknown name or setting, with the nearest one.
    """
    return build(spec, CODECS, "codec")


__all__ = ["CODECS", "Codec", "KVCodec", "PackedKV", "make_codec", "packed_bytes", "recode"]
