"""Damage of pickles by their operations, and of protobufs by the fields of their messages."""

import pickletools
import random
from collections.abc import Callable, Sequence
from typing import Any

from tests.fuzz.mutators import HOSTILE, Mutator, flip


def pickled(data: bytes, others: Sequence[bytes], rng: random.Random) -> bytes:
    """Leave out, repeat, exchange or move operations of a pickle, or change their numbers and names."""
    ops = [(op, arg, at) for op, arg, at in pickletools.genops(data)]
    ends = [at for _, _, at in ops[1:]] + [len(data)]
    pieces = [data[at:end] for (_, _, at), end in zip(ops, ends, strict=True)]
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(1, len(pieces))
        kind = rng.randrange(6)
        if kind == 0:
            pieces[at] = b""
        elif kind == 1:
            pieces.insert(at, rng.choice(pieces))
        elif kind == 2:
            pieces[at] = rng.choice(pieces)
        elif kind == 3:
            pieces[at] = rng.choice(
                (
                    b"N",
                    b"]",
                    b"}",
                    b")",
                    b"K\0",
                    b"J\xff\xff\xff\x7f",
                    b"\x88",
                    b"(",
                    b"0",
                    b"Q",
                    b"R",
                    b"b",
                    b"\x8a\x09" + b"\xff" * 8 + b"\x7f",
                    b"X\x01\0\0\0a",
                    b"G" + b"\x7f\xf0" + b"\0" * 6,
                )
            )
        elif kind == 4:
            pieces[at] = rng.choice(_GLOBALS)
        else:
            pieces[at] = flip(pieces[at], [data], rng)
    return b"".join(pieces)


_GLOBALS = tuple(
    f"c{module}\n{name}\n".encode()
    for module, name in (
        ("torch._utils", "_rebuild_sparse_tensor"),
        ("torch._utils", "_rebuild_qtensor"),
        ("torch._utils", "_rebuild_parameter"),
        ("torch._utils", "_rebuild_meta_tensor_no_storage"),
        ("torch", "QInt8Storage"),
        ("torch", "BoolStorage"),
        ("torch", "ComplexFloatStorage"),
        ("torch", "DoubleStorage"),
        ("torch", "Size"),
        ("torch", "float16"),
        ("collections", "OrderedDict"),
        ("collections", "Counter"),
        ("__builtin__", "bytearray"),
        ("builtins", "set"),
        ("_codecs", "encode"),
        ("os", "system"),
        ("torch", "device"),
        ("torch._tensor", "_rebuild_from_type_v2"),
        ("torch", "Tensor"),
        ("torch.nn.parameter", "Parameter"),
        ("torch", "sparse_coo"),
        ("torch", "per_tensor_affine"),
    )
)


def protobuf(parse: Callable[[bytes], Any]) -> Mutator:
    """Set, clear and repeat fields of a message, however deep, to hostile values of their types."""

    def mutate(data: bytes, others: Sequence[bytes], rng: random.Random) -> bytes:
        message = parse(data)
        for _ in range(rng.choice((1, 1, 2, 4))):
            _edit_message(message, rng)
        found: bytes = message.SerializePartialToString()
        return found

    return mutate


def _edit_message(message: Any, rng: random.Random) -> None:
    while True:
        fields = message.ListFields()
        if not fields:
            return
        field, value = rng.choice(fields)
        repeated = hasattr(value, "append") or hasattr(value, "add")
        if field.message_type is not None and rng.random() < 0.85:
            if repeated:
                if not value:
                    return
                message = value[rng.randrange(len(value))]
            else:
                message = value
            continue
        if rng.random() < 0.2:
            message.ClearField(field.name)
        elif field.message_type is not None:
            if repeated:
                value.add().CopyFrom(rng.choice(value)) if rng.random() < 0.5 and value else value.pop()
        else:
            hostile = _of_field(field, rng)
            if repeated:
                value.append(hostile) if rng.random() < 0.3 or not value else value.__setitem__(
                    rng.randrange(len(value)), hostile
                )
            else:
                setattr(message, field.name, hostile)
        return


def _of_field(field: Any, rng: random.Random) -> Any:
    if field.cpp_type == field.CPPTYPE_STRING:
        text = rng.choice([h for h in HOSTILE if isinstance(h, str) and h != "\ud800"])
        return text.encode() if field.type == field.TYPE_BYTES else text
    if field.cpp_type in (field.CPPTYPE_FLOAT, field.CPPTYPE_DOUBLE):
        return rng.choice((0.0, -1.0, float("nan"), float("inf"), 1e38))
    if field.cpp_type == field.CPPTYPE_BOOL:
        return rng.random() < 0.5
    if field.cpp_type == field.CPPTYPE_ENUM:
        return rng.choice(list(field.enum_type.values_by_number))
    numbers = [0, 1, 2, 3, 7, 255, (1 << 31) - 1]
    if field.cpp_type in (field.CPPTYPE_INT64, field.CPPTYPE_INT32):
        numbers += [-1, -(1 << 31)]
    if field.cpp_type == field.CPPTYPE_INT64:
        numbers += [(1 << 63) - 1, -(1 << 63), 1 << 40]
    return rng.choice(numbers)
