"""Reads `quantization_config`: how the matrix of each module is stored.

Activations are rounded to fp8 where a config has weights in blocks of 128 x 128 for that, and the device has kernels
for it. Else they are not, whatever a config says of them in 8 or 4 bits: only the weights are taken. What would change
their values and is not implemented is refused by its key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import regex

from draftwing.errors import CheckpointError
from draftwing.models.family import own_name
from draftwing.models.fields import WIDEST, Fields
from draftwing.requests.refusals import show

WHOLE = 0  # a group as tall or wide as its matrix
DYNAMIC_BLOCK = 128, 128  # of weights that are for activations in fp8, in groups of as many columns
LONGEST_PATTERN = 4000  # characters
MATCH_SECONDS = 0.1  # for one name
INSTEAD = "Take the model's checkpoint that is not quantised, or another quantised one"

Layout = Literal["awq", "gptq", "packed", "plain", "fp4", "bnb"]


@dataclass(frozen=True)
class Scheme:
    """How one matrix is stored.

    layout: `awq`, `gptq`; of compressed-tensors and fp8, `packed` in int32 or `plain`, a code in each element; `fp4`:
    NVFP4, whose scales have a scale of their own; `bnb`: blocks of bitsandbytes with values of a map, which are
    dequantised.
    real: codes are float8_e4m3fn, else integers of `bits`.  tall, wide: rows and columns of a group, or WHOLE.
    scale: suffix of the tensor of scales.  symmetric: zeros are 0.  act_order: a tensor says which columns are a group.
    zero_offset: what is added to stored zeros.  divided: scales are divided by theirs.  kind: of the map of
    `bnb`.  nested: its scales are in such blocks, too.  dynamic: made for activations in fp8, quantised by row and 128
    columns.
    """

    layout: Layout
    bits: int
    tall: int
    wide: int
    scale: str = "scales"
    real: bool = False
    symmetric: bool = True
    act_order: bool = False
    zero_offset: int = 0
    divided: bool = False
    kind: str = ""
    nested: bool = False
    dynamic: bool = False

    @property
    def parts(self) -> tuple[str, ...]:
        """Suffixes of the tensors that make the matrix; the codes come first."""
        if self.layout == "awq":
            return "qweight", "qzeros", self.scale
        if self.layout == "gptq":
            return "qweight", "qzeros", self.scale, *(("g_idx",) if self.act_order else ())
        if self.layout == "fp4":
            names = ("weight_packed", "weight_global_scale") if self.divided else ("weight", "weight_scale_2")
            return names[0], self.scale, names[1]
        if self.layout == "bnb":
            nested = ("weight.nested_absmax", "weight.nested_quant_map") if self.nested else ()
            return "weight", self.scale, "weight.quant_map", *nested, f"weight.quant_state.bitsandbytes__{self.kind}"
        more = () if self.symmetric else ("weight_zero_point",)
        if self.layout == "plain":
            return "weight", self.scale, *more
        return "weight_packed", self.scale, "weight_shape", *more, *(("weight_g_idx",) if self.act_order else ())


class Rule(NamedTuple):
    """Which modules have a scheme, or None: are not quantised.

    how: `name`, or `part` of it between dots, or `pattern` that it begins with, or `any`.
    """

    how: Literal["name", "part", "pattern", "any"]
    what: str
    scheme: Scheme | None

    def matches(self, module: str) -> bool:
        if self.how == "part":
            return f".{self.what}." in f".{module}."
        if self.how != "pattern":
            return self.how == "any" or self.what == module
        try:
            return regex.match(self.what, module, timeout=MATCH_SECONDS) is not None
        except TimeoutError:
            raise CheckpointError(
                f"quantization_config: the pattern {show(self.what)} takes too long to match {module}"
            ) from None


@dataclass(frozen=True)
class Quantization:
    """rules: the first one that matches counts."""

    method: str
    rules: tuple[Rule, ...]

    def scheme_of(self, module: str) -> Scheme | None:
        """Returns how a module is stored; module: its name with the `model.` prefix. None: it is not quantised."""
        return next((rule.scheme for rule in self.rules if rule.matches(module)), None)


FP8_TENSOR = Scheme("plain", 8, WHOLE, WHOLE, "weight_scale", real=True)
FP8_CHANNEL = Scheme("plain", 8, 1, WHOLE, "weight_scale", real=True)
NVFP4 = Scheme("fp4", 4, 1, 16, "weight_scale", real=True)
IN_MXFP4 = Quantization("mxfp4", ())  # of experts alone, whose tensors `models.apart` puts together


def _awq(fields: Fields) -> Quantization:
    _expect(fields, "version", fields.text("version", "gemm").lower(), ("gemm",))
    _expect(fields, "zero_point", fields.flag("zero_point", True), (True,))
    _expect(fields, _given(fields, "bits", "w_bit"), fields.whole(_given(fields, "bits", "w_bit"), 1, 64, 4), (4,))
    group = _group_size(fields, _given(fields, "group_size", "q_group_size"))
    return Quantization("awq", (*_skipped(fields), Rule("any", "", Scheme("awq", 4, 1, group, symmetric=False))))


def _gptq(fields: Fields) -> Quantization:
    key = _given(fields, "checkpoint_format", "format")
    written = fields.text(key, "gptq")
    _expect(fields, key, written, ("gptq", "gptq_v2"))
    _expect(fields, "is_marlin_format", fields.flag("is_marlin_format"), (False,))
    _expect(fields, "pack_dtype", fields.text("pack_dtype", "int32"), ("int32",))
    offset = 1 if written == "gptq" else 0
    rules = []
    dynamic = fields.inner("dynamic")
    for pattern, _ in dynamic.items():
        sign, rest = (pattern[:2], pattern[2:]) if pattern[:2] in ("-:", "+:") else ("+:", pattern)
        scheme = None if sign == "-:" else _gptq_scheme(dynamic.inner(pattern), fields, offset)
        rules.append(Rule("pattern", _pattern(dynamic, pattern, rest), scheme))
    return Quantization("gptq", (*rules, *_skipped(fields), Rule("any", "", _gptq_scheme(fields, fields, offset))))


def _gptq_scheme(own: Fields, common: Fields, zero_offset: int) -> Scheme:
    """own: what a pattern of `dynamic` says; what it leaves open is common."""

    def of(key: str) -> Fields:
        return common if own.get(key) is None else own

    bits = of("bits").whole("bits", 1, 64)
    _expect(of("bits"), "bits", bits, (2, 3, 4, 8))
    group = _group_size(of("group_size"), "group_size")
    return Scheme(
        "gptq", bits, 1, group,
        symmetric=of("sym").flag("sym", True), act_order=of("desc_act").flag("desc_act"), zero_offset=zero_offset,
    )  # fmt: skip


def _fp8(fields: Fields) -> Quantization:
    _expect(fields, "fmt", fields.text("fmt", "e4m3"), ("e4m3", "float8_e4m3fn"))
    activations = fields.text("activation_scheme", "dynamic")
    _expect(fields, "activation_scheme", activations, ("dynamic", "static"))
    tall, wide, scale = WHOLE, WHOLE, "weight_scale"
    if fields.get("weight_block_size") is not None:
        (tall, wide), scale = _block(fields, "weight_block_size"), "weight_scale_inv"
    dynamic = activations == "dynamic" and (tall, wide) == DYNAMIC_BLOCK
    scheme = Scheme("plain", 8, tall, wide, scale, real=True, dynamic=dynamic)
    return Quantization("fp8", (*_skipped(fields), Rule("any", "", scheme)))


def _fbgemm(fields: Fields) -> Quantization:
    return Quantization("fbgemm_fp8", (*_skipped(fields), Rule("any", "", FP8_CHANNEL)))


# By `quant_algo`, the first by the scales of its matrices.
_MODELOPT = {"FP8": FP8_TENSOR, "FP8_PER_CHANNEL_PER_TOKEN": FP8_CHANNEL, "NVFP4": NVFP4, "W4A16_NVFP4": NVFP4}


def _modelopt(fields: Fields) -> Quantization:
    own = fields.inner("quantization") if fields.has("quantization") else fields  # as hf_quant_config.json has it
    skipped = [_named(own, key, name, None) for key in ("ignore", "exclude_modules") for name in own.texts(key)]
    named = own.inner("quantized_layers")
    rules = [Rule("name", own_name(name), _modelopt_scheme(named.inner(name))) for name, _ in named.items()]
    if not rules or own.get("quant_algo") not in (None, "MIXED_PRECISION"):
        rules.append(Rule("any", "", _modelopt_scheme(own)))
    return Quantization("modelopt", (*skipped, *rules))


def _modelopt_scheme(fields: Fields) -> Scheme:
    algorithm = fields.text("quant_algo", "")
    _expect(fields, "quant_algo", algorithm, tuple(_MODELOPT))
    scheme = _MODELOPT[algorithm]
    if scheme is NVFP4:
        _expect(fields, "group_size", fields.whole("group_size", 1, WIDEST, NVFP4.wide), (NVFP4.wide,))
    return scheme


def _quark(fields: Fields) -> Quantization:
    if fields.get("layer_type_quant_config") not in (None, {}):
        raise _refusal(fields, "layer_type_quant_config", "none")
    rules = [_named(fields, "exclude", name, None) for name in fields.texts("exclude")]
    key = "layer_quant_config"  # of keys and values, for example, whose output is rounded for the cache
    named = fields.inner(key)
    rules += [_named(fields, key, name, _quark_scheme(named.inner(name))) for name, _ in named.items()]
    return Quantization("quark", (*rules, Rule("any", "", _quark_scheme(fields.inner("global_quant_config")))))


def _quark_scheme(fields: Fields) -> Scheme:
    weight = fields.inner("weight")
    _expect(weight, "dtype", weight.text("dtype", ""), ("fp8_e4m3",))
    strategy = weight.text("qscheme", "per_tensor")
    _expect(weight, "qscheme", strategy, ("per_tensor", "per_channel"))
    return FP8_TENSOR if strategy == "per_tensor" else FP8_CHANNEL


def _bitsandbytes(fields: Fields) -> Quantization:
    if fields.flag("load_in_8bit") or not fields.flag("load_in_4bit"):
        raise _refusal(fields, "load_in_4bit", "true")
    kind = fields.text("bnb_4bit_quant_type", "fp4")
    _expect(fields, "bnb_4bit_quant_type", kind, ("nf4", "fp4"))
    _expect(fields, "bnb_4bit_quant_storage", fields.text("bnb_4bit_quant_storage", "uint8"), ("uint8",))
    nested = fields.flag("bnb_4bit_use_double_quant")
    scheme = Scheme("bnb", 4, WHOLE, WHOLE, "weight.absmax", real=True, kind=kind, nested=nested)
    return Quantization("bitsandbytes", (Rule("any", "", scheme),))


FORMATS_OF_TENSORS: dict[str, Layout] = {
    "pack-quantized": "packed", "float-quantized": "plain", "int-quantized": "plain", "naive-quantized": "plain",
    "nvfp4-pack-quantized": "fp4",
}  # fmt: skip


def _compressed(fields: Fields) -> Quantization:
    sparsity = fields.inner("sparsity_config")
    _expect(sparsity, "format", sparsity.text("format", "dense"), ("dense",))
    if fields.get("transform_config") not in (None, {}) and fields.inner("transform_config").get("config_groups"):
        raise _refusal(fields.inner("transform_config"), "config_groups", "none: transforms of activations")
    groups = fields.inner("config_groups")
    rules = [_target(fields, "ignore", name, None) for name in fields.texts("ignore")]
    classes = []
    for name, _ in groups.items():
        group = groups.inner(name)
        scheme = _compressed_scheme(group, fields)
        for target in group.texts("targets"):
            if target == "Linear":
                classes.append(Rule("any", "", scheme))
            else:
                rules.append(_target(group, "targets", target, scheme))
    if not rules and not classes:
        raise _refusal(fields, "config_groups", "at least one group with targets")
    return Quantization("compressed-tensors", (*rules, *classes))


def _target(fields: Fields, key: str, target: str, scheme: Scheme | None) -> Rule:
    if target.startswith("re:"):
        return Rule("pattern", _pattern(fields, key, target[3:]), scheme)
    return Rule("name", own_name(target), scheme)


def _compressed_scheme(group: Fields, top: Fields) -> Scheme | None:
    inputs, weights = group.inner("input_activations"), group.inner("weights")
    if group.get("output_activations") is not None:
        raise _refusal(group, "output_activations", "none")
    if group.get("input_activations") is not None:
        _expect(inputs, "type", inputs.text("type", "int"), ("int", "float"))
        _expect(inputs, "num_bits", inputs.whole("num_bits", 1, 64, 8), (4, 8))
    if group.get("weights") is None:
        return None
    owner = top if group.get("format") is None else group
    real = weights.text("type", "int")
    _expect(weights, "type", real, ("int", "float"))
    written = owner.text("format", "naive-quantized" if real == "float" else "pack-quantized")
    _expect(owner, "format", written, tuple(FORMATS_OF_TENSORS))
    layout = FORMATS_OF_TENSORS[written]
    bits = weights.whole("num_bits", 1, 64, 8)
    _expect(weights, "num_bits", bits, (4,) if layout == "fp4" else (8,) if real == "float" else (4, 8))
    _expect(weights, "dynamic", weights.flag("dynamic"), (False,))
    if layout == "fp4":
        _expect(weights, "type", real, ("float",))
        _expect(weights, "group_size", weights.whole("group_size", 1, WIDEST, NVFP4.wide), (NVFP4.wide,))
        return replace(NVFP4, divided=True)
    if layout == "packed" and real == "float":
        raise _refusal(weights, "type", f"'int' with format {written!r}")
    order = weights.get("actorder")
    if not (order is None or isinstance(order, bool | str)) or (
        isinstance(order, str) and order not in ("group", "dynamic", "weight", "static")
    ):
        raise _refusal(weights, "actorder", "none, 'weight' or 'group'")
    tall, wide = _strategy(weights)
    by_group = inputs.get("dynamic") is True and inputs.get("strategy") == "group"
    dynamic = by_group and inputs.get("group_size") == wide and (tall, wide) == DYNAMIC_BLOCK
    return Scheme(
        layout, bits, tall, wide, "weight_scale", real=real == "float",
        symmetric=real == "float" or weights.flag("symmetric", True),
        act_order=layout == "packed" and order in ("group", "dynamic", True), dynamic=dynamic and real == "float",
    )  # fmt: skip


def _strategy(weights: Fields) -> tuple[int, int]:
    """Rows and columns of a group."""
    given = weights.get("group_size")
    strategy = weights.text("strategy", "tensor" if given is None else "channel" if given == -1 else "group")
    _expect(weights, "strategy", strategy, ("tensor", "channel", "group", "block"))
    if strategy == "block":
        return _block(weights, "block_structure")
    if strategy == "group":
        return 1, weights.whole("group_size", 1, WIDEST)
    return (WHOLE if strategy == "tensor" else 1), WHOLE


METHODS: dict[str, Callable[[Fields], Quantization]] = {
    "awq": _awq, "gptq": _gptq, "fp8": _fp8, "compressed-tensors": _compressed, "modelopt": _modelopt,
    "bitsandbytes": _bitsandbytes, "fbgemm_fp8": _fbgemm, "quark": _quark, "mxfp4": lambda _: IN_MXFP4,
}  # fmt: skip


def _given(fields: Fields, key: str, old: str) -> str:
    """Returns the key that is there, of two with one meaning."""
    return old if fields.get(key) is None and fields.get(old) is not None else key


def _skipped(fields: Fields) -> Iterator[Rule]:
    """Yields rules of the modules that stay as they are."""
    for key in ("modules_to_not_convert", "ignored_layers", "modules_to_not_quantize"):
        yield from (_named(fields, key, name, None) for name in fields.texts(key) if name)


def _named(fields: Fields, key: str, name: str, scheme: Scheme | None) -> Rule:
    """Returns a rule by a name that may be an expression behind `re:`, or in which a star stands for any characters;
    else it is of what is below, too."""
    if name.startswith("re:"):
        return Rule("pattern", _pattern(fields, key, name[3:]), scheme)
    name = own_name(name)
    if "*" not in name:
        return Rule("part", name, scheme)
    return Rule("pattern", ".*".join(map(regex.escape, name.split("*"))) + "$", scheme)


def _group_size(fields: Fields, key: str) -> int:
    size = fields.get(key)
    if size == -1 and type(size) is int:
        return WHOLE
    if type(size) is int and size < 1:
        raise fields.unlike(key, f"-1 or an integer from 1 to {WIDEST}")
    return fields.whole(key, 1, WIDEST, 128)


def _block(fields: Fields, key: str) -> tuple[int, int]:
    sizes = fields.get(key)
    if not isinstance(sizes, list) or len(sizes) != 2 or not all(type(n) is int and 1 <= n <= WIDEST for n in sizes):
        raise fields.unlike(key, f"two integers from 1 to {WIDEST}")
    return sizes[0], sizes[1]


def _pattern(fields: Fields, key: str, pattern: str) -> str:
    """Returns a regular expression that can be matched soon. Repeats by numbers are none: the library writes them
    out."""
    wrong = "" if len(pattern) <= LONGEST_PATTERN else f"one of at most {LONGEST_PATTERN} characters"
    if "{" in pattern:
        wrong = "one without {"
    if not wrong:
        try:
            regex.compile(pattern)
        except Exception as error:  # besides regex.error, malformed flags and sets raise what they happen to meet
            wrong = f"one that is right ({str(error)[:80]})"
    if wrong:
        raise CheckpointError(
            f"{fields.where}: {fields.inside}{show(key)}: expected a regular expression, {wrong}; found {show(pattern)}"
        )
    return pattern


def _expect(fields: Fields, key: str, found: Any, supported: tuple[Any, ...]) -> None:
    if found not in supported:
        raise _refusal(fields, key, " or ".join(map(repr, supported)))


def _refusal(fields: Fields, key: str, expected: str) -> CheckpointError:
    return CheckpointError(f"{fields.unlike(key, expected)}, which is not supported. {INSTEAD}")
