"""What do the codecs gain and cost on a real state, one core?

    python -m benchmarks.codecs [--small] [--json FILE]

The state is that of a byte-level transformer with Adam (4.9 million parameters, initialised as GPT-2), trained for 40
steps on the texts that pydoc has; bf16 weights are its weights rounded. Frames of 4 MiB, each codec in reused buffers,
in turn with a memcpy and with zstd 3 in one call, all in one run; every figure is the median of several rounds over all
frames. (Barely trained weights that began as uniform numbers, PyTorch's default, shrink more, 1.51, and encode a fifth
slower: zstd finds short repetitions among their exponents.)
Speeds are of raw bytes and wall time; the ceiling of each is the memcpy's.
The bars: planes on bf16 weights, ratio at least 1.48, encode at least 1.4 GB/s, decode at least 2.5 GB/s a core.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import zstandard

from benchmarks.report import Row, parser, report
from ckpt.format import codecs
from ckpt.types import DTYPE_CODE, FRAME_BYTES

RATIO_BAR, ENCODE_BAR, DECODE_BAR = 1.48, 1.4, 2.5


@dataclass(frozen=True)
class Size:
    width: int
    layers: int
    steps: int
    rounds: int
    frame_bytes: int


FULL = Size(width=256, layers=6, steps=40, rounds=9, frame_bytes=FRAME_BYTES)
SMALL = Size(width=32, layers=1, steps=3, rounds=2, frame_bytes=1 << 16)
CONTEXT = 128


@dataclass(frozen=True)
class Speed:
    """GB/s are of raw bytes and wall time, `_cpu` of this process's CPU time."""

    state: str
    codec: str
    ratio: float
    encode_gb_s: float
    decode_gb_s: float
    encode_cpu_gb_s: float
    decode_cpu_gb_s: float


