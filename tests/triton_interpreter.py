"""Triton 3.6's interpreter, mended and made fast enough for tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest


@contextmanager
def mended() -> Iterator[None]:
    """With numpy 2.4 or later the interpreter cannot loop to a number that a kernel computed, for int() takes no array
    of one element; and its products take bfloat16 for integers, and float32 in any order."""
    triton = pytest.importorskip("triton.runtime.interpreter")
    patch = triton._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def dot(self: Any, a: Any, b: Any, acc: Any, *_: Any) -> Any:
        left, right = _widen(a), _widen(b)
        total = acc.data.copy()
        for sums, one, other in zip(total, left, right, strict=True) if left.ndim == 3 else [(total, left, right)]:
            for first in range(0, one.shape[1], 16):  # a chunk is summed for itself, as a GPU does
                columns, rows = one.T[first : first + 16, :, None], other[first : first + 16, None]
                # [16, M, N], of which numpy adds one after the other: so it sums the outermost of several dimensions.
                sums += np.multiply(columns, rows, order="C").sum(0)
        return triton.TensorHandle(total, acc.dtype.scalar)

    scopes: list[Any] = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(triton, "_patch_lang_tensor", patched)
        monkeypatch.setattr(triton.InterpreterBuilder, "create_dot", dot)
        _speed_up_handles(triton, monkeypatch)
        _speed_up(triton, monkeypatch, scopes)
        yield
        for scope in reversed(scopes):
            scope.restore()


def _widen(handle: Any) -> np.ndarray:
    if handle.data.dtype == np.uint16:  # how the interpreter keeps bfloat16
        return (handle.data.astype(np.uint32) << 16).view(np.float32)
    return handle.data.astype(np.float32)


NUMBERS = (int, float, bool)


def _spread(data: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """As np.broadcast_to, which takes several times as long."""
    if data.size == 1:
        return np.ndarray(shape, data.dtype, data, 0, (0,) * len(shape))
    return np.broadcast_to(data, shape)


def _speed_up_handles(triton: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an operation does with numpy's arrays."""
    slow, fits, np_dtype = triton._convert_float, triton._validate_np_data_size, triton._get_np_dtype

    def handle(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr

    def binary(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        found, dtype = op(lhs.data, rhs.data), lhs.dtype.scalar
        if found.dtype is not lhs.data.dtype and not fits(found, dtype):
            found = found.astype(np_dtype(dtype))
        return triton.TensorHandle(found, dtype)

    def convert(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        """bfloat16 is the upper half of a float32, but for the smallest, of which it makes something else."""
        if source.name == "bf16" and target.name == "fp32":
            if not ((data & 0x7FFF) - np.uint16(1) < 0x7F).any():
                return data.astype(np.uint32) << 16
        elif source.name == "fp32" and target.name == "bf16" and rounding is None:
            bits = np.ascontiguousarray(data).view(np.uint32)
            if not ((bits & 0x7FFFFFFF) - np.uint32(1) < 0x7FFFFF).any():
                return (bits >> 16).astype(np.uint16)
        return slow(data, source, target, rounding)

    monkeypatch.setattr(triton.TensorHandle, "__init__", handle)
    monkeypatch.setattr(triton.InterpreterBuilder, "binary_op", binary)
    monkeypatch.setattr(triton, "_convert_float", convert)


def _speed_up(triton: Any, monkeypatch: pytest.MonkeyPatch, scopes: list[Any]) -> None:
    """Most of its time goes to things that it makes again and again, always the same. scopes: grows by what replaces
    the language."""
    core = pytest.importorskip("triton.language.core")
    replaced: set[frozenset[int]] = set()  # which modules of the language, by the modules that a kernel knows
    known: set[int] = set()
    patch_lang, left = triton._patch_lang, SimpleNamespace(restore=lambda: None)
    types: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}
    shapes: dict[str, tuple[Any, Any]] = {}
    dtypes: dict[str, np.dtype] = {}
    make_type, make_tensor, same = core.block_type.__init__, core.tensor.__init__, core.tuple.__eq__
    semantic, constants = triton.TritonSemantic, dict[tuple[type, Any, str], Any]()
    np_dtype, make_alike, make_constant = triton._get_np_dtype, semantic.broadcast_impl_value, semantic.scalar_constant
    check_types, unwrap = semantic.binary_op_type_checking_impl, core._unwrap_if_constexpr
    alike: dict[tuple[str, str], tuple[Any, Any, tuple[int, ...]] | None] = {}
    numbers: dict[tuple[str, type, Any, bool], Any] = {}
    elements: dict[tuple[str, str], Any] = {}
    builtin = core.builtin(lambda: None).__code__
    plain = {core.tensor, core.dtype, core.block_type, core.pointer_type, int, float, bool, str, type(None)}
    convert, make_of, is_type = semantic.cast, semantic.to_tensor, core.dtype.__eq__

    def patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        inner, semantic = member.__wrapped__ if member.__code__ is builtin else member, triton.TritonSemantic(builder)

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return inner(*args, **kwargs)

        scope.set_attr(obj, name, call)

    def patch_once(fn: Any) -> Any:
        """It searches the language for what to replace at each launch and where a kernel calls a function."""
        if id(fn.__globals__) not in known:
            known.add(id(fn.__globals__))
            languages = frozenset(id(value) for value in fn.__globals__.values() if value is triton.tl or value is core)
            if languages not in replaced:
                scopes.append(patch_lang(fn))
                replaced.add(languages)
        return left

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        patch_once(self.fn)
        return self.rewrite()(*args, **kwargs)

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, tuple([getattr(size, "value", size) for size in shape])
        if key not in types:
            make_type(self, element_ty, shape)
            types[key] = self.__dict__
        else:
            self.__dict__.update(types[key])

    def tensor(self: Any, handle: Any, type: Any) -> None:
        if type.name not in shapes:
            make_tensor(self, handle, type)
            shapes[type.name] = self.shape, self.numel
        else:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = shapes[type.name]

    def with_element(self: Any, scalar: Any) -> Any:
        key = self.name, scalar.name
        if key not in elements:
            elements[key] = core.block_type(scalar, self.shape)
        return elements[key]

    def broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        if lhs.type.name == rhs.type.name:  # most are of one type and shape
            return lhs, rhs
        key = lhs.type.name, rhs.type.name
        if key not in alike:
            left, right = make_alike(self, lhs, rhs)
            alike[key] = left.type, right.type, tuple(size.value for size in left.shape)
        left_type, right_type, shape = alike[key]
        if lhs.type.name != left_type.name:
            lhs = core.tensor(triton.TensorHandle(_spread(lhs.handle.data, shape), lhs.handle.dtype), left_type)
        if rhs.type.name != right_type.name:
            rhs = core.tensor(triton.TensorHandle(_spread(rhs.handle.data, shape), rhs.handle.dtype), right_type)
        return lhs, rhs

    def operands(
        self: Any, lhs: Any, rhs: Any, left_ptr: bool = False, right_ptr: bool = False, arithmetic: bool = True,
        divides: bool = False,
    ) -> Any:  # fmt: skip
        """Of one type they are not converted, unless halves are divided; numpy broadcasts a scalar itself, and a number
        is mostly of the other's type."""
        if not divides and arithmetic:
            if type(rhs) in NUMBERS and type(lhs) is core.tensor and not lhs.dtype.is_ptr():
                number = number_of(self, lhs, rhs, False)
                if number is not None:
                    return lhs, core.tensor(number.handle, lhs.type)
            elif type(lhs) in NUMBERS and type(rhs) is core.tensor and not rhs.dtype.is_ptr():
                number = number_of(self, rhs, lhs, True)
                if number is not None:
                    return core.tensor(number.handle, rhs.type), rhs
        tensors = type(lhs) is type(rhs) is core.tensor
        if tensors and left_ptr and lhs.dtype.is_ptr() and rhs.dtype.is_int():
            return broadcast(self, lhs, rhs)
        if not tensors or divides or lhs.dtype.name != rhs.dtype.name or lhs.dtype.is_ptr():
            return check_types(self, lhs, rhs, left_ptr, right_ptr, arithmetic, divides)
        if lhs.type.is_block() == rhs.type.is_block():
            return broadcast(self, lhs, rhs)
        if lhs.type.is_block():
            return lhs, core.tensor(rhs.handle, lhs.type)
        return core.tensor(lhs.handle, rhs.type), rhs

    def number_of(self: Any, tensor: Any, value: Any, first: bool) -> Any:
        """The number as a scalar of the tensor's type, or None where both become something else."""
        key = tensor.dtype.name, type(value), value, first
        if key not in numbers:
            alone = core.tensor(tensor.handle, tensor.dtype)
            pair = check_types(self, value, alone) if first else check_types(self, alone, value)
            number = pair[0 if first else 1]
            numbers[key] = number if number.dtype.name == tensor.dtype.name else None
        return numbers[key]

    def unwrapped(value: Any) -> Any:
        return value if type(value) in plain else unwrap(value)

    def cast(self: Any, tensor: Any, dtype: Any, rounding: Any = None) -> Any:
        return tensor if tensor.type.scalar is dtype.scalar else convert(self, tensor, dtype, rounding)

    def to_tensor(self: Any, value: Any, check: bool = True) -> Any:
        """Of each value that a kernel gives a name."""
        return value if type(value) is core.tensor else make_of(self, value, check)

    def same_type(self: Any, other: Any) -> bool:
        return self is other or is_type(self, other)

    def constant(self: Any, value: Any, dtype: Any) -> Any:
        """Nothing changes a tensor where it is."""
        key = type(value), value, dtype.name
        if key not in constants:
            constants[key] = make_constant(self, value, dtype)
        return constants[key]

    def equal(self: Any, other: Any) -> Any:
        if type(other) is core.tuple:
            return core.constexpr(self.values == other.values)
        if type(other) in (list, tuple):
            return core.constexpr(self.values == list(other))
        return same(self, other)

    def get_np_dtype(type: Any) -> np.dtype:
        name = type.scalar.name
        if name not in dtypes:
            dtypes[name] = np_dtype(type)
        return dtypes[name]

    monkeypatch.setattr(triton, "_patch_lang", patch_once)
    monkeypatch.setattr(triton, "_patch_attr", patch_attr)
    monkeypatch.setattr(triton.InterpretedFunction, "__call__", call)
    monkeypatch.setattr(semantic, "broadcast_impl_value", broadcast)
    monkeypatch.setattr(semantic, "binary_op_type_checking_impl", operands)
    monkeypatch.setattr(semantic, "scalar_constant", constant)
    monkeypatch.setattr(semantic, "cast", cast)
    monkeypatch.setattr(semantic, "to_tensor", to_tensor)
    monkeypatch.setattr(core, "_unwrap_if_constexpr", unwrapped)
    monkeypatch.setattr(core.dtype, "__eq__", same_type)
    monkeypatch.setattr(core.block_type, "__init__", block_type)
    monkeypatch.setattr(core.block_type, "with_element_ty", with_element)
    monkeypatch.setattr(core.block_type, "to_ir", lambda self, builder: self)
    monkeypatch.setattr(core.tensor, "__init__", tensor)
    monkeypatch.setattr(core.tuple, "__eq__", equal)
    monkeypatch.setattr(triton, "_get_np_dtype", get_np_dtype)
    # It computes whether integers overflow, and does not look at the result unless it is asked to debug.
    options = replace(triton.interpreter_builder.options, sanitize_overflow=False)
    monkeypatch.setattr(triton.interpreter_builder, "options", options)
