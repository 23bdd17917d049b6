"""Door 1: one FlashRT kernel in any script, through the kernels library alone.

Until the families are on the Hub, tell the library where the local builds are:

    eval "$(flash-rt kernels env)"
    python examples/get_kernel.py
"""

import torch
from kernels import get_kernel


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    norm = get_kernel("flashrt/norm", version=1)

    x = torch.randn(4, 4096, device=device)
    weight = torch.rand(4096, device=device) + 0.5
    y = norm.rms_norm(x, weight, eps=1e-6)

    expected = torch.nn.functional.rms_norm(x, (4096,), weight, eps=1e-6)
    print(f"rms_norm on {device}: largest difference to torch {(y - expected).abs().max():.1e}")


if __name__ == "__main__":
    main()
