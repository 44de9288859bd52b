"""What a stream promises: any length, the same frames whatever surrounds them, flat memory, isolation, control."""

from __future__ import annotations

import dataclasses
import gc
import statistics
import threading
import time
from itertools import islice

import numpy as np
import pytest
import torch

import streamvid
from streamvid.errors import StreamvidError
from streamvid.video_io import to_uint8

A, B = "a red ball", "a blue star on a white background"


@pytest.fixture(scope="module")
def pipe(tiny_random_folder):
    """The random model at 32x32 pixels: 4 tokens a frame, decoded quickly."""
    pipe = streamvid.load(tiny_random_folder)
    pipe.config = dataclasses.replace(pipe.config, height=32, width=32)
    return pipe


def latents(pipe, chunks: int, prompt: str = A, **options):
    """The clean latents of the first chunks, one tensor a chunk: what a stream is, without the cost of decoding."""
    with pipe.stream(prompt, output_type="latent", **options) as stream:
        return [chunk.frames.clone() for chunk in islice(stream.chunks(), chunks)]


def equal(left, right) -> bool:
    return len(left) == len(right) and all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))


# ---- lengths, forms, prefixes (cases 1, 7) ------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 4, 5, 9, 10, 12, 13, 20, 81])
def test_any_frame_count(pipe, count: int) -> None:
    frames = list(pipe.stream(A, num_frames=count))
    assert len(frames) == count
    assert frames[0].shape == (32, 32, 3) and frames[0].dtype == np.uint8
    clip = pipe(A, num_frames=count)
    assert clip.frames.shape == (1, count, 32, 32, 3)
    assert equal(frames, [to_uint8(frame) for frame in clip.frames[0]])


@pytest.mark.parametrize("count", [0, -3, 2.5, "9", True])
def test_a_frame_count_that_is_none_is_refused_in_one_line(pipe, count) -> None:
    for call in (lambda: pipe.stream(A, num_frames=count), lambda: pipe(A, num_frames=count)):
        with pytest.raises(ValueError, match="num_frames must be a whole number of at least 1") as caught:
            call()
        assert "\n" not in str(caught.value)


def test_a_longer_clip_and_a_later_switch_do_not_change_the_beginning(pipe) -> None:
    short = list(pipe.stream(A, num_frames=12))
    long = list(pipe.stream(A, num_frames=30))
    assert equal(short, long[:12])
    with pipe.stream(A, num_frames=30) as stream:
        receipt = stream.set_prompt(B, "recache", at_frame=20)
        switched = list(stream)
    assert receipt.status == "applied" and receipt.frame == 21
    assert equal(long[: receipt.frame], switched[: receipt.frame])
    assert not equal(long[receipt.frame :], switched[receipt.frame :])


def test_output_types_agree(pipe) -> None:
    frames = list(pipe.stream(A, num_frames=10))
    for kind in ("np", "pt", "pil"):
        assert equal(frames, [to_uint8(frame) for frame in pipe.stream(A, num_frames=10, output_type=kind)])
    assert pipe(A, num_frames=10, output_type="latent").frames.shape == (1, 4, 4, 4, 4)
    assert isinstance(pipe(A, num_frames=2, output_type="pil").frames[0], list)
    with pytest.raises(StreamvidError, match="did you mean 'latent'"):
        pipe.stream(A, output_type="latents")


def test_chunks_carry_their_metadata_and_the_unread_rest(pipe) -> None:
    stream = pipe.stream(A, num_frames=25)
    first = next(stream)
    blocks = list(stream.chunks())
    assert [(block.index, block.start_frame, len(block)) for block in blocks] == [
        (0, 1, 8),
        (1, 9, 12),
        (2, 21, 4),
    ]
    assert equal(
        [first, *(frame for block in blocks for frame in block.frames)], list(pipe.stream(A, num_frames=25))
    )
    assert {"context", "denoise", "decode", "total"} <= set(blocks[1].seconds)
    assert blocks[1].steps == {"computed": 2, "skipped": 0, "context": 1}


