"""Where the pictures of a file being written go: an MP4, a GIF or a PNG sequence, without a final name yet.

Each sink holds a few frames at most. Knows nothing of frame forms, final names or clean-up: see ``video_io``.
"""

from __future__ import annotations

import os
import re
from fractions import Fraction
from pathlib import Path
from typing import Any, Protocol

import numpy as np


class Sink(Protocol):
    """Where pictures go while the file has no name yet."""

    def add(self, picture: np.ndarray) -> None: ...

    def close(self) -> None: ...

    def abandon(self) -> None: ...

    def publish(self, path: Path) -> None: ...


class AvSink:
    """A PyAV container under a temporary name."""

    _stream: Any

    def __init__(self, part: Path, fps: float, format_name: str, options: dict[str, str]) -> None:
        import av

        self._part = part
        self._rate = Fraction(fps).limit_denominator(1001)
        self._container: Any = av.open(str(part), "w", format=format_name, options=options)
        self._count = 0

    def close(self) -> None:
        self._mux(self._stream.encode(None))
        self._container.close()

    def abandon(self) -> None:
        try:
            self._container.close()
        except OSError:  # the disk that made us give up may refuse the trailer as well
            return

    def publish(self, path: Path) -> None:
        os.replace(self._part, path)

    def _mux(self, packets: Any) -> None:
        for packet in packets:
            self._container.mux(packet)

    def _av_frame(self, picture: np.ndarray) -> Any:
        import av

        frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
        frame.pts = self._count
        frame.time_base = 1 / self._rate
        self._count += 1
        return frame


class Mp4Sink(AvSink):
    def __init__(self, part: Path, fps: float, height: int, width: int, crf: int) -> None:
        # The index goes to the front, so that browsers start before the whole file has come.
        super().__init__(part, fps, "mp4", {"movflags": "+faststart"})
        self._pad = (height % 2, width % 2)
        stream = self._container.add_stream("libx264", rate=self._rate)
        stream.height, stream.width = height + self._pad[0], width + self._pad[1]
        stream.pix_fmt = "yuv420p"
        stream.options = {"crf": str(crf), "preset": "veryfast"}
        context = stream.codec_context
        context.color_range = 1  # limited ("tv"), what players assume; the numbers are FFmpeg's enums
        context.colorspace = context.color_primaries = context.color_trc = 1  # BT.709
        self._stream = stream

    def add(self, picture: np.ndarray) -> None:
        if any(self._pad):
            picture = np.pad(picture, ((0, self._pad[0]), (0, self._pad[1]), (0, 0)), mode="edge")
        frame = self._av_frame(picture)
        yuv = frame.reformat(
            format="yuv420p", src_color_range="JPEG", dst_color_range="MPEG", dst_colorspace="ITU709"
        )
        yuv.pts, yuv.time_base = frame.pts, frame.time_base
        self._mux(self._stream.encode(yuv))


class GifSink(AvSink):
    """A palette for every frame, so that no frame has to wait for the last one."""

    def __init__(self, part: Path, fps: float, height: int, width: int) -> None:
        super().__init__(part, fps, "gif", {"loop": "0"})
        import av

        self._stream = self._container.add_stream("gif", rate=self._rate)
        self._stream.height, self._stream.width = height, width
        self._stream.pix_fmt = "pal8"
        graph: Any = av.filter.Graph()
        source = graph.add_buffer(width=width, height=height, format="rgb24", time_base=1 / self._rate)
        split = graph.add("split")
        palette = graph.add("palettegen", "stats_mode=single")
        use = graph.add("paletteuse", "new=1:dither=sierra2_4a")
        sink = graph.add("buffersink")
        source.link_to(split)
        split.link_to(use, 0, 0)
        split.link_to(palette, 1, 0)
        palette.link_to(use, 0, 1)
        use.link_to(sink)
        graph.configure()
        self._source, self._out, self._graph = source, sink, graph

    def add(self, picture: np.ndarray) -> None:
        self._source.push(self._av_frame(picture))
        self._drain()

    def close(self) -> None:
        self._source.push(None)
        self._drain()
        super().close()

    def _drain(self) -> None:
        import av

        while True:
            try:
                frame = self._out.pull()
            except (av.error.BlockingIOError, av.error.EOFError):
                return
            self._mux(self._stream.encode(frame))


class PngSink:
    """Numbered pictures in a temporary folder, moved into place together."""

    def __init__(self, part: Path) -> None:
        part.unlink(missing_ok=True)
        part.mkdir()
        self._part = part
        self._count = 0

    def add(self, picture: np.ndarray) -> None:
        from PIL import Image

        Image.fromarray(picture).save(self._part / f"{self._count}.png")
        self._count += 1

    def close(self) -> None:
        """Every picture is complete once it is added."""

    def abandon(self) -> None:
        """The folder is removed by the writer."""

    def publish(self, path: Path) -> None:
        for index in range(self._count):
            os.replace(self._part / f"{index}.png", sequence_name(path, index))
        self._part.rmdir()


def sequence_name(path: str | os.PathLike[str], index: int) -> Path:
    """The name of picture ``index`` of a PNG sequence written to ``path``."""
    path = Path(path)
    number = re.search(r"%(0?\d*)d", path.name)
    if number:  # the first pattern only; any other % is a letter like another
        return path.with_name(
            path.name[: number.start()] + f"{index:{number[1]}d}" + path.name[number.end() :]
        )
    return path.with_name(f"{path.stem}-{index:06d}{path.suffix}")
