"""Memory by address inside compiled functions: loads, stores, atomics, calls and array views.

An address is an int64.  All functions are callable from Numba-compiled code only; none of them
checks anything.  The atomics work on aligned 64-bit words.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic, register_jitable

from ops.cpu import contexts  # noqa: F401  before anything of Numba's is made

I64 = ir.IntType(64)


def _load(numba_type: types.Type) -> Callable[..., Any]:
    """Make the function `load(address) -> value` of one type."""

    @intrinsic
    def load(_: Any, address: types.Type) -> tuple[Any, Any]:
        def codegen(context: Any, builder: Any, _: Any, args: Any) -> Any:
            pointer = builder.inttoptr(args[0], context.get_value_type(numba_type).as_pointer())
            value = builder.load(pointer, typ=context.get_value_type(numba_type))
            value.align = 1
            return value

        return numba_type(types.int64), codegen

    return load


def _store(numba_type: types.Type) -> Callable[..., Any]:
    """Make the function `store(address, value)` of one type."""

    @intrinsic
    def store(_: Any, address: types.Type, value: types.Type) -> tuple[Any, Any]:
        def codegen(context: Any, builder: Any, _: Any, args: Any) -> Any:
            pointer = builder.inttoptr(args[0], args[1].type.as_pointer())
            builder.store(args[1], pointer).align = 1
            return context.get_dummy_value()

        return types.void(types.int64, numba_type), codegen

    return store


def named_place(name: str) -> Callable[[], int]:
    """Make the function `place() -> address` of what `llvmlite.binding.add_symbol` has given this
    name, before the code that calls it is loaded.  Code with an address in it would be of use to
    one process alone.
    """

    @intrinsic
    def place(_: Any) -> tuple[Any, Any]:
        def codegen(context: Any, builder: Any, _: Any, args: Any) -> Any:
            known = builder.module.globals.get(name)
            variable = known or ir.GlobalVariable(builder.module, I64, name)
            return builder.ptrtoint(variable, I64)

        return types.int64(), codegen

    return place


load_i32 = _load(types.int32)
load_i64 = _load(types.int64)
load_f32 = _load(types.float32)
store_i32 = _store(types.int32)
store_i64 = _store(types.int64)
store_f32 = _store(types.float32)


@intrinsic
def atomic_load(_: Any, address: types.Type) -> tuple[Any, Any]:
    """atomic_load(address) -> int64, acquire."""

    def codegen(_context: Any, builder: Any, _: Any, args: Any) -> Any:
        return builder.load_atomic(_word(builder, args[0]), "acquire", 8, typ=I64)

    return types.int64(types.int64), codegen


@intrinsic
def atomic_store(_: Any, address: types.Type, value: types.Type) -> tuple[Any, Any]:
    """atomic_store(address, value), release."""

    def codegen(context: Any, builder: Any, _: Any, args: Any) -> Any:
        builder.store_atomic(args[1], _word(builder, args[0]), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def atomic_add(_: Any, address: types.Type, value: types.Type) -> tuple[Any, Any]:
    """atomic_add(address, value) -> the int64 that was there before, acquire and release."""

    def codegen(_context: Any, builder: Any, _: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", _word(builder, args[0]), args[1], "acq_rel")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def compare_and_swap(
    _: Any, address: types.Type, expected: types.Type, desired: types.Type
) -> tuple[Any, Any]:
    """compare_and_swap(address, expected, desired) -> True if `desired` was stored."""

    def codegen(_context: Any, builder: Any, _: Any, args: Any) -> Any:
        word = _word(builder, args[0])
        return builder.extract_value(
            builder.cmpxchg(word, args[1], args[2], "acq_rel", "acquire"), 1
        )

    return types.boolean(types.int64, types.int64, types.int64), codegen


@intrinsic
def fence(_: Any) -> tuple[Any, Any]:
    """A full memory barrier: stores before it are seen before loads after it read."""

    def codegen(context: Any, builder: Any, _: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def pause(_: Any) -> tuple[Any, Any]:
    """Tell the core that this is a spin loop (nothing on machines other than x86)."""

    def codegen(context: Any, builder: Any, _: Any, args: Any) -> Any:
        if builder.module.triple.startswith(("x86_64", "i686")):
            function_type = ir.FunctionType(ir.VoidType(), [])
            builder.call(
                cgutils.get_or_insert_function(
                    builder.module, function_type, "llvm.x86.sse2.pause"
                ),
                [],
            )
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def prefetch(_: Any, address: types.Type) -> tuple[Any, Any]:
    """Start fetching the line at `address`; any address is harmless."""

    def codegen(context: Any, builder: Any, _: Any, args: Any) -> Any:
        i32, pointer = ir.IntType(32), ir.IntType(8).as_pointer()
        function = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(ir.VoidType(), [pointer, i32, i32, i32]),
            "llvm.prefetch.p0",
        )
        read, keep, data = i32(0), i32(3), i32(1)
        builder.call(function, [builder.inttoptr(args[0], pointer), read, keep, data])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def call(_: Any, function: types.Type, arguments: types.Type) -> tuple[Any, Any]:
    """call(address, (a, b, ...)) calls the C function void f(int64, int64, ...)."""
    return types.void(types.int64, arguments), _call_codegen(arguments, ir.VoidType())


@intrinsic
def call_i64(_: Any, function: types.Type, arguments: types.Type) -> tuple[Any, Any]:
    """call_i64(address, (a, b, ...)) -> what the C function int64 f(int64, int64, ...) returns."""
    return types.int64(types.int64, arguments), _call_codegen(arguments, I64)


@intrinsic
def _pointer(_: Any, address: types.Type, item: types.Type) -> tuple[Any, Any]:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(item.dtype)(types.int64, item), codegen


@register_jitable
def array(address: int, shape: Any, dtype: Any) -> Any:
    """The C-ordered array of `dtype` (e.g. np.float32) and `shape` (int or tuple) at `address`."""
    return carray(_pointer(address, dtype), shape)


def _word(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, I64.as_pointer())


def _call_codegen(arguments: types.Type, result: ir.Type) -> Callable[..., Any]:
    """The code of a call through an address; integer arguments are widened to int64."""

    def codegen(context: Any, builder: Any, _: Any, args: Any) -> Any:
        values = [
            context.cast(builder, value, kind, types.int64)
            for value, kind in zip(
                cgutils.unpack_tuple(builder, args[1], len(arguments)), arguments, strict=True
            )
        ]
        function_type = ir.FunctionType(result, [I64] * len(values))
        returned = builder.call(builder.inttoptr(args[0], function_type.as_pointer()), values)
        return context.get_dummy_value() if isinstance(result, ir.VoidType) else returned

    return codegen
