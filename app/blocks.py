"""The Gradio app: the live page as one component, clips with progress, and what a checkpoint is.

Loaded at its first visit, because importing Gradio takes longer than everything before the first frame of the plain
page. Knows nothing of sockets or passwords: the server lets a request through or not.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # read when Gradio is imported; nothing is sent anywhere
import gradio as gr

from streamvid.app.clips import MAX_FRAMES, make_clip
from streamvid.app.hub import Hub
from streamvid.app.settings import TabSettings, choices
from streamvid.errors import StreamvidError

HERE = Path(__file__).parent
FONTS = ["system-ui", "Segoe UI", "Roboto", "DejaVu Sans", "sans-serif"]  # plain names: none is fetched
# The stage opens its stream when it is first looked at, not behind another tab.
START = """
new IntersectionObserver((seen, observer) => {
  if (!seen.some((entry) => entry.isIntersecting)) return;
  observer.disconnect();
  import("/asset/main.js");
}).observe(element);
"""
CSS = """
.gradio-container { background: #0c0f14 !important; }
.gradio-container > .main { max-width: 1424px !important; padding: 8px 12px !important; }
.html-container:has(#sv) { padding: 0 !important; }
#sv nav { display: none; }
#sv header, #sv main { padding-inline: 0; }
"""


def build_blocks(hub: Hub) -> gr.Blocks:
    """The Gradio app over a hub. Loads the hub's model, if it is not loaded yet."""
    with gr.Blocks(analytics_enabled=False, title="streamvid", delete_cache=(600, 3600)) as blocks:
        with gr.Tabs() as tabs:
            with gr.Tab("Live", id="live"):
                gr.HTML(live_markup(), js_on_load=START, apply_default_css=False)
            with gr.Tab("Clip", id="clip"):
                _clip_tab(hub)
            with gr.Tab("Checkpoint", id="checkpoint"):
                _checkpoint_tab(hub)
        blocks.load(_asked_tab, None, tabs, api_visibility="private")
    blocks.queue(max_size=16, default_concurrency_limit=hub.max_streams)
    return blocks


def mount(app: Any, blocks: gr.Blocks, path: str, max_upload: int) -> Any:
    """Mount the Gradio app under ``path`` of a FastAPI application, without anything that leaves this machine."""
    return gr.mount_gradio_app(
        app,
        blocks,
        path,
        footer_links=["api"],
        show_error=False,  # what users do wrong is told all the same; what we do wrong stays in the log
        run_history=False,
        ssr_mode=False,
        enable_monitoring=False,
        mcp_server=False,
        max_file_size=max_upload,
        theme=gr.themes.Base(primary_hue="sky", neutral_hue="slate", font=FONTS, font_mono=["monospace"]),
        css=CSS,
        js="() => document.body.classList.add('dark')",
    )


def live_markup() -> str:
    """The body of the plain page with its style sheet, as the markup of one component."""
    body = (HERE / "page.html").read_text().split("<body>")[1].split("<script")[0]
    return f'<link rel="stylesheet" href="/asset/page.css">{body}'


def _asked_tab(request: gr.Request) -> Any:
    wanted = request.query_params.get("tab")
    return gr.Tabs(selected=wanted if wanted in ("clip", "checkpoint") else "live")


def _clip_tab(hub: Hub) -> None:
    offered = choices(hub.pipe(hub.default_model))

    def clip(
        prompt: str, frames: float, seed: float, memory: str, codec: str, step_cache: str,
        progress: gr.Progress = gr.Progress(),
    ) -> Iterator[tuple[Any, str]]:  # fmt: skip
        """A video of a prompt; the same numbers give the same video."""
        try:
            settings = TabSettings(
                prompt=prompt, seed=int(seed), memory=memory, codec=codec, step_cache=step_cache
            )
            with TemporaryDirectory(prefix="streamvid-clip-") as folder:
                path = Path(folder) / "streamvid.mp4"
                for done in make_clip(hub, settings, int(frames), path):
                    progress((done, int(frames)), unit="frames")
                    yield gr.skip(), f"{done} of {int(frames)} frames"
                yield str(path), f"{int(frames)} frames, seed {int(seed)}"
        except ValueError as error:
            raise gr.Error(" ".join(str(error).split()), print_exception=False) from None

    with gr.Row():
        with gr.Column():
            prompt = gr.Textbox(
                "a big red ball sliding from side to side on a navy background", label="Prompt", lines=2
            )
            with gr.Row():
                frames = gr.Slider(1, MAX_FRAMES, 81, step=1, label="Frames")
                seed = gr.Number(0, label="Seed", precision=0, minimum=0)
            memory = _plugin("Memory", offered["memory"], offered["default_memory"])
            with gr.Row():
                codec = _plugin("KV codec", offered["codec"], offered["default_codec"])
                cache = _plugin("Step cache", offered["step_cache"], "none")
            button = gr.Button("Make the clip", variant="primary")
        with gr.Column():
            video = gr.Video(label="Clip", autoplay=True, loop=True, interactive=False)
            note = gr.Textbox(label="Progress", interactive=False, max_lines=1)
    button.click(clip, [prompt, frames, seed, memory, codec, cache], [video, note], api_name="clip")


def _plugin(label: str, offered: dict[str, Any], default: str) -> gr.Dropdown:
    """A plug-in by name, or in its text form ``name:key=value``."""
    names = list(dict.fromkeys([default, *(name for name, each in offered.items() if not each.get("unfit"))]))
    return gr.Dropdown(names, value=default, label=label, allow_custom_value=True, min_width=140)


def _checkpoint_tab(hub: Hub) -> None:
    def info(model: str) -> tuple[str, dict[str, Any]]:
        """What a checkpoint is: kind, geometry, size, memory by window, and what it lacks to run."""
        from streamvid.inspect_checkpoint import inspect_checkpoint

        try:
            if model != hub.default_model and not hub.choose_models:
                raise StreamvidError("this server shows one model only")
            found = inspect_checkpoint(model).to_dict()
        except ValueError as error:
            raise gr.Error(" ".join(str(error).split()), print_exception=False) from None
        # Visitors need not know where things lie here; and a "path" is a file to fetch for Gradio's client.
        found, *parts = (
            {"file": each["path"] if hub.choose_models else Path(each["path"]).name}
            | {name: value for name, value in each.items() if name != "path"}
            for each in (found, *found["parts"])
        )
        found["parts"] = parts
        lines = [f"**{Path(found['file']).name}**: {found['layout']}"]
        for part in found["parts"]:
            lines.append(
                f"- {part['part']}: {part['parameters']:,} parameters, {part['num_bytes'] / 1e6:.1f} MB"
            )
        lines += [f"- missing: it {reason}" for reason in found["missing"].values()]
        return "\n".join(lines), json.loads(json.dumps(found))  # with texts as keys

    model = gr.Textbox(
        hub.default_model, label="Name, folder, file or owner/name", interactive=hub.choose_models
    )
    button = gr.Button("Info", variant="primary")
    text = gr.Markdown()
    everything = gr.JSON(label="Everything", max_height=480)
    button.click(info, model, [text, everything], api_name="checkpoint")