# ---- seeds, batches, prompts (cases 6) ----------------------------------------------------------------------------


def test_clips_of_a_batch_equal_their_solo_runs(pipe) -> None:
    batch = pipe([A, B, "c"], num_frames=9, seed=7).frames
    assert np.array_equal(batch[1], pipe(B, num_frames=9, seed=7).frames[0])
    assert np.array_equal(batch[1], pipe(["c", B, A], num_frames=9, seed=7).frames[1])
    assert not np.array_equal(batch[0], batch[1]), "two prompts must differ"


def test_seeds(pipe) -> None:
    one, other = (latents(pipe, 1, seed=seed)[0] for seed in (0, 2**64 - 1))
    assert not torch.equal(one, other)
    assert torch.equal(one, latents(pipe, 1, seed=0)[0])
    drawn = pipe.stream(A, seed=-1)
    assert 0 <= drawn.seed < 2**64 and drawn.settings["seed"] == drawn.seed
    assert drawn.seed != pipe.stream(A, seed=-1).seed
    for seed in (-2, 2**64, 1.5, None):
        with pytest.raises(StreamvidError, match="seed must be a whole number"):
            pipe.stream(A, seed=seed)


def test_a_generator_draws_the_seed(pipe) -> None:
    def run(generator):
        return pipe(A, num_frames=5, output_type="latent", generator=generator)

    generator = torch.Generator().manual_seed(3)
    first, second = run(generator), run(generator)
    assert first.seeds != second.seeds
    assert torch.equal(first.frames, run(torch.Generator().manual_seed(3)).frames)


def test_the_step_callback_sees_every_step_and_cannot_replace_latents(pipe) -> None:
    seen = []
    pipe(A, num_frames=12, callback_on_step_end=lambda p, i, t, kw: seen.append((i, t, kw["latents"].shape)))
    assert [(index, shape) for index, _, shape in seen] == [(i, (1, 3, 4, 4, 4)) for i in range(4)]
    assert seen[0][1] > seen[1][1]
    with pytest.raises(StreamvidError, match="not replace"):
        pipe(A, num_frames=2, callback_on_step_end=lambda p, i, t, kw: {"latents": kw["latents"] + 1})


# ---- settings -----------------------------------------------------------------------------------------------------


def test_sizes_that_do_not_fit_name_the_nearest(pipe) -> None:
    with pytest.raises(
        StreamvidError, match="multiple of 16, got 100; the nearest allowed sizes are 96 and 112"
    ):
        pipe.stream(A, height=100)
    assert next(pipe.stream(A, height=48, width=80)).shape == (48, 80, 3)


def test_unknown_settings_are_errors_that_name_the_nearest(pipe) -> None:
    with pytest.raises(StreamvidError, match="did you mean 'num_frames'"):
        pipe.stream(A, num_frame=3)
    with pytest.raises(ValueError, match="did you mean 'window'"):
        pipe.stream(A, memory="windw")
    with pytest.raises(ValueError, match="no setting 'sise'"):
        pipe.stream(A, memory="window:sise=3")
    with pytest.raises(ValueError, match="unknown step cache"):
        pipe.stream(A, step_cache="nothing")
    with pytest.raises(StreamvidError, match="negative_prompt has no effect"):
        pipe.stream(A, negative_prompt="blurry")
    with pytest.raises(StreamvidError, match="prompt must be a text"):
        pipe.stream(None)
    assert len(pipe.sessions) == 0, "a refused stream is not open"


