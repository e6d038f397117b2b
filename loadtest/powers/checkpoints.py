"""Checkpoints that are made of the demo model: quantised ones, and one of its first layers as a draft.

    python -m loadtest.powers.checkpoints KIND SOURCE FOLDER

Quantised by rounding to nearest, in compressed-tensors' format and with its own code: no calibration, so better
quantisers exist, and llmcompressor, which is one, wants older transformers than the engine has.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from serve_app import demo_model
from serve_app.config import Source
from serve_app.demo_model import DemoModelError
from serve_app.sources import SHAPES, read_shape, resolve

# Kind → compressed-tensors' name of the scheme. int8 and fp8: weights per channel, activations per token as they come;
# int4: weights alone.
SCHEMES = {"int8": "W8A8", "int4": "W4A16", "fp8": "FP8_DYNAMIC"}
FORMATS = {"int8": "int-quantized", "int4": "pack-quantized", "fp8": "float-quantized"}
# Weights of int4 that share a scale. The usual 128 does not divide the demo model's 576.
GROUP = 64
# Kind → how many of the 30 layers a draft keeps.
DRAFTS = {"draft-6": 6, "draft-24": 24}
KINDS = (*SCHEMES, *DRAFTS)


def prepare(kind: str, tell: Callable[[str], None]) -> Path:
    """The folder of the demo model's ``kind``, made now unless it is there. DemoModelError: it cannot be made."""
    source = demo_model.prepare(tell)
    folder = source.with_name(f"{source.name}-{kind}")
    if folder.exists():
        return folder
    tell(f"making the demo model's {kind}")
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    # A process of its own: torch's memory ends with it.
    child = subprocess.run(
        [sys.executable, "-m", "loadtest.powers.checkpoints", kind, str(source), str(partial)],
        capture_output=True,
        text=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""},
        check=False,
    )
    if child.returncode:
        raise DemoModelError(f"making {kind} failed:\n" + "\n".join(child.stderr.splitlines()[-15:]))
    partial.rename(folder)
    return folder


def quantised_shape(shape: str, kind: str, folder: Path) -> Path:
    """The ``shape`` with the quantisation of ``kind``, as a file in ``folder``: for dummy weights."""
    config = read_shape(resolve(Source(shape=shape))) | {"quantization_config": _quantisation(kind)}
    file = folder / f"{Path(shape).stem}-{kind}.json"
    file.write_text(json.dumps(config, indent=1))
    return file


def draft_shape(folder: Path) -> Path:
    """A model folder in ``folder`` that holds SmolLM2's shape with Llama 3's vocabulary: a draft with dummy weights."""
    small, large = (read_shape(SHAPES / f"{name}.json") for name in ("SmolLM2-135M-Instruct", "Llama-3.1-8B-Instruct"))
    made = folder / "draft"
    made.mkdir(exist_ok=True)
    (made / "config.json").write_text(json.dumps(small | {"vocab_size": large["vocab_size"]}, indent=1))
    return made


def _scheme(kind: str) -> Any:
    from compressed_tensors.quantization import preset_name_to_scheme

    scheme = preset_name_to_scheme(SCHEMES[kind], ["Linear"])
    if scheme.weights.group_size:
        scheme.weights.group_size = GROUP
    return scheme


def _plan(kind: str) -> Any:
    from compressed_tensors.quantization import QuantizationConfig

    return QuantizationConfig(config_groups={"group_0": _scheme(kind)}, ignore=["lm_head"])


def _quantisation(kind: str) -> dict[str, Any]:
    """What a checkpoint of ``kind`` has in its ``config.json``."""
    from compressed_tensors.quantization import QuantizationStatus

    compressed = {"format": FORMATS[kind], "quantization_status": QuantizationStatus.COMPRESSED}
    return dict(_plan(kind).model_copy(update=compressed).model_dump(mode="json", exclude_none=True))


def _quantise(kind: str, model: Any, folder: Path) -> None:
    import torch
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import apply_quantization_config
    from compressed_tensors.quantization.utils import calculate_qparams, is_module_quantized

    apply_quantization_config(model, _plan(kind))
    for module in model.modules():
        if not is_module_quantized(module):
            continue
        wanted = module.quantization_scheme.weights
        groups = module.weight.unflatten(1, (-1, wanted.group_size or module.weight.shape[1]))
        scale, zero = calculate_qparams(groups.amin(2), groups.amax(2), wanted)
        module.weight_scale = torch.nn.Parameter(scale, requires_grad=False)
        module.weight_zero_point = torch.nn.Parameter(zero, requires_grad=False)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(str(folder))


def _truncate(layers: int, model: Any, folder: Path) -> None:
    model.model.layers = model.model.layers[:layers]
    model.config.num_hidden_layers = layers
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = model.config.layer_types[:layers]
    model.save_pretrained(folder)


def main(kind: str, source: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(source, dtype="bfloat16")
    if kind in DRAFTS:
        _truncate(DRAFTS[kind], model, folder)
    else:
        _quantise(kind, model, folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
