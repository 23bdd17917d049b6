"""Inputs, and a reference that shares nothing with the family: values by enumeration, in fp64."""

import torch

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
SIZES = (1, 3, 15, 16, 31, 64, 127, 576, 1000, 5003)


def e4m3_value(byte: int) -> float:
    """The value of a byte without sign, below the NaN 0x7f."""
    exponent, mantissa = byte >> 3, byte & 7
    return mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)


E4M3 = tuple(e4m3_value(byte) for byte in range(0x7F))


def rows(*shape, dtype=torch.float32, device="cpu", seed=0):
    """Normal values whose rows differ in scale by powers of ten, with a few outliers."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    values = values * 10 ** (torch.rand((*shape[:-1], 1), generator=generator) * 4 - 3)
    values = values * torch.where(torch.rand(shape, generator=generator) > 0.99, 8.0, 1.0)
    return values.to(dtype).to(device)


def nearest(values: torch.Tensor, grid: tuple[float, ...]) -> torch.Tensor:
    """Index of the nearest grid point to each magnitude, the even index in a tie."""
    points = torch.tensor(grid, dtype=torch.float64)
    middles = (points[1:] + points[:-1]) / 2
    sizes = values.double().cpu().abs()
    above = torch.bucketize(sizes, middles, right=False)  # middle < size
    tie = (above < len(middles)) & (sizes == middles[above.clamp(max=len(middles) - 1)])
    return torch.where(tie & (above % 2 == 1), above + 1, above)


def fp8_bytes(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """``values / scale`` as E4M3 bytes; the quotient is one fp32 rounding, as documented."""
    quotient = (values.float() / scale).cpu()
    sign = torch.signbit(quotient).to(torch.uint8) << 7
    return nearest(quotient.clamp(-448, 448), E4M3).to(torch.uint8) | sign


def row_scale(values: torch.Tensor, largest: float) -> torch.Tensor:
    magnitude = values.float().abs().amax(-1)
    scale = (magnitude / torch.full_like(magnitude, largest)).clamp(min=2.0**-126)
    return torch.where(magnitude > 0, scale, 1.0)


def search(values, scales_around, importance=None):
    """The block scale byte and codes of one block, by the words of quantize_nvfp4's docstring.

    ``values`` are 16 fp32 numbers already divided by the global scale.
    """
    best, kept = None, None
    for byte in scales_around:
        scale = torch.tensor(E4M3[byte], dtype=torch.float32)
        codes = torch.zeros(16, dtype=torch.int64)
        quantised = torch.zeros(16)
        if byte != 0:
            quotient = values / scale
            codes = nearest(quotient, E2M1)
            quantised = torch.tensor(E2M1)[codes].copysign(quotient) * scale
            codes = codes + torch.signbit(quotient) * 8
        error = torch.zeros(())
        for index in range(16):
            term = (values[index] - quantised[index]) * (values[index] - quantised[index])
            error = error + (term if importance is None else term * importance[index])
        if best is None or error < best:
            best, kept = error, (byte, codes)
    return kept


def nvfp4(weight, importance=None):
    """(codes [N, K], block scale bytes [N, blocks], global scale), one block after the other."""
    N, K = weight.shape
    magnitude = float(weight.abs().max()) if weight.numel() else 0.0
    global_scale = torch.tensor(magnitude, dtype=torch.float32) / 2688 if magnitude else 1.0
    values = torch.nn.functional.pad(weight.float().cpu() / global_scale, (0, -K % 16))
    values = values.clamp(-2688, 2688)
    codes = torch.zeros(values.shape, dtype=torch.uint8)
    blocks = values.shape[1] // 16
    scales = torch.zeros(N, blocks, dtype=torch.uint8)
    if importance is not None:
        importance = torch.nn.functional.pad(importance.cpu(), (0, -K % 16))
    for n in range(N):
        for b in range(blocks):
            part = slice(16 * b, 16 * b + 16)
            center = int(nearest((values[n, part].abs().max() / 6).clamp(max=448), E4M3))
            around = range(max(center - 2, 0), min(center + 6, 126) + 1)
            given = None if importance is None else importance[part]
            scales[n, b], codes[n, part] = search(values[n, part], around, given)
    return codes[:, :K], scales, global_scale


# Layout of a tile as its contract writes it, one element at a time.
SLOT = ((15, (11, 10, 9)), (12, (8, 7, 6)), (14, (5, 4, 3)), (13, (2, 1, 0)))


def tile(codes, scale_bytes):
    """Tiles from codes ``[N, K]`` and E4M3 bytes ``[N, ceil(K / 16)]``, element by element."""
    N, K = codes.shape
    tiles = torch.zeros(-(-N // 16), -(-K // 256), 2304, dtype=torch.uint8)
    for n in range(N):
        for k in range(K):
            if scale_bytes[n, k // 16] == 0:
                continue
            half, g = divmod(n % 16, 8)
            segment, t = k % 256 // 128, k % 128 // 32
            word, element = k % 32 // 8, k % 8
            start = ((segment * 2 + half) * 32 + 4 * g + t) * 16 + word * 4
            sign_bit, magnitude_bits = SLOT[element // 2]
            code = int(codes[n, k])
            half_word = (code >> 3) << sign_bit
            for index, bit in enumerate(magnitude_bits):
                half_word |= (code >> (2 - index) & 1) << bit
            target = tiles[n // 16, k // 256, start + 2 * (element % 2) :]
            target[0] |= half_word & 255
            target[1] |= half_word >> 8
    for n in range(N):
        for b in range(scale_bytes.shape[1]):
            value = E4M3[int(scale_bytes[n, b])]
            half, g = divmod(n % 16, 8)
            segment, t = b * 16 % 256 // 128, b * 16 % 128 // 32
            place = 2048 + (4 * g + t) * 8 + half * 4 + 2 * segment + b % 2
            if value:
                exponent = torch.tensor(value, dtype=torch.float64).frexp().exponent.item() - 1
                mantissa = int((value / 2.0**exponent - 1) * 8)
                tiles[n // 16, b * 16 // 256, place] = (exponent + 22) << 3 | mantissa
    return tiles