def test_guidance_and_steps_change_what_is_run(pipe) -> None:
    plain = latents(pipe, 2)
    assert all(torch.equal(a, b) for a, b in zip(plain, latents(pipe, 2, guidance_scale=1.0), strict=True))
    guided = latents(pipe, 2, guidance_scale=3.0, negative_prompt="green")
    assert not torch.equal(plain[1], guided[1])
    assert not torch.equal(guided[1], latents(pipe, 2, guidance_scale=3.0)[1]), "the negative prompt is read"
    with pipe.stream(A, num_inference_steps=4) as stream:
        assert len(stream.settings["timesteps"]) == 4
    with pipe.stream(A) as stream:
        assert stream.settings["memory"]["size"] == 21, "endless streams are bounded by default"


def test_sparse_attention_that_reads_everything_is_exact(pipe) -> None:
    plain = latents(pipe, 3)
    assert all(
        torch.allclose(a, b, atol=1e-5)
        for a, b in zip(plain, latents(pipe, 3, sparse="topk:density=1"), strict=True)
    )
    with pytest.raises(ValueError, match="did you mean 'topk'"):
        pipe.stream(A, sparse="topl")


def test_some_prompt_tokens_can_be_left_out(pipe) -> None:
    plain = latents(pipe, 2)
    assert all(
        torch.equal(a, b) for a, b in zip(plain, latents(pipe, 2, cross="annca:density=1"), strict=True)
    )
    assert not torch.equal(plain[0], latents(pipe, 2, cross="annca:density=0.1")[0])
    with pytest.raises(ValueError, match="did you mean 'annca'"):
        pipe.stream(A, cross="anca")
    with pipe.stream(A, cross="annca:bits=8") as stream:
        assert stream.settings["cross"] == {"name": "AnnCA", "density": 0.25, "bits": 8, "seed": 0}


def test_token_subsets_work_with_a_codec(pipe) -> None:
    with pipe.stream(
        A, output_type="latent", codec="int8", step_cache="tokens:ratio=0.5", num_inference_steps=4
    ) as stream:
        for chunk in islice(stream.chunks(), 3):
            assert torch.isfinite(chunk.frames).all()
        assert stream.stats()["step_cache"]["compute_fraction"] < 1


@pytest.mark.parametrize("options", [{}, {"guidance_scale": 3.0}])
def test_a_fused_context_pass_changes_no_number_and_saves_a_pass(pipe, options) -> None:
    plain = latents(pipe, 4, **options)
    with pipe.stream(A, output_type="latent", fuse_context=True, **options) as stream:
        seen = []
        stream.on_step = lambda event: seen.append(event["decision"].mode)
        fused = [chunk.frames.clone() for chunk in islice(stream.chunks(), 4)]
    assert seen == ["full", "full"] + 3 * ["merge_clean", "full"]
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(plain, fused, strict=True))


# ---- prompt changes (cases 8, 9) ----------------------------------------------------------------------------------


def cache_of(stream):
    return stream._state.sides["cond"].cache


def rows(stream):
    """Un-rotated keys and values of every committed frame, by layer and frame."""
    found = {}
    for bank in cache_of(stream).all_banks():
        for entry in bank.entries:
            k, v = bank.read(entry)
            found[bank.layer, entry.frames] = (k.clone(), v.clone())
    return found


def run_switch(pipe, transition: str, chunks: int = 4, memory: str = "window:size=9,sink=3", after: int = 1):
    """Chunks 0..3 under A, then a switch: (latents, stream, keys and values just before the switch)."""
    stream = pipe.stream(A, output_type="latent", memory=memory)
    blocks = stream.chunks()
    made = [next(blocks).frames.clone() for _ in range(chunks)]
    stream._engine.finish(stream._state)
    before = rows(stream)
    receipt = stream.set_prompt(B, transition) if transition != "cut" else stream.cut(B)
    assert receipt.chunk == chunks
    made += [next(blocks).frames.clone() for _ in range(after)]
    assert receipt.status == "applied"
    return made, stream, before