class Model(torch.nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(256, size.width)
        self.at = torch.nn.Embedding(CONTEXT, size.width)
        layer = torch.nn.TransformerEncoderLayer(
            size.width, max(1, size.width // 64), 4 * size.width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = torch.nn.TransformerEncoder(layer, size.layers, enable_nested_tensor=False)
        self.out = torch.nn.Linear(size.width, 256)
        for parameter in self.parameters():  # as GPT-2 begins, rather than with PyTorch's uniform numbers
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.02)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        mask = torch.nn.Transformer.generate_square_subsequent_mask(text.shape[1])
        x = self.embed(text) + self.at(torch.arange(text.shape[1]))
        return self.out(self.layers(x, mask=mask, is_causal=True))


def trained(size: Size) -> tuple[dict[str, tuple[str, np.ndarray]], float]:
    """The state by name, each with its dtype and its bytes; and the last loss."""
    from pydoc_data.topics import topics

    torch.manual_seed(0)
    text = torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8).long()
    model = Model(size)
    optimizer = torch.optim.Adam(model.parameters(), lr=6e-4)
    loss = torch.zeros(())
    for _ in range(size.steps):
        starts = torch.randint(len(text) - CONTEXT - 1, (4,))
        batch = torch.stack([text[i : i + CONTEXT + 1] for i in starts.tolist()])
        loss = torch.nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    moments = [optimizer.state[p] for p in model.parameters()]
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    state = {
        "bf16 weights": ("bfloat16", weights.bfloat16().view(torch.uint8)),
        "fp32 weights": ("float32", weights.view(torch.uint8)),
        "exp_avg": ("float32", torch.cat([m["exp_avg"].flatten() for m in moments]).view(torch.uint8)),
        "exp_avg_sq": ("float32", torch.cat([m["exp_avg_sq"].flatten() for m in moments]).view(torch.uint8)),
    }
    return {name: (dtype, data.numpy()) for name, (dtype, data) in state.items()}, loss.item()


def timed(work: Callable[[], object]) -> tuple[float, float]:
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall_s, time.process_time() - cpu_s


def measure(state: str, dtype: str, data: np.ndarray, size: Size) -> list[Speed]:
    frames = [data[i : i + size.frame_bytes] for i in range(0, len(data), size.frame_bytes)]
    raws = [frame.data for frame in frames]
    code = DTYPE_CODE[dtype]
    scratch = codecs.CodecScratch()
    out = np.empty(size.frame_bytes, np.uint8)
    level3, inverse = zstandard.ZstdCompressor(level=3), zstandard.ZstdDecompressor()
    in_zstd = [level3.compress(raw) for raw in raws]
    in_planes = [(codec, bytes(stored)) for codec, stored in (codecs.encode("auto", code, r, scratch) for r in raws)]

    def copy() -> None:
        for frame in frames:
            np.copyto(out[: len(frame)], frame)

    def decode() -> None:
        for (codec, stored), raw in zip(in_planes, raws, strict=True):
            codecs.decode(codec, code, stored, out[: len(raw)].data, scratch)

    ways: dict[str, tuple[int, Callable[[], object], Callable[[], object]]] = {
        "memcpy": (len(data), copy, copy),
        "zstd 3": (
            sum(map(len, in_zstd)),
            lambda: [level3.compress(raw) for raw in raws],
            lambda: [inverse.decompress(stored) for stored in in_zstd],
        ),
        "planes": (
            sum(len(stored) for _, stored in in_planes),
            lambda: [codecs.encode("auto", code, raw, scratch) for raw in raws],
            decode,
        ),
    }
    times: dict[str, list[tuple[float, float, float, float]]] = {name: [] for name in ways}
    for _ in range(size.rounds):
        for name, (_, there, back) in ways.items():
            times[name].append((*timed(there), *timed(back)))
    rows = []
    for name, (stored_bytes, _, _) in ways.items():
        encode_s, encode_cpu_s, decode_s, decode_cpu_s = (statistics.median(t) for t in zip(*times[name], strict=True))
        gb = len(data) / 1e9
        speeds = [gb / max(s, 1e-9) for s in (encode_s, decode_s, encode_cpu_s, decode_cpu_s)]
        rows.append(Speed(state, name, len(data) / stored_bytes, *speeds))
    return rows


def rows_of(found: list[Speed]) -> list[Row]:
    bars = {"encode": ENCODE_BAR, "decode": DECODE_BAR}
    rows = []
    memcpy = next(each for each in found if each.codec == "memcpy")
    for each in found:
        if each.codec == "memcpy":
            memcpy = each
            continue
        name, judged = f"{each.state}, {each.codec}", (each.state, each.codec) == ("bf16 weights", "planes")
        met, bar = (each.ratio >= RATIO_BAR, f"at least {RATIO_BAR}") if judged else (None, "printed")
        rows.append(Row(f"{name}: ratio", each.ratio, "x", bar, met))
        speeds = (("encode", each.encode_gb_s, memcpy.encode_gb_s), ("decode", each.decode_gb_s, memcpy.decode_gb_s))
        for way, speed, ceiling in speeds:
            met, bar = (speed >= bars[way], f"at least {bars[way]} GB/s") if judged else (None, "printed")
            rows.append(Row(f"{name}: {way}", speed, "GB/s", bar, met, ceiling, speed / ceiling))
        for way, speed in (("encode", each.encode_cpu_gb_s), ("decode", each.decode_cpu_gb_s)):
            rows.append(Row(f"{name}: {way}, per second of CPU", speed, "GB", "printed", None))
    return rows


def main() -> int:
    args = parser(__doc__).parse_args()
    size = SMALL if args.small else FULL
    state, loss = trained(size)
    found = [each for name, (dtype, data) in state.items() for each in measure(name, dtype, data, size)]
    parameters = len(state["bf16 weights"][1]) // 2
    print(f"{parameters / 1e6:.1f} M parameters, loss {loss:.2f}; median of {size.rounds} rounds")
    return report("codecs", rows_of(found), args)


if __name__ == "__main__":
    sys.exit(main())
