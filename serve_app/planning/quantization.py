"""How many bits a quantised weight takes, scales included. Pure."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from serve_app.planning.architecture import PlanError

# vLLM's names for quantising a 16-bit checkpoint while it loads, with what a weight then takes. A block of 32 shares
# one byte of scale (mxfp8), a block of 16 one (nvfp4), a block of 64 four (bitsandbytes).
_WHILE_LOADING = {
    "fp8": 8.0,
    "fp8_per_tensor": 8.0,
    "fp8_per_block": 8.0,
    "fp8_per_channel": 8.0,
    "int8_per_channel_weight_only": 8.0,
    "experts_int8": 8.0,
    "mxfp8": 8.25,
    "nvfp4_per_token": 4.5,
    "bitsandbytes": 4.5,
}


@dataclass(frozen=True, slots=True)
class Quantization:
    """``bits`` per weight of a quantised matrix. ``ignored``: modules that stay as they are, by name or ``re:``
    pattern. ``while_loading``: the checkpoint is not quantised, the engine does it."""

    method: str
    bits: float
    ignored: tuple[str, ...] = ()
    experts_only: bool = False
    while_loading: bool = False

    def applies(self, module: str) -> bool:
        """Whether the weights of ``module`` (model.layers.0.self_attn.q_proj) are quantised."""
        if self.experts_only and not module.endswith(".experts"):
            return False
        return not any(_names(entry, module) for entry in self.ignored)


def quantization(config: Mapping[str, Any], engine: Mapping[str, Any]) -> Quantization | None:
    """That of the checkpoint (``config.json``), or the one that ``engine`` asks for. None: weights stay as they are.

    PlanError: a method whose size is not known here.
    """
    stored = config.get("quantization_config") or config.get("compression_config")
    if stored:
        return _stored(stored)
    asked = engine.get("quantization")
    if asked is None:
        return None
    if asked not in _WHILE_LOADING:
        raise PlanError(f"engine.quantization is {asked}, but the checkpoint's config.json has no quantization_config")
    return Quantization(asked, _WHILE_LOADING[asked], experts_only=asked == "experts_int8", while_loading=True)


def _stored(stored: Mapping[str, Any]) -> Quantization:
    method = str(stored.get("quant_method", "")).lower().replace("_", "-")
    names = ("ignore", "modules_to_not_convert", "ignored_layers", "exclude_modules")
    ignored = _modules(*(stored.get(key) for key in names))
    group = int(stored.get("group_size") or stored.get("q_group_size") or 0)
    bits = _bits(stored.get("bits") or stored.get("w_bit"))
    match method:
        case "fp8" | "fbgemm-fp8":
            block = stored.get("weight_block_size")
            return Quantization(method, 8 + (32 / (block[0] * block[1]) if block else 0), ignored)
        case "awq" | "gptq" | "auto-round" | "inc" if bits is not None:
            # Each group of weights has a 16-bit scale and a zero point.
            return Quantization(method, bits + ((16 + bits) / group if group > 0 else 0), ignored)
        case "bitsandbytes":
            return Quantization(method, 4.5 if stored.get("load_in_4bit") else 8.0, ignored)
        case "mxfp4":
            return Quantization(method, 4.25, ignored, experts_only=True)
        case "modelopt" | "modelopt-fp4":
            inner = stored.get("quantization") or stored
            algorithm = str(inner.get("quant_algo", "")).upper()
            if inner is not stored:
                ignored += _modules(inner.get("exclude_modules"))
            if algorithm.startswith("FP8"):
                return Quantization(method, 8.0, ignored)
            if algorithm == "NVFP4":
                return Quantization(method, 4.5, ignored)
        case "compressed-tensors":
            if (found := _compressed_bits(stored)) is not None:
                return Quantization(method, found, ignored)
    raise PlanError(f"its quantisation ({method or 'unnamed'}) is not one that plan can count")


def _compressed_bits(stored: Mapping[str, Any]) -> float | None:
    """Bits per weight of the compressed-tensors format; None where its groups differ or say nothing of weights."""
    found = set()
    for group in (stored.get("config_groups") or {}).values():
        weights = group.get("weights") or {}
        bits, size = _bits(weights.get("num_bits")), weights.get("group_size") or 0
        if bits is None:
            return None
        scale = 8 if weights.get("type") == "float" and bits == 4 else 16
        zero = 0 if weights.get("symmetric", True) else bits
        found.add(bits + ((scale + zero) / size if size > 0 else 0))
    return found.pop() if len(found) == 1 else None


def _bits(value: Any) -> int | None:
    return value if type(value) is int and 1 <= value <= 16 else None


def _modules(*lists: Any) -> tuple[str, ...]:
    """The entries of all ``lists``. PlanError: one is a pattern that is none."""
    entries = tuple(str(entry) for each in lists for entry in each or ())
    for entry in entries:
        try:
            re.compile(entry.removeprefix("re:") if entry.startswith("re:") else "")
        except re.error as e:
            raise PlanError(f"the quantisation's pattern {entry} is not one: {e}") from e
    return entries


def _names(entry: str, module: str) -> bool:
    if entry.startswith("re:"):
        return re.match(entry[3:], module) is not None
    # Whole parts of the dotted name: mlp.gate is not mlp.gate_proj.
    return re.search(rf"(^|\.){re.escape(entry.strip('*.'))}(\.|$)", module) is not None
