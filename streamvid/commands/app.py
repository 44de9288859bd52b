"""``streamvid app``: the interactive demo in a browser."""

from __future__ import annotations

import typer


def register(app: typer.Typer) -> None:
    @app.command("app")
    def demo(
        model: str = typer.Argument("tiny", metavar="[MODEL]", help="Name, file, folder or owner/name."),
        host: str = typer.Option("127.0.0.1", help="Address; one that others can reach needs --password."),
        port: int = typer.Option(7860, min=0, max=65535, help="0 takes a free one."),
        max_streams: int = typer.Option(4, min=1, help="Streams of all tabs together."),
        max_bytes: str | None = typer.Option(
            None, help="Of all tabs together, for example 500MB or 4GB; default: no limit."
        ),
        password: str | None = typer.Option(
            None, envvar="STREAMVID_PASSWORD", help="Asked for before anything is shown."
        ),
        browser: bool = typer.Option(True, "--browser/--no-browser", help="Open the page."),
        device: str | None = typer.Option(None, help="cpu, cuda, cuda:1, mps."),
        dtype: str | None = typer.Option(None, help="float32, bfloat16 or float16."),
    ) -> None:
        """Play with a live stream in the browser: prompts, memory, snapshots, comparisons, plots."""
        from streamvid.app.auth import check_host

        check_host(host, password)
        limit = None if max_bytes is None else parse_bytes(max_bytes)
        from streamvid.app.launch import launch

        launch(
            model,
            host=host,
            port=port,
            max_streams=max_streams,
            max_bytes=limit,
            password=password,
            open_browser=browser,
            device=device,
            dtype=dtype,
            say=typer.echo,
        )


def parse_bytes(text: str) -> int:
    """``"500MB"``, ``"4GB"``, ``"1000000"`` as bytes, in decimal units. Raises StreamvidError on anything else."""
    import re

    from streamvid.errors import StreamvidError

    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(k|M|G|T)?B?\s*", text, re.IGNORECASE)
    if found is None or float(found[1]) <= 0:
        raise StreamvidError(f"--max-bytes must be a size such as 500MB or 4GB, got {text!r}")
    scale = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}[(found[2] or "").lower()]
    return int(float(found[1]) * scale)
