"""Raises an exception whose text cannot be made, and which is no Exception. Seen as a crash all the same."""

KERNEL_TYPE = "softmax"


class Unspeakable(BaseException):
    def __str__(self):
        raise SystemExit(0)

    __repr__ = __str__


def kernel_fn(x):
    raise Unspeakable
