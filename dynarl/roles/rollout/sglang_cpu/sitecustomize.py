"""Lets `import torchvision` pass beside a CPU build of torch.

The torchvision on PyPI brings operators for a CUDA build of torch. Beside a CPU build its library is not loaded, and its
Python refuses to import because it attaches to operators that nobody declared. Nothing here calls them: declaring their
signatures, at the moment somebody imports torchvision, is enough.
"""

import sys
from importlib.abc import MetaPathFinder

OPERATORS = ("nms", "qnms")


class DeclareOperators(MetaPathFinder):
    """Finds nothing; declares the operators just before torchvision is found by someone else."""

    library = None

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision" and DeclareOperators.library is None:
            import torch

            # Kept for good: the operators go when the library object goes.
            DeclareOperators.library = torch.library.Library("torchvision", "DEF")
            for operator in OPERATORS:
                DeclareOperators.library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return None


sys.meta_path.insert(0, DeclareOperators())
