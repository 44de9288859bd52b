"""Training and encoding with diffusers' Wan VAE: the causal cache path, many frames a call.

Without its feature cache the Wan VAE skips all temporal resampling, so training goes through the cache
too. diffusers feeds the cache one latent at a time; here the first picture is one call and all others a
second one. The result is the same (tested) and several times faster in training, because every convolution
sees the whole clip.
"""

import torch
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import patchify, unpatchify


def make_vae(*, base: int = 24, decoder_base: int = 32, z_dim: int = 48) -> AutoencoderKLWan:
    """The VAE of the embedded model: 16x in space, 4x in time, in the residual layout of Wan 2.2."""
    return AutoencoderKLWan(
        base_dim=base,
        decoder_base_dim=decoder_base,
        z_dim=z_dim,
        dim_mult=[1, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[True, True],
        patch_size=4,
        in_channels=48,
        out_channels=48,
        is_residual=True,
        scale_factor_spatial=16,
        scale_factor_temporal=4,
        latents_mean=[0.0] * z_dim,
        latents_std=[1.0] * z_dim,
    )


def encode_parameters(vae: AutoencoderKLWan, video: torch.Tensor) -> torch.Tensor:
    """Mean and log-variance [b, 2 z, 1 + n, h, w] of a video [b, 3, 1 + 4 n, H, W] in -1..1,
    differentiable."""
    x = patchify(video, vae.config.patch_size)
    vae.clear_cache()
    parts = []
    for part in (x[:, :, :1], x[:, :, 1:]):
        if part.shape[2]:
            vae._enc_conv_idx = [0]
            parts.append(vae.encoder(part, feat_cache=vae._enc_feat_map, feat_idx=vae._enc_conv_idx))
    vae.clear_cache()
    return vae.quant_conv(torch.cat(parts, 2))


def decode_raw(vae: AutoencoderKLWan, z: torch.Tensor) -> torch.Tensor:
    """Video [b, 3, 1 + 4 n, H, W] (about -1..1, not clamped) of raw latents [b, z, 1 + n, h, w],
    differentiable."""
    z = vae.post_quant_conv(z)
    vae.clear_cache()
    parts = []
    for first, part in ((True, z[:, :, :1]), (False, z[:, :, 1:])):
        if part.shape[2]:
            vae._conv_idx = [0]
            parts.append(
                vae.decoder(part, feat_cache=vae._feat_map, feat_idx=vae._conv_idx, first_chunk=first)
            )
    vae.clear_cache()
    return unpatchify(torch.cat(parts, 2), vae.config.patch_size)


def latent_stats(vae: AutoencoderKLWan, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and standard deviation of every channel from the VAE's config, shaped to broadcast over [b, z,
    f, h, w]."""
    shape = (1, vae.config.z_dim, 1, 1, 1)
    mean = torch.tensor(vae.config.latents_mean, dtype=like.dtype, device=like.device).view(shape)
    std = torch.tensor(vae.config.latents_std, dtype=like.dtype, device=like.device).view(shape)
    return mean, std


def encode(vae: AutoencoderKLWan, video: torch.Tensor) -> torch.Tensor:
    """Normalised latents (posterior mean) [b, z, 1 + n, h, w] of a video [b, 3, 1 + 4 n, H, W] in -1..1."""
    mean, std = latent_stats(vae, video)
    return (encode_parameters(vae, video)[:, : vae.config.z_dim] - mean) / std


def decode(vae: AutoencoderKLWan, latents: torch.Tensor) -> torch.Tensor:
    """Video in -1..1 of normalised latents; shapes as in `encode`."""
    mean, std = latent_stats(vae, latents)
    return decode_raw(vae, latents * std + mean).clamp(-1, 1)
