"""The products that torture.py kills: the kind of C, the command and its options."""

from dataclasses import dataclass

# Number of tiles along each extent of a matrix.
TILES = 6


@dataclass(frozen=True)
class Case:
    """A product: the kind of its C, beta, and the number of tiles along m, n and k.

    `command` is run, or another command or function whose operand is A. With `sparse`, A is a CSR matrix.
    """

    kind: str
    beta: str = "0"
    existing: bool = False
    dtype: str = "float64"
    tiles: tuple[int, int, int] = (TILES, TILES, TILES)
    options: tuple[str, ...] = ()
    command: str = "run"
    sparse: bool = False

    @property
    def name(self) -> str:
        how = f"beta = {self.beta}, in place" if self.beta != "0" else "replaced" if self.existing else "new"
        kind = self.kind if self.command == "run" else f"{self.command} {self.kind}"
        kind = f"{kind} of CSR" if self.sparse else kind
        return " ".join((kind, self.dtype, "x".join(map(str, self.tiles)), *self.options, f"({how})"))

    @property
    def journals(self) -> int:
        """How many matrices with a journal the command writes, one after the other."""
        if self.kind == "group":
            return 0
        return 2 if "--pairwise" in self.options else int(self.command in JOURNALED)

    @property
    def resumes(self) -> bool:
        """Whether the command has --resume. Without a journal, it writes its result when it has ended."""
        return self.journals > 0 or self.command == "pca"


JOURNALED = ("run", "gram", "corr", "cov", "grm", "distances")
# Stores the product of a kernel matrix and a matrix. The arguments are X, the result, the backend, and others
# of `oocgemm.kernel_matmul`.
KERNEL_MATMUL = """
import os, sys
import numpy as np, oocgemm, zarr
x, out, backend, tile, device, host = sys.argv[1:]
v = np.random.default_rng(0).standard_normal((zarr.open_array(x).shape[0], 3))
how = {"tile": tile, "device_memory": device, "host_memory": host}
found = oocgemm.kernel_matmul(x, v, gamma=0.01, backend=backend, **how)
np.save("new.npy", found)
os.rename("new.npy", out)
"""
CASES = (
    Case("raw"),
    Case("raw", beta="0.5", existing=True),
    Case("zstd", tiles=(3, 6, 4)),
    Case("zstd", beta="-1", existing=True),
    Case("sharded", existing=True, tiles=(6, 3, 6)),
    Case("sharded", beta="0.5", existing=True),
    Case("npy", tiles=(4, 6, 3)),
    Case("npy", beta="0.5", existing=True),
    Case("raw", beta="0.5", existing=True, dtype="float16", tiles=(6, 4, 4), options=("--transpose-b",)),
    Case("raw", dtype="complex64", tiles=(6, 6, 2), options=("--adjoint-a", "--alpha", "0.7")),
    Case("raw", command="gram"),
    Case("zstd", command="gram", dtype="complex64", options=("--uplo", "full"), tiles=(4, 4, 3)),
    Case("npy", beta="0.5", existing=True, command="gram", options=("--uplo", "upper")),
    Case("raw", beta="0.5", existing=True, command="gram", options=("--uplo", "full"), tiles=(3, 3, 6)),
    Case("raw", command="gram", dtype="float32", options=("--transform", "center=k,scale=k")),
    Case(
        "raw",
        beta="0.5",
        existing=True,
        dtype="float32",
        options=("--transform-a", "center=k", "--transform-b", "scale=k"),
    ),
    Case("raw", command="corr", dtype="float32"),
    Case("zstd", command="cov", tiles=(4, 4, 3)),
    Case("raw", command="grm", dtype="int8", options=("--pairwise",)),
    Case("grm.bin", command="grm", dtype="int8", options=("--pairwise",), tiles=(4, 4, 3)),
    Case("group", command="pca", options=("--components", "5", "--iterations", "9")),
    Case("group", command="similarity", dtype="float32", options=("--topk", "9")),
    Case("group", command="corr", dtype="float32", options=("--threshold", "0.05")),
    Case("npy", command="kernel_matmul", dtype="float32"),
    Case("raw", command="grm", dtype="int8", options=("--pairwise", "--verify")),
    Case("raw", command="gram", dtype="int8", options=("--transform", "center=k,cast=int8", "--verify")),
    Case("group", command="similarity", dtype="float32", options=("--topk", "9", "--verify")),
    Case("group", command="corr", dtype="float32", options=("--threshold", "0.05", "--verify")),
    Case("raw", dtype="float32", sparse=True),
    Case("raw", dtype="float32", options=("--verify",), sparse=True),
    Case("npy", command="gram", dtype="float32", options=("--axis", "1"), sparse=True),
    Case("raw", command="distances", dtype="float32"),
    Case("raw", command="distances", dtype="int8", options=("--metric", "hamming")),
)
