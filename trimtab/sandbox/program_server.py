"""The far side of a jailed program whose functions are called from outside; see rewards/code_verifier.py.

    exec(this file's text) in a JailedProgram with a channel

It executes the program and calls what it defines. Messages are lines of JSON; only data goes back: an object of another
type than plain data is a reference, so that no method of the program's classes, such as `__eq__`, runs outside. Both
sides use `encode` and `decode`. This file imports nothing of the package: the jail has none.
"""

import json
import types

MOST_ITEMS = 100_000  # of an iterator
ITERATORS = (map, filter, zip, reversed, enumerate, range, types.GeneratorType)
VIEWS: tuple = (type({}.keys()), type({}.values()), type({}.items()))


def encode(value, refer):
    """A value as JSON. `refer`: gives the number of an object that is no plain data."""
    if type(value) is int and value.bit_length() > 64:  # decimal digits are limited
        return {"kind": "int", "value": hex(value)}
    if value is None or type(value) in (bool, int, float, str):
        return value
    if hasattr(value, "tolist") and callable(value.tolist) and not isinstance(value, type):
        value = value.tolist()  # of numpy
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return encode(kind(value), refer) if type(value) is not kind else value
    if isinstance(value, (bytes, bytearray)):
        return {"kind": "bytes", "value": bytes(value).hex()}
    if isinstance(value, complex):
        return {"kind": "complex", "value": [value.real, value.imag]}
    if isinstance(value, dict):
        return {"kind": "dict", "value": [[encode(a, refer), encode(b, refer)] for a, b in dict.items(value)]}
    for many in (list, tuple, set, frozenset):
        if isinstance(value, many):
            return {"kind": many.__name__, "value": [encode(one, refer) for one in many(value)]}
    if isinstance(value, ITERATORS + VIEWS):
        found = [encode(one, refer) for one, _ in zip(value, range(MOST_ITEMS))]
        return {"kind": "iterator", "value": found}
    return {"kind": "reference", "value": refer(value)}


def decode(value, find):
    """The value of its JSON. `find`: gives the object of a number."""
    if not isinstance(value, dict):
        return value
    kind, inner = value["kind"], value["value"]
    if kind == "reference":
        return find(inner)
    if kind == "bytes":
        return bytes.fromhex(inner)
    if kind == "complex":
        return complex(*inner)
    if kind == "int":
        return int(inner, 16)
    items = [decode(one, find) for one in inner] if kind != "dict" else []
    if kind == "dict":
        return {decode(a, find): decode(b, find) for a, b in inner}
    if kind == "iterator":
        return iter(items)
    return {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[kind](items)


def serve():
    import os
    import socket

    channel = socket.socket(fileno=4)
    lines = channel.makefile("r", encoding="utf-8")
    objects = []

    def refer(value):
        objects.append(value)
        return len(objects) - 1

    def answer(request):
        if "source" in request:
            space = {"__name__": "program"}
            exec(compile(request["source"], "program.py", "exec"), space)
            return {name: encode(space[name], refer) for name in request["names"] if name in space}
        target = objects[request["object"]]
        if "attribute" in request:
            return encode(getattr(target, request["attribute"]), refer)
        arguments = [decode(one, objects.__getitem__) for one in request["arguments"]]
        named = {name: decode(one, objects.__getitem__) for name, one in request["named"].items()}
        return encode(target(*arguments, **named), refer)

    for line in lines:
        try:
            reply = json.dumps({"value": answer(json.loads(line))})
        except BaseException as error:  # an exit of the program is an error like any other
            reply = json.dumps({"error": type(error).__name__})
        channel.sendall(reply.encode() + b"\n")
    os._exit(0)


if __name__ == "__main__":
    serve()
