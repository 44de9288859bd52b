"""One run of a model with a full cache, and from it the head profile that head-aware policies read."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from streamvid.memory import head_labels
from streamvid.memory.head_stats import Profiler
from streamvid.memory.heads import HeadProfile

if TYPE_CHECKING:
    from streamvid.pipeline import StreamPipeline


def profile_heads(
    pipe: StreamPipeline,
    prompts: Sequence[str],
    *,
    latents: int = 21,
    seed: int = 0,
    threshold: float = 0.8,
    skip: int = 1,
    dummy_share: float = 0.5,
    progress: Callable[[str], None] | None = None,
    **stream_options: Any,
) -> HeadProfile:
    """Watch every head while clips of ``latents`` latent frames are made, one a prompt.

    Args:
        pipe: the model.
        prompts: one clip each, seeds counting up from ``seed``.
        latents: latent frames a clip; a whole number of chunks is used.
        threshold, skip: of Forcing-KV's rule.
        dummy_share: part of all heads that are dummy heads.
        progress: told each prompt as it begins.
        stream_options: height, width and the like.
    """
    chunk = pipe.config.chunk_latents
    latents = max(latents // chunk, 2) * chunk
    profiler = Profiler(latents)
    for number, prompt in enumerate(prompts):
        if progress:
            progress(f"{number + 1}/{len(prompts)} {prompt}")
        frames = pipe.config.vae_scale_temporal * (latents - 1) + 1
        options = {"memory": profiler, "codec": "none", "output_type": "latent"} | stream_options
        with pipe.stream(
            prompt, num_frames=frames + chunk * pipe.config.vae_scale_temporal, seed=seed + number, **options
        ) as s:
            for _ in s.chunks():  # one chunk more than is watched, so that the last one's clean pass has run
                pass
    layers = profiler.finish()
    return HeadProfile(
        fingerprint=pipe.components.fingerprint,
        layers=len(layers),
        heads=layers[0].mass.shape[0],
        labels={
            "forcing_kv": head_labels.forcing_kv(layers, skip=skip, threshold=threshold),
            "dummy_forcing": head_labels.dummy_forcing(layers, share=dummy_share, chunk=chunk),
            "pyramid": head_labels.pyramid(layers),
        },
        numbers={
            "tempcache": head_labels.tempcache(layers),
            "tri_attention": head_labels.tri_attention(layers),
            "rotatekv": head_labels.rotatekv(layers),
        },
        made={
            "prompts": list(prompts),
            "latents": latents,
            "seed": seed,
            "threshold": threshold,
            "skip": skip,
            "dummy_share": dummy_share,
            "date": datetime.date.today().isoformat(),
        },
    )


def draw_labels(profile: HeadProfile, path: str) -> None:
    """A picture of the head types of every method: layers down, heads across. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    colours = ["#4269d0", "#efb118", "#ff725c", "#6cc5b0"]
    figure, axes = pyplot.subplots(1, len(profile.labels), squeeze=False, layout="constrained")
    figure.set_size_inches(1.2 + 0.32 * profile.heads * len(profile.labels) + 2, 1.6 + 0.28 * profile.layers)
    for axis, (method, rows) in zip(axes[0], profile.labels.items(), strict=True):
        kinds = sorted({label for row in rows for label in row})
        axis.imshow(
            [[kinds.index(label) for label in row] for row in rows],
            cmap=ListedColormap(colours[: len(kinds)]),
            vmin=-0.5,
            vmax=len(kinds) - 0.5,
            aspect="equal",
        )
        axis.set(
            title=method,
            xlabel="head",
            ylabel="layer",
            xticks=range(profile.heads),
            yticks=range(profile.layers),
        )
        counts = [sum(label == kind for row in rows for label in row) for kind in kinds]
        axis.legend(
            handles=[
                Patch(color=colour, label=f"{kind} {count}")
                for kind, count, colour in zip(kinds, counts, colours, strict=False)
            ],
            loc="upper center",
            bbox_to_anchor=(0.5, -0.22),
            frameon=False,
            fontsize=8,
        )
    figure.savefig(path, dpi=140)
    pyplot.close(figure)