@pytest.mark.parametrize(
    "how", ["cross", "recache", "causal", "micro", "flush", "flush:2", "swift", "blend:2", "cut"]
)
def test_a_switch_never_touches_earlier_chunks_and_changes_later_ones(pipe, how: str) -> None:
    plain = latents(pipe, 6, memory="window:size=9,sink=3")
    made, stream, _ = run_switch(pipe, how, after=2)
    assert all(torch.equal(a, b) for a, b in zip(plain[:4], made[:4], strict=True))
    assert not torch.equal(plain[5], made[5])
    assert stream.prompt == B
    assert torch.isfinite(made[5]).all()


def test_cross_leaves_the_past_untouched(pipe) -> None:
    _, stream, before = run_switch(pipe, "cross")
    held = rows(stream)
    assert held and all(torch.equal(held[key][0], before[key][0]) for key in held)
    assert torch.equal(stream._state.sides["cond"].embeds, pipe.text_encoder.encode([B]))


@pytest.mark.parametrize("how", ["recache", "causal"])
def test_reencoding_equals_a_pass_from_scratch_under_the_new_prompt(pipe, how: str) -> None:
    made, stream, before = run_switch(pipe, how, memory="window:size=21")
    with torch.no_grad():
        engine = stream._engine
        scratch = pipe.stream(B, output_type="latent", memory="window:size=21")
        side = scratch._state.sides["cond"]
        past = torch.cat(made[:4])[None]
        for part in [past] if how == "recache" else past.split(3, dim=1):
            engine.encode_past(side, part)
    right, got = rows(scratch), rows(stream)
    assert set(right) == set(got)
    for key in right:
        assert torch.allclose(got[key][0], right[key][0], atol=1e-5) and torch.allclose(
            got[key][1], right[key][1], atol=1e-5
        )
    changed = [key for key in right if key[0] == 1]  # layer 0 reads no text yet
    assert all(not torch.allclose(got[key][1], before[key][1], atol=1e-4) for key in changed)


def test_recache_under_the_same_prompt_changes_nothing_when_causal(pipe) -> None:
    stream = pipe.stream(A, output_type="latent", memory="window:size=21")
    blocks = stream.chunks()
    for _ in range(4):
        next(blocks)
    stream._engine.finish(stream._state)
    before = rows(stream)
    stream.set_prompt(A, "causal")
    next(blocks)
    for key, (k, v) in before.items():
        assert torch.allclose(rows(stream)[key][0], k, atol=1e-5) and torch.allclose(
            rows(stream)[key][1], v, atol=1e-5
        )


def test_recache_past_the_window_keeps_the_sink(pipe) -> None:
    _, stream, before = run_switch(pipe, "recache", chunks=6)
    held = rows(stream)
    assert {key[1] for key in held} == {(0,), (1,), (2,), (15,), (16,), (17,)}
    for frame in range(3):
        assert torch.equal(held[1, (frame,)][0], before[1, (frame,)][0]), "the sink stays as it was made"
    assert not torch.allclose(held[1, (17,)][1], before[1, (17,)][1], atol=1e-4)


def test_micro_encodes_only_the_newest_three(pipe) -> None:
    _, stream, before = run_switch(pipe, "micro", memory="window:size=21")
    held = rows(stream)
    for frame in range(9):
        assert torch.equal(held[1, (frame,)][0], before[1, (frame,)][0])
    for frame in range(9, 12):
        assert not torch.equal(held[1, (frame,)][1], before[1, (frame,)][1])


def test_flush_starts_afresh_at_its_own_position(pipe) -> None:
    made, stream, _ = run_switch(pipe, "flush", memory="window:size=21,positions=slot")
    assert not rows(stream), "nothing of the past is held"
    alone = pipe.stream(B, output_type="latent", memory="window:size=21,positions=slot")
    alone._noise = _Shifted(stream._noise, 4)
    assert torch.equal(made[4], next(alone.chunks()).frames), "as a first chunk with the noise of chunk 4"
    _, stream, _ = run_switch(pipe, "flush:2", chunks=6)
    assert {key[1] for key in rows(stream)} == {(0,), (1,), (2,), (16,), (17,)}


