"""Stands in for SGLang's kernel package, of which PyPI has no CPU build.

No operator is registered under torch.ops.sgl_kernel: SGLang sees from that that its CPU kernels are absent and takes its
native torch paths. One function is called on those paths all the same; every other name raises when it is called.
"""

__version__ = "0"


def assign_req_to_token_pool_cpu(rows, pool, starts, ends, slots, pool_width):
    """pool[rows[i], starts[i]:ends[i]] = the next ends[i] - starts[i] entries of `slots`, for each i in order.

    rows, starts, ends: [requests]; pool: [rows of the pool, pool_width] cache slots by position; slots: flat.
    """
    taken = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist()):
        count = end - start
        pool[row, start:end] = slots[taken : taken + count].to(pool.dtype)
        taken += count


def __getattr__(name):
    if not name.endswith("_cpu"):
        raise AttributeError(f"module 'sgl_kernel' has no attribute {name!r}")

    def absent(*_, **__):
        raise NotImplementedError(f"{name} needs a CPU build of SGLang's kernel package")

    return absent
