"""What do the codecs gain and cost on a real state, one core?

    python benchmarks/codecs.py [--small] [--json FILE]

The state is that of a byte-level transformer with Adam (4.9 million parameters, initialised as GPT-2), trained for 40
steps on the texts that pydoc has; bf16 weights are its weights rounded. Frames of 4 MiB, each codec in reused buffers,
in turn with a memcpy and with zstd 3 in one call, all in one run; every figure is the median of several rounds over all
frames. (Barely trained weights that began as uniform numbers, PyTorch's default, shrink more, 1.51, and encode a fifth
slower: zstd finds short repetitions among their exponents.)
The bars: planes on bf16 weights, ratio at least 1.48, encode at least 1.4 GB/s, decode at least 2.5 GB/s a core.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import zstandard

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
class Row:
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


def measure(state: str, dtype: str, data: np.ndarray, size: Size) -> list[Row]:
    frames = [data[i : i + size.frame_bytes] for i in range(0, len(data), size.frame_bytes)]
    raws = [frame.data for frame in frames]
    code = DTYPE_CODE[dtype]
    scratch = codecs.Scratch()
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
        rows.append(Row(state, name, len(data) / stored_bytes, *speeds))
    return rows


def machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown CPU")
    return f"{platform.node()}: {model}, {os.cpu_count()} cores"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a tiny model: shows that it runs, not how fast")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    size = SMALL if options.small else FULL
    state, loss = trained(size)
    rows = [row for name, (dtype, data) in state.items() for row in measure(name, dtype, data, size)]
    print(
        f"{machine()}; {len(state['bf16 weights'][1]) // 2 / 1e6:.1f} M parameters, loss {loss:.2f}; "
        f"median of {size.rounds} rounds"
    )
    print(f"{'state':14}{'codec':9}{'ratio':>7}{'encode GB/s':>13}{'decode GB/s':>13}{'per CPU-s':>16}")
    for row in rows:
        cpu = f"{row.encode_cpu_gb_s:.2f} {row.decode_cpu_gb_s:.2f}"
        print(f"{row.state:14}{row.codec:9}{row.ratio:7.3f}{row.encode_gb_s:13.2f}{row.decode_gb_s:13.2f}{cpu:>16}")
    bf16 = next(row for row in rows if (row.state, row.codec) == ("bf16 weights", "planes"))
    bars = {
        f"ratio {bf16.ratio:.3f} >= {RATIO_BAR}": bf16.ratio >= RATIO_BAR,
        f"encode {bf16.encode_gb_s:.2f} >= {ENCODE_BAR} GB/s": bf16.encode_gb_s >= ENCODE_BAR,
        f"decode {bf16.decode_gb_s:.2f} >= {DECODE_BAR} GB/s": bf16.decode_gb_s >= DECODE_BAR,
    }
    for bar, met in bars.items():
        print(f"{'met   ' if met else 'MISSED'} {bar}")
    if options.json:
        options.json.write_text(
            json.dumps(
                {"machine": machine(), "size": asdict(size), "rows": [asdict(row) for row in rows], "bars": bars}
            )
        )


if __name__ == "__main__":
    main()