class _Shifted:
    def __init__(self, noise, by: int) -> None:
        self.inner, self.by = noise, by

    def noise(self, chunk, step, *args):
        return self.inner.noise(chunk + self.by, step, *args)


def test_blend_arrives_at_the_new_prompt(pipe) -> None:
    target = pipe.text_encoder.encode([B])
    start = pipe.text_encoder.encode([A])
    _, stream, _ = run_switch(pipe, "blend:2")
    assert torch.allclose(stream._state.sides["cond"].embeds, (start + target) / 2, atol=1e-6)
    next(stream.chunks())
    assert torch.equal(stream._state.sides["cond"].embeds, target)
    assert stream._state.blend is None


def test_cut_is_a_new_video_from_there_on(pipe) -> None:
    with pipe.stream(A) as stream:
        blocks = stream.chunks()
        next(blocks), next(blocks)
        receipt = stream.cut(B)
        block = next(blocks)
        assert (receipt.chunk, receipt.frame, receipt.transition) == (2, 21, "cut")
        assert (block.index, block.start_frame, len(block)) == (2, 21, 9), "decoding starts afresh"
        assert next(blocks).start_frame == 30
    alone = pipe.stream(B)
    alone._noise = _Shifted(stream._noise, 2)
    assert np.array_equal(block.frames, next(alone.chunks()).frames), "nothing of the old scene is left"


def test_receipts_and_superseding(pipe) -> None:
    stream = pipe.stream(A, output_type="latent")
    blocks = stream.chunks()
    next(blocks)
    first = stream.set_prompt(B)
    second = stream.set_prompt("c", "recache")
    later = stream.set_prompt("d", at_frame=50)
    assert (first.status, first.superseded_by) == ("superseded", "c")
    assert (second.chunk, second.frame, second.status) == (1, 9, "waiting")
    assert (later.chunk, later.frame) == (5, 57)
    assert next(blocks).prompt == "c" and second.status == "applied"
    stream.cut("e", at_chunk=3)
    assert later.frame == 54, "a cut before it makes that chunk three frames shorter"
    assert [chunk.prompt for chunk in islice(blocks, 4)] == ["c", "e", "e", "d"]
    with pytest.raises(StreamvidError, match="has begun"):
        stream.set_prompt(B, at_chunk=2)
    with pytest.raises(StreamvidError, match="did you mean 'recache'"):
        stream.set_prompt(B, "recahce")
    with pytest.raises(StreamvidError, match="blend:N"):
        stream.set_prompt(B, "blend")


def test_reset_keeps_prompt_and_seed_and_starts_at_frame_0(pipe) -> None:
    stream = pipe.stream(A, seed=5)
    next(stream)
    stream.set_prompt(B)
    list(islice(stream, 20))
    waiting = stream.set_prompt("c")
    stream.reset()
    assert waiting.status == "dropped"
    again = [next(stream) for _ in range(12)]
    assert equal(again, list(pipe.stream(B, seed=5, num_frames=12)))
    assert stream.stats()["frame"] == 21 and stream.prompt == B


# ---- memory, isolation, control (cases 3, 4, 15) ------------------------------------------------------------------


def live_tensors() -> int:
    gc.collect()
    return sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())


def test_memory_and_time_are_flat_and_positions_do_not_run_out(pipe) -> None:
    stream = pipe.stream(A, output_type="latent", memory="window:size=7,sink=1,positions=slot")
    seconds, size, tensors = [], {}, {}
    begun = time.process_time()  # of this process: other work on the machine does not count
    for chunk in stream.chunks():
        seconds.append(time.process_time() - begun)
        assert torch.isfinite(chunk.frames).all()
        if chunk.index in (50, 299):
            size[chunk.index], tensors[chunk.index] = stream.nbytes(), live_tensors()
        if chunk.index == 299:
            break
        begun = time.process_time()
    assert size[50] == size[299] and tensors[50] == tensors[299]
    assert statistics.median(seconds[-50:]) <= 1.2 * statistics.median(seconds[20:70])
    assert stream.stats()["latent"] == 900


