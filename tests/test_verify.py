"""Every recorded case is reproduced through the public loading path, and a case that is not is found out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from streamvid import cli
from streamvid.verify import find_cases, verify_case

GOLDEN = Path(__file__).parent / "golden"
ROLLOUTS = [
    "sf_chunk3",
    "sf_rolling",
    "sf_rolling_nosink",
    "sf_frame1",
    "sf_first1_block3",
    "sf_first1_i2v",
    "sf_i2v",
    "sf_ctxnoise",
    "longlive_switch",
    "longlive_switch_globalsink",
]


@pytest.mark.parametrize("name", [*ROLLOUTS, "scheduler", "units"])
def test_fp32_cases(name):
    result = verify_case(GOLDEN / name)
    assert result.ok, (result.problem, [d for d in result.deviations if not d.ok])
    assert name not in ROLLOUTS or "latents" in {d.name for d in result.deviations}


def test_bfloat16_case():
    assert verify_case(GOLDEN / "sf_chunk3_bf16").ok


def copy(name: str, target: Path) -> Path:
    shutil.copytree(GOLDEN / name, target / name)
    return target / name


def test_a_pt_file_with_training_sections_is_accepted(tmp_path):
    folder = copy("sf_first1_block3", tmp_path)
    weights = load_file(folder / "weights.safetensors")
    (folder / "weights.safetensors").unlink()
    wrapped = {k.replace("model.", "model._fsdp_wrapped_module.", 1): v for k, v in weights.items()}
    torch.save({"generator": {}, "generator_ema": wrapped}, folder / "weights.pt")
    assert verify_case(folder).ok


@pytest.mark.parametrize("damage", ["tensor", "window", "sink_rule", "extra"])
def test_a_difference_is_found(tmp_path, damage):
    folder = copy("longlive_switch_globalsink" if damage == "sink_rule" else "sf_rolling_nosink", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    case = load_file(folder / "case.safetensors")
    if damage == "tensor":
        case["latents"][0, 5, 3, 1, 1] += 1e-4
    elif damage == "window":
        config["model"]["local_attn_size"] += 1
    elif damage == "sink_rule":
        config["global_sink"] = False
    else:
        case["chunk00/unknown"] = torch.zeros(1)
    save_file(case, folder / "case.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    assert not verify_case(folder).ok


def test_the_command_exits_with_the_verdict(tmp_path, capsys):
    folder = copy("units", tmp_path)
    assert cli.main(["verify", str(tmp_path)]) == 0
    assert "ok   units" in capsys.readouterr().out
    (folder / "config.json").unlink()
    assert cli.main(["verify", str(folder), "--json"]) == 1
    assert "config.json cannot be read" in json.loads(capsys.readouterr().out)["problem"]
    assert cli.main(["verify", str(tmp_path / "nothing")]) == 2
    assert "no case here" in capsys.readouterr().err
    assert [p.name for p in find_cases(tmp_path)] == ["units"]