def test_sessions_are_isolated(pipe) -> None:
    solo_a, solo_b = latents(pipe, 3, A, seed=1), latents(pipe, 3, B, seed=2)
    streams = [pipe.stream(p, seed=s, output_type="latent").chunks() for p, s in ((A, 1), (B, 2))]
    for index in range(3):
        assert torch.equal(next(streams[0]).frames, solo_a[index])
        assert torch.equal(next(streams[1]).frames, solo_b[index])


def test_every_way_to_end_frees_the_session(pipe) -> None:
    gc.collect()
    assert len(pipe.sessions) == 0
    with pytest.raises(RuntimeError), pipe.stream(A) as stream:
        next(stream)
        raise RuntimeError("the consumer failed")
    stream = pipe.stream(A, num_frames=3)
    assert pipe.sessions.nbytes() > 0 and len(list(stream)) == 3
    assert len(pipe.sessions) == 0, "the end of a clip closes its stream"
    stream = pipe.stream(A)
    next(stream)
    del stream
    gc.collect()
    assert len(pipe.sessions) == 0 and pipe.sessions.nbytes() == 0
    closed = pipe.stream(A)
    closed.close()
    closed.close()
    assert list(closed) == []
    for call in (closed.stats, closed.reset, lambda: closed.set_prompt(B), lambda: closed.snapshot("x")):
        with pytest.raises(StreamvidError, match="closed"):
            call()


def test_fifty_streams_leave_no_bytes(pipe) -> None:
    def cycle() -> None:
        with pipe.stream(A, output_type="latent") as stream:
            next(stream)

    cycle()
    before = live_tensors()
    for _ in range(50):
        cycle()
    assert live_tensors() == before


def test_the_limit_is_words_not_memory(tiny_random_folder) -> None:
    pipe = streamvid.load(tiny_random_folder, max_streams=2)
    held = [pipe.stream(A), pipe.stream(B)]
    with pytest.raises(StreamvidError, match="2 streams are open and 2 are allowed"):
        pipe.stream(A)
    held[0].close()
    pipe.stream(A).close()


def test_a_memory_that_cannot_fit_is_refused_with_its_numbers(pipe) -> None:
    with pytest.raises(StreamvidError, match=r"needs [0-9.]+ GB and [0-9.]+ GB are free .* shorter window"):
        pipe.stream(A, memory="window:size=2000000000")
    assert len(pipe.sessions) == 0


def test_decoding_that_stops_half_way_asks_for_a_reset(pipe, monkeypatch) -> None:
    stream = pipe.stream(A)
    first = next(stream)
    list(islice(stream, 8))
    decode = stream._state.decoder.decode_chunk
    monkeypatch.setattr(stream._state.decoder, "decode_chunk", lambda latents: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        next(stream)
    monkeypatch.setattr(stream._state.decoder, "decode_chunk", decode)
    with pytest.raises(StreamvidError, match="call reset"):
        next(stream)
    stream.reset()
    assert np.array_equal(next(stream), first)


def test_a_change_survives_a_context_pass_that_was_stopped(pipe, monkeypatch) -> None:
    plain, _, _ = run_switch(pipe, "recache", chunks=2)
    stream = pipe.stream(A, output_type="latent", memory="window:size=9,sink=3")
    blocks = stream.chunks()
    next(blocks), next(blocks)
    receipt = stream.set_prompt(B, "recache")
    commit = stream._engine._commit
    monkeypatch.setattr(stream._engine, "_commit", lambda side, latents: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        next(stream.chunks())
    monkeypatch.setattr(stream._engine, "_commit", commit)
    assert receipt.status == "waiting"
    assert torch.equal(next(stream.chunks()).frames, plain[2]) and receipt.status == "applied"


def test_pause_waits_for_resume_and_cannot_wait_for_itself(pipe) -> None:
    stream = pipe.stream(A, output_type="latent")
    next(stream)
    stream.pause()
    with pytest.raises(StreamvidError, match="call resume"):
        next(stream)
    got = []
    reader = threading.Thread(target=lambda: got.append(next(stream)))
    reader.start()
    time.sleep(0.05)
    assert not got and stream.stats()["paused"]
    stream.resume()
    reader.join(timeout=30)
    assert len(got) == 1


def test_a_slow_reader_is_never_outrun_and_ahead_changes_no_frame(pipe) -> None:
    plain = latents(pipe, 5)
    stream = pipe.stream(A, output_type="latent")
    next(stream)
    time.sleep(0.05)
    assert stream.stats()["chunk"] == 1, "nothing is made before it is asked for"
    with pipe.stream(A, output_type="latent", ahead=2) as stream:
        blocks = stream.chunks()
        made = [next(blocks).frames.clone()]
        deadline = time.monotonic() + 20
        while stream.stats()["chunk"] < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.3)
        assert stream.stats()["chunk"] <= 4, "the chunk to be read next and two more"
        made += [next(blocks).frames.clone() for _ in range(4)]
    assert all(torch.equal(a, b) for a, b in zip(plain, made, strict=True))
    with pytest.raises(StreamvidError, match="ahead must be 0, 1 or 2"):
        pipe.stream(A, ahead=3)


def test_a_failed_chunk_leaves_the_stream_as_it_was(pipe) -> None:
    plain = latents(pipe, 3)
    stream = pipe.stream(A, output_type="latent")
    blocks = stream.chunks()
    made = [next(blocks).frames.clone()]
    stream.on_step = lambda event: (_ for _ in ()).throw(RuntimeError("cancelled"))
    with pytest.raises(RuntimeError, match="cancelled"):
        next(stream.chunks())
    stream.on_step = None
    made += [chunk.frames.clone() for chunk in islice(stream.chunks(), 2)]
    assert all(torch.equal(a, b) for a, b in zip(plain, made, strict=True))


def test_a_policy_may_make_the_cut_its_own_way(pipe) -> None:
    stream = pipe.stream(A, output_type="latent", memory="infinity_rope")
    blocks = stream.chunks()
    for _ in range(3):
        next(blocks)
    receipt = stream.cut(B)
    later = stream.set_prompt(A, at_frame=receipt.frame + 1)
    assert (receipt.frame, later.frame) == (33, 45), "decoding goes on, so no chunk is shortened"
    assert next(blocks).prompt == B and rows(stream), "the history is kept"


def test_prompt_changes_reach_the_memory_policy(pipe) -> None:
    _, stream, _ = run_switch(pipe, "swift", memory="swift:size=9,shortest=6")
    regions = {entry.region for bank in cache_of(stream).all_banks() for entry in bank.entries}
    assert {"bridge", "anchors"} & regions


def test_load_names_the_nearest_setting(tiny_random_folder) -> None:
    with pytest.raises(StreamvidError, match="did you mean 'lora'"):
        streamvid.load(tiny_random_folder, lorra="x")
    with pytest.raises(ValueError, match="unknown attention backend"):
        streamvid.load(tiny_random_folder, attention="flash9")
    pipe = streamvid.StreamPipeline.from_pretrained(tiny_random_folder, torch_dtype=torch.float32)
    assert pipe.dtype == torch.float32 and pipe.device.type == "cpu"
    with pipe.stream(A), pytest.raises(StreamvidError, match="1 streams are open"):
        pipe.to("cpu")
    assert pipe.to("cpu") is pipe
